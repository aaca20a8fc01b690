package backend_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// none is a backend that can do nothing.
type none struct{ backend.Unsupported }

func newNone(context.Context, backend.Options) (backend.Backend, error) { return nil, errors.New("no") }

func register(t *testing.T, name string, devices ...tensor.DeviceType) {
	t.Helper()
	require.NoError(t, backend.Register(backend.Registration{Name: name, Devices: devices, New: newNone}))
}

func TestRegister(t *testing.T) {
	defer backend.Forget()()
	register(t, "Test-One", tensor.CPU)
	r, ok := backend.Lookup("TEST-ONE")
	require.True(t, ok)
	require.Equal(t, "test-one", r.Name)
	require.Contains(t, backend.Names(), "test-one")
	for _, bad := range []backend.Registration{
		{Name: "test-one", Devices: []tensor.DeviceType{tensor.CPU}, New: newNone},
		{Name: "", Devices: []tensor.DeviceType{tensor.CPU}, New: newNone},
		{Name: "a:b", Devices: []tensor.DeviceType{tensor.CPU}, New: newNone},
		{Name: "nothing", Devices: []tensor.DeviceType{tensor.CPU}},
		{Name: "nowhere", New: newNone},
	} {
		require.Error(t, backend.Register(bad), "%q", bad.Name)
	}
}

func TestParseDevices(t *testing.T) {
	defer backend.Forget()()
	_, err := backend.ParseDevices("")
	require.ErrorIs(t, err, backend.ErrUnknownBackend, "nothing is linked into this test")
	register(t, "gloo", tensor.CPU)
	register(t, "both", tensor.CPU, tensor.CUDA)
	for text, want := range map[string][]backend.DeviceBackend{
		"":                   {{tensor.CPU, "gloo"}},
		"gloo":               {{tensor.CPU, "gloo"}},
		"BOTH":               {{tensor.CPU, "both"}, {tensor.CUDA, "both"}},
		"cuda:both,cpu:gloo": {{tensor.CUDA, "both"}, {tensor.CPU, "gloo"}},
	} {
		got, err := backend.ParseDevices(text)
		require.NoError(t, err, "%q", text)
		require.Equal(t, want, got, "%q", text)
	}
	for text, want := range map[string]string{
		"cpu:gloo,both":     `invalid device:backend pairing "both"`,
		"cpu:gloo:x":        "invalid device:backend pairing",
		"cpu:":              "invalid device:backend pairing",
		"cpu:gloo,cpu:both": "duplicate device type cpu",
		"tpu:gloo":          `unknown device type "tpu"`,
		"nccl":              `"nccl": backend not registered (known: `,
		"cuda:gloo":         "gloo cannot serve device type cuda",
	} {
		require.ErrorContains(t, must.Err(backend.ParseDevices(text)), want, "%q", text)
	}
}

// TestUnsupportedRefusesEverything calls every operation that there is.
func TestUnsupportedRefusesEverything(t *testing.T) {
	v := reflect.ValueOf(none{backend.Unsupported{Backend: "none"}})
	ops := 0
	for i := range v.NumMethod() {
		m := v.Type().Method(i)
		if m.Type.NumIn() < 2 || m.Type.In(1) != reflect.TypeFor[context.Context]() {
			continue
		}
		args := []reflect.Value{}
		for k := 1; k < m.Type.NumIn(); k++ {
			args = append(args, reflect.Zero(m.Type.In(k)))
		}
		out := v.Method(i).Call(args)
		err, _ := out[len(out)-1].Interface().(error)
		require.ErrorIs(t, err, errors.ErrUnsupported, m.Name)
		require.ErrorContains(t, err, "backend none does not support ", m.Name)
		ops++
	}
	want := 0
	for typ, i := reflect.TypeFor[backend.Backend](), 0; i < typ.NumMethod(); i++ {
		if m := typ.Method(i).Type; m.NumIn() > 0 && m.In(0) == reflect.TypeFor[context.Context]() {
			want++
		}
	}
	require.Equal(t, want, ops, "every operation of Backend")
}

func TestReductions(t *testing.T) {
	f32 := func(vs ...float32) []byte {
		var b []byte
		for _, v := range vs {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
		return b
	}
	for _, tc := range []struct {
		op   backend.ReduceOp
		name string
		want []float32 // of a = {6, -4} and b = {3, 5} in a group of 2
	}{
		{backend.ReduceOp{}, "sum", []float32{9, 1}},
		{backend.Avg(), "avg", []float32{4.5, 0.5}},
		{backend.Product(), "product", []float32{18, -20}},
		{backend.Min(), "min", []float32{3, -4}},
		{backend.Max(), "max", []float32{6, 5}},
		{backend.PreMulSum(0.5), "premul_sum(0.5)", []float32{4.5, 0.5}},
		{backend.CustomOf("left", func(a, b float32) float32 { return a }), "custom(left)", []float32{6, -4}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.Equal(t, tc.name, tc.op.String())
			r := must.Get(tc.op.Reduction(tensor.Float32, 2))
			a, b := f32(6, -4), f32(3, 5)
			if r.Before != nil {
				r.Before(a)
				r.Before(b)
			}
			r.Combine(a, b)
			if r.After != nil {
				r.After(a)
			}
			require.Equal(t, f32(tc.want...), a)
		})
	}
	for _, bad := range []struct {
		op backend.ReduceOp
		d  tensor.DType
	}{
		{backend.BAnd(), tensor.Float32}, {backend.Max(), tensor.Complex64}, {backend.Avg(), tensor.Int32},
		{backend.PreMulSum(0.5), tensor.Int32}, {backend.Custom("nothing", nil), tensor.Float32},
		{backend.CustomOf("f", func(a, b int8) int8 { return a }), tensor.Uint8},
	} {
		require.Error(t, must.Err(bad.op.Reduction(bad.d, 2)), "%v of %v", bad.op, bad.d)
	}
	for _, name := range []string{"sum", "avg", "product", "min", "max", "band", "bor", "bxor"} {
		require.Equal(t, name, must.Get(backend.ParseReduceOp(name)).String())
	}
	for _, name := range []string{"premul_sum", "custom", "mean", ""} {
		require.Error(t, must.Err(backend.ParseReduceOp(name)), "%q", name)
	}
}

func TestErrorsAreFound(t *testing.T) {
	err := fmt.Errorf("x: %w", &backend.ArgumentError{Backend: "gloo", Op: work.Reduce, What: "invalid root rank: 9"})
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	require.Equal(t, "x: gloo: reduce: invalid root rank: 9", err.Error())
}

func ExampleParseDevices() {
	for _, name := range []string{"fast", "slow"} {
		_ = backend.Register(backend.Registration{Name: name, Devices: []tensor.DeviceType{tensor.CPU, tensor.CUDA}, New: newNone})
	}
	m, err := backend.ParseDevices("cpu:slow,cuda:fast")
	fmt.Println(m, err)
	// Output: [cpu:slow cuda:fast] <nil>
}

func ExampleCustomOf() {
	op := backend.CustomOf("larger magnitude", func(a, b int32) int32 {
		if a*a >= b*b {
			return a
		}
		return b
	})
	fmt.Println(op)
	// Output: custom(larger magnitude)
}
