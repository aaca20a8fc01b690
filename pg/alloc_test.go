package pg_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// sumAllocated is a life of tensors from Alloc.
func sumAllocated(t *testing.T, g *pg.ProcessGroup) {
	ctx := context.Background()
	const n = 200_000
	x := must.Get(g.Alloc(ctx, tensor.Float32, 2, n))
	require.Equal(t, []int{2, n}, x.Shape())
	require.NoError(t, x.Fill(float64(g.Rank())))
	require.NoError(t, must.Get(g.AllReduce(ctx, x, pg.Sum())).Wait(ctx))
	for _, at := range []int{0, n - 1} {
		require.Equal(t, float64(g.Size()*(g.Size()-1)/2), must.Get(x.Float64At(1, at)))
	}
	require.NoError(t, g.Free(x))
	require.Error(t, g.Free(nil))
}

func TestAlloc(t *testing.T) {
	pgtest.Run(t, 3, sumAllocated)
}

// TestAllocElsewhere: with DETAIL, over the wires that a job has, in groups of one rank, and for
// ranks that are no members.
func TestAllocElsewhere(t *testing.T) {
	for name, o := range map[string]pg.Options{"real": {}, "detail": {Detail: true}} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			o.Timeout = pgtest.Timeout
			o.Backend = "cpu:gloo"
			ended := make(chan bool, 2)
			for r := range 2 {
				go func() {
					defer func() { ended <- true }()
					ctx := context.Background()
					g, err := pg.New(ctx, st, r, 2, o)
					if err != nil {
						t.Errorf("rank %d: %v", r, err)
						return
					}
					defer g.Close()
					sumAllocated(t, g)
					one, err := g.NewGroup(ctx, []int{1})
					if err != nil {
						t.Errorf("rank %d: %v", r, err)
						return
					}
					if r == 1 {
						sumAllocated(t, one)
						return
					}
					if _, err := one.Alloc(ctx, tensor.Uint8, 1); err != pg.ErrNotMember {
						t.Errorf("no member: %v", err)
					}
					if err := one.Free(nil); err != pg.ErrNotMember {
						t.Errorf("no member: %v", err)
					}
				}()
			}
			<-ended
			<-ended
		})
	}
}
