package plan

import "fmt"

// none stands for a request that was not posted.
const none int32 = -1

// builder collects steps and assigns request indices. It takes the latest free one first, so
// Requests is the largest number of outstanding requests.
//
// A planner writes into a builder as for a whole plan. With peer it counts the ranks in another way.
type builder struct {
	plan Plan
	free []int32
	peer func(rank int) int // the group's number of a rank of the planner; nil if they are the same
}

// build returns a planner's plan of about steps steps.
func build(steps int, planner func(*builder)) *Plan {
	b := builder{plan: Plan{Steps: make([]Step, 0, steps)}}
	planner(&b)
	if kept := b.plan.Steps; 4*len(kept) < 3*cap(kept) {
		b.plan.Steps = append(make([]Step, 0, len(kept)), kept...)
	}
	return &b.plan
}

func (b *builder) emit(s Step) {
	b.plan.Steps = append(b.plan.Steps, s)
}

func (b *builder) post(kind Kind, peer int, buf Buffer, off, n int64) int32 {
	if b.peer != nil {
		peer = b.peer(peer)
	}
	req := int32(b.plan.Requests)
	if last := len(b.free) - 1; last >= 0 {
		req, b.free = b.free[last], b.free[:last]
	} else {
		b.plan.Requests++
	}
	b.emit(Step{Kind: kind, Buf: buf, Peer: int32(peer), Req: req, Off: off, Len: n})
	return req
}

func (b *builder) send(peer int, buf Buffer, off, n int64) int32 {
	return b.post(Send, peer, buf, off, n)
}

func (b *builder) recv(peer int, buf Buffer, off, n int64) int32 {
	return b.post(Recv, peer, buf, off, n)
}

// sendSome is send, but does nothing for an empty message.
func (b *builder) sendSome(peer int, buf Buffer, off, n int64) int32 {
	if n == 0 {
		return none
	}
	return b.send(peer, buf, off, n)
}

func (b *builder) recvSome(peer int, buf Buffer, off, n int64) int32 {
	if n == 0 {
		return none
	}
	return b.recv(peer, buf, off, n)
}

func (b *builder) wait(reqs ...int32) {
	for _, req := range reqs {
		if req != none {
			b.emit(Step{Kind: Wait, Req: req})
			b.free = append(b.free, req)
		}
	}
}

func (b *builder) local(kind Kind, buf Buffer, off int64, src Buffer, srcOff, n int64) {
	if n > 0 && (kind != Copy || buf != src || off != srcOff) {
		b.emit(Step{Kind: kind, Buf: buf, Off: off, Len: n, Src: src, SrcOff: srcOff})
	}
}

// scratch asks for n bytes of scratch memory.
func (b *builder) scratch(n int64) { b.plan.Scratch = max(b.plan.Scratch, n) }

// within runs a planner whose ranks peer turns into those of the group.
func (b *builder) within(peer func(int) int, planner func()) {
	b.peer = peer
	planner()
	b.peer = nil
}

// rounds is a pipeline of n messages each way, at most depth of them outstanding. post posts a
// receive and a send. done runs after the receive.
func (b *builder) rounds(n int64, depth int, post func(i int64) (recv, send int32), done func(i int64)) {
	pending := make([]struct{ recv, send int32 }, depth)
	for i := range n + int64(depth) {
		p := &pending[i%int64(depth)]
		if k := i - int64(depth); k >= 0 && k < n {
			b.wait(p.recv)
			if done != nil {
				done(k)
			}
			b.wait(p.send)
		}
		if i < n {
			p.recv, p.send = post(i)
		}
	}
}

func checkRank(rank, size int) {
	if size < 1 || rank < 0 || rank >= size {
		panic(fmt.Sprintf("plan: rank %d in a group of %d", rank, size))
	}
}

func checkRoot(root, size int) {
	if root < 0 || root >= size {
		panic(fmt.Sprintf("plan: root %d in a group of %d", root, size))
	}
}

func checkBytes(bytes int64) {
	if bytes < 0 {
		panic(fmt.Sprintf("plan: %d bytes", bytes))
	}
}

func checkElements(bytes, elem int64) {
	checkBytes(bytes)
	if elem < 1 || bytes%elem != 0 {
		panic(fmt.Sprintf("plan: %d bytes are no whole number of elements of %d", bytes, elem))
	}
}

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

func roundUp(a, b int64) int64 { return ceilDiv(a, b) * b }
