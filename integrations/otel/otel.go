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
//	c10d.operation.duration  histogram in seconds; c10d.op, c10d.route, and error.type if the operation failed
//	c10d.operation.bytes     bytes of operations that have succeeded; c10d.op, c10d.route
//	c10d.pending             operations that have not ended; c10d.op
package otel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	apitrace "go.opentelemetry.io/otel/trace"

	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

const scope = "github.com/c10d-go/c10d"

// Observer makes spans and metrics of operations. New makes one.
type Observer struct {
	tracer   apitrace.Tracer
	duration metric.Float64Histogram
	bytes    metric.Int64Counter
	pending  metric.Int64UpDownCounter
}

// New returns an observer. A nil provider leaves out its part.
func New(t apitrace.TracerProvider, m metric.MeterProvider) (*Observer, error) {
	o := new(Observer)
	if t != nil {
		o.tracer = t.Tracer(scope)
	}
	if m == nil {
		return o, nil
	}
	meter := m.Meter(scope)
	var errs [3]error
	o.duration, errs[0] = meter.Float64Histogram("c10d.operation.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from the call of an operation to its end."),
		metric.WithExplicitBucketBoundaries(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100))
	o.bytes, errs[1] = meter.Int64Counter("c10d.operation.bytes", metric.WithUnit("By"),
		metric.WithDescription("Bytes of this rank's tensors in operations that have succeeded."))
	o.pending, errs[2] = meter.Int64UpDownCounter("c10d.pending", metric.WithUnit("{operation}"),
		metric.WithDescription("Operations that have not ended."))
	return o, errors.Join(errs[:]...)
}

// Called implements trace.Observer.
func (o *Observer) Called(op trace.Operation) {
	if o.pending != nil {
		o.pending.Add(context.Background(), 1, metric.WithAttributes(attribute.String("c10d.op", op.Op.String())))
	}
}

// Ended implements trace.Observer.
func (o *Observer) Ended(op trace.Operation) {
	ctx := context.Background()
	name, route := attribute.String("c10d.op", op.Op.String()), attribute.String("c10d.route", op.Route())
	if o.pending != nil {
		o.pending.Add(ctx, -1, metric.WithAttributes(name))
		if op.Err == nil {
			o.bytes.Add(ctx, op.Bytes(), metric.WithAttributes(name, route))
			o.duration.Record(ctx, op.Ended.Sub(op.Called).Seconds(), metric.WithAttributes(name, route))
		} else {
			o.duration.Record(ctx, op.Ended.Sub(op.Called).Seconds(), metric.WithAttributes(name, route, attribute.String("error.type", kind(op.Err))))
		}
	}
	if o.tracer == nil {
		return
	}
	g := op.Group
	attributes := []attribute.KeyValue{
		attribute.String("c10d.group", g.Name), attribute.Int("c10d.rank", g.Rank), attribute.Int("c10d.epoch", g.Epoch),
		attribute.Int64("c10d.seq", int64(op.Seq)), attribute.Int64("c10d.bytes", op.Bytes()), attribute.String("c10d.dtype", op.DType().String()), route,
	}
	if op.Peer >= 0 {
		attributes = append(attributes, attribute.Int("c10d.peer", op.Peer))
	}
	_, span := o.tracer.Start(ctx, "c10d "+op.Op.String(), apitrace.WithTimestamp(op.Called), apitrace.WithNewRoot(), apitrace.WithAttributes(attributes...))
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
