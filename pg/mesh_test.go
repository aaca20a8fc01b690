package pg_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
)

// What init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp")) of PyTorch 2.6 shows:
// get_coordinate, the ranks of get_group("pp"), ("dp") and ("tp"), and those of
// mesh["dp", "tp"]._flatten() and mesh["pp", "tp"]._flatten().
func TestMeshIsPyTorchs(t *testing.T) {
	type shown struct {
		coord              []int
		pp, dp, tp, dt, pt []int
	}
	want := map[int]shown{
		0: {[]int{0, 0, 0}, []int{0, 4}, []int{0, 2}, []int{0, 1}, []int{0, 1, 2, 3}, []int{0, 1, 4, 5}},
		5: {[]int{1, 0, 1}, []int{1, 5}, []int{5, 7}, []int{4, 5}, []int{4, 5, 6, 7}, []int{0, 1, 4, 5}},
		7: {[]int{1, 1, 1}, []int{3, 7}, []int{5, 7}, []int{6, 7}, []int{4, 5, 6, 7}, []int{2, 3, 6, 7}},
	}
	pgtest.Run(t, 8, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		m := must.Get(pg.NewMesh(ctx, g, []pg.MeshDim{{"pp", 2}, {"dp", 2}, {"tp", 2}}))
		got := shown{coord: m.Coordinate()}
		for i, to := range []*[]int{&got.pp, &got.dp, &got.tp} {
			sub := must.Get(m.Group(m.Dims()[i].Name))
			require.Equal(t, got.coord[i], sub.Rank())
			*to = sub.Ranks()
		}
		flat := must.Get(m.Flatten(ctx, "dp_tp", "dp", "tp"))
		got.dt = flat.Ranks()
		require.Equal(t, 2*got.coord[1]+got.coord[2], flat.Rank())
		flat = must.Get(m.Flatten(ctx, "pp_tp", "pp", "tp"))
		got.pt = flat.Ranks()
		if w, ok := want[g.Rank()]; ok {
			require.Equal(t, w, got)
		}
		require.Same(t, flat, must.Get(m.Group("pp_tp")))

		require.ErrorContains(t, must.Err(m.Flatten(ctx, "x", "tp", "dp")), "not in the order of the mesh")
		require.ErrorContains(t, must.Err(m.Flatten(ctx, "x", "xx")), `no dimension "xx"`)
		require.ErrorContains(t, must.Err(m.Flatten(ctx, "tp", "pp", "dp")), `has a group "tp" already`)
		require.ErrorContains(t, must.Err(m.Group("xx")), `no group "xx"`)
	})
}

func TestMeshRefuses(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
		for want, dims := range map[string][]pg.MeshDim{
			"at least one dimension":             nil,
			"dimension 1 has no name":            {{"a", 2}, {"", 2}},
			`two dimensions have the name "a"`:   {{"a", 2}, {"a", 2}},
			"do not multiply to 4, the size of ": {{"a", 2}, {"b", 3}},
			"multiply to 4":                      {{"a", 2}},
			"[{a 0}] do not multiply":            {{"a", 0}},
		} {
			require.ErrorContains(t, must.Err(pg.NewMesh(t.Context(), g, dims)), want)
		}
	})
}

// cutting is a logger's handler that cancels a context when a group other than the default one is ready.
type cutting struct {
	slog.Handler
	groups *atomic.Int32
	cancel context.CancelFunc
}

func (h cutting) Enabled(context.Context, slog.Level) bool { return true }

func (h cutting) WithAttrs([]slog.Attr) slog.Handler { return h }

func (h cutting) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "process group ready" && h.groups.Add(1) > 1 {
		h.cancel()
	}
	return nil
}

// TestFailedGroupsAreClosed: if one of several groups cannot be made, those before it are closed.
func TestFailedGroupsAreClosed(t *testing.T) {
	const size = 4
	for name, tc := range map[string]struct {
		fails int // on the ranks below
		make  func(ctx context.Context, g *pg.ProcessGroup) error
	}{
		"NewMesh": {size, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.NewMesh(ctx, g, []pg.MeshDim{{"a", 2}, {"b", 2}}))
		}},
		"NewSubgroups": {2, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(g.NewSubgroups(ctx, 2))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			groups := make([]*pg.ProcessGroup, size)
			var wg sync.WaitGroup
			for r := range size {
				wg.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var err error
					groups[r], err = pg.New(t.Context(), st, r, size, pg.Options{
						Backend: "cpu:gloo", Timeout: jobLimit,
						Logger: slog.New(cutting{slog.DiscardHandler, new(atomic.Int32), cancel}),
					})
					if !assert.NoError(t, err) {
						return
					}
					err = tc.make(ctx, groups[r])
					if r >= tc.fails {
						assert.NoError(t, err)
						return
					}
					assert.Error(t, err)
					assert.Equal(t, 1, pg.Open(groups[r]))
				})
			}
			wg.Wait()
			for _, g := range groups {
				assert.NoError(t, g.Close())
			}
		})
	}
}

// TestMeshCloses: Close ends the groups of a mesh, and not the group that it was made of.
func TestMeshCloses(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		m := must.Get(pg.NewMesh(ctx, g, []pg.MeshDim{{"a", 2}, {"b", 2}}))
		must.Get(m.Flatten(ctx, "ab", "a", "b"))
		a := must.Get(m.Group("a"))
		require.Equal(t, 4, pg.Open(g))
		require.NoError(t, m.Close())
		require.NoError(t, m.Close())
		require.Equal(t, 1, pg.Open(g))
		require.ErrorIs(t, pg.Wait(a.AllReduce(ctx, pg.Slice([]int32{1}), pg.Sum())), pg.ErrClosed)
		require.ErrorContains(t, must.Err(m.Group("a")), `no group "a"`)
		require.NoError(t, pg.Wait(g.AllReduce(ctx, pg.Slice([]int32{1}), pg.Sum())))
	})
}

func ExampleNewMesh() {
	ranks(4, func(ctx context.Context, g *pg.ProcessGroup) (_ string, err error) {
		defer must.Catch(&err)
		m := must.Get(pg.NewMesh(ctx, g, []pg.MeshDim{{"dp", 2}, {"tp", 2}}))
		dp := must.Get(m.Group("dp"))
		sum := []int32{int32(g.Rank())}
		err = pg.Wait(dp.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
		return fmt.Sprintf("rank %d is at %v, dp is %v with sum %d", g.Rank(), m.Coordinate(), dp.Ranks(), sum[0]), err
	})
	// Output:
	// rank 0 is at [0 0], dp is [0 2] with sum 2
	// rank 1 is at [0 1], dp is [1 3] with sum 4
	// rank 2 is at [1 0], dp is [0 2] with sum 2
	// rank 3 is at [1 1], dp is [1 3] with sum 4
}
