package chain

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/transport"
)

// Kind is a collective of a stage.
type Kind uint8

// The collectives.
const (
	AllReduce Kind = iota
	ReduceScatter
	AllGather
	Broadcast
)

func (k Kind) String() string {
	return [...]string{"all-reduce", "reduce-scatter", "all-gather", "broadcast"}[k]
}

func (k Kind) reduces() bool { return k <= ReduceScatter }

// Collective is what a stage runs. All members have the same, except for the memory and Ready.
type Collective struct {
	Kind    Kind
	Members []int  // ranks of the mesh, this one among them, one of each cluster, in the order of the ring
	Root    int    // of a Broadcast: the sender's place in Members
	Slot    uint64 // the first of MaxSlots slots of the mesh that nobody else uses
	Chunks  int

	// Chunk returns the memory of chunk k of an AllReduce or a Broadcast. Block returns that of
	// member m's block in chunk k of a ReduceScatter or an AllGather. The length of a block is the
	// same on all members. Blocks and chunks may have different lengths, and be empty. Both are
	// called in Advance, for a chunk that may not be ready.
	Chunk func(k int) []byte
	Block func(k, m int) []byte

	// Elem is the size of an element in bytes. An AllReduce cuts chunks at multiples of it.
	Elem int

	// Combine computes dst = dst op src. Finish, if not nil, is called once for every part of
	// a result; AVG divides there.
	Combine func(dst, src []byte)
	Finish  func(b []byte)

	// Result, if not nil, is called in Advance when the result of chunk k is in place. Of a
	// ReduceScatter that is this member's own block; the others hold partial results. The
	// memory may be read from then on. Released, if not nil, is called when it may be written
	// too.
	Result   func(k int)
	Released func(k int)
}

// MaxSlots is how many slots a collective may use. They differ in the lowest 24 bits, which are
// zero in other slots of package gloo.
const MaxSlots = 1 << 24

const (
	// window is how many chunks are under way at a time: as many as a ring of package plan has
	// messages outstanding, for the same reason. BenchmarkStage in package gloo, over loopback,
	// shows no difference between 2, 4 and 8 that the load of its machine does not hide.
	window = 4

	// depth is how many receives into scratch memory a chunk has at a time.
	depth = 2

	// directBytes is the size up to which two members exchange whole chunks, and both reduce.
	// Larger chunks go in halves, which each member reduces once. BenchmarkStage of 64 KiB takes
	// 76 us so, and 99 us in halves. Longer messages of the native wire wait for a GRANT.
	directBytes = 64 << 10
)

// Error is why a collective has failed on this rank.
type Error struct {
	Kind        Kind
	Chunk, Step int // of the message that ended, -1 if the failure belongs to none
	Peer        int // its other end, a rank of the mesh
	Err         error
}

func (e *Error) Error() string {
	switch {
	case e.Chunk < 0:
		return fmt.Sprintf("chain: %v between clusters: %v", e.Kind, e.Err)
	case e.Peer < 0:
		return fmt.Sprintf("chain: %v between clusters, chunk %d is not ready on this rank: %v", e.Kind, e.Chunk, e.Err)
	}
	return fmt.Sprintf("chain: %v between clusters, chunk %d, step %d, message to or from rank %d: %v", e.Kind, e.Chunk, e.Step, e.Peer, e.Err)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// ErrNotMember: this rank is not in the list of members.
var ErrNotMember = errors.New("this rank is no member")

// Stage is the network stage of one rank. It runs one collective at a time, and keeps its memory
// for the next one. New makes one.
//
// One goroutine at a time drives it and calls its methods. Any goroutine may call those of a Call.
type Stage struct {
	mesh transport.Mesh
	post poster           // nil if the mesh has none
	poll transport.Poller // nil if the mesh has none
	reg  registry

	c          Collective
	round      uint64
	n, place   int // members, and this one's place
	prev, next int // the ranks that it receives from and sends to
	steps      int // messages of a chunk each way; slots of a chunk
	lanes      []*lane
	activated  int // chunks that have or had a lane
	released   int // chunks that are done
	running    bool
	err        error // of the last collective

	recvs, sends []*transport.Request // to be posted
}

// poster is a mesh that posts several requests at once.
type poster interface {
	Post(recvs, sends []*transport.Request)
}

// lane runs one chunk at a time.
type lane struct {
	s       *Stage
	at      int // which lane this is
	chunk   int
	ready   bool
	direct  bool
	whole   []byte   // the chunk, of an AllReduce or a Broadcast
	blocks  [][]byte // by member
	scratch []byte
	recvs   []message // by step
	sends   []message
	reduced int // the first reducing step whose receive has not been posted
	missing int // receives that have not been handled
	open    int // messages that have not ended
}

// message is a request with its key.
type message struct {
	transport.Request
	s    *Stage
	lane *lane
	step int
	send bool
}

// New returns a stage on mesh. Any number of stages, and others, may use a mesh.
func New(mesh transport.Mesh) *Stage {
	s := &Stage{mesh: mesh}
	s.post, _ = mesh.(poster)
	s.poll, _ = mesh.(transport.Poller)
	s.reg.init()
	return s
}

// Call is one run of a collective. The zero Call has ended.
type Call struct {
	s      *Stage
	round  uint64
	chunks int
	first  int
}

// Begin begins a collective. Receives are posted, nothing is sent: that follows Call.Ready.
func (s *Stage) Begin(c *Collective) (Call, error) {
	if s.running {
		return Call{}, errors.New("chain: a collective is under way on this stage")
	}
	n := len(c.Members)
	place := slices.Index(c.Members, s.mesh.Rank())
	steps := 1
	switch c.Kind {
	case AllReduce:
		steps = 2*n - 2
	case ReduceScatter, AllGather:
		steps = n - 1
	}
	var err error
	switch {
	case c.Kind > Broadcast:
		err = fmt.Errorf("chain: collective %d is unknown", uint8(c.Kind))
	case place < 0:
		err = fmt.Errorf("rank %d, members %v: %w", s.mesh.Rank(), c.Members, ErrNotMember)
	case !s.valid(c.Members):
		err = fmt.Errorf("members %v: want different ranks of a mesh of %d", c.Members, s.mesh.Size())
	case c.Kind == Broadcast && (c.Root < 0 || c.Root >= n):
		err = fmt.Errorf("root %d, want a place in %d members", c.Root, n)
	case c.Chunks < 0 || c.Chunks > MaxSlots/max(steps, 1):
		err = fmt.Errorf("%d chunks of %d messages, want at most %d messages", c.Chunks, steps, MaxSlots)
	case c.Slot%MaxSlots != 0:
		err = fmt.Errorf("slot %#x, want a multiple of %#x", c.Slot, MaxSlots)
	case c.Kind == AllReduce && c.Elem <= 0:
		err = fmt.Errorf("elements of %d bytes", c.Elem)
	case c.Kind.reduces() && c.Combine == nil && n > 1:
		err = errors.New("no Combine")
	case (c.Kind == AllReduce || c.Kind == Broadcast) && c.Chunk == nil, (c.Kind == ReduceScatter || c.Kind == AllGather) && c.Block == nil:
		err = errors.New("no memory: Chunk is for all-reduce and broadcast, Block for the others")
	}
	if f := s.mesh.Fault(); err == nil && f != nil {
		err = f
	}
	if err != nil {
		return Call{}, &Error{Kind: c.Kind, Chunk: -1, Peer: -1, Err: err}
	}
	s.c, s.n, s.place, s.steps = *c, n, place, steps
	s.next, s.prev = c.Members[modulo(place+1, n)], c.Members[modulo(place-1, n)]
	s.activated, s.released, s.running, s.err = 0, 0, true, nil
	lanes := min(window, c.Chunks)
	for len(s.lanes) < lanes {
		s.lanes = append(s.lanes, &lane{s: s, at: len(s.lanes)})
	}
	s.round = s.reg.begin(s.readyKey(c.Chunks))
	for i := range lanes {
		s.activate(s.lanes[i])
	}
	return Call{s, s.round, c.Chunks, s.readyKey(0)}, nil
}

// valid reports whether members are different ranks of the mesh.
func (s *Stage) valid(members []int) bool {
	for i, r := range members {
		if r < 0 || r >= s.mesh.Size() || slices.Contains(members[:i], r) {
			return false
		}
	}
	return true
}

// Ready says that the memory of chunk k is the stage's: this rank's part of the operand is there,
// and the rest may be written. From any goroutine, once for each chunk, in any order. It must not
// depend on results of chunk k and later ones.
//
// The memory belongs to the stage until Released. ErrLate says that the collective has ended.
func (c Call) Ready(k int) error {
	if k < 0 || k >= c.chunks {
		return fmt.Errorf("chain: chunk %d of %d is ready", k, c.chunks)
	}
	if err := c.s.reg.arrive(c.round, c.first+k); err != nil {
		return fmt.Errorf("chain: chunk %d is ready: %w", k, err)
	}
	return nil
}

// The keys of the registry: the receives and then the sends of each lane, by step, and then the
// chunks that are to be ready.
func (m *message) key() int {
	key := m.lane.at*2*m.s.steps + m.step
	if m.send {
		key += m.s.steps
	}
	return key
}

func (s *Stage) readyKey(k int) int { return window*2*s.steps + k }

// modulo returns i modulo n, never negative.
func modulo(i, n int) int {
	if i %= n; i < 0 {
		i += n
	}
	return i
}

// received returns the block that comes from the previous member in step t of a ring. Step t+1
// sends it on. Reducing steps come first: this member combines its own block with what has come.
// After the last of them its own block has the result.
func (s *Stage) received(t int) int {
	if s.c.Kind.reduces() {
		return modulo(s.place-2-t, s.n)
	}
	return modulo(s.place-1-t, s.n)
}

// sent returns the block that goes to the next member in step t.
func (s *Stage) sent(t int) int { return s.received(t - 1) }

// reducing is how many of the steps reduce.
func (s *Stage) reducing() int {
	if s.c.Kind.reduces() {
		return s.n - 1
	}
	return 0
}

// Ended implements transport.Owner.
func (m *message) Ended(*transport.Request) {
	if err := m.Err(); err != nil {
		m.s.reg.lose(m.key(), &Error{Kind: m.s.c.Kind, Chunk: m.lane.chunk, Step: m.step, Peer: m.Peer, Err: err})
		return
	}
	m.s.reg.arrive(m.s.round, m.key())
}

// request posts a message of a step. With callback it is handled as soon as it has ended.
func (l *lane) request(t int, send bool, buf []byte, callback bool) {
	s, m := l.s, &l.recvs[t]
	if send {
		m = &l.sends[t]
	}
	m.Peer, m.Slot, m.Buf = s.prev, s.c.Slot+uint64(l.chunk*s.steps+t), buf
	m.s, m.lane, m.step, m.send, m.Owner = s, l, t, send, m
	s.reg.expect(m.key(), callback)
	if send {
		m.Peer = s.next
		s.sends = append(s.sends, &m.Request)
	} else {
		s.recvs = append(s.recvs, &m.Request)
	}
}

// flush posts the requests that have been made and reports whether there were any.
func (s *Stage) flush() bool {
	if len(s.recvs)+len(s.sends) == 0 {
		return false
	}
	if s.post != nil {
		s.post.Post(s.recvs, s.sends)
	} else {
		for _, r := range s.recvs {
			s.mesh.Recv(r)
		}
		for _, r := range s.sends {
			s.mesh.Send(r)
		}
	}
	s.recvs, s.sends = s.recvs[:0], s.sends[:0]
	return true
}

// activate gives a lane the next chunk. It posts the first receives into scratch memory.
func (s *Stage) activate(l *lane) {
	k := s.activated
	s.activated++
	if len(l.recvs) < s.steps {
		l.recvs = make([]message, s.steps)
		l.sends = make([]message, s.steps)
	}
	l.chunk, l.ready, l.direct, l.reduced = k, false, false, 0
	if err := l.place(); err != nil {
		s.reg.fail(s.round, err)
		return
	}
	l.missing, l.open = l.count()
	largest := 0
	for t := range s.reducing() {
		largest = max(largest, len(l.blocks[s.received(t)]))
	}
	if l.direct {
		largest = len(l.whole)
	}
	if cap(l.scratch) < depth*largest {
		l.scratch = make([]byte, depth*largest)
	}
	switch {
	case l.direct:
		l.request(0, false, l.scratch[:len(l.whole)], false)
	case s.c.Kind.reduces():
		for i := range depth {
			l.receive(l.scratch[i*largest : (i+1)*largest : (i+1)*largest])
		}
	}
	s.reg.register(s.readyKey(k))
}

// place finds the chunk's memory.
func (l *lane) place() error {
	s := l.s
	if cap(l.blocks) < s.n {
		l.blocks = make([][]byte, s.n)
	}
	l.blocks = l.blocks[:s.n]
	switch s.c.Kind {
	case AllReduce:
		l.whole = s.c.Chunk(l.chunk)
		elems := len(l.whole) / s.c.Elem
		if elems*s.c.Elem != len(l.whole) {
			return fmt.Errorf("chunk %d has %d bytes, want elements of %d", l.chunk, len(l.whole), s.c.Elem)
		}
		l.direct = s.n == 2 && len(l.whole) <= directBytes && len(l.whole) > 0
		for m, at := 0, 0; m < s.n; m++ {
			end := at + elems/s.n*s.c.Elem
			if m < elems%s.n {
				end += s.c.Elem
			}
			l.blocks[m], at = l.whole[at:end], end
		}
	case Broadcast:
		l.whole = s.c.Chunk(l.chunk)
	default:
		for m := range l.blocks {
			l.blocks[m] = s.c.Block(l.chunk, m)
		}
	}
	return nil
}

// count returns how many messages the lane's chunk has: those to receive, and all. Empty ones do
// not count.
func (l *lane) count() (receives, all int) {
	s := l.s
	switch {
	case l.direct:
		return 1, 2
	case s.c.Kind == Broadcast:
		if len(l.whole) == 0 {
			return 0, 0
		}
		if l.hop() > 0 {
			receives = 1
		}
		all = receives
		if l.hop() < s.n-1 {
			all++
		}
		return receives, all
	}
	for t := range s.steps {
		if len(l.blocks[s.received(t)]) > 0 {
			receives++
			all++
		}
		if len(l.blocks[s.sent(t)]) > 0 {
			all++
		}
	}
	return receives, all
}

// hop is how far a Broadcast's chain has come when it is here.
func (l *lane) hop() int { return modulo(l.s.place-l.s.c.Root, l.s.n) }

// receive posts the next receive into scratch memory, if there is another one.
func (l *lane) receive(scratch []byte) {
	s := l.s
	for ; l.reduced < s.reducing(); l.reduced++ {
		if size := len(l.blocks[s.received(l.reduced)]); size > 0 {
			l.request(l.reduced, false, scratch[:size], l.ready)
			l.reduced++
			return
		}
	}
}

// begin runs when a chunk is ready: this member sends its own block, and its callbacks wait for
// the blocks of others.
func (l *lane) begin() {
	s := l.s
	l.ready = true
	switch {
	case l.direct:
		s.reg.register(l.recvs[0].key())
		l.request(0, true, l.whole, true)
	case s.c.Kind == Broadcast && l.open > 0:
		if l.hop() > 0 {
			l.request(0, false, l.whole, true)
		} else {
			l.request(0, true, l.whole, true)
		}
	case s.c.Kind == AllGather:
		for t := range s.steps {
			if b := l.blocks[s.received(t)]; len(b) > 0 {
				l.request(t, false, b, true)
			}
		}
		l.send(0)
	case s.c.Kind.reduces() && s.n > 1:
		for t := range l.reduced {
			if len(l.blocks[s.received(t)]) > 0 {
				s.reg.register(l.recvs[t].key())
			}
		}
		l.send(0)
	case s.c.Kind.reduces() && s.c.Finish != nil:
		s.c.Finish(l.blocks[0])
	}
	if l.missing == 0 {
		l.announce()
	}
	l.release()
}

// send sends the block of a step, unless that was the last step or the block is empty.
func (l *lane) send(t int) {
	if t < l.s.steps {
		if b := l.blocks[l.s.sent(t)]; len(b) > 0 {
			l.request(t, true, b, true)
		}
	}
}

// arrived runs when a message of step t has met its callback.
func (l *lane) arrived(t int) {
	s := l.s
	switch {
	case l.direct:
		l.open--
		l.exchanged()
		return
	case s.c.Kind == Broadcast:
		if l.hop() < s.n-1 {
			l.request(0, true, l.whole, true)
		}
	case t < s.reducing():
		got, own := l.recvs[t].Buf, l.blocks[s.received(t)]
		s.c.Combine(own, got)
		if t == s.reducing()-1 && s.c.Finish != nil {
			s.c.Finish(own)
		}
		l.receive(got[:cap(got)])
		l.send(t + 1)
	default:
		l.send(t + 1)
	}
	s.flush()
	l.open--
	if l.missing--; l.missing == 0 {
		l.announce()
	}
	l.release()
}

// left runs when the send of step t has ended. The block of a reducing step is free for its
// result.
func (l *lane) left(t int) {
	s := l.s
	l.open--
	switch {
	case l.direct:
		l.exchanged()
		return
	case s.c.Kind == AllReduce && t < s.n-1:
		l.request(t+s.n-1, false, l.blocks[s.sent(t)], true)
	}
	l.release()
}

// exchanged reduces a chunk that two members have exchanged. Both have the operand of the first
// member first.
func (l *lane) exchanged() {
	if l.open > 0 {
		return
	}
	s, got := l.s, l.recvs[0].Buf
	if s.place == 0 {
		s.c.Combine(l.whole, got)
	} else {
		s.c.Combine(got, l.whole)
		copy(l.whole, got)
	}
	if s.c.Finish != nil {
		s.c.Finish(l.whole)
	}
	l.missing = 0
	l.announce()
	l.release()
}

func (l *lane) announce() {
	if l.s.c.Result != nil {
		l.s.c.Result(l.chunk)
	}
}

// release ends a chunk without messages under way, and begins the next one.
func (l *lane) release() {
	s := l.s
	if l.open > 0 {
		return
	}
	if s.c.Released != nil {
		s.c.Released(l.chunk)
	}
	s.released++
	l.chunk = -1
	if s.activated < s.c.Chunks {
		s.activate(l)
	}
}

// Advance runs what can run: reductions, and messages that follow. It reports whether the
// collective has ended; Err is how. It does not wait.
func (s *Stage) Advance() (ended bool) {
	for s.running {
		key, ok := s.reg.next()
		if !ok {
			if !s.flush() {
				break
			}
			continue
		}
		switch first := s.readyKey(0); {
		case key >= first:
			k := key - first
			l := s.lanes[slices.IndexFunc(s.lanes, func(l *lane) bool { return l.chunk == k })]
			l.begin()
		default:
			l, t := s.lanes[key/(2*s.steps)], key%(2*s.steps)
			if t < s.steps {
				l.arrived(t)
			} else {
				l.left(t - s.steps)
			}
		}
	}
	if !s.running {
		return true
	}
	err, over := s.reg.failed()
	if err == nil && s.released < s.c.Chunks || err != nil && !over {
		return false
	}
	s.end(err)
	return true
}

// end ends the collective.
func (s *Stage) end(err error) {
	if err != nil {
		var e *Error
		if !errors.As(err, &e) {
			err = &Error{Kind: s.c.Kind, Chunk: -1, Peer: -1, Err: err}
		}
	}
	s.reg.end()
	s.running, s.err = false, err
	s.c = Collective{}
	for _, l := range s.lanes {
		l.chunk, l.whole = -1, nil
		clear(l.blocks)
		if cap(l.scratch) > keepScratch {
			l.scratch = nil
		}
	}
}

// keepScratch is how much scratch memory a lane keeps between collectives.
const keepScratch = 16 << 20

// Fail ends the collective with err, unless it has an error already. The mesh has to fail too, or
// messages that have been posted never end. Any goroutine may call it.
func (c Call) Fail(err error) {
	if c.s != nil {
		c.s.reg.fail(c.round, err)
	}
}

// Err returns how the last collective ended.
func (s *Stage) Err() error { return s.err }

// Finished implements transport.Waiter for a driver that polls the mesh. It is Advance, and also
// reports a failure. So the steps of a collective run within one PollUntil: between two of them, the
// mesh would let its own goroutines read again.
func (s *Stage) Finished() bool {
	if !s.reg.some.Load() {
		return false
	}
	if s.Advance() {
		return true
	}
	err, _ := s.reg.failed()
	return err != nil
}

// Awake returns a channel that delivers once when there is something for Advance.
func (s *Stage) Awake() <-chan struct{} { return s.reg.awake() }

// Awaited returns the message of the oldest chunk that the collective waits for, and its other
// end. If this rank has not said that the chunk is ready, step and peer are -1.
func (s *Stage) Awaited() (chunk, step, peer int) {
	var oldest *lane
	for _, l := range s.lanes {
		if l.chunk >= 0 && (oldest == nil || l.chunk < oldest.chunk) {
			oldest = l
		}
	}
	if oldest == nil {
		return -1, -1, -1
	}
	for t := 0; oldest.ready && t < s.steps; t++ {
		for _, m := range []*message{&oldest.recvs[t], &oldest.sends[t]} {
			if m.lane != nil && s.reg.awaits(m.key()) {
				return oldest.chunk, t, m.Peer
			}
		}
	}
	return oldest.chunk, -1, -1
}

// Wait drives the collective to its end and returns its error. If ctx ends, or the collective
// fails on this rank alone, it ends the mesh. After a panic in a function of the collective, and
// a Fail, Wait returns once the mesh has let go of the memory.
func (s *Stage) Wait(ctx context.Context) error {
	done, failed := ctx.Done(), s.mesh.Failed()
	for !s.Advance() {
		if err, _ := s.reg.failed(); err != nil {
			s.abort(err)
			done, failed = nil, nil
		} else if s.poll != nil {
			if s.poll.PollUntil(s); s.Advance() {
				break
			}
		}
		select {
		case <-s.Awake():
		case <-done:
			s.giveUp(context.Cause(ctx))
		case <-failed:
			s.reg.fail(s.round, s.mesh.Fault())
		}
	}
	if s.err != nil {
		s.abort(s.err)
	}
	return s.err
}

// abort ends the mesh because of err, unless it has ended.
func (s *Stage) abort(err error) {
	if s.mesh.Fault() == nil {
		s.mesh.Abort(transport.NewFault(transport.FaultAborted, s.mesh.Rank(), s.mesh.Rank(), err))
	}
}

// giveUp ends the collective and the mesh because a context has ended.
func (s *Stage) giveUp(cause error) {
	f := transport.NewFault(transport.FaultCanceled, s.mesh.Rank(), s.mesh.Rank(), cause)
	e := &Error{Kind: s.c.Kind, Err: f}
	e.Chunk, e.Step, e.Peer = s.Awaited()
	if errors.Is(cause, context.DeadlineExceeded) && e.Peer >= 0 {
		f.Kind, f.Rank = transport.FaultTimeout, e.Peer
	}
	s.reg.fail(s.round, e)
	s.mesh.Abort(f)
}
