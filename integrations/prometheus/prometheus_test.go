package prometheus_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/integrations/prometheus"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// alone returns the group of the only rank of a job, with metrics.
func alone(t *testing.T) (*pg.ProcessGroup, *client.Registry) {
	registry := client.NewPedanticRegistry()
	j := pgtest.NewJob(1)
	t.Cleanup(func() { j.Close() })
	o := j.Options()
	o.Recorder = trace.New(trace.Options{Observers: []trace.Observer{prometheus.New(registry)}})
	g := must.Get(pg.New(t.Context(), j.Store, 0, 1, o))
	t.Cleanup(func() { g.Close() })
	return g, registry
}

func TestMetrics(t *testing.T) {
	g, registry := alone(t)
	for range 3 {
		require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1, 2}), pg.Sum())))
	}
	x, err := tensor.New(tensor.Float32, 2)
	require.NoError(t, err)
	require.Error(t, must.Err(g.Broadcast(t.Context(), x, 7)))

	route := g.Recorder().Operations()[0].Route()
	require.NotEmpty(t, route)
	bytes := `
# HELP c10d_bytes_total Bytes of this rank's tensors in operations that have succeeded.
# TYPE c10d_bytes_total counter
c10d_bytes_total{group="0",op="all_reduce",route="ROUTE"} 24
# HELP c10d_epoch Epoch of the group.
# TYPE c10d_epoch gauge
c10d_epoch{group="0"} 0
# HELP c10d_oldest_pending_seconds For how long the oldest pending operation has been pending.
# TYPE c10d_oldest_pending_seconds gauge
c10d_oldest_pending_seconds{group="0"} 0
# HELP c10d_pending_operations Operations that have not ended.
# TYPE c10d_pending_operations gauge
c10d_pending_operations{group="0"} 0
`
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(strings.ReplaceAll(bytes, "ROUTE", route)),
		"c10d_bytes_total", "c10d_epoch", "c10d_oldest_pending_seconds", "c10d_pending_operations"))
	n, err := testutil.GatherAndCount(registry, "c10d_operations_total", "c10d_operation_seconds")
	require.NoError(t, err)
	require.Equal(t, 3, n, "two results, one histogram")

	require.Empty(t, must.Get(testutil.GatherAndLint(registry)))
}

// named is a backend that has only a name.
type named struct{ backend.Backend }

func (named) Name() string { return "gloo" }

// TestPending: operations that have not ended are counted, with the age of the oldest.
func TestPending(t *testing.T) {
	registry := client.NewRegistry()
	r := trace.New(trace.Options{Observers: []trace.Observer{prometheus.New(registry)}})
	g := r.Join(trace.Member{Name: "5@3", Epoch: 3, Ranks: []int{0}})
	call := func(f func() error) error {
		var c trace.Call
		c.Begin(g, named{}, work.Barrier, nil, nil, -1, 0)
		return c.Blocked(f)
	}
	require.NoError(t, call(func() error {
		return call(func() error {
			require.Equal(t, 2.0, value(t, registry, "c10d_pending_operations"))
			require.Greater(t, value(t, registry, "c10d_oldest_pending_seconds"), 0.0)
			return nil
		})
	}))
	require.Zero(t, value(t, registry, "c10d_pending_operations"))
	require.Zero(t, value(t, registry, "c10d_oldest_pending_seconds"))
	require.Equal(t, 3.0, value(t, registry, "c10d_epoch"))
}

// TestNextRecorder: a program that makes another group with another recorder has its gauges.
func TestNextRecorder(t *testing.T) {
	registry := client.NewRegistry()
	o := prometheus.New(registry)
	for epoch := range 2 {
		r := trace.New(trace.Options{Observers: []trace.Observer{o}})
		g := r.Join(trace.Member{Name: "0", Epoch: epoch, Ranks: []int{0}})
		var c trace.Call
		c.Begin(g, named{}, work.Barrier, nil, nil, -1, 0)
		require.NoError(t, c.Blocked(func() error {
			require.Equal(t, 1.0, value(t, registry, "c10d_pending_operations"))
			return nil
		}))
		require.Equal(t, float64(epoch), value(t, registry, "c10d_epoch"))
		g.Leave()
	}
}

// TestClosedGroup: the series of a closed group are scraped once more, and then gone. Others stay.
func TestClosedGroup(t *testing.T) {
	registry := client.NewRegistry()
	r := trace.New(trace.Options{Observers: []trace.Observer{prometheus.New(registry)}})
	call := func(g *trace.Group) {
		var c trace.Call
		c.Begin(g, named{}, work.Barrier, nil, nil, -1, 0)
		require.NoError(t, c.Blocked(func() error { return nil }))
	}
	groups := func() (all []string) {
		families := must.Get(registry.Gather())
		for _, f := range families {
			if f.GetName() == "c10d_operations_total" {
				for _, m := range f.GetMetric() {
					for _, l := range m.GetLabel() {
						if l.GetName() == "group" {
							all = append(all, l.GetValue())
						}
					}
				}
			}
		}
		return all
	}
	kept, closed := r.Join(trace.Member{Name: "0", Ranks: []int{0}}), r.Join(trace.Member{Name: "1", Ranks: []int{0}})
	call(kept)
	call(closed)
	require.Equal(t, []string{"0", "1"}, groups())
	closed.Leave()
	require.Equal(t, []string{"0", "1"}, groups(), "the last values")
	groups() // whoever collects first
	require.Equal(t, []string{"0"}, groups())
	again := r.Join(trace.Member{Name: "1", Ranks: []int{0}})
	call(again)
	require.Equal(t, []string{"0", "1"}, groups())
}

// TestDescription: a description may be any text.
func TestDescription(t *testing.T) {
	registry := client.NewPedanticRegistry()
	r := trace.New(trace.Options{Observers: []trace.Observer{prometheus.New(registry)}})
	g := r.Join(trace.Member{Name: "0", Description: "caf\xe9 \"1\"", Ranks: []int{0}})
	var c trace.Call
	c.Begin(g, named{}, work.Barrier, nil, nil, -1, 0)
	require.NoError(t, c.Blocked(func() error { return nil }))
	require.Equal(t, 1.0, value(t, registry, "c10d_operations_total"))
	require.Zero(t, value(t, registry, "c10d_pending_operations"))
}

// value returns the sum of a metric's series.
func value(t *testing.T, registry *client.Registry, name string) (sum float64) {
	t.Helper()
	all := must.Get(registry.Gather())
	for _, m := range all {
		if m.GetName() == name {
			for _, s := range m.GetMetric() {
				sum += s.GetGauge().GetValue() + s.GetCounter().GetValue() + s.GetHistogram().GetSampleSum()
			}
		}
	}
	return sum
}

// TestStraggler: the straggler score of the rank that calls last is the time that the others lose.
func TestStraggler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size, slow, calls, pause = 3, 1, 10, 20 * time.Millisecond
		var sums [size]float64
		var ranks sync.WaitGroup
		arrived, all := make(chan bool), make(chan bool)
		for rank := range size {
			ranks.Go(func() {
				registry := client.NewRegistry()
				r := trace.New(trace.Options{Observers: []trace.Observer{prometheus.New(registry)}})
				g := r.Join(trace.Member{Name: "0", Rank: rank, Ranks: []int{0, 1, 2}})
				for range calls {
					time.Sleep(time.Millisecond) // every rank computes
					if rank == slow {
						time.Sleep(pause)
					}
					var c trace.Call
					c.Begin(g, named{}, work.Barrier, nil, nil, -1, 0)
					_ = c.Blocked(func() error {
						arrived <- true
						<-all
						return nil
					})
				}
				sums[rank] = value(t, registry, "c10d_operation_seconds")
			})
		}
		for range calls {
			for range size {
				<-arrived
			}
			for range size {
				all <- true
			}
		}
		ranks.Wait()
		longest := slices.Max(sums[:])
		for rank, sum := range sums {
			want := 0.0
			if rank == slow {
				want = (calls * pause).Seconds()
			}
			require.InDelta(t, want, longest-sum, 1e-9, "rank %d", rank)
		}
	})
}

// BenchmarkObserver is what an operation costs the observer, without the operation: the difference of the two.
func BenchmarkObserver(b *testing.B) {
	for name, observers := range map[string][]trace.Observer{"off": nil, "on": {prometheus.New(client.NewRegistry())}} {
		b.Run(name, func(b *testing.B) {
			g := trace.New(trace.Options{Observers: observers}).Join(trace.Member{Name: "0", Ranks: []int{0}})
			x, err := tensor.New(tensor.Float32, 256)
			if err != nil {
				b.Fatal(err)
			}
			ts := []*tensor.Tensor{x}
			b.ReportAllocs()
			for b.Loop() {
				var c trace.Call
				c.Begin(g, named{}, work.AllReduce, ts, ts, -1, 0)
				_ = c.Blocked(func() error { return nil })
			}
		})
	}
}

// TestDashboard: the dashboard is JSON, and its queries name metrics that exist.
func TestDashboard(t *testing.T) {
	g, registry := alone(t)
	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())))
	known := make(map[string]bool)
	all := must.Get(registry.Gather())
	for _, m := range all {
		known[m.GetName()] = true
	}
	text := must.Get(os.ReadFile("dashboard.json"))
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &d))
	used := make(map[string]bool)
	for _, p := range d.Panels {
		require.NotEmpty(t, p.Targets, p.Title)
		for _, q := range p.Targets {
			for _, name := range regexp.MustCompile(`c10d_[a-z_]+`).FindAllString(q.Expr, -1) {
				name = strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum")
				require.True(t, known[name], "%s: there is no metric %s", p.Title, name)
				used[name] = true
			}
		}
	}
	require.Equal(t, known, used)
}
