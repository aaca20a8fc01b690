package registry_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/registry"
)

func TestWorksAreInOrder(t *testing.T) {
	var table registry.Table[string, int]
	names := func(kind string) (names []string) {
		for _, w := range table.Of(kind) {
			names = append(names, w.Name)
		}
		return names
	}
	require.Empty(t, names("dense"))
	for i, name := range []string{"middle", "first", "last"} {
		w := registry.Work[int]{Name: name, Priority: []int{0, 1, math.MinInt}[i], Do: i}
		before := table.Of("dense")
		require.NoError(t, table.Add(w, "dense"))
		require.Len(t, before, i, "a list that somebody has does not change")
		require.ErrorContains(t, table.Add(w, "sparse", "dense"), "clashes")
		require.Empty(t, names("sparse"), "a work is added for all kinds or for none")
	}
	require.Equal(t, []string{"first", "middle", "last"}, names("dense"))
	require.NoError(t, table.Add(registry.Work[int]{Name: "first", Priority: 1}, "sparse", "other"))
	require.Equal(t, []string{"first"}, names("sparse"))
	require.Equal(t, []string{"first"}, names("other"))
	require.Len(t, names("dense"), 3)
	require.Error(t, table.Add(registry.Work[int]{}, "dense"))
}

func TestRefusals(t *testing.T) {
	var r registry.Refusals
	far := errors.New("far")
	r.Add("a", far)
	r.Add("b", far)
	r.Add("c", errors.New("near"))
	require.Equal(t, registry.Refusals{"a: far, nor b", "c: near"}, r)
}
