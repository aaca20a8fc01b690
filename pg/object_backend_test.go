package pg_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// equal is a backend whose ranks send tensors of equal lengths only: gloo without AllGatherV, GatherV and AllToAll.
type equal struct{ backend.Backend }

var unequal = backend.Unsupported{Backend: "pg-test-equal"}

func (equal) Name() string { return "pg-test-equal" }

func (equal) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	return unequal.AllGatherV(ctx, out, in, o)
}

func (equal) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return unequal.GatherV(ctx, out, in, o)
}

func (equal) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	return unequal.AllToAll(ctx, out, in, o)
}

func init() {
	err := backend.Register(backend.Registration{Name: equal{}.Name(), Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) {
			gloo, _ := backend.Lookup("gloo")
			b, err := gloo.New(ctx, o)
			return equal{b}, err
		}})
	if err != nil {
		panic(err)
	}
}

// TestObjectsOnABackendOfEqualLengths: a backend that has no collectives of unequal lengths gets padded objects.
func TestObjectsOnABackendOfEqualLengths(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, all *pg.ProcessGroup) {
		o := pg.GroupOptions{Backend: "cpu:pg-test-equal"}
		g := must.Get(all.NewGroup(t.Context(), []int{0, 1, 2}, o))
		defer g.Close()
		want := []string{"", strings.Repeat("b", 1000), "c"}
		got := must.Get(pg.AllGatherObject(t.Context(), g, want[g.Rank()], picky{}))
		require.Equal(t, want, got)
		got = must.Get(pg.GatherObject(t.Context(), g, want[g.Rank()], 1, picky{}))
		if g.Rank() == 1 {
			require.Equal(t, want, got)
		}
		var parts []string
		if g.Rank() == 2 {
			parts = want
		}
		require.Equal(t, want[g.Rank()], must.Get(pg.ScatterObject(t.Context(), g, parts, 2, picky{})))
		require.NoError(t, g.Shutdown(t.Context()))
	})
}
