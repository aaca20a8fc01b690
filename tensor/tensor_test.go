package tensor_test

import (
	"fmt"
	"math"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	musts "github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// deviceMemory stands for memory that the CPU cannot read.
type deviceMemory int

func (deviceMemory) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: 1} }
func (m deviceMemory) Len() int            { return int(m) }

func onDevice(t *testing.T, d tensor.DType, shape ...int) *tensor.Tensor {
	t.Helper()
	n := d.Size()
	for _, k := range shape {
		n *= k
	}
	return musts.Get(tensor.OnDevice(d, deviceMemory(n), shape...))
}

func TestDTypes(t *testing.T) {
	// PyTorch's c10/core/ScalarType.h.
	codes := map[string]int{
		"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
		"complex64": 9, "complex128": 10, "bool": 11, "bfloat16": 15, "float8_e5m2": 23, "float8_e4m3fn": 24,
		"uint16": 27, "uint32": 28, "uint64": 29,
	}
	require.Len(t, tensor.DTypes(), len(codes))
	for _, d := range tensor.DTypes() {
		require.True(t, d.Valid())
		require.Equal(t, codes[d.String()], d.TorchCode(), d)
		for _, name := range []string{d.String(), "torch." + d.String()} {
			require.Equal(t, d, musts.Get(tensor.ParseDType(name)))
		}
		kinds := 0
		for _, is := range []bool{d.IsFloat(), d.IsComplex(), d.IsInteger(), d == tensor.Bool} {
			if is {
				kinds++
			}
		}
		require.Equal(t, 1, kinds, d)
	}
	for alias, want := range map[string]tensor.DType{"torch.long": tensor.Int64, "half": tensor.Float16, "cdouble": tensor.Complex128} {
		require.Equal(t, want, musts.Get(tensor.ParseDType(alias)))
	}
	for _, bad := range []string{"", "torch.", "invalid", "float33"} {
		require.Error(t, musts.Err(tensor.ParseDType(bad)), bad)
	}
	for _, d := range []tensor.DType{tensor.Invalid, 200} {
		require.False(t, d.Valid())
		require.Zero(t, d.Size())
		require.Equal(t, -1, d.TorchCode())
		require.ErrorIs(t, musts.Err(tensor.New(d, 1)), tensor.ErrInvalid)
	}
}

func TestOfEveryType(t *testing.T) {
	check := func(d tensor.DType, x *tensor.Tensor, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, d, x.DType())
		require.Equal(t, 2*d.Size(), x.ByteLen())
		require.Len(t, x.Bytes(), x.ByteLen())
	}
	ofPair(t, check, tensor.Uint8, []uint8{1, 2})
	ofPair(t, check, tensor.Uint16, []uint16{1, 2})
	ofPair(t, check, tensor.Uint32, []uint32{1, 2})
	ofPair(t, check, tensor.Uint64, []uint64{1, 2})
	ofPair(t, check, tensor.Int8, []int8{1, 2})
	ofPair(t, check, tensor.Int16, []int16{1, 2})
	ofPair(t, check, tensor.Int32, []int32{1, 2})
	ofPair(t, check, tensor.Int64, []int64{1, 2})
	ofPair(t, check, tensor.Float16, []tensor.F16{1, 2})
	ofPair(t, check, tensor.BFloat16, []tensor.BF16{1, 2})
	ofPair(t, check, tensor.Float8E4M3, []tensor.F8E4M3{1, 2})
	ofPair(t, check, tensor.Float8E5M2, []tensor.F8E5M2{1, 2})
	ofPair(t, check, tensor.Float32, []float32{1, 2})
	ofPair(t, check, tensor.Float64, []float64{1, 2})
	ofPair(t, check, tensor.Bool, []bool{true, false})
	ofPair(t, check, tensor.Complex64, []complex64{1, 2i})
	ofPair(t, check, tensor.Complex128, []complex128{1, 2i})
}

func ofPair[T tensor.Element](t *testing.T, check func(tensor.DType, *tensor.Tensor, error), d tensor.DType, pair []T) {
	t.Helper()
	x, err := tensor.Of(pair, 2)
	check(d, x, err)
	got := data[T](t, x)
	require.Equal(t, pair, got)
	require.Same(t, &pair[0], &got[0], "no copy")
	require.Same(t, &pair[0], &data[T](t, musts.Get(tensor.FromBytes(d, x.Bytes(), 2, 1)))[0])
	flat := musts.Get(tensor.Of(pair))
	require.Equal(t, []int{2}, flat.Shape())
	scalar := musts.Get(flat.Select(0, 0))
	scalar = musts.Get(tensor.Of(pair[:1], scalar.Shape()...))
	require.Zero(t, scalar.Dims())
	empty := musts.Get(tensor.Of([]T(nil), 0, 3))
	require.Empty(t, data[T](t, empty))
	require.Empty(t, empty.Bytes())
}

func TestWrongArguments(t *testing.T) {
	x := of(t, make([]float32, 6), 2, 3)
	v, err := x.Transpose(0, 1)
	require.NoError(t, err)
	dev := onDevice(t, tensor.Float32, 2, 3)
	room := make([]byte, 24)
	for name, call := range map[string]func() error{
		"scalar":   func() error { _, err := tensor.Of([]float32{1, 2, 3}, []int{}...); return err },
		"too few":  func() error { _, err := tensor.Of([]int8{1}, 2); return err },
		"negative": func() error { _, err := tensor.Of([]int8{}, -1, 0); return err },
		"overflow": func() error {
			return musts.Err(tensor.New(tensor.Int8, 1<<(strconv.IntSize/2), 1<<(strconv.IntSize/2)))
		},
		"overflow of bytes":  func() error { _, err := tensor.New(tensor.Int64, 1<<(strconv.IntSize-3)); return err },
		"empty but overflow": func() error { _, err := tensor.New(tensor.Int8, 0, math.MaxInt/64, math.MaxInt/64); return err },
		"bytes":              func() error { _, err := tensor.FromBytes(tensor.Int32, room[:5], 1); return err },
		"unaligned":          func() error { _, err := tensor.FromBytes(tensor.Int32, room[1:5], 1); return err },
		"nil memory":         func() error { _, err := tensor.OnDevice(tensor.Int32, nil, 1); return err },
		"memory":             func() error { _, err := tensor.OnDevice(tensor.Int32, deviceMemory(5), 1); return err },
		"data dtype":         func() error { _, err := tensor.Data[int32](x); return err },
		"data of a view":     func() error { _, err := tensor.Data[float32](v); return err },
		"slice":              func() error { _, err := x.Slice(0, 1, 3); return err },
		"slice backwards":    func() error { _, err := x.Slice(0, 2, 1); return err },
		"slice dim":          func() error { _, err := x.Slice(2, 0, 0); return err },
		"select":             func() error { _, err := x.Select(1, 3); return err },
		"transpose":          func() error { _, err := x.Transpose(0, 2); return err },
		"transpose first":    func() error { _, err := x.Transpose(-1, 0); return err },
		"reshape":            func() error { _, err := x.Reshape(4); return err },
		"reshape unknown":    func() error { _, err := x.Reshape(-1, 4); return err },
		"reshape two":        func() error { _, err := x.Reshape(-1, -1); return err },
		"reshape zero":       func() error { _, err := x.Reshape(-1, 0); return err },
		"reshape view":       func() error { _, err := v.Reshape(6); return err },
		"copy":               func() error { return x.CopyFrom(v) },
		"copy nil":           func() error { return x.CopyFrom(nil) },
		"index":              func() error { _, err := x.Float64At(0, 3); return err },
		"indices":            func() error { _, err := x.Float64At(0); return err },
		"device pack":        func() error { return dev.Pack(room) },
		"device unpack":      func() error { return dev.Unpack(room) },
		"device clone":       func() error { _, err := dev.Clone(); return err },
		"device data":        func() error { _, err := tensor.Data[float32](dev); return err },
		"device copy":        func() error { return x.CopyFrom(dev) },
		"device copy to":     func() error { return dev.CopyFrom(x) },
		"device fill":        func() error { return dev.Fill(1) },
		"device at":          func() error { _, err := dev.Float64At(0, 0); return err },
		"device equal":       func() error { _, err := dev.Equal(dev); return err },
		"device from dense":  func() error { _, err := tensor.FromDense(dev, 1); return err },
		"compare nil":        func() error { _, err := x.Equal(nil); return err },
		"not complex":        func() error { _, err := x.ViewAsReal(); return err },
		"fill":               func() error { return musts.Get(tensor.New(tensor.Uint8, 1)).Fill(256) },
	} {
		err := call()
		require.ErrorIs(t, err, tensor.ErrInvalid, name)
		e := musts.As[*tensor.Error](t, err, name)
		require.NotEmpty(t, e.Op)
	}
}

func TestDeviceViews(t *testing.T) {
	x := onDevice(t, tensor.Complex64, 4, 3)
	require.Equal(t, "complex64[4 3]@cuda:1", x.String())
	require.Equal(t, x.String(), x.Dump())
	v, err := x.Slice(0, 1, 3)
	require.NoError(t, err)
	require.Equal(t, 3, v.Offset())
	require.Equal(t, x.Memory(), v.Memory())
	require.Nil(t, v.Bytes())
	v = musts.Get(v.ViewAsReal())
	require.Equal(t, 6, v.Offset())
	musts.Get(v.AsStrided([]int{24}, []int{1}, 0))
	require.ErrorIs(t, musts.Err(v.AsStrided([]int{25}, []int{1}, 0)), tensor.ErrInvalid)

	indices, values := onDevice(t, tensor.Int64, 1, 2), onDevice(t, tensor.Float32, 2)
	s := sparse(t, indices, values, 9)
	require.NoError(t, s.SetSparse(onDevice(t, tensor.Int64, 1, 3), onDevice(t, tensor.Float32, 3), true))
	require.True(t, s.IsCoalesced())
	require.Equal(t, 3, s.NNZ())
	require.ErrorIs(t, musts.Err(s.Coalesce()), tensor.ErrInvalid)
	require.ErrorIs(t, musts.Err(tensor.Sparse(indices, of(t, []float32{1, 2}, 2), 9)), tensor.ErrInvalid)
	wide, err := onDevice(t, tensor.Int64, 2, 1).Transpose(0, 1)
	require.NoError(t, err)
	require.NoError(t, musts.Err(tensor.Sparse(wide, values, 9)), "one row is contiguous either way")
	every2nd, err := onDevice(t, tensor.Int64, 1, 4).AsStrided([]int{1, 2}, []int{4, 2}, 0)
	require.NoError(t, err)
	require.ErrorIs(t, musts.Err(tensor.Sparse(every2nd, values, 9)), tensor.ErrInvalid)
}

// ones returns a tensor of ones.
func ones(d tensor.DType, shape ...int) *tensor.Tensor {
	x := musts.Get(tensor.New(d, shape...))
	musts.Do(x.Fill(1))
	return x
}

func TestSetFloat64(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		d       tensor.DType
		v, want float64 // want NaN of an integer type: refused
	}{
		{tensor.Uint8, 255.9, 255}, {tensor.Uint8, 256, nan}, {tensor.Uint8, -0.9, 0}, {tensor.Uint8, -1, nan},
		{tensor.Int8, -128.9, -128}, {tensor.Int8, -129, nan}, {tensor.Int8, 128, nan},
		{tensor.Int64, -1 << 63, -1 << 63}, {tensor.Int64, 1 << 63, nan}, {tensor.Int64, inf, nan}, {tensor.Int64, nan, nan},
		{tensor.Uint64, 1<<64 - 2048, 1<<64 - 2048}, {tensor.Uint64, 1 << 64, nan}, {tensor.Uint16, 65535, 65535},
		{tensor.Int16, -5, -5}, {tensor.Int32, -1 << 31, -1 << 31}, {tensor.Uint32, 1<<32 - 1, 1<<32 - 1},
		{tensor.Bool, 0, 0}, {tensor.Bool, -0.5, 1}, {tensor.Bool, nan, 1},
		{tensor.Float16, 65520, inf}, {tensor.Float16, 1.0 / 7, 0.142822265625}, {tensor.BFloat16, 1.0 / 7, 0.142578125},
		{tensor.Float8E4M3, 448, 448}, {tensor.Float8E4M3, 1e9, nan}, {tensor.Float8E5M2, 1e9, inf}, {tensor.Float8E5M2, 0.3, 0.3125},
		{tensor.Float32, 0.1, float64(float32(0.1))}, {tensor.Float64, 0.1, 0.1}, {tensor.Float64, nan, nan},
	} {
		x := ones(c.d, 2)
		err := x.SetFloat64(c.v, 1)
		if c.d.IsInteger() && math.IsNaN(c.want) {
			require.ErrorIsf(t, err, tensor.ErrInvalid, "%v %v", c.d, c.v)
			c.want = 1
		} else {
			require.NoErrorf(t, err, "%v %v", c.d, c.v)
		}
		got := musts.Get(x.Float64At(1))
		require.Truef(t, got == c.want || got != got && c.want != c.want, "%v of %v is %v, want %v", c.d, c.v, got, c.want)
		got = musts.Get(x.Float64At(0))
		require.Equal(t, 1.0, got)
	}
	z := of(t, []complex128{3i}, 1)
	require.NoError(t, z.SetFloat64(2, 0))
	require.Equal(t, []complex128{2}, data[complex128](t, z))
	require.ErrorIs(t, musts.Err(z.Float64At(0)), tensor.ErrInvalid)
}

func TestFill(t *testing.T) {
	for _, d := range tensor.DTypes() {
		x := ones(d, 5, 7)
		v := musts.Get(x.Slice(1, 2, 5))
		v = musts.Get(v.Transpose(0, 1))
		require.NoError(t, v.Fill(0))
		each([]int{5, 7}, func(i []int) {
			require.Equalf(t, i[1] < 2 || i[1] >= 5, musts.Get(realAt(x, i)) == 1, "%v %v", d, i)
		})
	}
	require.Zero(t, ones(tensor.Int8, 0).Len())
}

func TestViewAsReal(t *testing.T) {
	z := of(t, []complex64{1 + 2i, 3 + 4i, 5 + 6i, 7 + 8i}, 2, 2)
	flipped := musts.Get(z.Transpose(0, 1))
	v := musts.Get(flipped.ViewAsReal())
	require.Equal(t, []int{2, 2, 2}, v.Shape())
	require.Equal(t, []float32{1, 2, 5, 6, 3, 4, 7, 8}, data[float32](t, musts.Get(v.Contiguous())))
	require.NoError(t, v.SetFloat64(9, 0, 1, 1))
	require.Equal(t, complex64(5+9i), data[complex64](t, z)[2])
	row := musts.Get(z.Select(0, 1))
	v = musts.Get(row.ViewAsReal())
	require.Equal(t, []float32{5, 9, 7, 8}, data[float32](t, v))
}

func TestEqualAndAllClose(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	negZero := math.Copysign(0, -1)
	for _, c := range []struct {
		name         string
		a, b         *tensor.Tensor
		equal, close bool // close within 1e-3 of the value or 1e-6
	}{
		{"same", of(t, []float32{1, 2}, 2), of(t, []float32{1, 2}, 2), true, true},
		{"near", of(t, []float32{1, 2000}, 2), of(t, []float32{1, 2001}, 2), false, true},
		{"far", of(t, []float32{1, 2000}, 2), of(t, []float32{1, 2003}, 2), false, false},
		{"shape", of(t, []float32{1, 2}, 2), of(t, []float32{1, 2}, 1, 2), false, false},
		{"dtype", of(t, []float32{1}, 1), of(t, []float64{1}, 1), false, false},
		{"zeros", of(t, []float64{0}, 1), of(t, []float64{negZero}, 1), true, true},
		{"nan", of(t, []float64{nan}, 1), of(t, []float64{nan}, 1), false, false},
		{"inf", of(t, []float64{inf}, 1), of(t, []float64{inf}, 1), true, true},
		{"inf and number", of(t, []float64{1}, 1), of(t, []float64{inf}, 1), false, false},
		{"-inf", of(t, []float64{-inf}, 1), of(t, []float64{inf}, 1), false, false},
		{"big integers", of(t, []int64{1 << 60}, 1), of(t, []int64{1<<60 + 1}, 1), false, true},
		{"complex", of(t, []complex64{1 + 1000i}, 1), of(t, []complex64{1.5 + 1000i}, 1), false, true},
		{"bool", of(t, []bool{true}, 1), of(t, []bool{false}, 1), false, false},
		{"none", of(t, []int8{}, 0), of(t, []int8{}, 0), true, true},
	} {
		got := musts.Get(c.a.Equal(c.b))
		require.Equal(t, c.equal, got, c.name)
		got = musts.Get(c.a.AllClose(c.b, 0, 0))
		require.Equal(t, c.equal, got, c.name)
		got = musts.Get(c.a.AllClose(c.b, 1e-3, 1e-6))
		require.Equal(t, c.close, got, c.name)
	}
	a := sparse(t, of(t, []int64{1, 0, 1}, 1, 3), of(t, []int8{1, 2, 3}, 3), 2)
	b := sparse(t, of(t, []int64{0, 1}, 1, 2), of(t, []int8{2, 4}, 2), 2)
	equal(t, a, b)
	got := musts.Get(a.Equal(sparse(t, of(t, []int64{}, 0, 1), of(t, []int8{2, 4}, 1, 2), 2)))
	require.False(t, got, "other sparse dimensions")
}

func TestFormat(t *testing.T) {
	x := of(t, []float32{1.5, -2}, 2)
	require.Equal(t, "float32[2]|float32[2]|  float32[2]", fmt.Sprintf("%v|%s|%12v", x, x, x))
	require.Equal(t, "float32[2]\n[1.5,  -2]", fmt.Sprintf("%+v", x))
	require.Equal(t, "<nil>", fmt.Sprintf("%v", (*tensor.Tensor)(nil)))

	for want, y := range map[string]*tensor.Tensor{
		"int8[]\n-3":                            of(t, []int8{-3}, []int{}...),
		"uint64[1]\n[18446744073709551615]":     of(t, []uint64{math.MaxUint64}, 1),
		"int64[1]\n[-9223372036854775807]":      of(t, []int64{-math.MaxInt64}, 1),
		"bool[2]\n[ true, false]":               of(t, []bool{true, false}, 2),
		"bfloat16[1]\n[3.140625]":               of(t, []tensor.BF16{0x4049}, 1),
		"complex64[1]\n[1-0.5i]":                of(t, []complex64{1 - 0.5i}, 1),
		"float64[2]\n[0.1, NaN]":                of(t, []float64{0.1, math.NaN()}, 2),
		"int8[0 2]\n[]":                         of(t, []int8{}, 0, 2),
		"int8[2 0]\n[[],\n []]":                 of(t, []int8{}, 2, 0),
		"int8[2 1 2]\n[[[1, 2]],\n\n [[3, 4]]]": of(t, []int8{1, 2, 3, 4}, 2, 1, 2),
	} {
		require.Equal(t, want, y.Dump())
	}

	numbers := make([]int32, 1001)
	for i := range numbers {
		numbers[i] = int32(i)
	}
	long := of(t, numbers, 1001)
	require.Equal(t, "int32[1001]\n[   0,    1,    2, ...,  998,  999, 1000]", long.Dump())
	wide := ones(tensor.Int8, 300, 4)
	require.Equal(t, "int8[300 4]\n[[1, 1, 1, 1],\n [1, 1, 1, 1],\n [1, 1, 1, 1],\n ...,\n [1, 1, 1, 1],\n [1, 1, 1, 1],\n [1, 1, 1, 1]]", wide.Dump())
	require.NotContains(t, musts.Get(long.Slice(0, 0, 1000)).Dump(), "...")
	empty := musts.Get(tensor.New(tensor.Int8, 1<<30, 0))
	require.Equal(t, "int8[1073741824 0]\n[[],\n [],\n [],\n ...,\n [],\n [],\n []]", empty.Dump())
}
