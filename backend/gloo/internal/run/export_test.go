package run

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/backend/gloo/internal/hostmesh"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/registry"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// SetWindow makes sparse all-reduces go in rounds of so many bytes, until restore.
func SetWindow(n int64) (restore func()) {
	before := window
	window = n
	return func() { window = before }
}

// SparseMeta is what a rank says first of a tensor of float32 with one sparse
// dimension, truly or not.
func SparseMeta(shape []int, entries int64) []byte {
	m := sparseMeta{entries: entries}
	m.same = [...]int64{int64(tensor.Float32), int64(backend.Sum().Kind()), 1, int64(len(shape)), int64(hash(shape)), 4 + shownDims: 0}
	for i, d := range shape {
		m.same[5+i] = int64(d)
	}
	return bytesOf(m.numbers())
}

// Numbers are as a rank sends them.
func Numbers(v ...int64) []byte { return bytesOf(v) }

// MonitoredSlot is the slot of a monitored barrier's messages.
var MonitoredSlot = monitoredSlot

// SetCloseWithin sets for how long Close waits for operations.
func SetCloseWithin(d time.Duration) (restore func()) {
	before := closeWithin
	closeWithin = d
	return func() { closeWithin = before }
}

// AbortMemory ends the operations in the memory that the ranks share.
func (b *Group) AbortMemory() { b.Memory.Abort(nil) }

// Blame blames a rank for an operation that has so much time left, and returns what has ended the group.
func (b *Group) Blame(rank int, left time.Duration) *transport.Fault {
	latest := time.Now().Add(left)
	d := &ask.Operation{Mesh: b.Meshes[0], Work: new(work.Promise).Work(), Ctx: context.Background()}
	d.Collective, d.Until, d.Latest = true, latest, latest
	b.blame(d, blame.Verdict{Rank: rank, Other: -1, Why: "it has not called it"})
	return b.fault()
}

// SetAtOnce sets how soon a wait has to come to be one at once.
func SetAtOnce(d time.Duration) (restore func()) {
	before := promptly
	promptly = d
	return func() { promptly = before }
}

// Habit is how many such waits in a row make one.
const Habit = promptWaits

// Streak returns how many there were.
func (b *Group) Streak() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.streak
}

// Traffic is what a rank's collectives send over connections.
type Traffic struct {
	hostmesh.Remote
	Messages, Bytes atomic.Int64
	To              []atomic.Int64 // bytes, by rank
}

// Send implements transport.Mesh.
func (c *Traffic) Send(r *transport.Request) {
	c.Messages.Add(1)
	c.Bytes.Add(int64(len(r.Buf)))
	c.To[r.Peer].Add(int64(len(r.Buf)))
	c.Remote.Send(r)
}

// Count counts from now on, before the first operation.
func (b *Group) Count() *Traffic {
	c := &Traffic{Remote: b.Meshes[0].(hostmesh.Remote), To: make([]atomic.Int64, b.size)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Meshes[0], b.TCP = c, nil
	return c
}

// AggregateRooted and Aggregate are up to how many bytes blocks go together.
const (
	AggregateRooted = cluster.TogetherRooted
	Aggregate       = cluster.Together
)

// SetClusterSizes sets from how many bytes on the ranks of a cluster share its traffic, and in chunks
// of how many, until restore.
func SetClusterSizes(single, chunk int) (restore func()) {
	before := [2]int{singleBytes, chunkBytes}
	singleBytes, chunkBytes = single, chunk
	return func() { singleBytes, chunkBytes = before[0], before[1] }
}

// Sent returns how many bytes this rank has written to its connections with each rank.
func (b *Group) Sent() []uint64 { return b.TCP.Sent() }

// Step is what a rank does in a plan for clusters.
type Step struct {
	*cluster.Step
	Begins bool
	Going  func() int // how many messages of steps between clusters are under way
}

// TraceSteps calls f with each step that the rank begins and ends from now on, in the goroutine that
// runs the operation.
func (b *Group) TraceSteps(f func(Step)) {
	b.trace = func(s *cluster.Step, begins bool, going func() int) { f(Step{s, begins, going}) }
}

// WrapMesh replaces the mesh, before the first operation.
func (b *Group) WrapMesh(f func(transport.Mesh) transport.Mesh) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Meshes[0], b.TCP = f(b.Meshes[0]), nil
}

// Unsettled returns how many steps between clusters and messages of them have not ended. No operation
// is under way.
func (b *Group) Unsettled() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.engines {
		for _, g := range e.between {
			if n += g.meeting.Posted(); g.step != nil || g.meeting.Due() {
				n++
			}
		}
	}
	return n
}

// InTurn reports whether collectives run one at a time.
func (b *Group) InTurn() bool { return b.inTurn() }

// FaultError is the error of an operation in a group that was closed without a fault.
func (b *Group) FaultError() error { return b.faultError(work.Info{}, nil) }

// Host is what an all-reduce work of a test does on host memory.
type Host interface {
	Rank() int
	AllGatherBytes(ctx context.Context, out, in []byte) error
	AllGatherVBytes(ctx context.Context, out, in []byte, counts []int64) error
}

func (h *host) Rank() int { return h.rank }

func (h *host) AllGatherVBytes(_ context.Context, out, in []byte, counts []int64) error {
	return h.engine.route.allGatherV(h.engine, out, in, counts)
}

// TestWork is an all-reduce work of a test's own. Can may be nil. New may return an error.
type TestWork struct {
	Name     string
	Device   tensor.DeviceType
	Layout   tensor.Layout
	Priority int
	Can      func(ts []*tensor.Tensor, op backend.ReduceOp) error
	New      func(ts []*tensor.Tensor, h Host) (run func(ctx context.Context) error, err error)
}

// RegisterTestWork makes a work known. A table has no way to take it back.
func RegisterTestWork(w TestWork) error {
	do := reduceWork{prepare: func(q *operation) (err error) {
		q.reduce.runner, err = w.New(q.reduce.tensors, &q.reduce.host)
		q.run = runAllReduce
		return err
	}}
	if w.Can != nil {
		do.can = func(q *operation) error { return w.Can(q.reduce.tensors, q.reduce.op) }
	}
	return reduceWorks.Add(registry.Work[reduceWork]{Name: w.Name, Priority: w.Priority, Do: do}, kind{w.Device, w.Layout})
}
