package cuda_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestTurns holds that calls at the same time take turns with the memory in which tensors are brought in order.
// They do not make memory of their own.
func TestTurns(t *testing.T) {
	w := newWorld(t, onDevices(2))
	lists := make([][]*vector, len(w.ranks))
	call := func(x *rank, r int) (*work.Work, error) {
		var ts []*tensor.Tensor
		for _, y := range lists[r] {
			ts = append(ts, y.t)
		}
		return x.b.AllReduceCoalesced(x.ctx, ts, backend.AllReduceOptions{Op: backend.Max()})
	}
	w.each(func(x *rank, r int) error {
		for range 5 {
			y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8000)))
			lists[r] = append(lists[r], y)
		}
		return must.Get(call(x, r)).Wait(x.ctx)
	})
	before := w.m.Stats()
	w.each(func(x *rank, r int) error {
		var all []*work.Work
		for range 20 {
			v := must.Get(call(x, r))
			all = append(all, v)
		}
		return work.WaitAll(x.ctx, all...)
	})
	require.Equal(t, before.MadeMemories, w.m.Stats().MadeMemories)
	w.end()
}
