package work_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/work"
)

// TestRankNames: errors of a group that is not the default group have global ranks and the description.
func TestRankNames(t *testing.T) {
	names := &work.Names{Description: "evaluation", GlobalRanks: []int{1, 3, 5}}
	for _, c := range []struct{ text, want string }{
		{"rank 2 died (noticed by rank 0)", "rank 2 (global rank 5) died (noticed by rank 0 (global rank 1))"},
		{"[Rank 0]: Ranks 1, 2 failed; these came: 0", "[Rank 0]: Ranks 1, 2 (global ranks 3 and 5) failed; these came: 0 (global rank 1)"},
		{"waits for ranks 0, 1 and 2", "waits for ranks 0, 1 and 2 (global ranks 1, 3 and 5)"},
		{"waits for ranks 0, 1 and 2 more", "waits for ranks 0, 1 (global ranks 1 and 3) and 2 more"},
		{"waits for rank 0; 2 ranks 1 more", "waits for rank 0 (global rank 1); 2 ranks 1 more"},
		{"link between 0 and 2: timed out", "link between 0 and 2 (global ranks 1 and 5): timed out"},
		{"rank 1 of 3", "rank 1 (global rank 3) of 3"},
		{"rank 3 died", "rank 3 died"},
		{"rank 99999999999999999999 died", "rank 99999999999999999999 died"},
		{"ranks 0-2 died", "ranks 0-2 died"},
		{"rank 1 (global rank 3) died", "rank 1 (global rank 3) died"},
		{"global rank 1 died", "global rank 1 died"},
		{"rank 1 of the default group died", "rank 1 of the default group died"},
		{`rank 1 of group "1" died`, `rank 1 of group "1" died`},
		{`rank 0 left group "1", rank 1 died`, `rank 0 (global rank 1) left group "1", rank 1 (global rank 3) died`},
		{`rank 0 aborted: work: barrier seq 1 on rank 2 of group "0": rank 1 died`, `rank 0 (global rank 1) aborted: work: barrier seq 1 on rank 2 of group "0": rank 1 died`},
		{`rank 0 said: detail: rank 1 of group "0" calls`, `rank 0 (global rank 1) said: detail: rank 1 of group "0" calls`},
		{`rank 1 called all_reduce("rank 0 of \"all\", rank 2")`, `rank 1 (global rank 3) called all_reduce("rank 0 of \"all\", rank 2")`},
		{"timed out: context deadline exceeded: rank 1 of my list; ranks 0 and 2: answers take 9ms", "timed out: context deadline exceeded: rank 1 of my list; ranks 0 and 2 (global ranks 1 and 5): answers take 9ms"},
		{"timed out: context deadline exceeded; rank 2 waits", "timed out: context deadline exceeded; rank 2 (global rank 5) waits"},
		{"stopped waiting: context canceled: ranks 0, 1", "stopped waiting: context canceled: ranks 0, 1"},
		{"crank 1, ranks", "crank 1, ranks"},
		{"", ""},
	} {
		require.Equal(t, c.want, names.Say("1", c.text))
		require.Equal(t, c.text, (*work.Names)(nil).Say("1", c.text))
		require.Equal(t, c.text, (&work.Names{Description: "x"}).Say("1", c.text))
	}
	require.Equal(t, "rank 1 (global rank 3)", names.Rank(1))
	require.Equal(t, "rank 1", (*work.Names)(nil).Rank(1))
	require.Equal(t, `group "1" (evaluation)`, names.Group("1"))
	require.Equal(t, `group "1"`, (*work.Names)(nil).Group("1"))
	require.Equal(t, []int{5, 1}, names.Of([]int{2, 0}).GlobalRanks)
	require.Equal(t, []int{2, 0}, (*work.Names)(nil).Of([]int{2, 0}).GlobalRanks)
}

// TestNamesOfErrors: the program's own words are left alone.
func TestNamesOfErrors(t *testing.T) {
	info := work.Info{Op: work.Barrier, Seq: 3, Group: "1", Rank: 1, Names: &work.Names{Description: "evaluation", GlobalRanks: []int{1, 3}}}
	const begin = `work: barrier seq 3 on rank 1 (global rank 3) of group "1" (evaluation): `
	for _, c := range []struct {
		cause error
		want  string
	}{
		{fmt.Errorf("rank 0 %w", work.ErrPeerDied), "rank 0 (global rank 1) peer died"},
		{fmt.Errorf("rank 0 %w: rank 1 of my list", work.ErrAborted), "rank 0 (global rank 1) aborted: rank 1 of my list"},
		{fmt.Errorf("step 1 of 2 (inside, chunk 0): rank 0 %w the group: rank 1 of my list", work.ErrAborted), "step 1 of 2 (inside, chunk 0): rank 0 (global rank 1) aborted the group: rank 1 of my list"},
		{fmt.Errorf("before barrier: rank 1 %w: rank 0 is odd", work.ErrCanceled), "before barrier: rank 1 (global rank 3) operation cancelled: rank 0 is odd"},
		{fmt.Errorf("chunk 1: rank 1 %w (noticed by rank 0): aborted: rank 0", work.ErrPanicked), "chunk 1: rank 1 (global rank 3) panicked (noticed by rank 0 (global rank 1)): aborted: rank 0"},
		{work.Recovered(errors.New("rank 1 is odd")), "panic: rank 1 is odd"},
	} {
		p := work.NewPromise(info)
		p.Complete(c.cause)
		text := p.Work().Err().Error()
		require.Contains(t, text, begin+c.want)
	}
	info.Names = nil
	require.Equal(t, `work: barrier seq 3 on rank 1 of group "1": rank 0 died`, (&work.Error{Info: info, Err: errors.New("rank 0 died")}).Error())
}
