package gorgonia_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	gt "gorgonia.org/tensor"

	"github.com/c10d-go/c10d/integrations/gorgonia"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// checkShared holds that t has d's elements, in d's order, and is the same memory.
func checkShared(t *testing.T, d *gt.Dense) {
	t.Helper()
	x := must.Get(gorgonia.Tensor(d))
	require.Equal(t, d.Shape().TotalSize(), x.Len())
	require.Equal(t, []int(d.Shape()), append([]int{}, x.Shape()...))
	each(d.Shape(), func(index []int) {
		want := must.Get(d.At(index...))
		got := must.Get(x.Float64At(index...))
		require.EqualValues(t, want, got, "%v", index)
		require.NoError(t, x.SetFloat64(got+100, index...))
		require.EqualValues(t, got+100, must.Get(d.At(index...)), "%v is not the same memory", index)
	})
}

// each calls f with every index of a shape.
func each(shape []int, f func(index []int)) {
	index := make([]int, len(shape))
	for n := range gt.Shape(shape).TotalSize() {
		for i := len(shape) - 1; i >= 0; i-- {
			index[i], n = n%shape[i], n/shape[i]
		}
		f(index)
	}
}

func dense(shape ...int) *gt.Dense {
	return gt.New(gt.WithShape(shape...), gt.WithBacking(gt.Range(gt.Float64, 0, gt.Shape(shape).TotalSize())))
}

func TestViews(t *testing.T) {
	slice := func(d *gt.Dense, s ...gt.Slice) *gt.Dense {
		return must.Get(d.Slice(s...)).(*gt.Dense)
	}
	transposed := func(d *gt.Dense, axes ...int) *gt.Dense {
		require.NoError(t, d.T(axes...))
		return d
	}
	for name, d := range map[string]*gt.Dense{
		"vector":             dense(5),
		"column":             dense(5, 1),
		"row":                dense(1, 5),
		"matrix":             dense(3, 4),
		"cube":               dense(2, 3, 4),
		"transposed":         transposed(dense(3, 4)),
		"permuted":           transposed(dense(2, 3, 4), 2, 0, 1),
		"rows":               slice(dense(4, 3), gt.S(1, 3)),
		"one row":            slice(dense(4, 3), gt.S(2)),
		"one column":         slice(dense(4, 3), nil, gt.S(1)),
		"columns":            slice(dense(4, 5), nil, gt.S(1, 4)),
		"every other column": slice(dense(4, 6), nil, gt.S(0, 6, 2)),
		"block":              slice(dense(3, 4, 5), gt.S(1, 3), gt.S(0, 2), gt.S(2, 5)),
		"block, transposed":  transposed(slice(dense(4, 5), gt.S(1, 3), gt.S(1, 4))),
		"column-major":       gt.New(gt.WithShape(2, 3), gt.AsFortran([]float64{1, 2, 3, 4, 5, 6})),
	} {
		t.Run(name, func(t *testing.T) { checkShared(t, d) })
	}
}

func TestScalar(t *testing.T) {
	d := gt.New(gt.FromScalar(float32(3)))
	x := must.Get(gorgonia.Tensor(d))
	require.Empty(t, x.Shape())
	require.NoError(t, x.SetFloat64(4))
	require.Equal(t, float32(4), d.ScalarValue())
}

func TestDTypes(t *testing.T) {
	for _, c := range []struct {
		backing any
		want    tensor.DType
	}{
		{[]bool{true, false}, tensor.Bool},
		{[]int{1, 2}, tensor.Int64},
		{[]int8{1, 2}, tensor.Int8},
		{[]int16{1, 2}, tensor.Int16},
		{[]int32{1, 2}, tensor.Int32},
		{[]int64{1, 2}, tensor.Int64},
		{[]uint{1, 2}, tensor.Uint64},
		{[]uint8{1, 2}, tensor.Uint8},
		{[]uint16{1, 2}, tensor.Uint16},
		{[]uint32{1, 2}, tensor.Uint32},
		{[]uint64{1, 2}, tensor.Uint64},
		{[]float32{1, 2}, tensor.Float32},
		{[]float64{1, 2}, tensor.Float64},
		{[]complex64{1, 2}, tensor.Complex64},
		{[]complex128{1, 2}, tensor.Complex128},
		{[]tensor.F16{1, 2}, tensor.Float16},
		{[]tensor.BF16{1, 2}, tensor.BFloat16},
		{[]tensor.F8E4M3{1, 2}, tensor.Float8E4M3},
		{[]tensor.F8E5M2{1, 2}, tensor.Float8E5M2},
	} {
		d := gt.New(gt.WithShape(2), gt.WithBacking(c.backing))
		x, err := gorgonia.Tensor(d)
		require.NoError(t, err, "%T", c.backing)
		require.Equal(t, c.want, x.DType())

		// And back, over the same memory.
		back, err := gorgonia.Dense(x)
		require.NoError(t, err, "%T", c.backing)
		require.Equal(t, d.Uintptr(), back.Uintptr())
		require.Equal(t, d.Shape(), back.Shape())
		require.Equal(t, c.want, must.Get(gorgonia.Tensor(back)).DType())
	}
}

func TestUnsupported(t *testing.T) {
	masked := dense(2, 3)
	masked.SetMask(make([]bool, 6))
	for text, d := range map[string]*gt.Dense{
		"is nil":                         nil,
		"masked":                         masked,
		"of type string,":                gt.New(gt.WithShape(2), gt.WithBacking([]string{"a", "b"})),
		"Go cannot read":                 gt.New(gt.WithShape(2), gt.Of(gt.Float32), gt.WithEngine(unreadable{})),
		"of type gorgonia_test.Celsius,": gt.New(gt.WithShape(2), gt.WithBacking([]Celsius{1, 2})),
	} {
		_, err := gorgonia.Tensor(d)
		require.ErrorIs(t, err, gorgonia.ErrUnsupported, text)
		require.ErrorContains(t, err, text)
	}
	_, err := gorgonia.Tensors(dense(2), nil)
	require.ErrorIs(t, err, gorgonia.ErrUnsupported)
	require.ErrorContains(t, err, "tensor 1")
	require.ErrorIs(t, must.Err(gorgonia.DType(gt.Dtype{})), gorgonia.ErrUnsupported)

	x := must.Get(tensor.Of([]float32{1, 2, 3, 4}, 2, 2))
	columns := must.Get(x.Transpose(0, 1))
	empty, err := tensor.New(tensor.Float32, 0, 3)
	require.NoError(t, err)
	for text, x := range map[string]*tensor.Tensor{"is nil": nil, "not contiguous": columns, "no elements": empty} {
		_, err := gorgonia.Dense(x)
		require.ErrorIs(t, err, gorgonia.ErrUnsupported)
		require.ErrorContains(t, err, text)
	}
}

// Celsius is a type that no group can add.
type Celsius float32

// unreadable is an engine whose memory Go cannot read.
type unreadable struct{ gt.StdEng }

func (unreadable) AllocAccessible() bool { return false }

// TestAllReduce sums a matrix on one rank, a transposed one and a slice on the others.
func TestAllReduce(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		d := dense(4, 3)
		switch g.Rank() {
		case 1:
			d = dense(3, 4)
			require.NoError(t, d.T())
		case 2:
			v := must.Get(dense(6, 5).Slice(gt.S(1, 5), gt.S(1, 4)))
			d = v.(*gt.Dense)
		}
		require.NoError(t, must.Get(g.AllReduce(ctx, must.Get(gorgonia.Tensor(d)), pg.Sum())).Wait(ctx))
		for i := range 4 {
			for j := range 3 {
				require.Equal(t, float64(3*i+j)+float64(4*j+i)+float64(5*(i+1)+j+1), must.Get(d.At(i, j)))
			}
		}
	})
}

func ExampleTensor() {
	w := gt.New(gt.WithShape(2, 2), gt.WithBacking([]float32{1, 2, 3, 4}))
	t, err := gorgonia.Tensor(w)
	if err != nil {
		panic(err)
	}
	if err := t.Fill(7); err != nil { // or an operation of a group
		panic(err)
	}
	fmt.Println(w.Data())
	// Output: [7 7 7 7]
}
