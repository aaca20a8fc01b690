package trace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/work"
)

// A test that reads the file of a failure waits for it, however busy the host is.
func init() { dumpLimit = time.Minute }

// ofRun is a recorder of a rank in a run, with one operation.
func ofRun(prefix string, m Member) *Recorder {
	r := New(Options{Entries: 8, Prefix: prefix})
	m.Name, m.Ranks, m.Prompt = "0", []int{0, 1}, true
	g := r.Join(m)
	called(g).Complete(nil)
	return r
}

// called is an operation that the group has called.
func called(g *Group) *work.Promise {
	p := work.NewPromise(work.Info{Op: work.AllReduce, Group: g.Name, Rank: g.Rank})
	p.Start()
	var c Call
	c.Begin(g, &named{name: "gloo"}, work.AllReduce, nil, nil, -1, 0)
	_, _ = c.Issued(p.Work(), nil)
	return p
}

const (
	firstRun  = "aaaaaaaa11111111"
	secondRun = "bbbbbbbb22222222"
)

// read reads dumps.
func read(t *testing.T, dir string, names ...string) (all []*File) {
	for _, name := range names {
		f := must.Get(ReadFile(filepath.Join(dir, name)))
		all = append(all, f)
	}
	return all
}

// TestRuns: a restart leaves the dumps of the attempt before it, and dumps of different runs are not merged.
func TestRuns(t *testing.T) {
	dir := t.TempDir()
	prefix := filepath.Join(dir, "rank_")
	dump := func(r *Recorder) {
		require.Equal(t, prefix+"0", must.Get(r.Dump()))
	}
	other := ofRun(prefix, Member{Rank: 1, Run: firstRun, Job: "job"})
	must.Get(other.Dump())
	first := ofRun(prefix, Member{Run: firstRun, Job: "job"})
	dump(first)
	dump(first)
	second := ofRun(prefix, Member{Run: secondRun, Job: "job", Attempt: 1})
	dump(second)
	dump(second)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 3)

	all := read(t, dir, "rank_0", "rank_1", "rank.aaaaaaaa.0.0")
	require.Equal(t, "job", all[0].Job)
	require.Equal(t, 1, all[0].Attempt)
	_, err = Merge(all[:2])
	require.ErrorContains(t, err, "rank_1 is of run aaaaaaaa, attempt 0, job \"job\", and "+prefix+"0 of run bbbbbbbb, attempt 1, job \"job\"")
	runs := Runs(all)
	require.Len(t, runs, 2)
	j := must.Get(Merge(runs[0]))
	require.Equal(t, []int{0, 1}, j.Ranks)
	require.Empty(t, j.Stuck)
	var b bytes.Buffer
	require.NoError(t, j.Print(&b, 0))
	require.Contains(t, b.String(), "2 dumps of ranks 0-1\nrun aaaaaaaa, attempt 0, job \"job\"\n")
	j = must.Get(Merge(runs[1]))
	require.Equal(t, []int{0}, j.Ranks)
	require.Equal(t, []int{1}, j.Missing)
	require.Equal(t, secondRun, j.Run)

	dir2 := t.TempDir()
	require.NoError(t, j.WriteTorch(dir2))
	require.Equal(t, secondRun, read(t, dir2, "rank_0")[0].Run)
}

// TestRunsWithoutName: dumps of PyTorch ranks belong to the run of the others. Without a run's name the attempt counts.
func TestRunsWithoutName(t *testing.T) {
	dir := t.TempDir()
	prefix := filepath.Join(dir, "rank_")
	torch := glooDump(t, dir, 2, 0, "all_reduce")
	for rank, attempt := range []int{0, 0, 1} {
		r := ofRun(prefix+[]string{"a", "b", "c"}[rank], Member{Rank: rank % 2, Attempt: attempt})
		must.Get(r.Dump())
	}
	all := read(t, dir, "rank_a0", "rank_b1", "rank_c0", filepath.Base(torch))
	require.Len(t, Runs([]*File{all[0], all[1], all[3]}), 1)
	require.Len(t, Runs(all[3:]), 1)
	require.Len(t, Runs(all[:3]), 2)
	require.Len(t, Runs(all), 3, "nobody knows which run the PyTorch rank was in")
	require.ErrorContains(t, must.Err(Merge(all)), "give the dumps of one run")
}

// TestOneRunInADump: a program that begins another run with the recorder of the one before does not mix them.
func TestOneRunInADump(t *testing.T) {
	dir := t.TempDir()
	r := ofRun(filepath.Join(dir, "rank_"), Member{Run: firstRun})
	must.Get(r.Dump())
	called(r.Join(Member{Name: "0", Ranks: []int{0, 1}, Prompt: true, Run: secondRun})).Complete(nil)
	must.Get(r.Dump())
	for name, run := range map[string]string{"rank_0": secondRun, "rank.aaaaaaaa.0.0": firstRun} {
		f := read(t, dir, name)[0]
		require.Equal(t, run, f.Run)
		require.Len(t, f.Entries, 1)
	}
}

// TestEarlier: PyTorch's analyzer takes each file whose name contains the prefix, and reads a rank behind it.
func TestEarlier(t *testing.T) {
	for prefix, want := range map[string]string{
		"/tmp/job/rank_": "/tmp/job/rank.run.1.", "/tmp/job/dump": "/tmp/job/dum.run.1.", "/tmp/job/rank.": "/tmp/job/rank-run-1-",
		"rank_": "rank.run.1.", "a/ö": "a/.run.1.", "/tmp/job/": "/tmp/job/.run.1.",
	} {
		require.Equal(t, filepath.FromSlash(want), earlier(filepath.FromSlash(prefix), "run", 1))
	}
	dir := t.TempDir()
	prefix := filepath.Join(dir, "rank_")
	for _, m := range []Member{{Job: "../a b"}, {Run: firstRun}} {
		must.Get(ofRun(prefix, m).Dump())
	}
	require.Equal(t, "../a b", read(t, dir, "rank...-a-b.0.0")[0].Job)
	require.NoError(t, os.WriteFile(prefix+"0", []byte("no dump"), 0o666))
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	require.NoError(t, os.Chtimes(prefix+"0", at, at))
	must.Get(ofRun(prefix, Member{Run: secondRun}).Dump())
	kept := must.Get(os.ReadFile(filepath.Join(dir, "rank.20260102T030405.000.0.0")))
	require.Equal(t, "no dump", string(kept))
}

// TestLostDump: a dump that cannot be written is logged, with its name and the reason.
func TestLostDump(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o666))
	var log bytes.Buffer
	r := New(Options{Entries: 8, Prefix: filepath.Join(file, "rank_")})
	g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Prompt: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	p := called(g)
	p.Complete(errors.New("broken"))
	require.ErrorContains(t, p.Work().Wait(t.Context()), "broken")
	require.Contains(t, log.String(), "no dump of the last operations")
	require.Contains(t, log.String(), filepath.Join(file, "rank_0")+" cannot be written")
}

// TestRefusedByFailedGroup: a rank whose next call comes after its group has failed writes its dump, with the call. No
// other refused call is in it.
func TestRefusedByFailedGroup(t *testing.T) {
	info := work.Info{Op: work.AllReduce, Seq: 1, Group: "0"}
	for name, err := range map[string]error{
		"failed":      &work.Error{Info: info, Peer: 1, Err: work.ErrPeerDied},
		"closed":      &work.Error{Info: info, Peer: -1, Err: work.ErrClosed},
		"not started": &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w: %w", work.ErrTimeout, context.DeadlineExceeded)},
		"argument":    errors.New("a tensor is nil"),
	} {
		t.Run(name, func(t *testing.T) {
			prefix := filepath.Join(t.TempDir(), "rank_")
			r := New(Options{Entries: 8, Prefix: prefix})
			g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Prompt: true})
			called(g).Complete(nil)
			for range 3 {
				var c Call
				c.Begin(g, &named{name: "gloo"}, work.AllReduce, nil, nil, -1, 0)
				_, got := c.Issued(nil, err)
				require.Equal(t, err, got)
			}
			f, e := ReadFile(prefix + "0")
			if name != "failed" {
				require.ErrorIs(t, e, os.ErrNotExist)
				require.Len(t, r.Operations(), 1)
				return
			}
			require.NoError(t, e)
			require.Len(t, f.Entries, 2)
			require.Equal(t, err.Error(), f.Entries[1].Error)
			require.Len(t, r.Operations(), 2, "later calls are refused")
			require.Equal(t, uint64(1), r.Operations()[1].Seq)
		})
	}
}

// TestEndDoesNotWait: the end of an operation does not wait for a file system that hangs. Wait and Leave do, for a while.
func TestEndDoesNotWait(t *testing.T) {
	defer func(limit time.Duration) { dumpLimit = limit }(dumpLimit)
	dumpLimit = time.Hour
	dir := t.TempDir()
	r := New(Options{Entries: 8, Prefix: filepath.Join(dir, "rank_")})
	g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Prompt: true, Logger: slog.New(slog.DiscardHandler)})
	other := r.Join(Member{Name: "1", Ranks: []int{0, 1}, Prompt: true})
	p, q := called(g), called(other)
	r.dumps.files.Lock() // as if the file were being written
	must.End(t, "both operations", func() {
		p.Complete(errors.New("broken"))
		q.Complete(errors.New("broken"))
	})
	until := time.Now().Add(100 * time.Millisecond)
	r.dumps.lock.Lock()
	done := r.dumps.done
	r.dumps.until = until
	r.dumps.lock.Unlock()
	require.Error(t, p.Work().Wait(t.Context()))
	require.Error(t, q.Work().Wait(t.Context()))
	g.Leave()
	require.False(t, time.Now().Before(until))
	r.dumps.files.Unlock()
	<-done
	must.Get(ReadFile(filepath.Join(dir, "rank_0")))
}
