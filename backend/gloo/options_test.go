package gloo_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/store"
)

// TestBadOptions: an option that has no meaning is refused by each rank for itself, before it
// meets others.
type otherOptions struct{}

func (otherOptions) BackendName() string { return "other" }

type otherFabric struct{ gloo.Fabric }

func TestBadOptions(t *testing.T) {
	for _, tc := range []struct {
		name       string
		rank, size int
		specific   backend.SpecificOptions
		text       string
	}{
		{"wire", 0, 1, gloo.Options{Wire: "pigeon"}, `unknown wire "pigeon"`},
		{"copies", 0, 1, gloo.Options{Copy: "thrice"}, `"thrice"`},
		{"sums", 0, 1, gloo.Options{Sums: "rough"}, `"rough"`},
		{"sparse", 0, 1, gloo.Options{Sparse: "thin"}, `unknown form of sparse all-reduce "thin"`},
		{"table", 0, 1, gloo.Options{Table: t.TempDir()}, "directory"},
		{"rank", 2, 2, gloo.Options{}, "rank 2 is not within a group of 2"},
		{"negative rank", -1, 2, gloo.Options{}, "rank -1 is not within a group of 2"},
		{"size", 0, 0, gloo.Options{}, "rank 0 is not within a group of 0"},
		{"options of another backend", 0, 1, otherOptions{}, "gloo: options of type gloo_test.otherOptions, want gloo.Options"},
		{"fabric", 0, 1, gloo.Options{Fabric: otherFabric{}}, "Options.Fabric is a gloo_test.otherFabric: set it to what NewFabric returns"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			b, err := gloo.New(t.Context(), backend.Options{Store: st, Rank: tc.rank, Size: tc.size, Timeout: gloo.GroupTimeout, Specific: tc.specific})
			require.ErrorContains(t, err, tc.text)
			require.Nil(t, b)
		})
	}
}
