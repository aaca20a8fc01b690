package run_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/copies"
)

func choicesOf(b *gloo.Backend, op string) (cs []backend.Choice) {
	for _, c := range b.Explain().Choices {
		if c.Op == op {
			cs = append(cs, c)
		}
	}
	return cs
}

// TestExplainCopies: Explain says which collectives are copied once, and from which size on.
func TestExplainCopies(t *testing.T) {
	onLinux(t)
	bs, errs := connectWith(t, run.GroupTimeout, gloo.Options{}, gloo.Options{})
	for r, err := range errs {
		require.NoError(t, err)
		require.Equal(t, "shm", bs[r].Explain().Links[0].Transport)
		for _, op := range []string{"all_gather", "all_to_all", "scatter", "broadcast", "gather", "barrier"} {
			cs := choicesOf(bs[r], op)
			last := cs[len(cs)-1]
			require.Equal(t, int64(-1), last.UpTo)
			switch op {
			case "all_gather", "all_to_all", "scatter":
				require.Equal(t, "staged", cs[0].Algorithm)
				if len(cs) == 2 {
					require.False(t, copies.Fast(), "two copies are faster")
					require.Equal(t, "single copy", last.Algorithm)
				}
			default:
				require.Len(t, cs, 1)
				require.NotContains(t, last.Why, "one copy")
			}
		}
	}
}
