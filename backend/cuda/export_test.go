package cuda

import (
	"context"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/pause"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// SetCloseLimit changes how long Close waits for devices that do not go on after an
// operation has failed, until the function that it returns is called.
func SetCloseLimit(d time.Duration) func() {
	old := group.CloseLimit
	group.CloseLimit = d
	return func() { group.CloseLimit = old }
}

// VirtualTime has goroutines that wait for devices sleep at once, and other processes open no memory of this one, until
// the function that it returns is called.
func VirtualTime() func() {
	old := pause.Yield
	pause.Yield, region.Passes = 0, false
	return func() { pause.Yield, region.Passes = old, true }
}

// SetGrace changes how long an operation that has failed waits for the kernels of other ranks, until the function that it
// returns is called.
func SetGrace(d time.Duration) func() {
	old := directway.Grace
	directway.Grace = d
	return func() { directway.Grace = old }
}

// SetReportLimit changes how long a kernel may take to report that it was told to end, until the function that it
// returns is called.
func SetReportLimit(d time.Duration) func() {
	old := directway.ReportLimit
	directway.ReportLimit = d
	return func() { directway.ReportLimit = old }
}

// SetHostIdentity changes what tells hosts apart, until the function that it
// returns is called.
func SetHostIdentity(f func() [32]byte) func() {
	old := group.HostIdentity
	group.HostIdentity = f
	return func() { group.HostIdentity = old }
}

// SetVisibleDevices changes what tells which devices a process has, until the function that it returns is called.
func SetVisibleDevices(f func() string) func() {
	old := group.VisibleDevices
	group.VisibleDevices = f
	return func() { group.VisibleDevices = old }
}

// OwnDevice returns the device for a rank that has shown none.
func (b *Backend) OwnDevice() int { return b.g.OwnDevice() }

// KeepRegions leaves the memory that ranks shared mapped, for tests of programs whose
// orders were left out, until the function that it returns is called. Streams of such a
// program may use the memory after it has been given back, which the simulator is to
// report; without the mapping the test would end with a signal. Programs that keep
// their orders are tested without this.
func KeepRegions() func() {
	old := region.Unmap
	region.Unmap = func(*region.SharedMemory) error { return nil }
	return func() { region.Unmap = old }
}

// SetBefore has f called before the system is asked for n bytes of memory that ranks share,
// until the function that it returns is called. A region of words has PageSize bytes.
func SetBefore(f func(call string, n int) error) func() {
	old := region.Before
	region.Before = f
	return func() { region.Before = old }
}

// Underway notes how many operations devices are at. The function that it returns sets the count back: what a
// test has left on the devices of its machine is gone with the machine.
func Underway() func() {
	n := pool.Underway.Load()
	return func() { pool.Underway.Store(n) }
}

// ProcessEach reports whether ranks of this process are as those of several.
func ProcessEach() bool { return !region.OwnProcess }

// PageSize is the bytes of a region of words.
const PageSize = region.PageSize

// OtherProcesses has ranks of this process open each other's memory as those of other
// processes do, until the function that it returns is called.
func OtherProcesses() func() {
	region.OwnProcess = false
	return func() { region.OwnProcess = true }
}

// SetFirstChunk changes the number of the first chunk that goes through shared memory,
// until the function that it returns is called.
func SetFirstChunk(n uint64) func() {
	hostshm.FirstChunk = n
	return func() { hostshm.FirstChunk = 0 }
}

// SetMostQueued changes how many commands operations may have left on a stream when the
// next one is enqueued, until the function that it returns is called.
func SetMostQueued(n int64) func() {
	old := group.MostQueued
	group.MostQueued = n
	return func() { group.MostQueued = old }
}

// SetCrew changes how many goroutines of a rank combine its share, and the least that one of them
// does. The function that it returns undoes that.
func SetCrew(n, part int) func() {
	oldCrew, oldPart := hostshm.CrewOf, group.SmallestPart
	hostshm.CrewOf, group.SmallestPart = func(int) int { return n }, part
	return func() { hostshm.CrewOf, group.SmallestPart = oldCrew, oldPart }
}

// Fill makes memory in advance for so many operations under way, of every size up to so
// many bytes: page-locked and, if there is direct work, its device's.
func (b *Backend) Fill(bytes, operations int) error {
	var hosts []driver.HostMemory
	var devices []driver.Memory
	direct := b.direct.Open.Load() != nil
	for n := pool.Bytes(0); n <= pool.Bytes(bytes); n = pool.Bytes(n + 1) {
		many := operations
		if n <= 64<<10 {
			many *= 4 // small ones are short
		}
		for range many {
			h, err := b.g.Pinned.Get(pool.OnHost, n)
			if err != nil {
				return err
			}
			hosts = append(hosts, h)
			if !direct {
				continue
			}
			m, err := b.g.Scratch.Get(b.direct.Dev, n)
			if err != nil {
				return err
			}
			devices = append(devices, m)
		}
	}
	for _, h := range hosts {
		b.g.Pinned.Put(pool.OnHost, h)
	}
	for _, m := range devices {
		b.g.Scratch.Put(b.direct.Dev, m)
	}
	return nil
}

// Chooses returns a function that chooses the ways of operations on tensors: the work of an all-reduce,
// then the ways of operations that kernels do. Its result is valid until the next call.
func (b *Backend) Chooses(ctx context.Context, ts []*tensor.Tensor) func() []string {
	var names []string
	return func() []string {
		names = names[:0]
		for _, op := range []work.OpType{work.AllReduce, work.AllReduceCoalesced, work.Broadcast, work.AllGather, work.ReduceScatterTensor} {
			c := b.newCall(ctx, op, 0, board.Call{DType: ts[0].DType(), N: ts[0].Len(), Root: -1})
			if c.out, c.bytes = ts, ts[0].ByteLen(); operations[op].plan.Reduces() {
				c.reduce, c.print.With = backend.Sum(), board.Reducing(backend.Sum())
			}
			w, _, err := c.choose(true)
			if err != nil {
				panic(err)
			}
			if op == work.AllReduce {
				names = append(names, w.Name)
			} else {
				names = append(names, c.chosen().Name)
			}
			c.free()
		}
		return names
	}
}

// Meeting reports whether an operation has been handed to the worker.
func (b *Backend) Meeting() bool {
	b.g.Mu.Lock()
	defer b.g.Mu.Unlock()
	return b.g.Last != nil
}

// TestWork is an all-reduce work of a test's own, for dense tensors. A table has no way to take it back.
type TestWork struct {
	Usable func() error
	Run    func(ctx context.Context, cpu backend.Backend) error // the host's part
	Order  func(work.Stream) error
}

// RegisterTestWork makes a work known.
func RegisterTestWork(name string, priority int, w TestWork) {
	add(name, priority, testWay{w: w}, tensor.Strided, work.AllReduce)
}

type testWay struct {
	alone
	w TestWork
}

func (t testWay) Can(*call) error   { return t.w.Usable() }
func (testWay) OnDevice(*call) bool { return true }
func (testWay) How(*call) string    { return "" }
func (t testWay) Issue(c *call) (*work.Work, error) {
	q := &group.Operation{Print: c.print, Sync: t.w.Order}
	q.Call = func(q *group.Operation, _ []*tensor.Tensor) error { return t.w.Run(q.Ctx, q.B.CPU) }
	return c.b.g.Issue(c.ctx, c.op, c.timeout, q)
}
