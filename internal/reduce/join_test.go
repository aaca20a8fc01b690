package reduce

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// eachJoin calls test for all dtypes that Join has a sum for.
func eachJoin(t *testing.T, test func(t *testing.T, d tensor.DType, join JoinFunc, f Func)) {
	needAssembly(t)
	some := false
	for _, d := range tensor.DTypes() {
		if join := Join(Avg, d); join != nil {
			f := must.Get(Kernel(Sum, d))
			some = true
			t.Run(d.String(), func(t *testing.T) { test(t, d, join, f) })
		}
	}
	if !some {
		t.Skip("no loop of this processor joins operands")
	}
}

// TestJoin compares Join with a Func that is called for one operand after the other. Bits, lengths, addresses
// and the number of operands are random. The result has memory of its own, or takes the place of an operand.
func TestJoin(t *testing.T) {
	rng := must.Rand(t)
	eachJoin(t, func(t *testing.T, d tensor.DType, join JoinFunc, f Func) {
		for round := range 400 {
			count, n := 1+rng.IntN(9), rng.IntN(300)*d.Size()
			operands := make([][]byte, count)
			for i := range operands {
				operands[i] = make([]byte, n+64)[rng.IntN(64):][:n:n]
				for j := range operands[i] {
					operands[i][j] = byte(rng.Uint32())
				}
			}
			want := slices.Clone(operands[0])
			for _, src := range operands[1:] {
				f(want, src)
			}
			around := bytes.Repeat([]byte{0xee}, n+128)
			skip := rng.IntN(64)
			dst, whole := around[skip:][:n], slices.Clone(around)
			if round%2 == 1 {
				dst = operands[rng.IntN(count)]
			}
			join(dst, operands)
			require.True(t, bytes.Equal(want, dst), "%d operands of %d bytes: want %x, got %x", count, n, want, dst)
			if round%2 == 0 {
				copy(whole[skip:], dst)
				require.True(t, bytes.Equal(whole, around), "%d operands of %d bytes: bytes outside of the result were written", count, n)
			}
		}
		long := make([][]byte, 5)
		for i := range long {
			long[i], _ = benchBytes(Sum, d, piece+1024+d.Size())
		}
		want := slices.Clone(long[0])
		for _, src := range long[1:] {
			f(want, src)
		}
		got := make([]byte, len(want))
		join(got, long)
		require.True(t, bytes.Equal(want, got))
	})
}

// TestJoinLengths has operands that do not fit.
func TestJoinLengths(t *testing.T) {
	eachJoin(t, func(t *testing.T, d tensor.DType, join JoinFunc, _ Func) {
		n := d.Size()
		require.Panics(t, func() { join(make([]byte, n), nil) })
		require.Panics(t, func() { join(make([]byte, n), [][]byte{make([]byte, n), make([]byte, 2*n)}) })
		require.Panics(t, func() { join(make([]byte, n+1), [][]byte{make([]byte, n+1)}) })
	})
	require.Nil(t, Join(Custom, tensor.Float32))
	require.Nil(t, Join(Sum, tensor.Invalid))
}

// TestJoinStack has a join run at every depth of a goroutine's stack, as TestStackGrows does.
func TestJoinStack(t *testing.T) {
	join := Join(Sum, tensor.Float32)
	if join == nil {
		t.Skip("no loop of this processor joins operands")
	}
	one := []byte{0, 0, 0x80, 0x3f}
	for depth := range 600 {
		done := make(chan []byte)
		go func() {
			dst := make([]byte, 4)
			deeper(depth, func() { join(dst, [][]byte{one, one, one, one}) })
			done <- dst
		}()
		require.Equal(t, []byte{0, 0, 0x80, 0x40}, <-done, "depth %d", depth)
	}
}
