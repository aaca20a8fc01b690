package pg_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// listener is an observer that notes what it hears.
type listener struct {
	mu            sync.Mutex
	called, ended []trace.Operation
}

func (l *listener) Called(e trace.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.called = append(l.called, e.Operation())
}

func (l *listener) Ended(e trace.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = append(l.ended, e.Operation())
}

// recorded runs f on size ranks with recorders of their own.
func recorded(t *testing.T, size int, o trace.Options, f func(g *pg.ProcessGroup, l *listener)) {
	j := pgtest.NewJob(size)
	defer j.Close()
	var ranks sync.WaitGroup
	defer ranks.Wait()
	for rank := range size {
		ranks.Go(func() {
			l := new(listener)
			own := o
			own.Observers = []trace.Observer{l}
			options := j.Options()
			options.Recorder = trace.New(own)
			g, err := pg.New(t.Context(), j.Store, rank, size, options)
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
				return
			}
			defer g.Close()
			f(g, l)
		})
	}
}

// TestRecorder: the ring and the observers have every call of every group, with its sizes, numbers,
// route and times.
func TestRecorder(t *testing.T) {
	recorded(t, 2, trace.Options{}, func(g *pg.ProcessGroup, l *listener) {
		ctx := t.Context()
		wait := func(w *work.Work, err error) {
			if err == nil {
				err = w.Wait(ctx)
			}
			if err != nil {
				t.Error(err)
			}
		}
		x := vec(6)
		wait(g.AllReduce(ctx, x, pg.Sum()))
		if g.Rank() == 0 {
			wait(g.Send(ctx, x, 1))
		} else {
			wait(g.Recv(ctx, x, 0))
		}
		sub, err := g.NewGroup(ctx, []int{0, 1}, pg.GroupOptions{Description: "half"})
		if err != nil {
			t.Error(err)
			return
		}
		wait(sub.AllGather(ctx, []*tensor.Tensor{vec(6), vec(6)}, x, pg.CallOptions{Timeout: time.Minute}))
		if err := g.MonitoredBarrier(ctx); err != nil {
			t.Error(err)
		}
		_, err = g.Broadcast(ctx, x, 5)
		if err == nil {
			t.Error("there is no rank 5")
		}

		ops := g.Recorder().Operations()
		if len(ops) != 4 || len(l.called) != 5 || len(l.ended) != 5 {
			t.Errorf("%d recorded, %d called, %d ended", len(ops), len(l.called), len(l.ended))
			return
		}
		kinds := []work.OpType{work.AllReduce, work.Send, work.AllGather, work.Barrier}
		if g.Rank() == 1 {
			kinds[1] = work.Recv
		}
		for i, o := range ops {
			switch {
			case o.Op != kinds[i]:
				t.Errorf("operation %d is %v", i, o.Op)
			case o.Err != nil || o.Called.IsZero() || o.Began.Before(o.Called) && o.Op != work.Barrier || o.Ended.Before(o.Began):
				t.Errorf("%v: called %v, began %v, ended %v, error %v", o.Op, o.Called, o.Began, o.Ended, o.Err)
			case l.ended[i].Op != o.Op || l.ended[i].Ended != o.Ended:
				t.Errorf("the observer heard of %+v", l.ended[i])
			}
		}
		all := ops[2]
		if all.Group.Description != "half" || all.Collective != 1 || all.Timeout != time.Minute || all.Bytes() != 24 || all.DType() != tensor.Float32 ||
			all.Route() == "" || all.Out.Tensors != 2 || len(all.Out.Dims()) != 2 {
			t.Errorf("%+v, route %q", all, all.Route())
		}
		if p := ops[1]; p.Peer != 1-g.Rank() || p.P2P != 1 || p.Collective != 1 || ops[3].Collective != 2 || ops[3].Group.ID != 0 {
			t.Errorf("%+v, then %+v", p, ops[3])
		}
		if refused := l.ended[4]; refused.Err == nil || !refused.Began.IsZero() {
			t.Errorf("refused: %+v", refused)
		}
	})
}

// TestPendingOperationsStay: the ring goes around an operation that has not ended.
func TestPendingOperationsStay(t *testing.T) {
	recorded(t, 2, trace.Options{Entries: 4}, func(g *pg.ProcessGroup, _ *listener) {
		ctx := t.Context()
		w, err := g.Recv(ctx, vec(1), 1-g.Rank(), pg.P2POptions{Tag: 9})
		for range 10 {
			err = errors.Join(err, pg.Wait(g.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum())))
		}
		ops := g.Recorder().Operations()
		if err != nil || len(ops) != 4 || ops[0].Op != work.Recv || !ops[0].Ended.IsZero() || ops[3].Record != 10 {
			t.Errorf("%v: %+v", err, ops)
		}
		for _, o := range ops[1:] {
			if o.Record < 8 {
				t.Errorf("operation %d was kept, and a later one not", o.Record)
			}
		}
		if err := pg.Wait(g.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum())); err != nil {
			t.Error(err)
		}
		s, err := g.Send(ctx, vec(1), 1-g.Rank(), pg.P2POptions{Tag: 9})
		if err == nil {
			err = work.WaitAll(ctx, s, w)
		}
		if err != nil {
			t.Error(err)
		}
	})
}

// TestDumpOnFailure: when a group fails every rank that notices writes its file before the operation's
// Wait returns, and the merged files say which rank had not called.
func TestDumpOnFailure(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	prefix := filepath.Join(dir, "job", "rank_")
	recorded(t, 3, trace.Options{Prefix: prefix}, func(g *pg.ProcessGroup, _ *listener) {
		ctx := t.Context()
		err := pg.Wait(g.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum()))
		if err != nil {
			t.Error(err)
		}
		if g.Rank() == 2 {
			// It calls nothing more, and is asked for a dump.
			require.Eventually(t, func() bool { _, err := os.Stat(prefix + "0"); return err == nil }, pgtest.Timeout, time.Millisecond)
			if _, err := g.Recorder().Dump(); err != nil {
				t.Error(err)
			}
			return
		}
		w, err := g.AllReduce(ctx, vec(5), pg.Sum(), pg.CallOptions{Timeout: 5 * time.Second})
		if err == nil {
			err = w.Wait(ctx)
		}
		if err == nil {
			t.Error("rank 2 is missing")
		}
		if _, err := os.Stat(prefix + strconv.Itoa(g.Rank())); err != nil {
			t.Error(err)
		}
	})
	var files []*trace.File
	for _, r := range []string{"1", "0", "2"} {
		f := must.Get(trace.ReadFile(prefix + r))
		files = append(files, f)
	}
	j := must.Get(trace.Merge(files))
	require.Len(t, j.Stuck, 1)
	require.Equal(t, []int{2}, j.Stuck[0].NotCalled)
	require.Equal(t, []int{0, 1}, j.Stuck[0].Waiting)
	require.Contains(t, j.Stuck[0].Error, "all_reduce seq 1")
}

// TestRecorderOff: trace.Off records nothing.
func TestRecorderOff(t *testing.T) {
	j := pgtest.NewJob(1)
	defer j.Close()
	o := j.Options()
	o.Recorder = trace.Off
	g := must.Get(pg.New(t.Context(), j.Store, 0, 1, o))
	defer g.Close()
	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())))
	require.Empty(t, g.Recorder().Operations())
	require.Empty(t, g.Recorder().Groups())
}

// TestPromptBackends: calls of gloo are recorded once they are issued. Those that check others' arguments first may
// block, and are recorded before.
func TestPromptBackends(t *testing.T) {
	for _, detail := range []bool{false, true} {
		j := pgtest.NewJob(1)
		defer j.Close()
		o := j.Options()
		o.Detail = detail
		g := must.Get(pg.New(t.Context(), j.Store, 0, 1, o))
		defer g.Close()
		require.Equal(t, !detail, g.Recorder().Groups()[0].Prompt)
	}
}

// TestRecorderAllocates: neither the recorder, nor options, nor the lists of tensors cost an allocation.
func TestRecorderAllocates(t *testing.T) {
	j := pgtest.NewJob(1)
	defer j.Close()
	g := must.Get(j.Join(t.Context(), 0))
	defer g.Close()
	b, err := g.Backend(tensor.CPU)
	require.NoError(t, err)
	ctx, x, y := t.Context(), vec(4), vec(4)
	ts := []*tensor.Tensor{x}
	type call func() (*work.Work, error)
	for name, calls := range map[string][2]call{
		"all_reduce": {
			func() (*work.Work, error) { return b.AllReduce(ctx, ts, backend.AllReduceOptions{}) },
			func() (*work.Work, error) { return g.AllReduce(ctx, x, pg.Sum(), pg.CallOptions{Timeout: time.Minute}) },
		},
		"reduce": {
			func() (*work.Work, error) { return b.Reduce(ctx, x, backend.ReduceOptions{}) },
			func() (*work.Work, error) { return g.Reduce(ctx, x, 0, pg.Sum()) },
		},
		"all_gather": {
			func() (*work.Work, error) { return b.AllGatherIntoTensor(ctx, y, x, backend.AllGatherOptions{}) },
			func() (*work.Work, error) { return g.AllGatherIntoTensor(ctx, y, x) },
		},
		"reduce_scatter": {
			func() (*work.Work, error) { return b.ReduceScatterTensor(ctx, y, x, backend.ReduceScatterOptions{}) },
			func() (*work.Work, error) { return g.ReduceScatterTensor(ctx, y, x, pg.Sum()) },
		},
	} {
		var n [2]float64
		for i, call := range calls {
			n[i] = testing.AllocsPerRun(200, func() {
				w, err := call()
				if err == nil {
					err = w.Wait(ctx)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		require.Equal(t, n[0], n[1], name)
	}
}

// TestTraceVariable: Init takes the prefix from C10D_TRACE, and SIGUSR1 makes the rank write its file, which names the
// run and the attempt.
func TestTraceVariable(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no SIGUSR1")
	}
	prefix := filepath.Join(t.TempDir(), "rank_")
	t.Setenv("C10D_TRACE", prefix)
	t.Setenv("TORCHELASTIC_RESTART_COUNT", "2")
	g, err := pg.Init(t.Context(), "file://"+filepath.Join(t.TempDir(), "store"), pg.InitOptions{Size: 1})
	require.NoError(t, err)
	defer g.Close()
	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())))
	require.NoError(t, exec.Command("kill", "-USR1", strconv.Itoa(os.Getpid())).Run())
	require.Eventually(t, func() bool {
		f, err := trace.ReadFile(prefix + "0")
		return err == nil && len(f.Entries) == 1 && f.Run != "" && f.Attempt == 2
	}, 20*time.Second, time.Millisecond)
}

// TestTraceVariableWithRecorder: the variable also holds for a recorder of the program, such as one with metrics. One with
// a prefix of its own keeps it, and the log says so.
func TestTraceVariableWithRecorder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("C10D_TRACE", filepath.Join(dir, "rank_"))
	for _, own := range []string{"", filepath.Join(dir, "own_")} {
		var log waitingtest.Log
		r := trace.New(trace.Options{Prefix: own, Observers: []trace.Observer{nobody{}}})
		g, err := pg.Init(t.Context(), "file://"+filepath.Join(t.TempDir(), "store"), pg.InitOptions{Size: 1, Options: pg.Options{Recorder: r, Logger: log.Logger()}})
		require.NoError(t, err)
		name := must.Get(r.Dump())
		require.NoError(t, g.Close())
		want := own
		if own == "" {
			want = filepath.Join(dir, "rank_")
		}
		require.Equal(t, want+"0", name)
		require.Equal(t, own != "", strings.Contains(log.String(), "C10D_TRACE is not used"), log.String())
	}
}

// BenchmarkRecorder shows what the recorder costs an all_reduce, by its ranks and bytes. One group makes short
// rounds of calls, with and without a recorder in turn, and never stops between them. Both kinds of rounds use the
// same connections and memory. If the machine becomes slower, two rounds that follow each other become slower alike.
//
//	%slower     the median of the ratios of two such rounds
//	%low, %high the bounds of its 95 % confidence interval
//	ns/off      the median call without a recorder
//
// In "small" the ring has 8 entries, which stay in the first-level cache. Its difference to the one with
// the default ring is what the ring's memory costs. In "none" both kinds of rounds have no recorder: 0 has
// to be between its bounds.
func BenchmarkRecorder(b *testing.B) {
	for _, world := range []int{2, 4, 8} {
		for _, size := range []int{1 << 10, 1 << 20} {
			for _, c := range []struct {
				name     string
				recorder *trace.Options // nil for none
			}{
				{"none", nil},
				{"on", &trace.Options{}},
				{"small", &trace.Options{Entries: 8}},
				{"observed", &trace.Options{Observers: []trace.Observer{nobody{}}}},
			} {
				b.Run(fmt.Sprintf("%d/%d/%s", world, size, c.name), func(b *testing.B) {
					if world > runtime.GOMAXPROCS(0) {
						b.Skipf("%d ranks need as many CPUs", world)
					}
					benchmarkRecorder(b, world, size, c.recorder)
				})
			}
		}
	}
}

// nobody is an observer that does nothing.
type nobody struct{}

func (nobody) Called(trace.Event) {}
func (nobody) Ended(trace.Event)  {}

func benchmarkRecorder(b *testing.B, world, size int, recorded *trace.Options) {
	ctx := context.Background()
	st := store.NewHash()
	defer st.Close()
	calls := max(200<<10/size, 4)
	var ratios, off []float64
	rank := func(rank int) error {
		o := pg.Options{BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.WireNative}}}
		if recorded != nil {
			o.Recorder = trace.New(*recorded)
		} else {
			o.Recorder = trace.Off
		}
		g, err := pg.New(ctx, st, rank, world, o)
		if err != nil {
			return err
		}
		defer g.Close()
		traced := pg.Record(g, nil)
		defer func() { pg.Record(g, traced) }()
		ts := []*tensor.Tensor{vec(size / 4)}
		round := func(t *trace.Group) (float64, error) {
			pg.Record(g, t)
			start := time.Now()
			for range calls {
				w, err := g.AllReduce(ctx, ts[0], pg.Max())
				if err == nil {
					err = w.Wait(ctx)
				}
				if err != nil {
					return 0, err
				}
			}
			return float64(time.Since(start)) / float64(calls), nil
		}
		states := [2]*trace.Group{nil, traced}
		const warm = 20 // pairs; the ring is full and the memory is there afterwards
		for n := range warm + b.N {
			if n == warm && rank == 0 {
				b.ResetTimer()
			}
			var took [2]float64
			for k := range states {
				state := (k + n) % 2
				if took[state], err = round(states[state]); err != nil {
					return err
				}
			}
			if n >= warm && rank == 0 {
				ratios, off = append(ratios, took[1]/took[0]), append(off, took[0])
			}
		}
		return nil
	}
	var ranks sync.WaitGroup
	for n := range world {
		ranks.Go(func() {
			if err := rank(n); err != nil {
				b.Errorf("rank %d: %v", n, err)
			}
		})
	}
	ranks.Wait()
	b.StopTimer()
	if b.Failed() {
		return
	}
	slices.Sort(ratios)
	slices.Sort(off)
	n := len(ratios)
	within := int(0.98*math.Sqrt(float64(n))) + 1 // 1.96 standard deviations of how many are below the median
	for _, m := range []struct {
		unit string
		at   int
	}{{"%slower", n / 2}, {"%low", max(n/2-within, 0)}, {"%high", min(n/2+within, n-1)}} {
		b.ReportMetric(100*(ratios[m.at]-1), m.unit)
	}
	b.ReportMetric(off[n/2], "ns/off")
}
