package meet

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// TestGetOfANotice: the store's own timeout ends no wait.
func TestGetOfANotice(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		errs []error // of the calls
		want error
	}{
		{t.Context(), []error{nil}, nil},
		{t.Context(), []error{store.ErrTimeout, nil}, nil},
		{t.Context(), []error{errBroken}, errBroken},
		{ended, []error{store.ErrTimeout}, store.ErrTimeout},
	} {
		p := &probe{Store: store.NewHash()}
		require.NoError(t, p.Store.Set(t.Context(), "k", []byte("v")))
		errs := c.errs
		p.before = func(string) error {
			err := errs[0]
			errs = errs[1:]
			return err
		}
		v, err := get(c.ctx, p, "k")
		require.ErrorIs(t, err, c.want)
		require.Equal(t, c.want == nil, string(v) == "v")
		require.Empty(t, errs)
	}
}

// TestTellWhatCounts: a fault is told unless another one was, or the store fails.
func TestTellWhatCounts(t *testing.T) {
	mine := Fault{Rank: 1, By: 1, Text: "mine"}
	for first, c := range map[string]struct {
		fails string
		calls string
	}{
		"":                                  {calls: "compare set first, set first"},
		`{"fault":{"rank":"x","text":"y"}}`: {calls: "compare set first, compare set last, set last"},
		`{"asks":true}`:                     {calls: "compare set first, compare set last, set last"},
		"{}":                                {fails: "compare set first", calls: "compare set first"},
	} {
		p := &probe{Store: store.NewHash(), before: fails(c.fails)}
		if first != "" {
			require.NoError(t, p.Store.Set(t.Context(), "first", []byte(first)))
		}
		require.Equal(t, mine, Tell(p, mine), first)
		require.Equal(t, c.calls, strings.Join(p.calls, ", "), first)
	}
}

// TestSilentCalls: rank 0 of three lacks rank 1 and asks who runs.
func TestSilentCalls(t *testing.T) {
	const all, second = answerRounds * answerRound, "wait here/2"
	for name, c := range map[string]struct {
		keys         map[string]string
		fails, loses string
		silent       []int
		took         time.Duration
		calls        []string // that wait or get; nil: any
	}{
		"all answer": {
			keys:  map[string]string{"here/1": "[]", "here/2": "[1]"},
			calls: []string{"wait here/1 here/2", "get here/1", "get here/2"},
		},
		"one answers": {
			keys:   map[string]string{"here/1": "[2]"},
			silent: []int{2}, took: all,
			calls: []string{"wait here/1 here/2", second, second, second, "get here/1"},
		},
		"one answers garbage":            {keys: map[string]string{"here/1": `[2,"x"]`}, took: all},
		"one answers, the reply is lost": {keys: map[string]string{"here/1": "[2]"}, loses: "get here/1", took: all},
		"nobody answers":                 {silent: []int{1}, took: all},
		"a fault":                        {keys: map[string]string{"first": `{"asks":true}`, "last": `{"fault":{"rank":2}}`}, silent: []int{2}},
		"a fault, the reply is lost":     {keys: map[string]string{"first": `{"asks":true}`, "last": `{"fault":{"rank":2}}`}, loses: "check last", silent: []int{1}, took: all},
		"a fault of nobody":              {keys: map[string]string{"first": `{"fault":{"rank":-1}}`}},
		"garbage":                        {keys: map[string]string{"first": `{"fault":{"rank":"x"}}`}, silent: []int{1}, took: all},
		"the store fails":                {fails: "compare set first"},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: fails(c.fails), after: fails(c.loses)}
			for key, text := range c.keys {
				require.NoError(t, p.Store.Set(t.Context(), key, []byte(text)))
			}
			n := must.Get(Prepare(t.Context(), NoticeConfig{Store: p, Ranks: []int{0, 1, 2}}))
			begun := time.Now()
			silent := n.Silent([]int{1})
			require.Equal(t, fmt.Sprint(c.silent), fmt.Sprint(silent), name)
			require.Equal(t, c.took, time.Since(begun), name)
			n.Close()
			var calls []string
			for _, call := range p.calls {
				if strings.HasPrefix(call, "wait ") || strings.HasPrefix(call, "get ") {
					calls = append(calls, call)
				}
			}
			if c.calls != nil {
				require.Equal(t, c.calls, calls, name)
			}
		})
	}
}
