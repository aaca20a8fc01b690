package cuda_test

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ones returns n ones in CPU memory, also as a tensor.
func ones(n int) ([]int32, *tensor.Tensor, error) {
	v := slices.Repeat([]int32{1}, n)
	t, err := tensor.Of(v, n)
	return v, t, err
}

// TestMixedAndHostOrder all-reduces the same CPU memory by kernels and through the host, one call right after the
// other.
func TestMixedAndHostOrder(t *testing.T) {
	for _, first := range []string{"kernels", "host"} {
		t.Run(first, func(t *testing.T) {
			w := newWorld(t, directly(2))
			w.each(func(x *rank, r int) error {
				must.Do(x.meetDirectly(r))
				v, wide, err := ones(1 << 16)
				if err != nil {
					return err
				}
				short := unsafe.Slice((*int16)(unsafe.Pointer(&v[0])), 2*len(v)) // no kernels add these
				narrow := must.Get(tensor.Of(short, len(short)))
				kernels := func() (*work.Work, error) {
					return x.b.AllReduce(x.ctx, []*tensor.Tensor{wide}, backend.AllReduceOptions{})
				}
				host := func() (*work.Work, error) { return x.b.Reduce(x.ctx, narrow, backend.ReduceOptions{}) }
				calls, want := []func() (*work.Work, error){kernels, host}, int32(4-2*r) // 2, and 2+2 at the root
				if first == "host" {
					calls, want = []func() (*work.Work, error){host, kernels}, 3 // 1+1 at the root, and 2+1
				}
				var works []*work.Work
				for _, call := range calls {
					y := must.Get(call())
					works = append(works, y)
				}
				must.Do(work.WaitAll(x.ctx, works...))
				if v[0] != want || v[len(v)-1] != want {
					t.Errorf("rank %d: %s first: got %d..%d, want %d", r, first, v[0], v[len(v)-1], want)
				}
				return nil
			})
			w.end()
		})
	}
}

// TestMixedThenSend sends CPU memory right after an all-reduce of it by kernels, with the default tag and with another.
func TestMixedThenSend(t *testing.T) {
	for _, c := range []struct {
		tag uint32
		any bool
	}{{0, false}, {1, false}, {0, true}, {1, true}} {
		tag := c.tag
		w := newWorld(t, directly(2))
		w.each(func(x *rank, r int) error {
			must.Do(x.meetDirectly(r))
			_, u, err := ones(1 << 16)
			if err != nil {
				return err
			}
			got, to, err := ones(1 << 16)
			if err != nil {
				return err
			}
			y := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{u}, backend.AllReduceOptions{}))
			var m *work.Work
			switch {
			case r == 0:
				m, err = x.b.Send(x.ctx, u, 1, backend.P2POptions{Tag: tag})
			case c.any:
				m, err = x.b.RecvAnySource(x.ctx, to, backend.P2POptions{Tag: tag})
			default:
				m, err = x.b.Recv(x.ctx, to, 0, backend.P2POptions{Tag: tag})
			}
			if err != nil {
				return err
			}
			must.Do(work.WaitAll(x.ctx, y, m))
			if from, err := m.SourceRank(); r == 1 && (from != 0 || err != nil) {
				t.Errorf("tag %d: source %d, %v", tag, from, err)
			}
			if r == 1 && (got[0] != 2 || got[len(got)-1] != 2) {
				t.Errorf("tag %d: received %d..%d, want 2", tag, got[0], got[len(got)-1])
			}
			return nil
		})
		w.end()
	}
}
