package pg

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// mislaid are the options of a backend that no package has registered.
type mislaid struct{}

func (mislaid) BackendName() string { return "glooo" }

// TestBackendOptionsNobodyGets: options that no backend would get are refused, before the store is
// opened.
func TestBackendOptionsNobodyGets(t *testing.T) {
	for want, o := range map[string]BackendOptions{
		`BackendOptions[1], a pg.mislaid, is for "glooo", which is no backend of this program (it has `: {gloo.Options{}, mislaid{}},
		`BackendOptions[1], a gloo.Options, is the second for backend "gloo"`:                           {gloo.Options{}, gloo.Options{}},
		`BackendOptions[0] is nil`: {nil},
	} {
		o := Options{BackendOptions: o}
		st := store.NewHash()
		defer st.Close()
		_, err := New(t.Context(), st, 0, 1, o)
		require.ErrorContains(t, err, want)
		_, err = initFrom(context.Background(), "tcp://nowhere.invalid:1?rank=1&world_size=2", InitOptions{Options: o}, environ(""))
		require.ErrorContains(t, err, want)
	}
}

// TestErrorsNameTheCall: a call on a closed group, and one that no backend serves, say which.
func TestErrorsNameTheCall(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	g, err := New(t.Context(), st, 0, 1, Options{Backend: "cpu:gloo"})
	require.NoError(t, err)
	_, err = g.Backend(tensor.CUDA)
	require.EqualError(t, err, `pg: no backend for device type cuda in group "0" (it has cpu:gloo)`)
	require.NoError(t, g.Close())
	x, err := tensor.New(tensor.Float32, 1)
	require.NoError(t, err)
	list := []*tensor.Tensor{x}
	ctx := t.Context()
	for want, call := range map[string]func() error{
		"all_reduce": func() error { _, err := g.AllReduce(ctx, list[0], Sum()); return err },
		"broadcast":  func() error { _, err := g.Broadcast(ctx, list[0], 0); return err },
		"send":       func() error { _, err := g.Send(ctx, x, 1); return err },
		"barrier":    func() error { _, err := g.BarrierAsync(ctx); return err },
	} {
		err := call()
		require.ErrorIs(t, err, ErrClosed)
		require.EqualError(t, err, `pg: `+want+` in group "0": group closed`)
	}
}
