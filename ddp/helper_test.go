package ddp_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ ddp.Group = (*pg.ProcessGroup)(nil)

// recorder passes calls on and writes down what a peer would see of them.
type recorder struct {
	ddp.Group
	mu    sync.Mutex
	calls []string
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf(format, args...))
}

// take returns the calls since the last take.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.calls
	r.calls = []string{}
	return c
}

func (r *recorder) AllReduce(ctx context.Context, t *tensor.Tensor, op pg.ReduceOp, o ...pg.CallOptions) (*work.Work, error) {
	r.note("all_reduce %v %v", t, op)
	return r.Group.AllReduce(ctx, t, op, o...)
}

func (r *recorder) Broadcast(ctx context.Context, t *tensor.Tensor, root int, o ...pg.CallOptions) (*work.Work, error) {
	r.note("broadcast %v from %d", t, root)
	return r.Group.Broadcast(ctx, t, root, o...)
}

func (r *recorder) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o ...pg.CallOptions) (*work.Work, error) {
	r.note("all_gather %v", in)
	return r.Group.AllGather(ctx, out, in, o...)
}

// instant is a group of one rank whose collectives end at once and allocate nothing.
type instant struct{ done *work.Work }

func newInstant() instant { return instant{work.Completed(work.Info{Op: work.AllReduce}, nil)} }

func (instant) Rank() int { return 0 }
func (instant) Size() int { return 1 }

func (g instant) AllReduce(context.Context, *tensor.Tensor, pg.ReduceOp, ...pg.CallOptions) (*work.Work, error) {
	return g.done, nil
}

func (g instant) Broadcast(context.Context, *tensor.Tensor, int, ...pg.CallOptions) (*work.Work, error) {
	return g.done, nil
}

func (g instant) AllGather(_ context.Context, out []*tensor.Tensor, in *tensor.Tensor, _ ...pg.CallOptions) (*work.Work, error) {
	return g.done, out[0].CopyFrom(in)
}

// patience is far more than anything takes; a PyTorch rank may need tens of
// seconds to start.
const patience = 3 * time.Minute

// soon bounds a test that would otherwise hang.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func zeros(t *testing.T, dt tensor.DType, shape ...int) *tensor.Tensor {
	t.Helper()
	return must.Get(tensor.New(dt, shape...))
}

func fill(t *testing.T, x *tensor.Tensor, v float64) {
	t.Helper()
	require.NoError(t, x.Fill(v))
}

// first returns the first element.
func first(t *testing.T, x *tensor.Tensor) float64 {
	t.Helper()
	return must.Get(x.Float64At(make([]int, x.Dims())...))
}

// vectors returns float32 parameters p0, p1, ... of the given lengths.
func vectors(t *testing.T, lengths ...int) []ddp.Param {
	t.Helper()
	var ps []ddp.Param
	for i, n := range lengths {
		ps = append(ps, ddp.Param{Name: fmt.Sprintf("p%d", i), Value: zeros(t, tensor.Float32, n), Grad: zeros(t, tensor.Float32, n)})
	}
	return ps
}

// backward makes the gradients of all parameters ready, the last first.
func backward(t *testing.T, d *ddp.DDP, n int) {
	t.Helper()
	for i := n - 1; i >= 0; i-- {
		require.NoError(t, d.Ready(i))
	}
}

// tryIteration runs one iteration, until its first error.
func tryIteration(t *testing.T, d *ddp.DDP, n int) (err error) {
	defer must.Catch(&err)
	t.Helper()
	must.Do(d.Begin(soon(t)))
	for i := n - 1; i >= 0; i-- {
		must.Do(d.Ready(i))
	}
	return d.Finish(soon(t))
}
