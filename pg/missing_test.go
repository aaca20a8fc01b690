package pg

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

// TestForgottenRankIsNamed: of 3 ranks one is never started. All others name it, in the log
// while they wait, and in their errors.
func TestForgottenRankIsNamed(t *testing.T) {
	t.Parallel()
	const noTrace = `msg="c10d: waiting for rank 1 to call Init" group=0 rank=RANK missing="rank 1 has not called Init`
	for _, tc := range []struct {
		name    string
		url     func(t *testing.T) (url, env string)
		missing int
		want    map[int]string // by rank; -1 for all others
	}{
		{"tcp", atPort, 1, map[int]string{-1: noTrace + ` (it has not joined the store)"`}},
		{"tcp, the host", atPort, 0, map[int]string{
			-1: `msg="c10d: waiting for rank 0, which hosts the store at 127.0.0.1:`,
		}},
		{"tcp, of the launcher", atAgent, 0, map[int]string{
			-1: `missing="rank 0 has not called Init (it has not joined the store)"`,
		}},
		{"Redis", func(t *testing.T) (string, string) {
			return "redis://" + startRedis(t) + "/0?prefix=run&rank=%d&world_size=3", ""
		}, 1, map[int]string{-1: noTrace + `"`}},
		{"file", func(t *testing.T) (string, string) {
			return "file://" + filepath.Join(t.TempDir(), "f") + "?rank=%d&world_size=3", ""
		}, 1, map[int]string{-1: noTrace + `"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			url, env := tc.url(t)
			ctx, cancel := context.WithCancelCause(waiting.WithFirst(context.Background(), 50*time.Millisecond))
			defer cancel(nil)
			logs := make([]waitingtest.Log, 3)
			var wg sync.WaitGroup
			errs := make([]error, 3)
			for r := range 3 {
				if r == tc.missing {
					continue
				}
				fill := func(s string) string { return strings.ReplaceAll(s, "%d", fmt.Sprint(r)) }
				wg.Go(func() {
					_, errs[r] = initFrom(ctx, fill(url), InitOptions{Options: Options{Logger: logs[r].Logger()}}, environ(fill(env)))
				})
			}
			for r := range 3 {
				want, ok := tc.want[r]
				if !ok {
					want = tc.want[-1]
				}
				want = strings.ReplaceAll(want, "RANK", fmt.Sprint(r))
				if r != tc.missing {
					require.Eventually(t, func() bool { return strings.Contains(logs[r].String(), want) }, 20*time.Second, time.Millisecond,
						"rank %d: %s\nwant %s", r, &logs[r], want)
				}
			}
			cancel(nil)
			wg.Wait()
			for r := range 3 {
				if r != tc.missing {
					require.Error(t, errs[r])
					require.Contains(t, logs[r].String(), `level=ERROR msg="c10d: process group failed" group=0 rank=`+fmt.Sprint(r)+" size=3 err=")
				}
			}
			if tc.missing != 0 {
				// A rank whose context ends a moment later hears first that the other one gave up.
				missing, first, second := fmt.Sprint("rank ", tc.missing), errs[0].Error(), errs[2].Error()
				require.True(t, strings.Contains(first, missing) || strings.Contains(second, missing), "%s\n%s", first, second)
				for _, text := range []string{first, second} {
					require.True(t, strings.Contains(text, missing) || strings.Contains(text, "gave up: context canceled"), text)
				}
			}
		})
	}
}

// atPort is a store that rank 0 hosts.
func atPort(t *testing.T) (url, env string) {
	return "tcp://" + freeport.Loopback(t) + "?rank=%d&world_size=3", ""
}

// atAgent is a store that a launcher hosts.
func atAgent(t *testing.T) (url, env string) {
	agent := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	t.Cleanup(func() { agent.Close() })
	host, port, _ := net.SplitHostPort(agent.Addr().String())
	return "env://", "RANK=%d WORLD_SIZE=3 MASTER_ADDR=" + host + " MASTER_PORT=" + port + " TORCHELASTIC_USE_AGENT_STORE=True"
}

// TestForgottenGroupIsNamed: a rank that does not make a group which others make is named
// with its number in both groups.
func TestForgottenGroupIsNamed(t *testing.T) {
	ctx, cancel := context.WithCancel(waiting.WithFirst(context.Background(), 50*time.Millisecond))
	defer cancel()
	st := store.NewHash()
	defer st.Close()
	logs, groups := make([]waitingtest.Log, 3), make([]*ProcessGroup, 3)
	var wg sync.WaitGroup
	for r := range 3 {
		wg.Go(func() {
			groups[r] = must.Get(New(ctx, st, r, 3, Options{Logger: logs[r].Logger(), Timeout: time.Minute}))
		})
	}
	wg.Wait()
	wg.Go(func() {
		require.Error(t, must.Err(groups[1].NewGroup(ctx, []int{1, 2})))
	})
	const want = `msg="c10d: waiting for rank 1 (global rank 2) to connect" group=1 rank=0 global_rank=1 missing="rank 1 (global rank 2) published no address (it has not made this group`
	require.Eventually(t, func() bool { return strings.Contains(logs[1].String(), want) }, 20*time.Second, time.Millisecond, "%s", &logs[1])
	cancel()
	wg.Wait()
	require.Contains(t, logs[1].String(), `msg="c10d: process group failed" group=1 rank=0 global_rank=1 size=2`)
	for _, g := range groups {
		g.Abort(errors.New("over"))
		wg.Go(func() { g.Close() })
	}
	wg.Wait()
}

// TestStoreBarrierTellsHowManyCame is about the barrier after a group has been made.
func TestStoreBarrierTellsHowManyCame(t *testing.T) {
	for name, o := range map[string]Options{
		"InitBarrier": {InitBarrier: true},
		"V1":          {},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, registerMeet())
			ctx, cancel := context.WithCancel(waiting.WithFirst(context.Background(), 20*time.Millisecond))
			defer cancel()
			st := store.NewHash()
			defer st.Close()
			var log waitingtest.Log
			o.Backend, o.Logger = "init-meet", log.Logger()
			// Rank 1 is one of PyTorch: this is its first key, and that of "init-meet".
			first, meets := "0//cpu//0/1", "0//cpu//1"
			if name == "V1" {
				first, meets = "0/0/rank_1", "0/1"
			}
			require.NoError(t, st.MultiSet(ctx, []string{first, meets}, [][]byte{nil, nil}))
			done := make(chan error, 1)
			go func() { _, err := New(ctx, st, 0, 2, o); done <- err }()
			require.Eventually(t, func() bool {
				return strings.Contains(log.String(), `group \"0\": 1 of 2 ranks have come" rank=0`)
			}, 20*time.Second, time.Millisecond, "%s", &log)
			cancel()
			require.Error(t, <-done)
		})
	}
}

// TestManyRanksAreAway: 32 of 40 ranks are away. Every error and every line of a log names them, and no other.
func TestManyRanksAreAway(t *testing.T) {
	t.Parallel()
	const size, away = 40, 32 // ranks 1 to 32
	url := "file://" + filepath.Join(t.TempDir(), "f") + "?rank=%d&world_size=" + fmt.Sprint(size)
	errs, logs := make([]error, size), make([]waitingtest.Log, size)
	synctest.Test(t, func(t *testing.T) {
		ctx := waiting.WithFirst(t.Context(), 2*time.Second)
		var wg sync.WaitGroup
		for r := range size {
			if r == 0 || r > away {
				wg.Go(func() {
					o := InitOptions{Options: Options{Timeout: 5 * time.Second, Logger: logs[r].Logger()}}
					_, errs[r] = initFrom(ctx, strings.ReplaceAll(url, "%d", fmt.Sprint(r)), o, environ(""))
				})
			}
		}
		wg.Wait()
	})
	for r, err := range errs {
		if r > 0 && r <= away {
			continue
		}
		e := must.As[*MeetingError](t, err, "rank %d", r)
		require.Equal(t, allRanks(away + 1)[1:], e.Missing, "rank %d: %v", r, err)
		require.Empty(t, e.Stopped, "rank %d: %v", r, err)
		require.Contains(t, err.Error(), "rank 8 has not called Init")
		require.Contains(t, err.Error(), "; 24 more ranks are missing: ")
		require.Contains(t, logs[r].String(), "waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 24 more to call Init")
	}
}

// TestRank0DoesNotAnswer: rank 0 has come and has not answered. That is what the line says.
func TestRank0DoesNotAnswer(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(waiting.WithFirst(t.Context(), 20*time.Millisecond))
	defer cancel()
	st := store.NewHash()
	defer st.Close()
	require.NoError(t, st.Set(ctx, "c10d-go/meet/-/0/turn/1/end", []byte(`{"zero":{"nonce":"n","size":2}}`)))
	var log waitingtest.Log
	done := make(chan error, 1)
	go func() { _, err := New(ctx, st, 1, 2, Options{Logger: log.Logger()}); done <- err }()
	require.Eventually(t, func() bool {
		return strings.Contains(log.String(), `waiting for rank 0, which has called Init, to answer" group=0 rank=1`)
	}, 20*time.Second, time.Millisecond, "%s", &log)
	cancel()
	require.Error(t, <-done)
}
