package plan

import "fmt"

// none stands for a request that was not posted.
const none int32 = -1

// builder collects steps and hands out request indices, the latest free one
// first, so that Requests is what is outstanding at most.
type builder struct {
	plan Plan
	free []int32
}

func newBuilder(steps int) builder {
	return builder{plan: Plan{Steps: make([]Step, 0, steps)}}
}

func (b *builder) post(kind Kind, peer int, buf Buffer, off, n int64) int32 {
	req := int32(b.plan.Requests)
	if last := len(b.free) - 1; last >= 0 {
		req, b.free = b.free[last], b.free[:last]
	} else {
		b.plan.Requests++
	}
	b.plan.Steps = append(b.plan.Steps, Step{Kind: kind, Buf: buf, Peer: int32(peer), Req: req, Off: off, Len: n})
	return req
}

func (b *builder) send(peer int, buf Buffer, off, n int64) int32 {
	return b.post(Send, peer, buf, off, n)
}

func (b *builder) recv(peer int, buf Buffer, off, n int64) int32 {
	return b.post(Recv, peer, buf, off, n)
}

func (b *builder) wait(req int32) {
	if req == none {
		return
	}
	b.plan.Steps = append(b.plan.Steps, Step{Kind: Wait, Req: req})
	b.free = append(b.free, req)
}

// waitAll waits for every request outstanding, in the order of their indices.
// It serves plans in which these are the lowest.
func (b *builder) waitAll() {
	for req := range int32(b.plan.Requests - len(b.free)) {
		b.wait(req)
	}
}

func (b *builder) local(kind Kind, buf Buffer, off int64, src Buffer, srcOff, n int64) {
	if n > 0 {
		b.plan.Steps = append(b.plan.Steps, Step{Kind: kind, Buf: buf, Off: off, Len: n, Src: src, SrcOff: srcOff})
	}
}

func (b *builder) done() *Plan { return &b.plan }

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
