package pgtest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// Each of three ranks sends to the next one. They receive before they wait for the send, because ranks that all
// wait for a send wait for each other.
func TestRun(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		next, before := (g.Rank()+1)%g.Size(), (g.Rank()+g.Size()-1)%g.Size()
		sent, err := g.Send(t.Context(), pg.Slice([]int32{int32(g.Rank())}), next)
		require.NoError(t, err)
		got := make([]int32, 1)
		require.NoError(t, pg.Wait(g.Recv(t.Context(), pg.Slice(got), before)))
		require.NoError(t, sent.Wait(t.Context()))
		require.Equal(t, []int32{int32(before)}, got)
	})
}
