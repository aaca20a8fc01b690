package debug_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/trace/debug"
)

var world = []int{0, 1, 2}

// rank is a status with some ended all_reduces, and what is pending.
func rank(n int, called uint64, pending ...debug.Operation) *debug.Status {
	now := time.Now()
	s := &debug.Status{Rank: n, Size: 3, Host: "host", Now: now}
	s.Groups = []debug.Group{{Name: "0", Rank: n, Ranks: world, Collectives: called}}
	for i := range called - uint64(len(pending)) {
		s.Recent = append(s.Recent, debug.Operation{
			Group: "0", Op: "all_reduce", Peer: -1, Collective: i + 1, State: "done", Called: now.Add(-time.Minute + time.Duration(i)*time.Second), Took: time.Millisecond,
		})
	}
	s.Pending = pending
	return s
}

func pending(op string, number uint64, age time.Duration) debug.Operation {
	return debug.Operation{Group: "0", Op: op, Peer: -1, Collective: number, State: "running", Called: time.Now().Add(-age), Took: age}
}

// meeting is the status of a rank without a group.
func meeting(n int, log ...debug.Line) *debug.Status {
	return &debug.Status{Rank: n, Size: 3, Now: time.Now(), State: "waits", Log: log}
}

// TestVerdicts: what the page says of a job.
func TestVerdicts(t *testing.T) {
	recv := debug.Operation{Group: "0", Op: "recv", P2P: true, Peer: 2, State: "running", Called: time.Now().Add(-20 * time.Second), Took: 20 * time.Second}
	receiver := rank(1, 0)
	receiver.Pending = []debug.Operation{recv}
	receiver.Groups[0].Probes = []backend.Probe{{Waits: []backend.Wait{{Why: []string{"rank 2 has not sent it (tag 7)"}}}}}
	failed := rank(1, 2)
	failed.Recent[1].State, failed.Recent[1].Error = "failed", "gloo: all_reduce: rank 2 is gone"
	goneOn := rank(1, 2)
	goneOn.Recent[1].State, goneOn.Recent[1].Error = "failed", "gloo: all_reduce: rank 2 is gone"
	goneOn.Groups[0].Name, goneOn.Groups[0].Epoch = "0@1", 1
	off := statusOf(t, debug.New(trace.Off))
	left := trace.New()
	left.Join(trace.Member{Name: "0", Ranks: world}).Leave()
	closed := statusOf(t, debug.New(left))
	busy := rank(2, 3) // its last operations no longer have collective 3
	busy.Recent = nil
	for range 64 {
		busy.Recent = append(busy.Recent, debug.Operation{Group: "1", Op: "send", P2P: true, Peer: 1, State: "done", Called: time.Now()})
	}
	gone := rank(2, 0) // has left group 0, with which its last operations have nothing to do
	gone.Groups = []debug.Group{{Name: "1", Rank: 1, Ranks: []int{1, 2}}}
	for i, o := range busy.Recent {
		o.Record = uint64(1000 + i)
		gone.Recent = append(gone.Recent, o)
	}
	outer := rank(0, 3, pending("all_reduce", 3, 4*time.Second)) // waits for rank 1, which waits for rank 2
	outer.Groups[0].Ranks = []int{0, 1}
	middle, inner := rank(1, 2), rank(2, 2)
	middle.Groups[0].Ranks = []int{0, 1}
	middle.Groups = append(middle.Groups, debug.Group{Name: "1", Ranks: []int{1, 2}, Collectives: 1})
	middle.Pending = []debug.Operation{pending("all_gather", 1, 3*time.Second)}
	middle.Pending[0].Group = "1"
	inner.Groups = []debug.Group{{Name: "1", Rank: 1, Ranks: []int{1, 2}}}
	inner.Recent = nil
	warning := debug.Line{Level: "WARN", Text: "waiting for rank 1 to connect"}
	for name, c := range map[string]struct {
		ranks []*debug.Status // nil for one that does not answer
		level string
		late  []int
		want  string // in text and details
	}{
		"nothing pending":        {[]*debug.Status{rank(0, 3), rank(1, 3), rank(2, 2)}, "ok", nil, "No operation has been pending"},
		"not pending long":       {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 100*time.Millisecond)), rank(1, 2), rank(2, 2)}, "ok", nil, "No operation has been"},
		"a rank is late":         {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 4*time.Second)), rank(1, 3, pending("all_reduce", 3, 3*time.Second)), rank(2, 2)}, "waiting", []int{2}, "Rank 2 has not called it: it has called 2 of 3 collectives. Its last operation, all_reduce, ended"},
		"two are late":           {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 11*time.Second)), rank(1, 2), rank(2, 2)}, "stuck", []int{1, 2}, `all_reduce, collective 2 of group "0", waits for ranks 1-2.`},
		"one is stopped":         {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 11*time.Second)), rank(1, 3, pending("all_reduce", 3, 11*time.Second)), nil}, "stuck", []int{2}, "Rank 2: process 9 is stopped (no answer)."},
		"calls differ":           {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 2*time.Second)), rank(1, 3, pending("broadcast", 3, 2*time.Second)), rank(2, 3, pending("all_reduce", 3, 2*time.Second))}, "waiting", nil, "rank 0 called all_reduce, rank 1 broadcast"},
		"all have called":        {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 2*time.Second)), rank(1, 3, pending("all_reduce", 3, 2*time.Second)), rank(2, 3)}, "waiting", nil, "takes long. Every rank has called it."},
		"a receive":              {[]*debug.Status{rank(0, 0), receiver, rank(2, 0)}, "stuck", []int{2}, "recv of rank 1 in group \"0\" waits for rank 2, for 20.0 s. rank 2 has not sent it (tag 7)"},
		"a failure":              {[]*debug.Status{rank(0, 2), failed, rank(2, 2)}, "stuck", nil, "all_reduce failed on rank 1. gloo: all_reduce: rank 2 is gone"},
		"no default group":       {[]*debug.Status{meeting(0), meeting(1), nil}, "waiting", []int{2}, "Ranks 0-1 cannot make the default group: no sign of rank 2."},
		"none for long":          {[]*debug.Status{meeting(0, debug.Line{Level: "WARN", Text: "waiting"}), meeting(1), nil}, "stuck", []int{2}, "cannot make the default group"},
		"none, with all pages":   {[]*debug.Status{meeting(0, warning), meeting(1), meeting(2)}, "stuck", nil, "Ranks 0-2 cannot make the default group. All ranks have a page. Rank 0: waiting for rank 1 to connect"},
		"a newcomer waits":       {[]*debug.Status{rank(0, 2), rank(1, 2), meeting(2, warning)}, "stuck", nil, "Rank 2 cannot make the default group."},
		"nothing is recorded":    {[]*debug.Status{off, rank(1, 2), nil}, "waiting", nil, "No page of rank 2."},
		"a recorder is off":      {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 4*time.Second)), off, rank(2, 2)}, "waiting", []int{2}, "waits for rank 2."},
		"the others have called": {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 4*time.Second)), off, rank(2, 3)}, "waiting", nil, "Every rank that records operations has called it."},
		"all recorders are off":  {[]*debug.Status{off, off, off}, "ok", nil, "No rank records operations. Ranks 0-2 record no operations."},
		"groups are closed":      {[]*debug.Status{closed, rank(1, 2), nil}, "waiting", nil, "No page of rank 2."},
		"a call long ago":        {[]*debug.Status{rank(0, 3, pending("reduce", 3, 4*time.Second)), rank(1, 2), busy}, "waiting", []int{1}, `collective 2 of group "0", waits for rank 1.`},
		"a group that was left":  {[]*debug.Status{rank(0, 3, pending("all_reduce", 3, 4*time.Second)), rank(1, 3), gone}, "waiting", nil, `takes long. Rank 2 has left group "0", and its page no longer has operations that old.`},
		"who waits is not late":  {[]*debug.Status{outer, middle, inner}, "waiting", []int{2}, `all_gather, collective 0 of group "1", waits for rank 2.`},
		"a failed epoch":         {[]*debug.Status{rank(0, 2), goneOn, rank(2, 2)}, "ok", nil, "No operation has been pending"},
		"a rank has no page":     {[]*debug.Status{rank(0, 2), rank(1, 2), nil}, "waiting", nil, "No page of rank 2. Rank 2: process 9 is stopped (no answer)."},
	} {
		t.Run(name, func(t *testing.T) {
			j := debug.NewJob(debug.JobOptions{
				Name: "job", Size: 3, About: func(int) string { return "process 9 is stopped" },
				Ask: func(_ context.Context, rank int, _ url.Values) (debug.Answer, error) {
					if c.ranks[rank] == nil {
						return debug.Answer{}, errors.New("no answer")
					}
					text, err := json.Marshal(c.ranks[rank])
					return debug.Answer{Body: text}, err
				},
			})
			s := j.Status(t.Context())
			require.Equal(t, c.level, s.Level)
			require.Equal(t, c.late, s.Late)
			require.Contains(t, strings.Join(append([]string{s.Text}, s.Why...), " "), c.want)
			page := get(t, j, "/").Body.String()
			require.Contains(t, page, "verdict "+c.level)
			for _, r := range c.late {
				require.Contains(t, page, `<tr id="rank`+string(rune('0'+r))+`" class="late">`)
			}
		})
	}
}

// TestVerdictsOfEpochs: after a change of members the default group's numbers are not the launcher's.
func TestVerdictsOfEpochs(t *testing.T) {
	member := func(n int, pending ...debug.Operation) *debug.Status {
		s := rank(n, uint64(len(pending)), pending...)
		s.Groups[0] = debug.Group{Name: "0", Epoch: 1, Rank: n, Ranks: []int{0, 1}, Collectives: uint64(2 + len(pending))}
		return s
	}
	wait := pending("all_reduce", 3, 4*time.Second)
	recv := debug.Operation{Group: "0", Op: "recv", P2P: true, Peer: 0, State: "running", Called: time.Now().Add(-20 * time.Second), Took: 20 * time.Second}
	for name, c := range map[string]struct {
		ranks []*debug.Status
		late  []int
		want  string
	}{
		"a rank is late":   {[]*debug.Status{nil, member(0), member(1, wait)}, []int{1}, "waits for rank 1. Rank 1 has not called it: it has called 2 of 3 collectives"},
		"the other one":    {[]*debug.Status{nil, member(0, wait), member(1)}, []int{2}, "waits for rank 2."},
		"nobody is":        {[]*debug.Status{nil, member(0, wait), member(1, wait)}, nil, "Every rank has called it."},
		"who is not known": {[]*debug.Status{nil, nil, member(1, wait)}, []int{0, 1}, "waits for ranks 0-1."},
		"a receive":        {[]*debug.Status{nil, member(0), member(1, recv)}, []int{1}, "recv of rank 2 in group \"0\" waits for rank 1,"},
	} {
		t.Run(name, func(t *testing.T) {
			j := debug.NewJob(debug.JobOptions{Size: 3, Ask: func(_ context.Context, rank int, _ url.Values) (debug.Answer, error) {
				if c.ranks[rank] == nil {
					return debug.Answer{}, errors.New("no answer")
				}
				text, err := json.Marshal(c.ranks[rank])
				return debug.Answer{Body: text}, err
			}})
			s := j.Status(t.Context())
			require.Equal(t, c.late, s.Late)
			require.Contains(t, strings.Join(append([]string{s.Text}, s.Why...), " "), c.want)
			require.Empty(t, s.Merge.Missing)
		})
	}
}

// TestRankOfEpochs: the page of a rank has the launcher's number after a change of members, too.
func TestRankOfEpochs(t *testing.T) {
	moved := rank(1, 2)
	moved.Groups[0] = debug.Group{Name: "0@1", Epoch: 1, Rank: 1, Ranks: []int{0, 1}}
	j := debug.NewJob(debug.JobOptions{Size: 3, Ask: func(context.Context, int, url.Values) (debug.Answer, error) {
		text, err := json.Marshal(moved)
		return debug.Answer{Body: text}, err
	}})
	require.Contains(t, get(t, j, "/?rank=2").Body.String(), "Rank 2 of 3")
}

// TestButtonsHaveTime: a rank has as long for a button as it takes, and not longer.
func TestButtonsHaveTime(t *testing.T) {
	var limit time.Duration
	j := debug.NewJob(debug.JobOptions{Size: 1, Ask: func(ctx context.Context, _ int, form url.Values) (debug.Answer, error) {
		if form == nil {
			return debug.Answer{Body: []byte("{}")}, nil
		}
		until, ok := ctx.Deadline()
		require.True(t, ok, "a rank that has stopped would be waited for without end")
		limit = time.Until(until)
		return debug.Answer{}, nil
	}})
	var s debug.JobStatus
	require.NoError(t, json.Unmarshal(get(t, j, "/?format=json").Body.Bytes(), &s))
	press := func(form url.Values) time.Duration {
		form.Set("token", s.Token)
		require.Equal(t, http.StatusOK, post(t, j, "/?rank=0", form).Code)
		return limit
	}
	require.Less(t, press(url.Values{"do": {"goroutines"}}), time.Minute)
}

// TestGoneVisitor: nobody is asked for a visitor that has gone.
func TestGoneVisitor(t *testing.T) {
	asked := 0
	j := debug.NewJob(debug.JobOptions{Size: 1, Ask: func(context.Context, int, url.Values) (debug.Answer, error) {
		asked++
		return debug.Answer{Body: []byte("{}")}, nil
	}})
	ctx, cancel := context.WithCancel(t.Context())
	request := httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
	j.ServeHTTP(httptest.NewRecorder(), request)
	require.Equal(t, 1, asked)
	cancel()
	j.ServeHTTP(httptest.NewRecorder(), request)
	require.Equal(t, 1, asked)
}

// gloo is a backend that has only a name.
type gloo struct{ backend.Backend }

func (gloo) Name() string { return "gloo" }

// TestJob: the page of a job has those of its ranks, and passes their buttons on.
func TestJob(t *testing.T) {
	pages := make([]*debug.Page, 2)
	for i := range pages {
		r := trace.New()
		g := r.Join(trace.Member{Name: "0", Rank: i, Ranks: []int{0, 1}})
		var c trace.Call
		c.Begin(g, gloo{}, 0, nil, nil, -1, 0)
		if err := c.Blocked(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		pages[i] = debug.New(r)
	}
	dir := t.TempDir()
	silent := false // rank 2 is always silent, rank 1 then
	j := debug.NewJob(debug.JobOptions{Name: "job", Size: 3, Dir: dir, Ask: func(ctx context.Context, rank int, form url.Values) (debug.Answer, error) {
		if rank == 2 || silent && rank == 1 {
			return debug.Answer{}, errors.New("no answer")
		}
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/?format=json", nil)
		if form != nil {
			r = httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader(form.Encode()))
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
		pages[rank].ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			return debug.Answer{}, errors.New(w.Body.String())
		}
		name := ""
		if form.Get("do") == "download" {
			name = "rank_1"
		}
		return debug.Answer{Body: w.Body.Bytes(), Name: name}, nil
	}})
	var s debug.JobStatus
	require.NoError(t, json.Unmarshal(get(t, j, "/?format=json").Body.Bytes(), &s))
	require.Len(t, s.Ranks, 3)
	require.Empty(t, s.Ranks[0].Status.Token, "tokens of ranks are for the page alone")
	require.Contains(t, get(t, j, "/?rank=1").Body.String(), "Rank 1 of 2")
	require.Equal(t, http.StatusBadGateway, get(t, j, "/?rank=2").Code)
	require.Equal(t, http.StatusNotFound, get(t, j, "/?rank=3").Code)

	require.Equal(t, http.StatusForbidden, post(t, j, "/?rank=1", url.Values{"do": {"dump"}}).Code)
	good := url.Values{"do": {"dump"}, "token": {s.Token}}
	w := post(t, j, "/?rank=1", good)
	require.Equal(t, `attachment; filename="rank_1"`, w.Header().Get("Content-Disposition"))
	require.Contains(t, post(t, j, "/?rank=1", url.Values{"do": {"goroutines"}, "token": {s.Token}}).Body.String(), "goroutine ")
	require.Equal(t, http.StatusBadRequest, post(t, j, "/", url.Values{"do": {"goroutines"}, "token": {s.Token}}).Code)

	page := post(t, j, "/", good).Body.String()
	require.Contains(t, page, "no dump of rank 2: no answer")
	require.Contains(t, page, "2 dumps of ranks 0-1")
	files, err := filepath.Glob(filepath.Join(dir, "c10d-dump-*", "rank_*"))
	for _, name := range files {
		require.Zero(t, must.Get(os.Stat(name)).Mode().Perm()&0o077, "only this user can read dumps")
	}
	require.NoError(t, err)
	require.Len(t, files, 2)
	silent = true
	require.NoError(t, os.RemoveAll(dir))
	require.Contains(t, post(t, j, "/", good).Body.String(), "no such file or directory")
}
