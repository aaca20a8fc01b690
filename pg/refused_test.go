package pg_test

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onNoBackend is memory of a device that no backend of the tests serves.
type onNoBackend struct{}

func (onNoBackend) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (onNoBackend) Len() int              { return 4 }

// operations calls every operation of g with tensors t, and f with what it returns. It finds
// them by their signature, so that no new one is forgotten.
func operations(g *pg.ProcessGroup, t *tensor.Tensor, f func(name string, w *work.Work, err error)) (n int) {
	v := reflect.ValueOf(g)
	for i := range v.NumMethod() {
		name, m := v.Type().Method(i).Name, v.Method(i)
		if m.Type().NumOut() != 2 || m.Type().Out(0) != reflect.TypeFor[*work.Work]() || m.Type().NumIn() == 0 ||
			m.Type().In(0) != reflect.TypeFor[context.Context]() {
			continue
		}
		args := make([]reflect.Value, m.Type().NumIn())
		for k := range args {
			args[k] = argument(m.Type().In(k), t)
		}
		call := m.Call
		if m.Type().IsVariadic() {
			call = m.CallSlice
		}
		out := call(args)
		w, _ := out[0].Interface().(*work.Work)
		err, _ := out[1].Interface().(error)
		f(name, w, err)
		n++
	}
	return n
}

func argument(typ reflect.Type, t *tensor.Tensor) reflect.Value {
	switch typ {
	case reflect.TypeFor[context.Context]():
		return reflect.ValueOf(context.Background())
	case reflect.TypeFor[*tensor.Tensor]():
		return reflect.ValueOf(t)
	case reflect.TypeFor[pg.BarrierOptions]():
		return reflect.ValueOf(pg.BarrierOptions{Device: t.Device().Type})
	}
	if typ.Kind() == reflect.Slice {
		return reflect.Append(reflect.Zero(typ), argument(typ.Elem(), t))
	}
	return reflect.Zero(typ)
}

// TestOperationsAreRefused: operations without a backend, and those of a closed group, return an
// error and no Work.
func TestOperationsAreRefused(t *testing.T) {
	foreign := must.Get(tensor.OnDevice(tensor.Float32, onNoBackend{}, 1))
	here, err := tensor.New(tensor.Float32, 1)
	require.NoError(t, err)
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		other, err := g.NewGroup(t.Context(), []int{0})
		require.NoError(t, err)
		require.NoError(t, other.Close())
		for _, tc := range []struct {
			name string
			g    *pg.ProcessGroup
			t    *tensor.Tensor
			is   error
			text string
		}{
			{"no backend", g, foreign, nil, `pg: no backend for device type cuda in group "0"`},
			{"closed", other, here, pg.ErrClosed, ` in group "1": group closed`},
		} {
			n := operations(tc.g, tc.t, func(name string, w *work.Work, err error) {
				require.ErrorContains(t, err, tc.text, "%s: %s", tc.name, name)
				require.Nil(t, w, "%s: %s", tc.name, name)
				if tc.is != nil {
					require.ErrorIs(t, err, tc.is, "%s: %s", tc.name, name)
				}
			})
			require.GreaterOrEqual(t, n, 20, tc.name)
		}
		require.ErrorIs(t, other.MonitoredBarrier(t.Context()), pg.ErrClosed)
	})
}

// onlyCUDA is a backend that refuses every operation.
type onlyCUDA struct{ backend.Unsupported }

func (onlyCUDA) Name() string             { return "pg-test-cuda" }
func (onlyCUDA) Rank() int                { return 0 }
func (onlyCUDA) Size() int                { return 1 }
func (onlyCUDA) Seq() uint64              { return 0 }
func (onlyCUDA) SetTimeout(time.Duration) {}
func (onlyCUDA) Abort(error)              {}
func (onlyCUDA) Close() error             { return nil }

func init() {
	err := backend.Register(backend.Registration{Name: onlyCUDA{}.Name(), Devices: []tensor.DeviceType{tensor.CUDA},
		New: func(context.Context, backend.Options) (backend.Backend, error) {
			return onlyCUDA{backend.Unsupported{Backend: "pg-test-cuda"}}, nil
		}})
	if err != nil {
		panic(err)
	}
}

// TestTheTensorsChooseTheBackend: an operation goes to the backend of its first tensor's device.
func TestTheTensorsChooseTheBackend(t *testing.T) {
	foreign := must.Get(tensor.OnDevice(tensor.Float32, onNoBackend{}, 1))
	here := must.Get(tensor.New(tensor.Float32, 1))
	j := pgtest.NewJob(1)
	defer j.Close()
	o := j.Options()
	o.Backend = "cpu:gloo,cuda:pg-test-cuda"
	g, err := pg.New(t.Context(), j.Store, 0, 1, o)
	require.NoError(t, err)
	defer g.Close()
	operations(g, foreign, func(name string, w *work.Work, err error) {
		require.ErrorIs(t, err, errors.ErrUnsupported, name)
		require.ErrorContains(t, err, "pg-test-cuda", name)
	})
	ended := 0
	operations(g, here, func(name string, w *work.Work, err error) {
		if err != nil {
			require.ErrorIs(t, err, backend.ErrInvalidArgument, "%s: a rank cannot send to itself", name)
			return
		}
		require.NoError(t, w.Wait(t.Context()), name)
		ended++
	})
	require.GreaterOrEqual(t, ended, 15)
	_, err = g.AllReduceCoalesced(t.Context(), []*tensor.Tensor{nil, foreign}, pg.Sum())
	require.ErrorContains(t, err, "pg-test-cuda", "the first tensor that there is")
}

// objects calls f with what each collective on objects returns for v.
func objects[T any](ctx context.Context, g *pg.ProcessGroup, v T, c pg.Codec[T], f func(op string, err error)) {
	_, err := pg.AllGatherObject(ctx, g, v, c)
	f("AllGatherObject", err)
	_, err = pg.GatherObject(ctx, g, v, 0, c)
	f("GatherObject", err)
	_, err = pg.BroadcastObject(ctx, g, []T{v}, 0, c)
	f("BroadcastObject", err)
	_, err = pg.ScatterObject(ctx, g, []T{v}, 0, c)
	f("ScatterObject", err)
}

// TestObjectsAreRefused: collectives on objects return the error of a group that is closed, and of
// an object that cannot be encoded.
func TestObjectsAreRefused(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		other, err := g.NewGroup(ctx, []int{0})
		require.NoError(t, err)
		objects(ctx, other, func() {}, nil, func(op string, err error) {
			e := must.As[*pg.ObjectError](t, err, op)
			require.Equal(t, op, e.Op)
			require.Zero(t, e.Rank, op)
		})
		require.NoError(t, other.Close())
		objects(ctx, other, 1, nil, func(op string, err error) { require.ErrorIs(t, err, pg.ErrClosed, op) })
	})
}

// TestTheDefaultTimeout: a group without Options.Timeout has the default, and so have its operations.
func TestTheDefaultTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(2)
		defer j.Close()
		o := j.Options()
		o.Timeout = 0
		g := must.Get(pg.New(t.Context(), j.Store, 0, 2, o))
		defer g.Close()
		other, err := j.Fabric().(*mem.Fabric).Join("0/0", 1, 2) // which calls nothing
		require.NoError(t, err)
		defer other.Close()
		begun := time.Now()
		require.ErrorIs(t, g.Barrier(t.Context()), work.ErrTimeout)
		require.GreaterOrEqual(t, time.Since(begun), backend.DefaultTimeout)
	})
}

// TestBarrierOfTheStoreTimesOut: the barrier that ranks make as PyTorch up to 2.0 does ends with
// the timeout, and says how many came.
func TestBarrierOfTheStoreTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(2)
		defer j.Close()
		o := j.Options()
		begun := time.Now()
		_, err := pg.New(t.Context(), pg.Torch1{Store: j.Store}, 0, 2, o)
		require.True(t, errors.Is(err, context.DeadlineExceeded), "%v", err)
		require.ErrorContains(t, err, `pg: store barrier of group "0": 1 of 2 ranks came`)
		require.Less(t, time.Since(begun), pgtest.Timeout+time.Second)
	})
}
