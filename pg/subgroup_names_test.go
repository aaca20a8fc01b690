package pg_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// evaluation runs f on 4 ranks, with a group of ranks 1, 2 and 3, and returns the ranks' errors and logs.
func evaluation(t *testing.T, change func(*pg.Options), f func(j *pgtest.Job, g, sub *pg.ProcessGroup) error) (errs []error, logs []*waitingtest.Log) {
	j := pgtest.NewJob(4)
	defer j.Close()
	errs, logs = make([]error, 4), make([]*waitingtest.Log, 4)
	var ranks sync.WaitGroup
	for r := range 4 {
		logs[r] = new(waitingtest.Log)
		ranks.Go(func() {
			ctx := waiting.WithFirst(t.Context(), 50*time.Millisecond)
			o := j.Options()
			o.Logger = logs[r].Logger()
			if change != nil {
				change(&o)
			}
			g, err := pg.New(ctx, j.Store, r, 4, o)
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			sub, err := g.NewGroup(ctx, []int{1, 2, 3}, pg.GroupOptions{Description: "evaluation"})
			if err != nil {
				errs[r] = err
				return
			}
			errs[r] = f(j, g, sub)
		})
	}
	ranks.Wait()
	return errs, logs
}

// onRank is how errors of rank 1 of the default group begin.
const onRank = ` on rank 0 (global rank 1) of group "1" (evaluation): `

// TestSubgroupNames: errors and log lines of a group that is not the default group name its description, and its ranks
// by their numbers in both groups.
func TestSubgroupNames(t *testing.T) {
	sum := func(sub *pg.ProcessGroup, n int) error {
		return pg.Wait(sub.AllReduce(t.Context(), pg.Slice(make([]float32, n)), pg.Sum()))
	}
	t.Run("late", func(t *testing.T) {
		t.Parallel()
		var left sync.WaitGroup
		left.Add(2)
		errs, logs := evaluation(t, nil, func(_ *pgtest.Job, g, sub *pg.ProcessGroup) error {
			switch g.Rank() {
			case 0:
				return nil
			case 3:
				left.Wait()
				return nil
			}
			defer left.Done()
			return sub.MonitoredBarrier(t.Context(), pg.CallOptions{Timeout: 5 * time.Second})
		})
		require.ErrorContains(t, errs[1], onRank+"rank 2 (global rank 3) did not take part in time")
		require.Contains(t, logs[1].String(), "waits for rank 2 (global rank 3)")
		require.Contains(t, logs[1].String(), "rank 2 (global rank 3) has not called it")
		require.Contains(t, logs[1].String(), "group=1 rank=0 description=evaluation global_rank=1 ")
		require.Contains(t, logs[2].String(), `msg="process group ready" group=1 rank=1 description=evaluation global_rank=2 size=3`)
	})
	t.Run("died", func(t *testing.T) {
		errs, _ := evaluation(t, nil, func(j *pgtest.Job, g, sub *pg.ProcessGroup) error {
			switch g.Rank() {
			case 0:
				return nil
			case 3:
				j.Fabric().Kill("1", 2)
				return nil
			}
			return sum(sub, 1)
		})
		require.ErrorContains(t, errs[1], onRank+"rank 2 (global rank 3) died")
	})
	t.Run("detail", func(t *testing.T) {
		errs, _ := evaluation(t, func(o *pg.Options) { o.Detail = true }, func(j *pgtest.Job, g, sub *pg.ProcessGroup) error {
			if g.Rank() == 0 {
				return nil
			}
			return sum(sub, 1+g.Rank()/3)
		})
		require.ErrorContains(t, errs[1], `rank 0 (global rank 1) of group "1" (evaluation) calls `)
		require.ErrorContains(t, errs[1], ", but rank 2 (global rank 3) calls ")
	})
	t.Run("object", func(t *testing.T) {
		errs, _ := evaluation(t, nil, func(_ *pgtest.Job, g, sub *pg.ProcessGroup) error {
			switch g.Rank() {
			case 0:
				return nil
			case 3:
				return must.Err(pg.AllGatherObject(t.Context(), sub, "three"))
			}
			return must.Err(pg.AllGatherObject(t.Context(), sub, g.Rank()))
		})
		require.ErrorContains(t, errs[1], `pg: AllGatherObject: object of rank 2 (global rank 3) of group "1" (evaluation): json: `)
		require.ErrorContains(t, errs[3], `pg: AllGatherObject: object of rank 0 (global rank 1) of group "1" (evaluation): json: `)
	})
	t.Run("aborted because of the default group", func(t *testing.T) {
		errs, _ := evaluation(t, nil, func(j *pgtest.Job, g, sub *pg.ProcessGroup) error {
			if g.Rank() == 3 {
				j.Kill(3)
				return nil
			}
			err := sum(g, 1)
			if g.Rank() == 0 {
				return err
			}
			sub.Abort(err)
			return sum(sub, 1)
		})
		require.NotContains(t, errs[0].Error(), "global")
		require.NotContains(t, errs[1].Error(), "rank 3 (global", errs[1].Error())
	})
	t.Run("never made", func(t *testing.T) {
		t.Parallel()
		j := pgtest.NewJob(3)
		defer j.Close()
		errs, logs := make([]error, 3), make([]waitingtest.Log, 3)
		var ranks, came sync.WaitGroup
		came.Add(2)
		for r := range 3 {
			ranks.Go(func() {
				ctx := waiting.WithFirst(t.Context(), 50*time.Millisecond)
				o := pg.Options{Logger: logs[r].Logger(), Timeout: pgtest.Timeout}
				g, err := pg.New(ctx, j.Store, r, 3, o)
				if err != nil {
					t.Error(err)
					return
				}
				defer g.Close()
				if r == 2 {
					came.Wait() // it forgets to call NewGroup
					return
				}
				defer came.Done()
				limited, cancel := context.WithTimeout(ctx, 5*time.Second)
				defer cancel()
				_, errs[r] = g.NewGroup(limited, []int{1, 2}, pg.GroupOptions{Description: "evaluation"})
			})
		}
		ranks.Wait()
		require.ErrorContains(t, errs[1], `pg: group "1" (evaluation), rank 0 (global rank 1) of 2: `)
		require.ErrorContains(t, errs[1], "rank 1 (global rank 2) ")
		require.Equal(t, 1, strings.Count(logs[1].String(), `msg="c10d: process group failed" group=1 rank=0 description=evaluation global_rank=1 size=2`))
		require.Contains(t, logs[1].String(), "waiting for rank 1 (global rank 2) to connect")
	})
}
