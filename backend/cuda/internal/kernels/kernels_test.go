package kernels

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// TestList holds that the text has each kernel, with the parameter that launches have, and that no
// kernel uses the stack. A launch says what it does.
func TestList(t *testing.T) {
	require.Contains(t, string(Lists), ".entry "+List+"(")
	require.Contains(t, string(Lists), fmt.Sprintf("_param_0[%d]", listBytes))
	require.NotContains(t, string(Lists), ".local")
	require.LessOrEqual(t, listBytes, 4096)
	parts := []ListPart{{1 << 20, 64, 16}, {1 << 21, 80, 40_000}}
	for _, back := range []bool{false, true} {
		l := ListLaunch(nil, 1<<30, back, parts)
		packed, b, got := ParseList(l.Args.Bytes(), len(parts))
		require.Equal(t, driver.Ptr(1<<30), packed)
		require.Equal(t, back, b)
		require.Equal(t, parts, got)
		require.Equal(t, driver.Dim{X: 2, Y: 3}, l.Grid)
		read, write := driver.Reads, driver.Writes
		if back {
			read, write = write, read
		}
		require.Equal(t, []driver.Access{read(1<<20, 16), read(1<<21, 40_000), write(1<<30+64, 40_016)}, l.Access)
	}
}

// TestCoo holds that the text has each kernel, and no other one, and that none uses the stack. Sums are not contracted.
// All dtypes are added but those of 8 bits that are floats.
func TestCoo(t *testing.T) {
	for _, name := range CooNames {
		require.Contains(t, string(COO), ".entry "+name+"(")
	}
	require.Equal(t, len(CooNames), bytes.Count(COO, []byte(".entry ")))
	for _, not := range []string{".local", "fma.", ".ftz"} {
		require.NotContains(t, string(COO), not)
	}
	for _, d := range tensor.DTypes() {
		a, ok := CooAdds(d)
		require.Equal(t, d != tensor.Float8E4M3 && d != tensor.Float8E5M2, ok, d)
		if ok {
			require.Equal(t, d.Size(), a.Parts*a.Size, d)
			if a.Parts == 1 && !d.IsInteger() {
				require.Equal(t, d, a.DType())
			}
		}
	}
}

// TestNames holds that the text has exactly the kernels that can be asked for.
func TestNames(t *testing.T) {
	names := map[string]bool{Copy: true, Pack: true, Unpack: true, Exchange: true}
	EachCombine(func(d tensor.DType, name string) {
		require.False(t, names[name], name)
		names[name] = true
	})
	EachCast(func(_, _ tensor.DType, name string) { names[name] = true })
	for name := range names {
		require.Contains(t, string(PTX), ".entry "+name+"(")
	}
	require.Equal(t, len(names), bytes.Count(PTX, []byte(".entry ")))

	for _, d := range tensor.DTypes() {
		for _, o := range append(operators, backend.Avg()) {
			name, op := Combine(o.Kind(), d)
			if _, err := o.Reduction(d, 2); err != nil || !slices.Contains(numbers, d) {
				require.Empty(t, name, "%v of %v", o, d)
				continue
			}
			require.True(t, names[name], "%v of %v", o, d)
			if o.Kind() == backend.Avg().Kind() {
				o = backend.Sum()
			}
			require.Equal(t, o.Kind(), Operator(op).Kind())
		}
		for _, o := range []backend.ReduceOp{backend.PreMulSum(2), backend.Custom("f", nil)} {
			name, _ := Combine(o.Kind(), d)
			require.Empty(t, name, "%v of %v", o, d)
		}
	}
}

// TestArithmetic holds that the compiler kept to the source: sums and products are
// not contracted, and divisions are exact.
func TestArithmetic(t *testing.T) {
	for _, not := range []string{"fma.", "approx", "div.full", ".ftz"} {
		require.NotContains(t, string(PTX), not)
	}
}

func TestLayout(t *testing.T) {
	var a driver.Args
	Layout{Size: 4, Shape: []int{3, 5}, Strides: []int{-7, 2}}.Append(a.Reset().Ptr(1).Ptr(2))
	require.Equal(t, 3, a.Len())
	require.Equal(t, 16+144, len(a.Bytes()))
	l, n := ParseLayout(a.Bytes()[a.Offset(2):])
	require.Equal(t, 15, n)
	require.Equal(t, 4, l.Size)
	require.Equal(t, []int{1, 1, 1, 1, 1, 1, 3, 5}, l.Shape)
	require.Equal(t, []int{-7, 2}, l.Strides[6:])
}
