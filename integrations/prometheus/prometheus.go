// Package prometheus shows the operations of a rank as Prometheus metrics.
//
//	metrics := prometheus.New(registry)
//	recorder := trace.New(trace.Options{Observers: []trace.Observer{metrics}})
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Recorder: recorder}})
//	http.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
//
// The file dashboard.json is a Grafana dashboard of these metrics.
//
//	c10d_operations_total{op, route, group, result}        operations that have ended; result is ok or error
//	c10d_bytes_total{op, route, group}                     bytes of this rank's tensors in operations that have succeeded
//	c10d_operation_seconds{op, route}                      histogram of the time from call to end
//	c10d_pending_operations{group}                         operations that have not ended
//	c10d_oldest_pending_seconds{group}                     for how long the oldest of these has been pending
//	c10d_epoch{group}                                      the epoch of the last call
//
// The label group is the group's description, or its name without the epoch if it has none: new
// epochs begin no new series.
package prometheus

import (
	"cmp"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/trace"
	"github.com/prometheus/client_golang/prometheus"
)

// Observer counts operations. New makes one. A rank has one of its own.
type Observer struct {
	operations *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	epoch      *prometheus.GaugeVec
	count      *prometheus.Desc
	oldest     *prometheus.Desc

	mu      sync.Mutex
	pending map[uint64]call
	groups  map[string]bool // that have had operations
}

type call struct {
	group  string
	called time.Time
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
		epoch: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "c10d_epoch", Help: "Epoch of the group at its last call.",
		}, []string{"group"}),
		count:   prometheus.NewDesc("c10d_pending_operations", "Operations that have not ended.", []string{"group"}, nil),
		oldest:  prometheus.NewDesc("c10d_oldest_pending_seconds", "For how long the oldest pending operation has been pending.", []string{"group"}, nil),
		pending: make(map[uint64]call), groups: make(map[string]bool),
	}
	r.MustRegister(o.operations, o.bytes, o.seconds, o.epoch, o)
	return o
}

// groupOf is the label group.
func groupOf(g *trace.Group) string {
	name, _, _ := strings.Cut(g.Name, "@")
	return cmp.Or(g.Description, name)
}

// Called implements trace.Observer.
func (o *Observer) Called(op trace.Operation) {
	group := groupOf(op.Group)
	o.epoch.WithLabelValues(group).Set(float64(op.Group.Epoch))
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pending[op.Record] = call{group, op.Called}
	o.groups[group] = true
}

// Ended implements trace.Observer.
func (o *Observer) Ended(op trace.Operation) {
	o.mu.Lock()
	delete(o.pending, op.Record)
	o.mu.Unlock()
	name, route, group, result := op.Op.String(), op.Route(), groupOf(op.Group), "ok"
	if op.Err != nil {
		result = "error"
	} else {
		o.bytes.WithLabelValues(name, route, group).Add(float64(op.Bytes()))
		o.seconds.WithLabelValues(name, route).Observe(op.Ended.Sub(op.Called).Seconds())
	}
	o.operations.WithLabelValues(name, route, group, result).Inc()
}

// Describe implements prometheus.Collector.
func (o *Observer) Describe(to chan<- *prometheus.Desc) { to <- o.count; to <- o.oldest }

// Collect implements prometheus.Collector.
func (o *Observer) Collect(to chan<- prometheus.Metric) {
	count, oldest := make(map[string]int), make(map[string]time.Duration)
	o.mu.Lock()
	for group := range o.groups {
		count[group] = 0
	}
	for _, c := range o.pending {
		count[c.group]++
		oldest[c.group] = max(oldest[c.group], time.Since(c.called))
	}
	o.mu.Unlock()
	for group, n := range count {
		to <- prometheus.MustNewConstMetric(o.count, prometheus.GaugeValue, float64(n), group)
		to <- prometheus.MustNewConstMetric(o.oldest, prometheus.GaugeValue, oldest[group].Seconds(), group)
	}
}
