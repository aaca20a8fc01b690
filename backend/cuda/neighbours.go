package cuda

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/peers"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// neighbours is what a group knows about work on the devices, and its ring once
// it has been made. What they tell each other makes the answers the same on every
// rank.
type neighbours struct {
	b   *Backend
	why error // why there is none and will be none; set by New

	mu      sync.Mutex // held while the ring is made
	failed  error      // why there is none
	ring    *ring
	done    bool
	current atomic.Pointer[ring] // ring, for who does not wait

	// spoiled is why an operation was not enqueued as a whole. Nothing may come after it
	// on the ring: it would be taken for what is missing, or carry on what that has left
	// behind, before the worker comes to the operation and ends the group. Guarded by
	// Backend.calls.
	spoiled error
}

// hostIdentity tells the hosts of a group apart: by what the kernel drew when it
// started, which containers of a host have in common, else by the name.
var hostIdentity = func() [sha256.Size]byte {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		name, err := os.Hostname()
		if err != nil {
			name = fmt.Sprintf("process %d", os.Getpid())
		}
		id = []byte(name)
	}
	return sha256.Sum256(id)
}

// reasonLen is how much of a reason the other ranks are told.
const reasonLen = 160

// told is what ranks tell each other: a reason why not, and something else.
func told(reason error, more []byte) []byte {
	b := make([]byte, 1+reasonLen, 1+reasonLen+len(more))
	if reason != nil {
		b[0] = 1
		text := strings.ToValidUTF8(reason.Error(), "?")
		copy(b[1:], strings.ToValidUTF8(text[:min(len(text), reasonLen)], ""))
	}
	return append(b, more...)
}

// hear gathers what all ranks tell. It returns the first reason, with its rank's
// number, and what else each has told.
func (b *Backend) hear(ctx context.Context, timeout time.Duration, mine []byte) (reason error, others [][]byte, err error) {
	in, err := tensor.Of(mine, len(mine))
	if err != nil {
		return nil, nil, err
	}
	all := make([]byte, len(mine)*b.size)
	out, err := tensor.Of(all, len(all))
	if err != nil {
		return nil, nil, err
	}
	w, err := b.cpu.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{Timeout: timeout})
	if err == nil {
		err = w.Wait(context.Background())
	}
	if err != nil {
		return nil, nil, err
	}
	for r := range b.size {
		x := all[r*len(mine) : (r+1)*len(mine)]
		if x[0] != 0 && reason == nil {
			reason = fmt.Errorf("rank %d: %s", r, trimZeros(x[1:1+reasonLen]))
		}
		others = append(others, x[1+reasonLen:])
	}
	return reason, others, nil
}

// meet finds out, with the other ranks, what needs no device to be opened.
func (b *Backend) meet(ctx context.Context) error {
	n := &neighbours{b: b}
	b.neighbours = n
	why := b.missing
	if why == nil {
		why = lacks(b.driver)
	}
	host := hostIdentity()
	var name string
	b.board, name = newBoard()
	mine := make([]byte, sha256.Size+8+regionNameLen)
	copy(mine, host[:])
	binary.LittleEndian.PutUint64(mine[len(host):], uint64(b.options.DeviceChunk))
	copy(mine[len(host)+8:], name)
	reason, all, err := b.hear(ctx, 0, told(why, mine))
	if err != nil {
		return fmt.Errorf("cuda: meeting the other ranks: %w", err)
	}
	n.why = reason
	boards := make(map[int]string)
	for r, x := range all {
		if bytes.Equal(x[:len(host)], host[:]) && r != b.rank {
			boards[r] = string(trimZeros(x[len(host)+8:][:regionNameLen]))
		}
	}
	b.board.open(b.rank, boards)
	b.oneHost = len(boards) == b.size-1
	for r, x := range all {
		if chunk := binary.LittleEndian.Uint64(x[len(host):]); chunk != uint64(b.options.DeviceChunk) {
			return fmt.Errorf("cuda: rank %d has Options.DeviceChunk %d, rank %d %d", r, chunk, b.rank, b.options.DeviceChunk)
		}
		if n.why == nil && !bytes.Equal(x[:len(host)], all[0][:len(host)]) {
			n.why = fmt.Errorf("rank %d is on another host than rank 0", r)
		}
	}
	return nil
}

// made returns the ring, once ready has returned nil.
func (n *neighbours) made() *ring {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ring
}

// ready returns nil if there is a ring, and makes it at the first call: together
// with the other ranks, which come to it in the order of the group's collectives.
func (n *neighbours) ready(h *host, op work.OpType) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.done {
		return n.failed
	}
	t := h.call.Tensors[0]
	if _, probe := t.Memory().(nowhere); probe {
		return errNotAsked
	}
	b := n.b
	r := &ring{
		b: b, dev: t.Device().Index, chunk: b.options.DeviceChunk, steps: make(map[string]driver.Function), quit: make(chan struct{}),
	}
	err := b.together(h.ctx, op, h.op.print, func(q *operation) (err error) {
		n.failed, err = r.make(q)
		return err
	})
	if err != nil {
		// The group has ended; what comes next says so.
		return errors.Join(err, r.free())
	}
	n.done = true
	if n.failed == nil {
		n.ring = r
		n.current.Store(r)
		if b.broken() != nil {
			r.abandon()
		}
		return nil
	}
	if err := r.free(); err != nil {
		n.failed = errors.Join(n.failed, err)
	}
	return n.failed
}

// errNotAsked is what Explain says before the ranks have looked at their devices.
var errNotAsked = errors.New("whether the devices reach each other is found out by the first collective that can stay on them")

// together has f run on all ranks, between the group's collectives before this call and those after
// it. Op and print are the collective for which that is needed.
func (b *Backend) together(ctx context.Context, op work.OpType, print call, f func(q *operation) error) error {
	if ctx == nil {
		ctx = context.Background()
	}
	q := &operation{call: func(q *operation, _ []*tensor.Tensor) error { return f(q) }}
	if err := b.queueTogether(ctx, op, print, q); err != nil {
		return err
	}
	return q.Work().Wait(context.Background())
}

func (b *Backend) queueTogether(ctx context.Context, op work.OpType, print call, q *operation) error {
	b.calls.Lock()
	defer b.calls.Unlock()
	info, timeout, err := b.admit(ctx, op, 0)
	if err != nil {
		return err
	}
	q.init(b, ctx, info, timeout)
	q.print = print
	q.print.op = op
	if err := b.enter(info, q.print); err != nil {
		return err
	}
	if ctx.Done() != nil {
		q.unwatch = context.AfterFunc(ctx, func() {
			err := q.named(canceled(ctx))
			b.fail(fmt.Errorf("the group has failed: %w", err), err)
		})
	}
	b.queue(q)
	return nil
}

// make makes the ring. It returns why it cannot be made, which is the same on all
// ranks, or an error that ends the group. The caller frees what is there then.
func (r *ring) make(q *operation) (why, err error) {
	if why, err = r.meet(q); why != nil && err == nil {
		err = r.b.share(q.ctx, q.left())
	}
	return why, err
}

func (r *ring) meet(q *operation) (why, err error) {
	b := r.b
	handle, words, why := r.prepare()
	mine, err := handle.MarshalBinary()
	if err != nil {
		return nil, err
	}
	mine = append(mine, make([]byte, regionNameLen)...)
	copy(mine[driver.MemoryHandleSize:], words)
	why, all, err := b.hear(q.ctx, q.left(), told(why, mine))
	if why != nil || err != nil {
		return why, err
	}
	why = r.connect(all)
	why, _, err = b.hear(q.ctx, q.left(), told(why, nil))
	// Who opens the page has done so.
	err = errors.Join(err, r.own.page.hide())
	return why, err
}

// prepare makes what a rank has of its own, and returns how others reach it.
func (r *ring) prepare() (h driver.MemoryHandle, words string, err error) {
	b := r.b
	// A handle that is none, for who could not get so far.
	h.Len = 1
	if r.v, err = b.driver.Device(r.dev); err != nil {
		return h, "", err
	}
	if !r.v.Info().StreamValues {
		return h, "", fmt.Errorf("streams of device %d cannot wait for values", r.dev)
	}
	if r.module, err = r.v.Load(kernels.PTX); err != nil {
		return h, "", err
	}
	for name, f := range map[string]*driver.Function{kernels.Copy: &r.copy, kernels.Pack: &r.pack, kernels.Unpack: &r.unpack} {
		if *f, err = r.module.Function(name); err != nil {
			return h, "", err
		}
	}
	// All of them, so that no rank finds out during a call that it lacks one.
	kernels.Each(func(_ backend.ReduceOp, _ tensor.DType, name string) {
		if err == nil {
			r.steps[name], err = r.module.Function(name)
		}
	})
	if err != nil {
		return h, "", err
	}
	if r.stream, err = r.v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d ring", b.rank)}); err != nil {
		return h, "", err
	}
	r.own = &workspace{uses: 1, d: b.driver}
	if r.own.mem, err = r.v.Alloc(ringSlots * r.chunk); err != nil {
		return h, "", err
	}
	if r.own.page, err = newRegion(pageSize); err != nil {
		return h, "", fmt.Errorf("a page of words: %w", err)
	}
	if r.own.words, err = b.driver.RegisterHost(r.own.page.bytes); err != nil {
		return h, "", err
	}
	if b.size == 1 {
		return h, "", nil
	}
	if h, err = r.own.mem.Export(); err != nil {
		return driver.MemoryHandle{Len: 1}, "", err
	}
	r.own.publish(h)
	return h, r.own.page.name, nil
}

// connect opens what the neighbours have.
func (r *ring) connect(handles [][]byte) error {
	b := r.b
	if b.size == 1 {
		return nil
	}
	open := func(rank int) (*mapping, error) {
		for _, m := range r.opened {
			if m.rank == rank {
				return m, nil
			}
		}
		var h driver.MemoryHandle
		if err := h.UnmarshalBinary(handles[rank][:driver.MemoryHandleSize]); err != nil {
			return nil, err
		}
		m, err := r.open(rank, h, string(trimZeros(handles[rank][driver.MemoryHandleSize:])))
		if err != nil {
			return nil, fmt.Errorf("the memory of rank %d: %w", rank, err)
		}
		r.opened = append(r.opened, m)
		return m, nil
	}
	var err error
	if r.left, err = open(around(b.rank-1, b.size)); err != nil {
		return err
	}
	if r.right, err = open(around((b.rank+1)%b.size, b.size)); err != nil {
		return err
	}
	if r.marks, err = openRegion(string(trimZeros(handles[0][driver.MemoryHandleSize:])), pageSize); err != nil {
		return fmt.Errorf("the words of rank 0: %w", err)
	}
	r.left.says = append(r.left.says, goneAt(0))
	r.right.says = append(r.right.says, goneAt(1))
	return nil
}

// goneAt is the word in which the right neighbour (0) and the left one (1) say that
// they have let go of a rank's slots.
func goneAt(neighbour int) int { return (2*ringSlots + neighbour) * wordEach }

// markAt is the word of rank 0 in which all ranks can see whether one of them lets its
// stream go on, whatever it waits for: the first to do so, plus one. That rank says so
// before its stream goes on. Who finds no mark after its own stream has done an
// operation therefore has what the ranks have given, though some may have failed since.
const markAt = (2*ringSlots + 2) * wordEach

func (r *ring) mark() *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.marks.bytes[markAt])) }

// marked returns which rank has let its stream go on, -1 if none has.
func (r *ring) marked() int {
	if r.marks == nil {
		return -1
	}
	return int(r.mark().Load()) - 1
}

// gone waits until both neighbours have let go; false if that takes too long.
func (w *workspace) gone(limit time.Duration) bool {
	for end := time.Now().Add(limit); w.words.Load32(goneAt(0)) == 0 || w.words.Load32(goneAt(1)) == 0; {
		if time.Now().After(end) {
			return false
		}
		time.Sleep(200 * time.Microsecond)
	}
	return true
}

// workspace is what a rank lets its neighbours write. Ranks of one process share
// it, and the last one that has it frees it.
type workspace struct {
	d      driver.Driver
	mem    driver.Memory     // the slots
	words  driver.HostMemory // registered for the owner's driver
	page   *region           // what the words are in
	handle driver.MemoryHandle
	shown  bool
	uses   int // guarded by workspaces
}

func (w *workspace) ptr() driver.Ptr        { return w.mem.Ptr() }
func (w *workspace) word(at int) driver.Ptr { return w.words.Ptr() + driver.Ptr(at) }

type workspaceKey struct {
	owner [16]byte
	id    uint64
}

// workspaces are those of this process.
var workspaces struct {
	sync.Mutex
	by map[workspaceKey]*workspace
}

// publish makes the workspace known to ranks of this process.
func (w *workspace) publish(h driver.MemoryHandle) {
	workspaces.Lock()
	defer workspaces.Unlock()
	if workspaces.by == nil {
		workspaces.by = make(map[workspaceKey]*workspace)
	}
	w.handle, w.shown = h, true
	workspaces.by[workspaceKey{h.Owner, h.ID}] = w
}

// use returns the workspace that a handle is of, and counts one more use; nil if
// it is not of this process.
func use(h driver.MemoryHandle) *workspace {
	if !ownProcess {
		return nil
	}
	workspaces.Lock()
	defer workspaces.Unlock()
	w := workspaces.by[workspaceKey{h.Owner, h.ID}]
	if w != nil {
		w.uses++
	}
	return w
}

// shared reports whether others than the owner use the workspace.
func (w *workspace) shared() bool {
	workspaces.Lock()
	defer workspaces.Unlock()
	return w.uses > 1
}

// leave ends one use, the last one with the memory.
func (w *workspace) leave() error {
	workspaces.Lock()
	w.uses--
	last := w.uses == 0
	if last && w.shown {
		delete(workspaces.by, workspaceKey{w.handle.Owner, w.handle.ID})
	}
	workspaces.Unlock()
	if !last {
		return nil
	}
	var errs []error
	if w.mem != nil {
		errs = append(errs, w.mem.Close())
	}
	if w.words != nil {
		errs = append(errs, w.words.Close())
	}
	if w.page != nil {
		errs = append(errs, w.page.leave())
	}
	return errors.Join(errs...)
}

// mapping is a neighbour's memory as this rank reaches it.
type mapping struct {
	rank  int
	mem   driver.Memory
	words driver.HostMemory
	page  *region    // of another process
	of    *workspace // nil if it is another process's
	says  []int      // the words that tell the other rank of its end

	disable func() error // takes back the access to its device; may be nil
}

func (m *mapping) ptr() driver.Ptr        { return m.mem.Ptr() }
func (m *mapping) word(at int) driver.Ptr { return m.words.Ptr() + driver.Ptr(at) }

// open makes the memory of a neighbour reachable: by its handle if it is another
// process's, else by its address.
func (r *ring) open(rank int, h driver.MemoryHandle, words string) (m *mapping, err error) {
	m = &mapping{rank: rank, of: use(h)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	switch {
	case m.of != nil && m.of.d == r.b.driver:
		m.words = m.of.words
	case m.of != nil:
		m.words, err = r.b.driver.RegisterHost(m.of.page.bytes)
	default:
		if m.page, err = openRegion(words, pageSize); err == nil {
			m.words, err = r.b.driver.RegisterHost(m.page.bytes)
		}
	}
	if err != nil {
		return m, fmt.Errorf("its words: %w", err)
	}
	if h.Owner != r.own.handle.Owner {
		m.mem, err = r.v.OpenMemory(h)
		return m, err
	}
	if m.of == nil {
		return m, errors.New("it has been freed")
	}
	on := -1
	for i := range r.b.driver.Count() {
		v, err := r.b.driver.Device(i)
		if err != nil {
			return m, err
		}
		if v.Info().UUID == h.UUID {
			on = i
			if m.mem, err = v.Borrow(m.of.ptr(), m.of.mem.Len()); err != nil {
				return m, err
			}
			break
		}
	}
	switch {
	case on < 0:
		return m, errors.New("it is on a device of this process that this rank's driver does not have")
	case on == r.dev:
		return m, nil
	}
	if err := peers.Enable(r.b.driver, r.v, on); err != nil {
		return m, err
	}
	m.disable = func() error { return peers.Disable(r.b.driver, r.v, on) }
	return m, nil
}

// close ends the mapping.
func (m *mapping) close() error {
	var errs []error
	if m.mem != nil {
		errs = append(errs, m.mem.Close())
	}
	if m.disable != nil {
		errs = append(errs, m.disable())
	}
	for _, at := range m.says {
		m.words.Store32(at, 1)
	}
	if m.words != nil && (m.of == nil || m.words != m.of.words) {
		errs = append(errs, m.words.Close())
	}
	if m.page != nil {
		errs = append(errs, m.page.leave())
	}
	if m.of != nil {
		errs = append(errs, m.of.leave())
	}
	*m = mapping{rank: m.rank}
	return errors.Join(errs...)
}

// abandon lets the ring's stream go on, whatever it waits for: the group has
// failed.
func (n *neighbours) abandon() {
	if n == nil {
		return
	}
	if r := n.current.Load(); r != nil {
		r.abandon()
	}
}

// linger is how long a rank that closes waits for others of its process to have
// done with its memory, before it leaves freeing it to the last of them, and for
// other processes after a failure, which may be theirs.
const linger = time.Second

// close ends the ring. What a neighbour may still use stays.
func (n *neighbours) close() error {
	if n == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	r, b := n.ring, n.b
	if r == nil {
		return nil
	}
	n.ring, n.done, n.failed = nil, true, work.ErrClosed
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	for _, o := range b.late {
		if o.device != nil {
			o.settled(ctx)
		}
	}
	r.mu.Lock()
	active := r.active
	r.mu.Unlock()
	if active > 0 {
		r.stop()
		return fmt.Errorf("cuda: %d operations that failed have not left the device after %v, whose memory stays", active, closeLimit)
	}
	var errs []error
	if b.broken() == nil && b.cpuErr() == nil {
		if err := r.last(ctx); err != nil {
			errs = append(errs, fmt.Errorf("cuda: ending the ring: %w", err))
		}
	}
	r.stop()
	idle, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	if !drained(idle, []driver.Stream{r.stream}) {
		return errors.Join(append(errs, fmt.Errorf("cuda: the ring's stream has not ended after %v, and the memory stays", closeLimit))...)
	}
	foreign := false
	for _, m := range r.opened {
		foreign = foreign || m.of == nil
		errs = append(errs, m.close())
	}
	r.opened = nil
	if foreign {
		// Their mappings have to go before the memory does.
		limit := closeLimit
		if b.broken() != nil || b.cpuErr() != nil {
			limit = linger
		}
		if !r.own.gone(limit) {
			r.own = nil // kept for good: nobody can tell whether they will
		}
	} else if b.size > 1 {
		for end := time.Now().Add(linger); r.own.shared() && time.Now().Before(end); {
			time.Sleep(200 * time.Microsecond)
		}
	}
	return errors.Join(append(errs, r.free())...)
}

// last waits until the right neighbour has taken all that it was sent: from then
// on nobody touches this rank's memory. If the group fails meanwhile, that is no
// error.
func (r *ring) last(ctx context.Context) error {
	if r.sent == 0 {
		return nil
	}
	r.begin()
	defer r.end()
	batch := r.b.tracker.Batch()
	slot, count := turn(r.sent - 1)
	batch.WaitValue(r.stream, r.own.word(takenAt(slot)), count, driver.AtLeast)
	p, err := batch.Run()
	if err == nil {
		err = r.settle(ctx, p)
	}
	if err != nil {
		if r.b.cpuErr() != nil {
			err = nil
		} else {
			err = fmt.Errorf("rank %d has not taken what it was sent: %w", r.right.rank, err)
			r.b.fail(err, err)
		}
		r.abandon()
		more, cancel := context.WithTimeout(context.Background(), closeLimit)
		defer cancel()
		drained(more, []driver.Stream{r.stream})
	}
	if p != nil {
		p.Release()
	}
	return err
}

// settle waits for a batch, or until the group has failed.
func (r *ring) settle(ctx context.Context, p interface{ Done() (bool, error) }) error {
	pause := 10 * time.Microsecond
	for {
		if done, err := p.Done(); done {
			return err
		}
		if err := cmp.Or(r.b.cpuErr(), r.b.broken(), ctx.Err()); err != nil {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, time.Millisecond)
	}
}

// stop ends what release does.
func (r *ring) stop() {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.quit)
	}
	r.mu.Unlock()
	r.wg.Wait()
}

// free gives back all that there is; nothing uses it any more.
func (r *ring) free() error {
	r.stop()
	var errs []error
	for _, m := range r.opened {
		errs = append(errs, m.close())
	}
	if r.own != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
		defer cancel()
		if drained(ctx, []driver.Stream{r.stream}) {
			errs = append(errs, r.own.leave())
		}
	}
	r.opened, r.own = nil, nil
	if r.marks != nil {
		errs = append(errs, r.marks.leave())
		r.marks = nil
	}
	if r.stream != nil {
		r.b.tracker.Forget(r.stream)
		errs = append(errs, r.stream.Close())
		r.stream = nil
	}
	if r.module != nil {
		errs = append(errs, r.module.Close())
		r.module = nil
	}
	return errors.Join(errs...)
}
