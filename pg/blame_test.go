package pg_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/work"
)

// TestBlame: before an operation fails, a rank that "c10d run" started notes which rank of
// the job ended the group. Other ranks of the process note nothing.
func TestBlame(t *testing.T) {
	for _, detail := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "blame")
		t.Setenv(launch.FailureVariable, path)
		t.Setenv("RANK", "1")
		t.Setenv("WORLD_SIZE", "4")
		run := func() {
			job(t, 4, func(o *pg.Options) { o.Detail = detail }, func(g *pg.ProcessGroup) {
				ctx := context.Background()
				sub, err := g.NewGroup(ctx, []int{1, 3})
				require.NoError(t, err)
				switch g.Rank() {
				case 3:
					require.NoError(t, sub.Close())
				case 1:
					require.ErrorIs(t, wait(sub.AllReduce(ctx, vec(3), pg.Sum())), work.ErrPeerLeft)
					b := must.Get(launch.ReadBlame(path))
					require.Equal(t, []int{1, 3}, []int{b.Rank, b.Peer})
					require.Contains(t, b.Message, "rank 1 (global rank 3) left the group")
				}
			})
		}
		run()
		// A new default group begins anew.
		require.NoError(t, os.WriteFile(path, []byte(`{"rank":1,"peer":0}`), 0o600))
		run()
	}
}
