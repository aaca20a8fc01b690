package pg_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
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
		wait(g.AllReduce(ctx, []*tensor.Tensor{x}, backend.AllReduceOptions{}))
		if g.Rank() == 0 {
			wait(g.Send(ctx, x, 1, backend.P2POptions{}))
		} else {
			wait(g.Recv(ctx, x, 0, backend.P2POptions{}))
		}
		sub, err := g.NewGroup(ctx, []int{0, 1}, pg.GroupOptions{Description: "half"})
		if err != nil {
			t.Error(err)
			return
		}
		wait(sub.AllGather(ctx, []*tensor.Tensor{vec(6), vec(6)}, x, backend.AllGatherOptions{Timeout: time.Minute}))
		if err := g.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}); err != nil {
			t.Error(err)
		}
		_, err = g.Broadcast(ctx, []*tensor.Tensor{x}, backend.BroadcastOptions{Root: 5})
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
		w, err := g.Recv(ctx, vec(1), 1-g.Rank(), backend.P2POptions{Tag: 9})
		for range 10 {
			err = errors.Join(err, pg.AllReduceSlice(ctx, g, []float32{1}, backend.Sum()))
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
		if err := pg.AllReduceSlice(ctx, g, []float32{1}, backend.Sum()); err != nil {
			t.Error(err)
		}
		s, err := g.Send(ctx, vec(1), 1-g.Rank(), backend.P2POptions{Tag: 9})
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
	dir := t.TempDir()
	prefix := filepath.Join(dir, "job", "rank_")
	recorded(t, 3, trace.Options{Prefix: prefix}, func(g *pg.ProcessGroup, _ *listener) {
		ctx := t.Context()
		err := pg.AllReduceSlice(ctx, g, []float32{1}, backend.Sum())
		if err != nil {
			t.Error(err)
		}
		if g.Rank() == 2 {
			// It calls nothing more, and is asked for a dump.
			for begun := time.Now(); time.Since(begun) < 20*time.Second; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(prefix + "0"); err == nil {
					break
				}
			}
			if _, err := g.Recorder().Dump(); err != nil {
				t.Error(err)
			}
			return
		}
		w, err := g.AllReduce(ctx, []*tensor.Tensor{vec(5)}, backend.AllReduceOptions{Timeout: 300 * time.Millisecond})
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
		f, err := trace.ReadFile(prefix + r)
		require.NoError(t, err)
		files = append(files, f)
	}
	j, err := trace.Merge(files)
	require.NoError(t, err)
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
	g, err := pg.New(t.Context(), j.Store, 0, 1, o)
	require.NoError(t, err)
	defer g.Close()
	require.NoError(t, pg.AllReduceSlice(t.Context(), g, []float32{1}, backend.Sum()))
	require.Empty(t, g.Recorder().Operations())
	require.Empty(t, g.Recorder().Groups())
}

// singles are operations of single tensors that a group and its backend have.
type singles interface {
	Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error)
	AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error)
	ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error)
}

// TestRecorderAllocates: neither the recorder nor the lists of tensors that it sees cost an allocation.
func TestRecorderAllocates(t *testing.T) {
	j := pgtest.NewJob(1)
	defer j.Close()
	g, err := j.Join(t.Context(), 0)
	require.NoError(t, err)
	defer g.Close()
	b, err := g.Backend(tensor.CPU)
	require.NoError(t, err)
	ctx, x, y := t.Context(), vec(4), vec(4)
	for name, call := range map[string]func(singles) (*work.Work, error){
		"reduce": func(b singles) (*work.Work, error) { return b.Reduce(ctx, x, backend.ReduceOptions{}) },
		"all_gather": func(b singles) (*work.Work, error) {
			return b.AllGatherIntoTensor(ctx, y, x, backend.AllGatherOptions{})
		},
		"reduce_scatter": func(b singles) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, y, x, backend.ReduceScatterOptions{})
		},
	} {
		allocations := func(b singles) float64 {
			return testing.AllocsPerRun(200, func() {
				w, err := call(b)
				if err == nil {
					err = w.Wait(ctx)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		require.Equal(t, allocations(b), allocations(g), name)
	}
}

// TestTraceVariable: Init takes the prefix from C10D_TRACE, and SIGUSR1 makes the rank write its file.
func TestTraceVariable(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no SIGUSR1")
	}
	prefix := filepath.Join(t.TempDir(), "rank_")
	t.Setenv(pg.TraceVariable, prefix)
	g, err := pg.Init(t.Context(), "file://"+filepath.Join(t.TempDir(), "store"), pg.InitOptions{Size: 1})
	require.NoError(t, err)
	defer g.Close()
	require.NoError(t, pg.AllReduceSlice(t.Context(), g, []float32{1}, backend.Sum()))
	require.NoError(t, exec.Command("kill", "-USR1", strconv.Itoa(os.Getpid())).Run())
	require.Eventually(t, func() bool {
		f, err := trace.ReadFile(prefix + "0")
		return err == nil && len(f.Entries) == 1
	}, 20*time.Second, time.Millisecond)
}

// BenchmarkRecorder shows what the recorder costs an all_reduce of two ranks. It measures with and
// without it in turn, so that the machine's changes of speed concern both: the metric
// "slower" is the median of the rounds' ratios, in percent.
func BenchmarkRecorder(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		b.Run(strconv.Itoa(size), func(b *testing.B) { benchmarkRecorder(b, size, trace.Options{}) })
		b.Run(strconv.Itoa(size)+"/observed", func(b *testing.B) {
			benchmarkRecorder(b, size, trace.Options{Observers: []trace.Observer{nobody{}}})
		})
	}
}

// nobody is an observer that does nothing.
type nobody struct{}

func (nobody) Called(trace.Event) {}
func (nobody) Ended(trace.Event)  {}

func benchmarkRecorder(b *testing.B, size int, recorded trace.Options) {
	ctx := context.Background()
	var groups [2][2]*pg.ProcessGroup // with and without, by rank
	for i, recorder := range []func() *trace.Recorder{func() *trace.Recorder { return trace.New(recorded) }, func() *trace.Recorder { return trace.Off }} {
		st := store.NewHash()
		defer st.Close()
		var made sync.WaitGroup
		for rank := range 2 {
			made.Go(func() {
				var err error
				o := pg.Options{Recorder: recorder(), BackendOptions: []backend.SpecificOptions{gloo.Options{Wire: gloo.WireNative}}}
				groups[i][rank], err = pg.New(ctx, st, rank, 2, o)
				if err != nil {
					panic(err)
				}
			})
		}
		made.Wait()
		defer groups[i][0].Close()
		defer groups[i][1].Close()
	}
	const calls = 500
	inputs := [2][]*tensor.Tensor{{vec(size / 4)}, {vec(size / 4)}}
	round := func(i, n int) time.Duration {
		var ranks sync.WaitGroup
		start := time.Now()
		for rank, g := range groups[i] {
			ranks.Go(func() {
				ts := inputs[rank]
				for range n {
					w, err := g.AllReduce(ctx, ts, backend.AllReduceOptions{Op: backend.Max()})
					if err == nil {
						err = w.Wait(ctx)
					}
					if err != nil {
						panic(err)
					}
				}
			})
		}
		ranks.Wait()
		return time.Since(start) / time.Duration(n)
	}
	n := max(calls*(1<<10)/size, 20)
	round(0, n)
	round(1, n)
	b.ResetTimer()
	var ratios, off []float64
	for b.Loop() {
		var took [2]time.Duration
		first := len(ratios) % 2
		took[first] = round(first, n)
		took[1-first] = round(1-first, n)
		ratios, off = append(ratios, float64(took[0])/float64(took[1])), append(off, float64(took[1]))
	}
	slices.Sort(ratios)
	slices.Sort(off)
	b.ReportMetric(100*(ratios[len(ratios)/2]-1), "%slower")
	b.ReportMetric(off[len(off)/2], "ns/off")
}
