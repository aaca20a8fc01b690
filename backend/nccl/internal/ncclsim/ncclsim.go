// Package ncclsim is NCCL on the simulated devices of driver/sim, for tests.
//
// Violations lists broken rules, which a real NCCL does not report:
//
//   - a communicator is used after its end
//   - a call is made on a thread with another current device, or on one that the goroutine may leave
//   - operations differ from rank to rank. They match by their order, as NCCL's do
//
// An operation is one kernel of each rank, so the simulator finds memory that nothing orders. A kernel waits until all
// ranks' have begun, or until its own rank aborts.
package ncclsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/tensor"
)

const kernelName = "ncclSim"

// Version is that of APIs, unless they ask for another one.
const Version libnccl.Version = 22809

// Library is what the processes of a simulated machine share. Its methods may be called from many goroutines.
type Library struct {
	// Trace, if not nil, is told each call of a device with its arguments. Set it first.
	Trace func(device int, call string)

	mu       sync.Mutex
	ids      int
	cliques  map[string]*clique // by ids
	members  map[libnccl.Comm]*member
	next     libnccl.Comm
	threads  map[sim.Thread]*thread
	launches map[uint64]*launch
	factors  map[libnccl.RedOp]float64
	wrong    []string
	closed   bool
}

// New returns the library of a machine.
func New(m *sim.Machine) (*Library, error) {
	l := &Library{
		cliques: map[string]*clique{}, members: map[libnccl.Comm]*member{}, threads: map[sim.Thread]*thread{},
		launches: map[uint64]*launch{}, factors: map[libnccl.RedOp]float64{},
	}
	return l, m.Register(kernelName, l.kernel)
}

// API returns an API of a version; 0 means Version.
func (l *Library) API(v libnccl.Version) libnccl.API {
	if v == 0 {
		v = Version
	}
	return &api{l, v}
}

// Violations returns which rules were broken.
func (l *Library) Violations() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.wrong)
}

// Open returns how many communicators have been neither destroyed nor aborted.
func (l *Library) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.members)
}

// clique is the ranks of a communicator. Library.mu guards all that is below.
type clique struct {
	size       int
	members    []*member // by rank; nil for those that have not come
	came       int
	version    libnccl.Version
	ended      int // ranks that have called CommFinalize
	collective map[int]*collective
	messages   map[[2]int][]*message
	splits     map[int]*split
}

func newClique(size int) *clique {
	return &clique{size: size, members: make([]*member, size), collective: map[int]*collective{}, messages: map[[2]int][]*message{}, splits: map[int]*split{}}
}

// member is a rank's end of a communicator.
type member struct {
	handle  libnccl.Comm
	c       *clique
	rank    int
	dev     *sim.Device
	failed  libnccl.Result // Success while it works
	why     string
	module  driver.Module
	kernel  driver.Function
	last    driver.Stream
	number  int // of the next collective, counted where it runs
	splits  int
	running int
	final   bool
	aborted bool
}

// thread is what NCCL keeps for a thread.
type thread struct {
	depth int
	tasks []*task
}

type kind uint8

const (
	allReduce kind = iota
	broadcast
	reduce
	allGather
	reduceScatter
	send
	recv
)

var kindNames = [...]string{"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send", "Recv"}

// task is one operation.
type task struct {
	m        *member
	s        driver.Stream
	what     signature
	in, out  driver.Ptr
	inN      int // bytes
	outN     int
	factor   float64 // of a PREMUL_SUM
	multiply bool
}

// signature is what all ranks of a collective need alike.
type signature struct {
	kind  kind
	count int
	t     libnccl.DataType
	op    libnccl.RedOp
	root  int
}

func (s signature) String() string {
	text := fmt.Sprintf("%s %d %s", kindNames[s.kind], s.count, dtypes[s.t])
	switch s.kind {
	case allReduce, reduce, reduceScatter:
		text += fmt.Sprint(" op ", s.op)
	}
	switch s.kind {
	case broadcast, reduce:
		text += fmt.Sprint(" root ", s.root)
	case send, recv:
		text += fmt.Sprint(" peer ", s.root)
	}
	return text
}

var dtypes = [...]tensor.DType{
	tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Uint32, tensor.Int64, tensor.Uint64, tensor.Float16, tensor.Float32, tensor.Float64, tensor.BFloat16,
	tensor.Float8E4M3, tensor.Float8E5M2,
}

type collective struct {
	what  signature
	parts [][]byte
	came  int
	left  int
}

type message struct {
	data  []byte
	t     libnccl.DataType
	taken bool
}

type split struct {
	calls map[*member]call
	made  map[*member]*member
}

type call struct{ color, key int }

// launch is the tasks of one kernel.
type launch struct {
	m     *member
	tasks []*task
}

type api struct {
	l       *Library
	version libnccl.Version
}

func (a *api) Path() string { return "simulated" }

func (a *api) Version() libnccl.Version { return a.version }

func (a *api) UniqueID() (id libnccl.UniqueID, r libnccl.Result) {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	a.l.ids++
	copy(id[:], fmt.Sprint("id ", a.l.ids))
	return id, libnccl.Success
}

func (l *Library) violation(format string, args ...any) libnccl.Result {
	l.wrong = append(l.wrong, fmt.Sprintf(format, args...))
	return libnccl.InvalidUsage
}

// thread returns the state of the calling thread, and its device. The caller holds l.mu.
func (l *Library) thread(call string) (*thread, *sim.Device) {
	t, tied := sim.OwnThread()
	if !tied {
		l.violation("%s in a goroutine that is not tied to its thread", call)
		return nil, nil
	}
	if l.threads[t] == nil {
		l.threads[t] = &thread{}
	}
	v := sim.Current()
	if v == nil {
		l.violation("%s on a thread without a current device", call)
	}
	return l.threads[t], v
}

// member returns a communicator for a call on this thread. The caller holds l.mu.
func (l *Library) member(c libnccl.Comm, call string) (*member, *thread) {
	t, v := l.thread(call)
	m := l.members[c]
	switch {
	case m == nil:
		l.violation("%s with a communicator that is none, or no more", call)
	case v == nil:
		m = nil
	case v != m.dev:
		l.violation("%s of a communicator of %v on a thread with %v", call, m.dev.ID(), v.ID())
		m = nil
	}
	return m, t
}

func (l *Library) trace(v *sim.Device, format string, args ...any) {
	if l.Trace != nil {
		l.Trace(v.ID().Index, fmt.Sprintf(format, args...))
	}
}

// join makes a member of a device; its clique and rank may follow. The caller holds l.mu.
func (l *Library) join(v *sim.Device) (*member, libnccl.Result) {
	mod, err := v.Load(sim.Image(kernelName))
	if err != nil {
		return nil, libnccl.SystemError
	}
	f, err := mod.Function(kernelName)
	if err != nil {
		return nil, libnccl.SystemError
	}
	l.next++
	m := &member{handle: l.next, dev: v, module: mod, kernel: f}
	l.members[m.handle] = m
	return m, libnccl.Success
}

func (a *api) CommInit(ids []libnccl.UniqueID, size, rank int) (libnccl.Comm, libnccl.Result) {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	t, v := l.thread("CommInit")
	if v == nil {
		return 0, libnccl.InvalidUsage
	}
	if t.depth > 0 {
		return 0, l.violation("CommInit in a group")
	}
	l.trace(v, "CommInit %d of %d, %d ids", rank, size, len(ids))
	key := ""
	for _, id := range ids {
		if !bytes.HasPrefix(id[:], []byte("id ")) {
			return 0, libnccl.InvalidArgument
		}
		key += string(id[:])
	}
	c := l.cliques[key]
	if c == nil {
		c = newClique(size)
		c.version = a.version
		l.cliques[key] = c
	}
	if rank < 0 || rank >= size || size != c.size || c.members[rank] != nil {
		return 0, libnccl.InvalidArgument
	}
	m, r := l.join(v)
	if r != libnccl.Success {
		return 0, r
	}
	m.c, m.rank = c, rank
	c.members[rank] = m
	c.came++
	for _, o := range c.members {
		switch {
		case o == nil:
		case c.version != a.version:
			o.failed, o.why = libnccl.InvalidUsage, "Mismatched NCCL version detected"
		case o != m && o.dev.ID() == v.ID():
			o.failed, o.why = libnccl.InvalidUsage, "Duplicate GPU detected"
			m.failed, m.why = o.failed, o.why
		}
	}
	l.until(func() bool { return m.state() != libnccl.InProgress || m.aborted })
	if r = m.state(); r == libnccl.InProgress {
		r = libnccl.SystemError
	}
	return m.handle, r
}

// Close ends calls that wait for other ranks, as the end of the processes does.
func (l *Library) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// until waits without the lock, which the caller holds.
func (l *Library) until(f func() bool) {
	for !f() && !l.closed {
		l.mu.Unlock()
		runtime.Gosched()
		time.Sleep(20 * time.Microsecond)
		l.mu.Lock()
	}
}

// state is the member's as CommGetAsyncError says it.
func (m *member) state() libnccl.Result {
	switch {
	case m.failed != libnccl.Success:
		return m.failed
	case m.c == nil || m.c.came < m.c.size, m.final && (m.c.ended < m.c.size || m.running > 0):
		return libnccl.InProgress
	}
	for _, s := range m.c.splits {
		if _, asked := s.calls[m]; asked && len(s.calls) < m.c.size {
			return libnccl.InProgress
		}
	}
	return libnccl.Success
}

func (a *api) CommSplit(c libnccl.Comm, color, key int) (libnccl.Comm, libnccl.Result) {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	m, t := l.member(c, "CommSplit")
	if m == nil {
		return 0, libnccl.InvalidUsage
	}
	if t.depth > 0 || m.state() != libnccl.Success {
		return 0, l.violation("CommSplit in a group, or of a communicator that is %v", m.state())
	}
	l.trace(m.dev, "CommSplit color %d key %d", color, key)
	s := m.c.splits[m.splits]
	if s == nil {
		s = &split{calls: map[*member]call{}, made: map[*member]*member{}}
		m.c.splits[m.splits] = s
	}
	m.splits++
	s.calls[m] = call{color, key}
	var made *member
	if color != libnccl.NoColor {
		var r libnccl.Result
		if made, r = l.join(m.dev); r != libnccl.Success {
			return 0, r
		}
		s.made[m] = made
	}
	if len(s.calls) == m.c.size {
		s.form(m.c)
	}
	l.until(func() bool { return len(s.calls) == m.c.size || m.aborted })
	if made == nil {
		return 0, libnccl.Success
	}
	return made.handle, libnccl.Success
}

// form makes the cliques of a split.
func (s *split) form(parent *clique) {
	byColor := map[int][]*member{}
	for _, m := range parent.members {
		if c := s.calls[m].color; c != libnccl.NoColor {
			byColor[c] = append(byColor[c], m)
		}
	}
	for _, list := range byColor {
		slices.SortStableFunc(list, func(a, b *member) int { return s.calls[a].key - s.calls[b].key })
		c := newClique(len(list))
		for r, m := range list {
			made := s.made[m]
			made.c, made.rank, c.members[r] = c, r, made
			c.came++
		}
	}
}

func (a *api) CommAsyncError(c libnccl.Comm) (state, r libnccl.Result) {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.members[c]
	if m == nil {
		return 0, l.violation("CommGetAsyncError with a communicator that is none, or no more")
	}
	return m.state(), libnccl.Success
}

func (a *api) CommFinalize(c libnccl.Comm) libnccl.Result {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	m, _ := l.member(c, "CommFinalize")
	if m == nil {
		return libnccl.InvalidUsage
	}
	l.trace(m.dev, "CommFinalize")
	if !m.final {
		m.final = true
		m.c.ended++
	}
	l.until(func() bool { return m.state() != libnccl.InProgress || m.aborted })
	return libnccl.Success
}

func (a *api) CommDestroy(c libnccl.Comm) libnccl.Result { return a.end(c, "CommDestroy", false) }

func (a *api) CommAbort(c libnccl.Comm) libnccl.Result { return a.end(c, "CommAbort", true) }

func (a *api) end(c libnccl.Comm, call string, abort bool) libnccl.Result {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	m, _ := l.member(c, call)
	if m == nil {
		return libnccl.InvalidUsage
	}
	l.trace(m.dev, "%s", call)
	m.aborted = abort
	l.until(func() bool { return m.running == 0 })
	delete(l.members, c)
	m.module.Close()
	return libnccl.Success
}

func (a *api) ErrorText(c libnccl.Comm, r libnccl.Result) string {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if m := a.l.members[c]; m != nil && m.why != "" {
		return r.String() + ": " + m.why
	}
	return r.String()
}

func (a *api) GroupStart() libnccl.Result {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	t, v := a.l.thread("GroupStart")
	if v == nil {
		return libnccl.InvalidUsage
	}
	a.l.trace(v, "GroupStart")
	t.depth++
	return libnccl.Success
}

func (a *api) GroupEnd() libnccl.Result {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	t, v := a.l.thread("GroupEnd")
	if v == nil {
		return libnccl.InvalidUsage
	}
	if t.depth == 0 {
		return a.l.violation("GroupEnd without a GroupStart on its thread")
	}
	a.l.trace(v, "GroupEnd")
	if t.depth--; t.depth > 0 {
		return libnccl.Success
	}
	return a.l.flush(t)
}

// flush gives the streams the tasks of a group: one kernel for each communicator and stream. The caller holds l.mu.
func (l *Library) flush(t *thread) libnccl.Result {
	tasks := t.tasks
	t.tasks = nil
	for len(tasks) > 0 {
		first := tasks[0]
		x := &launch{m: first.m}
		tasks = slices.DeleteFunc(tasks, func(o *task) bool {
			same := o.m == first.m && o.s == first.s
			if same {
				x.tasks = append(x.tasks, o)
			}
			return same
		})
		if l.launch(x, first.s) != nil {
			return libnccl.InternalError
		}
	}
	return libnccl.Success
}

func (l *Library) launch(x *launch, s driver.Stream) error {
	id := uint64(len(l.launches))
	l.launches[id] = x
	run := &driver.Launch{Function: x.m.kernel, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args)}
	run.Args.Uint64(id)
	for _, t := range x.tasks {
		if t.inN > 0 {
			run.Access = append(run.Access, driver.Reads(t.in, t.inN))
		}
		if t.outN > 0 {
			run.Access = append(run.Access, driver.Writes(t.out, t.outN))
		}
	}
	if last := x.m.last; last != nil && last != s && !driver.Capturing(s) && !driver.Capturing(last) {
		if e, err := last.Record(); err == nil { // NCCL runs a communicator's kernels in order
			err = s.Wait(e)
			e.Release()
			if err != nil {
				return err
			}
		}
	}
	x.m.last = s
	return s.Launch(run)
}

// add begins an operation.
func (a *api) add(c libnccl.Comm, s driver.Stream, x *task) libnccl.Result {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	m, t := l.member(c, kindNames[x.what.kind])
	if m == nil {
		return libnccl.InvalidUsage
	}
	if m.failed != libnccl.Success {
		return m.failed
	}
	if state := m.state(); state != libnccl.Success {
		return l.violation("%v on a communicator that is %v", x.what, state)
	}
	if s.Device() != m.dev.ID() {
		return l.violation("%v on a stream of %v, the communicator has %v", x.what, s.Device(), m.dev.ID())
	}
	if x.what.root < 0 || x.what.root >= m.c.size {
		return libnccl.InvalidArgument
	}
	if f, made := l.factors[x.what.op]; made {
		x.multiply, x.factor, x.what.op = true, f, libnccl.Sum
		l.trace(m.dev, "%v times %v", x.what, f)
	} else {
		l.trace(m.dev, "%v", x.what)
	}
	x.m, x.s = m, s
	t.tasks = append(t.tasks, x)
	if t.depth > 0 {
		return libnccl.Success
	}
	return l.flush(t)
}

func (a *api) size(c libnccl.Comm) int {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if m := a.l.members[c]; m != nil && m.c != nil {
		return m.c.size
	}
	return 1
}

func (a *api) AllReduce(in, out driver.Ptr, n int, t libnccl.DataType, op libnccl.RedOp, c libnccl.Comm, s driver.Stream) libnccl.Result {
	b := n * t.Size()
	return a.add(c, s, &task{what: signature{allReduce, n, t, op, 0}, in: in, inN: b, out: out, outN: b})
}

func (a *api) Broadcast(in, out driver.Ptr, n int, t libnccl.DataType, root int, c libnccl.Comm, s driver.Stream) libnccl.Result {
	b := n * t.Size()
	x := &task{what: signature{broadcast, n, t, 0, root}, in: in, out: out, outN: b}
	if a.is(c, root) {
		x.inN = b
	}
	return a.add(c, s, x)
}

// is reports whether this is rank r of a communicator.
func (a *api) is(c libnccl.Comm, r int) bool {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	m := a.l.members[c]
	return m != nil && m.rank == r
}

func (a *api) Reduce(in, out driver.Ptr, n int, t libnccl.DataType, op libnccl.RedOp, root int, c libnccl.Comm, s driver.Stream) libnccl.Result {
	b := n * t.Size()
	x := &task{what: signature{reduce, n, t, op, root}, in: in, inN: b, out: out}
	if a.is(c, root) {
		x.outN = b
	}
	return a.add(c, s, x)
}

func (a *api) AllGather(in, out driver.Ptr, n int, t libnccl.DataType, c libnccl.Comm, s driver.Stream) libnccl.Result {
	b := n * t.Size()
	return a.add(c, s, &task{what: signature{allGather, n, t, 0, 0}, in: in, inN: b, out: out, outN: b * a.size(c)})
}

func (a *api) ReduceScatter(in, out driver.Ptr, n int, t libnccl.DataType, op libnccl.RedOp, c libnccl.Comm, s driver.Stream) libnccl.Result {
	b := n * t.Size()
	return a.add(c, s, &task{what: signature{reduceScatter, n, t, op, 0}, in: in, inN: b * a.size(c), out: out, outN: b})
}

func (a *api) Send(p driver.Ptr, n int, t libnccl.DataType, peer int, c libnccl.Comm, s driver.Stream) libnccl.Result {
	return a.add(c, s, &task{what: signature{send, n, t, 0, peer}, in: p, inN: n * t.Size()})
}

func (a *api) Recv(p driver.Ptr, n int, t libnccl.DataType, peer int, c libnccl.Comm, s driver.Stream) libnccl.Result {
	return a.add(c, s, &task{what: signature{recv, n, t, 0, peer}, out: p, outN: n * t.Size()})
}

func (a *api) RedOpPreMulSum(scalar []byte, t libnccl.DataType, c libnccl.Comm) (libnccl.RedOp, libnccl.Result) {
	l := a.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if m, _ := l.member(c, "RedOpCreatePreMulSum"); m == nil {
		return 0, libnccl.InvalidUsage
	}
	var f float64
	switch t {
	case libnccl.Float32:
		f = float64(math.Float32frombits(binary.NativeEndian.Uint32(scalar)))
	case libnccl.Float64:
		f = math.Float64frombits(binary.NativeEndian.Uint64(scalar))
	case libnccl.Float16:
		f = float64(tensor.F16(binary.NativeEndian.Uint16(scalar)).Float32())
	case libnccl.BFloat16:
		f = float64(tensor.BF16(binary.NativeEndian.Uint16(scalar)).Float32())
	default:
		return 0, libnccl.InvalidArgument
	}
	op := libnccl.RedOp(100)
	for l.has(op) {
		op++
	}
	l.factors[op] = f
	return op, libnccl.Success
}

func (l *Library) has(op libnccl.RedOp) bool {
	_, ok := l.factors[op]
	return ok
}

func (a *api) RedOpDestroy(op libnccl.RedOp, c libnccl.Comm) libnccl.Result {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if !a.l.has(op) {
		return a.l.violation("RedOpDestroy of an operator that is none, or no more")
	}
	delete(a.l.factors, op)
	return libnccl.Success
}

var operators = map[libnccl.RedOp]backend.ReduceOp{
	libnccl.Sum: backend.Sum(), libnccl.Prod: backend.Product(), libnccl.Max: backend.Max(), libnccl.Min: backend.Min(), libnccl.Avg: backend.Avg(),
}
