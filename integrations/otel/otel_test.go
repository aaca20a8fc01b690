package otel_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/c10d-go/c10d/integrations/otel"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

func TestSpansAndMetrics(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	reader := sdkmetric.NewManualReader()
	o, err := otel.New(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)), sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)))
	require.NoError(t, err)
	j := pgtest.NewJob(1)
	defer j.Close()
	options := j.Options()
	options.Recorder = trace.New(trace.Options{Observers: []trace.Observer{o}})
	g := must.Get(pg.New(t.Context(), j.Store, 0, 1, options))
	defer g.Close()

	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1, 2}), pg.Sum())))
	x, err := tensor.New(tensor.Float32, 2)
	require.NoError(t, err)
	require.Error(t, must.Err(g.Broadcast(t.Context(), x, 7)))
	ended := spans.Ended()
	require.Len(t, ended, 2)
	require.Equal(t, "c10d all_reduce", ended[0].Name())
	require.False(t, ended[0].EndTime().Before(ended[0].StartTime()))
	require.Contains(t, ended[0].Attributes(), attribute.Int64("c10d.bytes", 8))
	require.Contains(t, ended[0].Attributes(), attribute.String("c10d.dtype", "float32"))
	require.Equal(t, codes.Error, ended[1].Status().Code)

	// While an operation is pending.
	var all metricdata.ResourceMetrics
	var pending trace.Call
	b := must.Get(g.Backend(tensor.CPU))
	pending.Begin(options.Recorder.Groups()[0], b, work.Barrier, nil, nil, -1, 0)
	require.NoError(t, pending.Blocked(func() error { return reader.Collect(t.Context(), &all) }))
	sums, gauges := make(map[string]int64), make(map[string]float64)
	for _, m := range all.ScopeMetrics[0].Metrics {
		switch d := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range d.DataPoints {
				sums[m.Name] += p.Value
			}
		case metricdata.Gauge[int64]:
			gauges[m.Name] = float64(d.DataPoints[0].Value)
		case metricdata.Gauge[float64]:
			gauges[m.Name] = d.DataPoints[0].Value
		case metricdata.Histogram[float64]:
			for _, p := range d.DataPoints {
				sums[m.Name] += int64(p.Count)
			}
		}
	}
	require.Equal(t, map[string]int64{"c10d.operation.bytes": 8, "c10d.operation.duration": 2, "c10d.pending": 1}, sums)
	require.Equal(t, 0.0, gauges["c10d.epoch"])
	require.Greater(t, gauges["c10d.pending.age"], 0.0)
}

// TestNextRecorder: a program that makes another group with another recorder has its gauges.
func TestNextRecorder(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	o := must.Get(otel.New(nil, sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	j := pgtest.NewJob(1)
	defer j.Close()
	options := j.Options()
	options.Recorder = trace.New()
	plain := must.Get(pg.New(t.Context(), j.Store, 0, 1, options))
	defer plain.Close()
	b := must.Get(plain.Backend(tensor.CPU))
	for epoch := range 2 {
		g := trace.New(trace.Options{Observers: []trace.Observer{o}}).Join(trace.Member{Name: "0", Epoch: epoch, Ranks: []int{0}})
		var call trace.Call
		call.Begin(g, b, work.Barrier, nil, nil, -1, 0)
		require.NoError(t, call.Blocked(func() error { return nil }))
		var all metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(t.Context(), &all))
		seen := false
		for _, m := range all.ScopeMetrics[0].Metrics {
			if d, ok := m.Data.(metricdata.Gauge[int64]); ok && m.Name == "c10d.epoch" {
				require.EqualValues(t, epoch, d.DataPoints[0].Value)
				seen = true
			}
		}
		require.True(t, seen)
		g.Leave()
	}
}

// TestWithoutProviders: either part can be left out.
func TestWithoutProviders(t *testing.T) {
	o := must.Get(otel.New(nil, nil))
	r := trace.New(trace.Options{Observers: []trace.Observer{o}})
	j := pgtest.NewJob(1)
	defer j.Close()
	options := j.Options()
	options.Recorder = r
	g := must.Get(pg.New(t.Context(), j.Store, 0, 1, options))
	defer g.Close()
	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())))
}
