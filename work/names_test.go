package work_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/work"
)

// TestRankNames: errors and log lines of a group that is not the default group have global ranks and the description.
func TestRankNames(t *testing.T) {
	names := &work.Names{Description: "evaluation", GlobalRanks: []int{1, 3, 5}}
	require.Equal(t, "rank 1 (global rank 3)", names.Rank(1))
	require.Equal(t, "rank 3", names.Rank(3), "it is not in the group")
	require.Equal(t, " (global ranks 1, 3 and 5)", names.Global(0, 1, 2))
	require.Equal(t, "rank 1", (*work.Names)(nil).Rank(1))
	require.Equal(t, `group "1" (evaluation)`, names.Group("1"))
	require.Equal(t, `group "1"`, (*work.Names)(nil).Group("1"))
	require.Equal(t, []int{5, 1}, names.Of([]int{2, 0}).GlobalRanks)
	require.Equal(t, []int{2, 0}, (*work.Names)(nil).Of([]int{2, 0}).GlobalRanks)

	info := work.Info{Op: work.Barrier, Seq: 3, Group: "1", Rank: 1, Names: names}
	const begin = `work: barrier seq 3 on rank 1 (global rank 3) of group "1" (evaluation): `
	link := &work.LinkError{Ranks: [2]int{0, 2}, Err: work.ErrTimeout}
	for _, e := range []struct {
		peer  int
		cause error
		want  string
	}{
		{0, errors.New("rank 0 died"), "rank 0 died (rank 0 is global rank 1)"},
		{1, errors.New("panic: rank 2 is odd"), "panic: rank 2 is odd"},
		{-1, errors.New("too slow"), "too slow"},
		{-1, fmt.Errorf("%w: no data", link), "link between 0 and 2: no data (ranks 0 and 2 are global ranks 1 and 5)"},
	} {
		require.Equal(t, begin+e.want, (&work.Error{Info: info, Peer: e.peer, Err: e.cause}).Error())
	}
	info.Names = nil
	require.Equal(t, `work: barrier seq 3 on rank 1 of group "1": rank 0 died`, (&work.Error{Info: info, Err: errors.New("rank 0 died")}).Error())

	var log bytes.Buffer
	names.Logger(slog.New(slog.NewTextHandler(&log, nil)), "1", 2).Info("ready")
	require.Contains(t, log.String(), `msg=ready group=1 rank=2 description=evaluation global_rank=5 global_ranks="[1 3 5]"`)
}
