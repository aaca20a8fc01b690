package trace

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// DefaultEntries is how many operations a Recorder keeps by default, about 200 bytes for each.
const DefaultEntries = 1024

// Off is a Recorder that records nothing.
var Off = new(Recorder)

// Options are the options of New. The zero value works.
type Options struct {
	// Entries is how many operations are kept. 0 or less means DefaultEntries.
	Entries int

	// Prefix names the files of Dump: "/tmp/job/rank_" makes rank 3 write /tmp/job/rank_3. In later
	// epochs too, that is its rank in the first one, or a newcomer's number: see pg.View. A recorder with a prefix also writes its file when a group fails. Empty means that it writes none.
	Prefix string

	// Observers are told of every operation.
	Observers []Observer

	// Stacks records where the program calls each operation, which takes about a microsecond.
	Stacks bool
}

// Observer is told of the operations of a rank. Its methods are called on the goroutines that call and
// run operations, with locks of the backend held: they must return soon and must not call the group.
type Observer interface {
	// Called comes when the operation is called, and before Ended. A backend.Prompt has the operation then, which
	// goes on if Called panics. Another backend does not have it. Seq, Began and Ended are not known yet.
	Called(e Event)

	// Ended comes when the operation has ended, or was refused: Began is zero then.
	Ended(e Event)
}

// observers are told one after the other.
type observers []Observer

func (all observers) Called(e Event) {
	for _, o := range all {
		o.Called(e)
	}
}

func (all observers) Ended(e Event) {
	for _, o := range all {
		o.Ended(e)
	}
}

// Event is an operation that an observer is told of. It may be used until the observer's method returns.
// Its methods cost less than Operation, which copies everything.
type Event struct {
	recorder *Recorder
	at       int // place in the ring
	ended    bool
}

// Operation returns all that is known of the operation, for as long as the observer likes.
func (e Event) Operation() Operation {
	w := unissued
	if e.ended {
		w = nil
	}
	return e.recorder.operation(e.at, w) // without a lock: the entry belongs to who tells the observers
}

// Group returns the group.
func (e Event) Group() *Group { return e.entry().group }

// Op returns the kind of the operation.
func (e Event) Op() work.OpType { return e.entry().op }

// Bytes is as Operation.Bytes.
func (e Event) Bytes() int64 { return e.entry().bytes() }

// Route is as Operation.Route.
func (e Event) Route() string {
	x := e.entry()
	return x.group.route(x.backend, x.op, x.bytes())
}

// Err returns the error of an operation that has failed or was refused.
func (e Event) Err() error { return e.entry().failure() }

// Took returns the time from Operation.Called to the end, and 0 in Observer.Called.
func (e Event) Took() time.Duration {
	if !e.ended {
		return 0
	}
	x := e.entry()
	return x.ended - x.called
}

func (e Event) entry() *entry { return &e.recorder.entries[e.at] }

// Operation describes a call.
type Operation struct {
	Record     uint64 // numbers the recorder's operations from 0
	Group      *Group
	Backend    string
	Op         work.OpType
	Seq        uint64 // the number of the operation in its group, as in work.Info
	Collective uint64 // how many collectives the group has called, this one included
	P2P        uint64 // how many sends and receives the group has called, this one included
	Peer       int    // of a send or receive, within the group; -1 if there is none
	In, Out    Shape
	Timeout    time.Duration
	Called     time.Time // when the program made the call
	Began      time.Time // zero if it has not begun
	Ended      time.Time // zero while it is pending
	Err        error

	stack []uintptr
}

// Frames returns the functions that led to the call, the innermost first. It is empty without
// Options.Stacks.
func (o *Operation) Frames() []runtime.Frame {
	if len(o.stack) == 0 {
		return nil
	}
	var all []runtime.Frame
	for next, more := runtime.CallersFrames(o.stack), true; more; {
		var f runtime.Frame
		if f, more = next.Next(); f.Function != "" && !strings.HasPrefix(f.Function, "runtime.") && !strings.HasPrefix(f.Function, ownFrames) {
			all = append(all, f)
		}
	}
	return all
}

// ownFrames are those of the recorder itself. How many there are depends on the backend.
const ownFrames = "github.com/c10d-go/c10d/trace.(*Call)."

// Bytes returns the size of this rank's input, or of its output where it has no input.
func (o *Operation) Bytes() int64 {
	if o.In.Tensors == 0 {
		return o.Out.Bytes()
	}
	return o.In.Bytes()
}

// DType returns the type of the elements, Invalid for operations without tensors.
func (o *Operation) DType() tensor.DType {
	if o.In.Tensors == 0 {
		return o.Out.DType
	}
	return o.In.DType
}

// Route returns how the group does such an operation, such as "shm: ring". It is the transport alone
// if the backend does not say more, and empty if it says nothing.
func (o *Operation) Route() string { return o.Group.route(o.Backend, o.Op, o.Bytes()) }

// maxDims is how many dimensions of a tensor a Shape has.
const maxDims = 4

// Shape sums up the tensors of a side of a call.
type Shape struct {
	Elements int // of all tensors
	Tensors  int32
	DType    tensor.DType
	dims     int8 // of the first one; -1 if the tensors differ, or have more than maxDims, or too large ones
	dim      [maxDims]int32
}

// Bytes returns the size of the tensors.
func (s *Shape) Bytes() int64 { return int64(s.Elements) * int64(s.DType.Size()) }

// Dims returns the dimensions. Several tensors of one shape have their number as first dimension.
// Tensors of different shapes have the number of their elements.
func (s *Shape) Dims() []int {
	if s.dims < 0 {
		return []int{s.Elements}
	}
	dims := []int{}
	if s.Tensors > 1 {
		dims = append(dims, int(s.Tensors))
	}
	for _, d := range s.dim[:s.dims] {
		dims = append(dims, int(d))
	}
	return dims
}

// set describes the tensors.
func (s *Shape) set(ts []*tensor.Tensor) {
	*s = Shape{}
	for _, t := range ts {
		switch {
		case t == nil:
			continue
		case s.Tensors == 0:
			s.DType, s.dims = t.DType(), int8(min(t.Dims(), maxDims+1))
			if s.dims > maxDims {
				s.dims = -1
			}
			for i := range max(s.dims, 0) {
				n := t.Dim(int(i))
				if s.dim[i] = int32(n); int(s.dim[i]) != n {
					s.dims = -1
				}
			}
		case !s.fits(t):
			s.dims = -1
		}
		s.Tensors++
		s.Elements += t.Len()
	}
}

// fits reports whether t has the dimensions of the tensors before it.
func (s *Shape) fits(t *tensor.Tensor) bool {
	if t.Dims() != int(s.dims) {
		return false
	}
	for i, d := range s.dim[:s.dims] {
		if t.Dim(i) != int(d) {
			return false
		}
	}
	return true
}

// Recorder keeps the last operations of one rank, in all its groups and epochs. It allocates nothing
// while it records. All methods may be called from many goroutines.
type Recorder struct {
	options Options
	dumps   *dumps // nil in Off
	dropped atomic.Uint64

	lock     sync.Mutex // guards what follows
	stacks   []stack    // of the entries; nil without Options.Stacks
	groups   []*Group
	joined   int    // groups, ever
	next     uint32 // place in entries
	stacked  bool   // there are stacks
	records  uint64
	entries  []entry  // made by the first Join
	observer Observer // Options.Observers; nil if there are none
}

// maxFrames is how many calls of a stack are recorded. The first three to five are the recorder's and package pg's.
const maxFrames = 16

// stack has program counters, and zeros behind them.
type stack [maxFrames]uintptr

// entry is a place of the ring. A pending operation keeps its place.
//
// Recorder.lock guards it, except at the end of an operation. While work is not nil, whoever ends the
// operation owns seq, began, ended and err, and writes them without the lock. Storing nil in work hands
// them over. That saves the end of each operation a lock.
type entry struct {
	work       atomic.Pointer[work.Work] // while the operation is pending: unissued before the backend has it
	group      *Group
	backend    string
	record     uint64
	collective uint64
	called     time.Duration // since work.Origin
	peer       int32
	op         work.OpType
	same       bool // out is in
	blocked    bool // the call blocks: it began when it was called
	in         Shape
	out        Shape // not valid if same
	p2p        uint64
	timeout    time.Duration

	seq   uint64
	began time.Duration // since work.Origin, as ended
	ended time.Duration
	err   *error
}

// failure is the operation's error.
func (e *entry) failure() error {
	if e.err == nil {
		return nil
	}
	return *e.err
}

// bytes is Operation.Bytes.
func (e *entry) bytes() int64 {
	if e.in.Tensors == 0 && !e.same {
		return e.out.Bytes()
	}
	return e.in.Bytes()
}

// unissued stands for the Work of an operation that the backend does not have yet.
var unissued = new(work.Work)

// New returns a recorder.
func New(opts ...Options) *Recorder {
	o := option.Last(opts)
	if o.Entries <= 0 {
		o.Entries = DefaultEntries
	}
	r := &Recorder{options: o, stacked: o.Stacks, dumps: new(dumps)}
	switch len(o.Observers) {
	case 0:
	case 1:
		r.observer = o.Observers[0]
	default:
		r.observer = observers(o.Observers)
	}
	return r
}

// Dropped returns how many operations were not recorded because as many as Options.Entries were
// pending.
func (r *Recorder) Dropped() uint64 { return r.dropped.Load() }

// Adopt is for package pg: it sets Options.Prefix and Options.Stacks where the program has not, from the environment.
// It returns false if the recorder has another prefix, is in a group already, or is Off.
func (r *Recorder) Adopt(prefix string, stacks bool) bool {
	if r.options.Entries == 0 {
		return false
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	if r.joined > 0 || r.options.Prefix != "" && prefix != "" {
		return r.options.Prefix == prefix
	}
	if prefix != "" {
		r.options.Prefix = prefix
	}
	r.options.Stacks = r.options.Stacks || stacks
	r.stacked = r.options.Stacks
	return true
}

// Prefix returns Options.Prefix.
func (r *Recorder) Prefix() string { return r.options.Prefix }

// Joined reports whether the rank has ever been in a group.
func (r *Recorder) Joined() bool {
	r.lock.Lock()
	defer r.lock.Unlock()
	return r.joined > 0
}

// Groups returns the groups that the rank is in, oldest first.
func (r *Recorder) Groups() []*Group {
	r.lock.Lock()
	defer r.lock.Unlock()
	return append([]*Group(nil), r.groups...)
}

// Call is an operation that package pg calls. The zero value is one that nobody records.
//
// Its methods take a pointer: a copy right after the fields were written would take some 10 ns. It has no tensors, so
// that the caller's lists need not be on the heap.
type Call struct {
	group   *Group
	backend string
	entry   int           // its place in the ring, plus 1; 0 if it has none
	called  time.Duration // since work.Origin
	timeout time.Duration
	peer    int32
	op      work.OpType
	same    bool // out is in
	in      Shape
	out     Shape // not valid if same
}

// Begin is for package pg: it comes before a call is given to the backend. The caller then calls Issued or
// Blocked. Nothing is recorded if g is nil.
func (c *Call) Begin(g *Group, b backend.Backend, op work.OpType, in, out []*tensor.Tensor, peer int, timeout time.Duration) {
	if g == nil {
		return
	}
	c.group, c.backend, c.op, c.peer, c.timeout = g, b.Name(), op, int32(peer), timeout
	c.in.set(in)
	if c.same = len(in) > 0 && len(out) > 0 && &in[0] == &out[0]; !c.same {
		c.out.set(out)
	}
	c.called = time.Since(work.Origin())
	if !g.prompt {
		c.open()
	}
}

// open records a call that the backend does not have.
func (c *Call) open() {
	if c.entry, _ = c.enter(unissued); c.entry == 0 {
		return
	}
	told := false
	defer func() {
		if !told { // an observer has panicked, and the backend does not get the call
			c.takeBack()
		}
	}()
	c.group.recorder.tellCalled(c.entry - 1)
	told = true
}

// takeBack forgets a call that the backend has not taken.
func (c *Call) takeBack() {
	g := c.group
	g.recorder.lock.Lock()
	defer g.recorder.lock.Unlock()
	if c.op.IsP2P() {
		g.messages--
	} else {
		g.collectives--
	}
	c.vacate()
}

// vacate gives the call's place back. The recorder's lock is held.
func (c *Call) vacate() {
	if c.entry != 0 {
		e := &c.group.recorder.entries[c.entry-1]
		e.group = nil
		e.work.Store(nil)
	}
}

// enter takes a place of the ring for an operation, and returns it plus 1. It returns 0 if there is none. Over reports
// that the operation has succeeded. Then the place is pending only if there are observers, until they have been told.
func (c *Call) enter(w *work.Work) (place int, over bool) {
	g := c.group
	r := g.recorder
	r.lock.Lock()
	if c.op.IsP2P() {
		g.messages++
	} else {
		g.collectives++
	}
	at := int(r.next)
	for n := len(r.entries); r.entries[at].pending(); n-- {
		if at++; at == len(r.entries) {
			at = 0
		}
		if n == 0 {
			r.lock.Unlock()
			r.dropped.Add(1)
			return 0, false
		}
	}
	if r.next = uint32(at + 1); int(r.next) == len(r.entries) {
		r.next = 0
	}
	e := &r.entries[at]
	e.group, e.record, e.called, e.err, e.blocked = g, r.records, c.called, nil, false
	r.records++
	e.backend, e.op, e.peer, e.in = c.backend, c.op, c.peer, c.in
	if e.same = c.same; !e.same {
		e.out = c.out
	}
	e.collective = g.collectives
	e.p2p, e.timeout = g.messages, c.timeout
	if r.stacked {
		r.stacks[at] = stack{}
		runtime.Callers(2, r.stacks[at][:]) // without Callers and enter
	}
	if e.seq, e.began, e.ended, over = w.Succeeded(); !over || r.observer != nil {
		e.work.Store(w)
	}
	r.lock.Unlock()
	return at + 1, over
}

// tellCalled tells the observers of a call.
func (r *Recorder) tellCalled(at int) {
	if r.observer != nil {
		r.observer.Called(Event{recorder: r, at: at})
	}
}

// pending reports whether an operation has the place. r.lock is held.
func (e *entry) pending() bool { return e.work.Load() != nil }

// Issued takes what the backend has returned for the call, and returns it.
func (c *Call) Issued(w *work.Work, err error) (*work.Work, error) {
	if c.group == nil {
		return w, err
	}
	if err != nil {
		c.refused(err)
		return w, err
	}
	r := c.group.recorder
	switch {
	case c.entry != 0:
		r.entries[c.entry-1].work.Store(w)
		c.observe(w)
	case !c.group.prompt: // dropped
	default:
		var over bool
		if c.entry, over = c.enter(w); c.entry == 0 {
			break
		}
		switch {
		case r.observer != nil:
			c.tell(w, over)
		case !over:
			c.observe(w)
		}
	}
	return w, nil
}

// tell tells the observers of an operation that the backend has. It also tells them of the end if the operation is over;
// else they hear of it later. They hear of it even if one of them panics.
func (c *Call) tell(w *work.Work, over bool) {
	r := c.group.recorder
	if over {
		defer r.tellEnded(c.entry - 1)
	} else {
		defer c.observe(w)
	}
	r.tellCalled(c.entry - 1)
}

// observe has the recorder told of the end of the operation. If somebody else is, the operation is another group's,
// which a backend has returned as its own: then that group's recorder has it.
func (c *Call) observe(w *work.Work) {
	r := c.group.recorder
	if !w.Observe(r, uint32(c.entry)) {
		r.lock.Lock()
		c.vacate()
		r.lock.Unlock()
	}
}

// Blocked records a call that blocks until f returns.
func (c *Call) Blocked(f func() error) error {
	if c.group != nil && c.group.prompt {
		c.open()
	}
	if c.entry == 0 {
		return f()
	}
	r := c.group.recorder
	e := &r.entries[c.entry-1]
	r.lock.Lock()
	e.blocked = true
	began := e.called
	r.lock.Unlock()
	err := work.ErrPanicked // unless f returns
	defer func() {
		r.Ended(uint32(c.entry), 0, began, time.Since(work.Origin()), err)
		if err != nil {
			r.Settle()
		}
	}()
	err = f()
	return err
}

// refused takes back an operation that was not issued. But if the group has failed and this is the first that the rank
// hears of it, the operation has failed as if it had been issued.
func (c *Call) refused(err error) {
	if c.entry == 0 && c.group.prompt {
		c.open()
	}
	r := c.group.recorder
	if seq, failed := groupFailed(err); failed && c.entry != 0 && !c.group.failed.Load() {
		defer r.Settle()
		r.Ended(uint32(c.entry), seq, 0, time.Since(work.Origin()), err)
		return
	}
	defer c.takeBack() // also if an observer panics
	if c.entry == 0 {
		return
	}
	e := &r.entries[c.entry-1]
	e.seq, e.began, e.ended, e.err = 0, 0, time.Since(work.Origin()), &err
	if r.observer != nil {
		r.observer.Ended(Event{r, c.entry - 1, true})
	}
}

// groupFailed reports whether a call was refused because its group has failed. Other reasons are its arguments, its
// context, and a group that was closed. seq is the number of the operation.
func groupFailed(err error) (seq uint64, failed bool) {
	var e *work.Error
	if !errors.As(err, &e) || errors.Is(err, work.ErrClosed) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return 0, false
	}
	return e.Seq, true
}

// Ended implements work.Observer.
func (r *Recorder) Ended(token uint32, seq uint64, began, ended time.Duration, err error) {
	e := &r.entries[token-1]
	g := e.group
	e.seq, e.began, e.ended = seq, began, ended
	if err != nil {
		kept := err
		e.err = &kept
		defer r.failed(g) // also if an observer panics
	}
	if r.observer != nil {
		r.tellEnded(int(token - 1))
	} else {
		e.work.Store(nil)
	}
}

// dumps writes a recorder's file. After failures one goroutine does so. Ends of operations do not wait for it: they
// hold locks of a backend, and a file system may hang.
type dumps struct {
	files   sync.Mutex // one Dump at a time
	written string     // the file and the run of the last Dump; guarded by files

	lock  sync.Mutex
	asked bool          // a group has failed since the goroutine has begun its last file
	done  chan struct{} // closed at the goroutine's end; nil if there is none
	until time.Time     // how long others wait for it
}

// dumpLimit is how long Settle waits for the recorder's file. The file takes milliseconds. Tests change it.
var dumpLimit = 2 * time.Second

// failed has the file of a recorder with a prefix written, after the first failure of a group.
func (r *Recorder) failed(g *Group) {
	if r.options.Prefix == "" || !g.failed.CompareAndSwap(false, true) {
		return
	}
	d := r.dumps
	d.lock.Lock()
	defer d.lock.Unlock()
	d.asked = true
	if d.done == nil {
		d.done, d.until = make(chan struct{}), time.Now().Add(dumpLimit)
		go r.write(g.Logger)
	}
}

// write writes the file until no further group has failed meanwhile.
func (r *Recorder) write(log *slog.Logger) {
	if log == nil {
		log = slog.Default()
	}
	late := time.AfterFunc(dumpLimit, func() {
		log.Error("c10d: the dump of the last operations is not yet written: the file system does not answer", "prefix", r.options.Prefix, "waited", dumpLimit)
	})
	defer late.Stop()
	d := r.dumps
	asked := func() (again bool) {
		d.lock.Lock()
		defer d.lock.Unlock()
		if again, d.asked = d.asked, false; !again {
			close(d.done)
			d.done = nil
		}
		return again
	}
	for asked() {
		if _, err := r.Dump(); err != nil {
			log.Error("c10d: no dump of the last operations", "err", err)
		}
	}
}

// Settle waits until the file is written that a failure has made necessary, for at most two seconds from its begin on.
// Work.Wait of an operation that has failed calls it, because the program may end soon.
func (r *Recorder) Settle() {
	r.dumps.lock.Lock()
	done, until := r.dumps.done, r.dumps.until
	r.dumps.lock.Unlock()
	if done == nil {
		return
	}
	limit := time.NewTimer(time.Until(until))
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
}

// tellEnded tells the observers of an end, and gives the place back, also if one of them panics.
func (r *Recorder) tellEnded(at int) {
	defer r.entries[at].work.Store(nil)
	r.observer.Ended(Event{r, at, true})
}

// operation is an entry for others. w is entry.work, and nil for an operation that ends. r.lock is held, or
// the entry is the caller's.
func (r *Recorder) operation(at int, w *work.Work) (o Operation) {
	e := &r.entries[at]
	o.Record, o.Group, o.Backend, o.Op, o.Collective = e.record, e.group, e.backend, e.op, e.collective
	o.Peer, o.In, o.Out, o.P2P, o.Timeout = int(e.peer), e.in, e.out, e.p2p, e.timeout
	if e.same {
		o.Out = e.in
	}
	var began time.Duration
	switch {
	case w == nil:
		began, o.Err, o.Ended, o.Seq = e.began, e.failure(), work.Origin().Add(e.ended), e.seq
	case w != unissued:
		began, o.Seq = w.Began(), w.Info().Seq
	case e.blocked:
		began = e.called
	}
	o.Called = work.Origin().Add(e.called)
	if began != 0 {
		o.Began = work.Origin().Add(began)
	}
	if r.stacked {
		pcs := r.stacks[at][:]
		if end := slices.Index(pcs, 0); end >= 0 {
			pcs = pcs[:end]
		}
		o.stack = slices.Clone(pcs)
	}
	return o
}

// Operations returns what the recorder has, oldest first.
func (r *Recorder) Operations() []Operation {
	all, _ := r.snapshot()
	return all
}

// snapshot returns Operations, and how many collectives each group has called: those that the rank is in, and those of
// the operations.
func (r *Recorder) snapshot() (all []Operation, calls map[*Group]uint64) {
	all, calls = make([]Operation, 0, r.options.Entries), make(map[*Group]uint64)
	r.lock.Lock()
	for i := range r.entries {
		if e := &r.entries[i]; e.group != nil {
			all = append(all, r.operation(i, e.work.Load()))
			calls[e.group] = e.group.collectives
		}
	}
	for _, g := range r.groups {
		calls[g] = g.collectives
	}
	r.lock.Unlock()
	slices.SortFunc(all, func(a, b Operation) int { return cmp.Compare(a.Record, b.Record) })
	return all, calls
}
