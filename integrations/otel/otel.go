// Package otel shows the operations of a rank as OpenTelemetry traces and metrics.
//
//	o, err := otel.New(tracerProvider, meterProvider)
//	recorder := trace.New(trace.Options{Observers: []trace.Observer{o}})
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Recorder: recorder}})
//
// An operation is a span from its call to its end, with the attributes c10d.group, c10d.rank, c10d.epoch,
// c10d.seq, c10d.bytes, c10d.dtype, c10d.route and, for sends and receives, c10d.peer. Spans have no
// parent: a call's context is not known when it ends. An error is the span's status.
//
// The metrics:
//
//   - c10d.operation.duration: histogram in seconds; c10d.op, c10d.route, and error.type if the operation
//     failed
//   - c10d.operation.bytes: bytes of operations that have succeeded; c10d.op, c10d.route
//   - c10d.pending: operations that have not ended; c10d.group
//   - c10d.pending.age: for how many seconds the oldest of these has been pending; c10d.group
//   - c10d.epoch: the group's epoch; c10d.group
//
// In metrics, c10d.group is the group's description, or its name without the epoch if it has none. The
// rank that calls last spends the least time in collectives: a query finds stragglers in
// c10d.operation.duration, as package prometheus has it.
package otel

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	apitrace "go.opentelemetry.io/otel/trace"

	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

const scope = "github.com/c10d-go/c10d"

// Observer makes spans and metrics of operations. New makes one. A rank has one of its own.
type Observer struct {
	tracer   apitrace.Tracer // nil without spans
	duration metric.Float64Histogram
	bytes    metric.Int64Counter // nil without metrics
	pending  metric.Int64ObservableUpDownCounter
	age      metric.Float64ObservableGauge
	epoch    metric.Int64ObservableGauge
	recorder atomic.Pointer[trace.Recorder] // of the last operation

	mu    sync.Mutex
	known map[labels]metric.MeasurementOption
}

// labels are those of an operation in metrics.
type labels struct {
	op     work.OpType
	route  string
	failed string // error.type
}

// New returns an observer. A nil provider leaves out its part.
func New(t apitrace.TracerProvider, m metric.MeterProvider) (*Observer, error) {
	o := &Observer{known: make(map[labels]metric.MeasurementOption)}
	if t != nil {
		o.tracer = t.Tracer(scope)
	}
	if m == nil {
		return o, nil
	}
	meter := m.Meter(scope)
	var errs [6]error
	o.duration, errs[0] = meter.Float64Histogram("c10d.operation.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from the call of an operation to its end."),
		metric.WithExplicitBucketBoundaries(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100))
	o.bytes, errs[1] = meter.Int64Counter("c10d.operation.bytes", metric.WithUnit("By"),
		metric.WithDescription("Bytes of this rank's tensors in operations that have succeeded."))
	o.pending, errs[2] = meter.Int64ObservableUpDownCounter("c10d.pending", metric.WithUnit("{operation}"),
		metric.WithDescription("Operations that have not ended."))
	o.age, errs[3] = meter.Float64ObservableGauge("c10d.pending.age", metric.WithUnit("s"),
		metric.WithDescription("For how long the oldest pending operation has been pending."))
	o.epoch, errs[4] = meter.Int64ObservableGauge("c10d.epoch", metric.WithDescription("Epoch of the group."))
	if errs[2] == nil && errs[3] == nil && errs[4] == nil {
		_, errs[5] = meter.RegisterCallback(o.gauges, o.pending, o.age, o.epoch)
	}
	return o, errors.Join(errs[:]...)
}

// gauges reports what is so now.
func (o *Observer) gauges(_ context.Context, to metric.Observer) error {
	r := o.recorder.Load()
	if r == nil {
		return nil
	}
	for _, l := range r.Loads() {
		its := metric.WithAttributes(attribute.String("c10d.group", l.Label))
		to.ObserveInt64(o.epoch, int64(l.Epoch), its)
		to.ObserveInt64(o.pending, int64(l.Pending), its)
		to.ObserveFloat64(o.age, l.Oldest.Seconds(), its)
	}
	return nil
}

// Called implements trace.Observer.
func (o *Observer) Called(e trace.Event) {
	if r := e.Group().Recorder(); o.recorder.Load() != r {
		o.recorder.Store(r)
	}
}

// Ended implements trace.Observer.
func (o *Observer) Ended(e trace.Event) {
	if o.bytes != nil {
		l := labels{op: e.Op(), route: e.Route()}
		if err := e.Err(); err != nil {
			l.failed = kind(err)
		}
		its := o.attributes(l)
		o.duration.Record(context.Background(), e.Took().Seconds(), its)
		if l.failed == "" {
			o.bytes.Add(context.Background(), e.Bytes(), its)
		}
	}
	if o.tracer != nil {
		o.span(e.Operation())
	}
}

// attributes returns the attributes of an operation in metrics. It makes them once.
func (o *Observer) attributes(l labels) metric.MeasurementOption {
	o.mu.Lock()
	defer o.mu.Unlock()
	its := o.known[l]
	if its == nil {
		all := []attribute.KeyValue{attribute.String("c10d.op", l.op.String()), attribute.String("c10d.route", l.route)}
		if l.failed != "" {
			all = append(all, attribute.String("error.type", l.failed))
		}
		its = metric.WithAttributeSet(attribute.NewSet(all...))
		o.known[l] = its
	}
	return its
}

// span makes the span of an operation.
func (o *Observer) span(op trace.Operation) {
	g := op.Group
	attributes := []attribute.KeyValue{
		attribute.String("c10d.group", g.Name), attribute.Int("c10d.rank", g.Rank), attribute.Int("c10d.epoch", g.Epoch),
		attribute.Int64("c10d.seq", int64(op.Seq)), attribute.Int64("c10d.bytes", op.Bytes()), attribute.String("c10d.dtype", op.DType().String()),
		attribute.String("c10d.route", op.Route()),
	}
	if op.Peer >= 0 {
		attributes = append(attributes, attribute.Int("c10d.peer", op.Peer))
	}
	_, span := o.tracer.Start(context.Background(), "c10d "+op.Op.String(), apitrace.WithTimestamp(op.Called), apitrace.WithNewRoot(), apitrace.WithAttributes(attributes...))
	if op.Err != nil {
		span.RecordError(op.Err, apitrace.WithTimestamp(op.Ended))
		span.SetStatus(codes.Error, op.Err.Error())
	}
	span.End(apitrace.WithTimestamp(op.Ended))
}

// kind is the value of error.type: few different ones.
func kind(err error) string {
	for _, k := range []struct {
		err  error
		name string
	}{
		{work.ErrTimeout, "timeout"}, {work.ErrPeerDied, "peer_died"}, {work.ErrPeerLeft, "peer_left"}, {work.ErrCanceled, "canceled"},
		{work.ErrAborted, "aborted"}, {work.ErrMismatch, "mismatch"}, {work.ErrCorrupted, "corrupted"}, {work.ErrPanicked, "panicked"}, {work.ErrClosed, "closed"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return "_OTHER"
}
