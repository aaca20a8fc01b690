// Package prometheus shows the operations of a rank as Prometheus metrics.
//
//	metrics := prometheus.New(registry)
//	recorder := trace.New(trace.Options{Observers: []trace.Observer{metrics}})
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Recorder: recorder}})
//	http.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
//
// The file dashboard.json is a Grafana dashboard of these metrics.
//
//   - c10d_operations_total{op, route, group, result}: operations that have ended; result is ok or error
//   - c10d_bytes_total{op, route, group}: bytes of this rank's tensors in operations that have succeeded
//   - c10d_operation_seconds{op, route}: histogram of the time from call to end
//   - c10d_pending_operations{group}: operations that have not ended
//   - c10d_oldest_pending_seconds{group}: for how long the oldest of these has been pending
//   - c10d_epoch{group}: the group's epoch
//
// The label group is the group's description, or its name without the epoch if it has none: new
// epochs begin no new series.
//
// # Stragglers
//
// All ranks leave a collective at about the same time, so the rank that calls last spends the least
// time in it. The straggler score of a rank is how much more of each second the rank that waits longest
// spends in collectives. A score of 0.3 means that others lose up to 30 % of their time to this rank.
// The dashboard has this query, which needs the metrics of all ranks:
//
//	scalar(max(sum by (instance) (rate(c10d_operation_seconds_sum{op!~"send|recv.*"}[1m])))) -
//	    sum by (instance) (rate(c10d_operation_seconds_sum{op!~"send|recv.*"}[1m]))
//
// # Cost
//
// An operation takes about 0.1 us longer: see BenchmarkObserver. The gauges are made when
// they are collected.
package prometheus

import (
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
	"github.com/prometheus/client_golang/prometheus"
)

// Observer counts operations. New makes one. A rank has one of its own.
type Observer struct {
	operations *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	epoch      *prometheus.Desc
	count      *prometheus.Desc
	oldest     *prometheus.Desc
	recorder   atomic.Pointer[trace.Recorder] // of the last operation

	mu    sync.Mutex
	known map[labels]*series
	gone  map[string]bool // groups that were closed at the last scrape
}

// labels are those of an operation.
type labels struct {
	op     work.OpType
	route  string
	group  string
	failed bool
}

// series are what an operation with some labels counts in. Looking them up by name takes a microsecond.
type series struct {
	operations prometheus.Counter
	bytes      prometheus.Counter // nil for operations that have failed, as seconds
	seconds    prometheus.Observer
}

// New returns an observer that is registered with r.
func New(r prometheus.Registerer) *Observer {
	o := &Observer{
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "c10d_operations_total", Help: "Operations that have ended.",
		}, []string{"op", "route", "group", "result"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "c10d_bytes_total", Help: "Bytes of this rank's tensors in operations that have succeeded.",
		}, []string{"op", "route", "group"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "c10d_operation_seconds", Help: "Time from the call of an operation to its end.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 14), // 1 us to 67 s
		}, []string{"op", "route"}),
		epoch:  prometheus.NewDesc("c10d_epoch", "Epoch of the group.", []string{"group"}, nil),
		count:  prometheus.NewDesc("c10d_pending_operations", "Operations that have not ended.", []string{"group"}, nil),
		oldest: prometheus.NewDesc("c10d_oldest_pending_seconds", "For how long the oldest pending operation has been pending.", []string{"group"}, nil),
		known:  make(map[labels]*series),
	}
	r.MustRegister(o.operations, o.bytes, o.seconds, o)
	return o
}

// Called implements trace.Observer.
func (o *Observer) Called(e trace.Event) {
	if r := e.Group().Recorder(); o.recorder.Load() != r {
		o.recorder.Store(r)
	}
}

// Ended implements trace.Observer.
func (o *Observer) Ended(e trace.Event) {
	s := o.seriesOf(labels{e.Op(), e.Route(), e.Group().Label(), e.Err() != nil})
	s.operations.Inc()
	if s.bytes != nil {
		s.bytes.Add(float64(e.Bytes()))
		s.seconds.Observe(e.Took().Seconds())
	}
}

func (o *Observer) seriesOf(l labels) *series {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.known[l]
	if s == nil {
		result := "ok"
		if l.failed {
			result = "error"
		}
		s = &series{operations: o.operations.WithLabelValues(l.op.String(), l.route, l.group, result)}
		if !l.failed {
			s.bytes, s.seconds = o.bytes.WithLabelValues(l.op.String(), l.route, l.group), o.seconds.WithLabelValues(l.op.String(), l.route)
		}
		o.known[l] = s
	}
	return s
}

// Describe implements prometheus.Collector.
func (o *Observer) Describe(to chan<- *prometheus.Desc) { to <- o.epoch; to <- o.count; to <- o.oldest }

// Collect implements prometheus.Collector.
func (o *Observer) Collect(to chan<- prometheus.Metric) {
	r := o.recorder.Load()
	if r == nil {
		return
	}
	o.forget(r)
	for _, l := range r.Loads() {
		to <- prometheus.MustNewConstMetric(o.epoch, prometheus.GaugeValue, float64(l.Epoch), l.Label)
		to <- prometheus.MustNewConstMetric(o.count, prometheus.GaugeValue, float64(l.Pending), l.Label)
		to <- prometheus.MustNewConstMetric(o.oldest, prometheus.GaugeValue, l.Oldest.Seconds(), l.Label)
	}
}

// forget drops the series of groups that are closed. A scrape after the end has had their last values.
func (o *Observer) forget(r *trace.Recorder) {
	open := make(map[string]bool)
	for _, g := range r.Groups() {
		open[g.Label()] = true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	gone := make(map[string]bool)
	for l := range o.known {
		switch {
		case open[l.group]:
		case o.gone[l.group]:
			delete(o.known, l)
			of := prometheus.Labels{"group": l.group}
			o.operations.DeletePartialMatch(of)
			o.bytes.DeletePartialMatch(of)
		default:
			gone[l.group] = true
		}
	}
	o.gone = gone
}
