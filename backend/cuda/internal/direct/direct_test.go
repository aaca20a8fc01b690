package direct

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// every calls f with each PTX text.
func every(f func(image []byte, kernels ...string)) {
	Images(2, f)
	Images(window.MostRanks, f)
	RingImage(f)
}

// TestKernels holds that the texts have the kernels that calls ask for, and no others.
func TestKernels(t *testing.T) {
	every(func(b []byte, kernels ...string) {
		for _, name := range kernels {
			require.Contains(t, string(b), ".entry "+name+"(")
		}
		require.Equal(t, len(kernels), bytes.Count(b, []byte(".entry ")), "%v", kernels)
	})
}

// TestText holds what the compiler must not do: contract or approximate arithmetic, flush
// subnormal numbers, or put anything into memory of the stack, which would slow every call.
func TestText(t *testing.T) {
	every(func(b []byte, _ ...string) {
		for _, not := range []string{"fma.rn.f32", "fma.rn.f64", "approx", "div.full", ".ftz", ".local"} {
			require.NotContains(t, string(b), not)
		}
	})
	bytes := map[Job]int{
		OneShotJob: len(raw(new(Call))), TwoShotsJob: len(raw(new(Call))),
		StraightJob: len(raw(new(Move))), SpreadJob: len(raw(new(Spread))), MoveJob: len(raw(new(Move))),
	}
	for _, ranks := range []int{2, window.MostRanks} {
		for _, k := range kernelsOf(ranks) {
			parameter := fmt.Sprintf("%s_param_0[%d]", entry(k.name, ranks), bytes[k.job])
			require.Contains(t, string(image(k.text+group(ranks))), parameter)
		}
	}
	require.Contains(t, string(image(rings)), fmt.Sprintf("_param_0[%d]", len(raw(new(Ring)))))
}

func TestSupports(t *testing.T) {
	for _, c := range []struct {
		op backend.ReduceOp
		d  tensor.DType
		ok bool
	}{
		{backend.Sum(), tensor.Float32, true},
		{backend.Avg(), tensor.BFloat16, true},
		{backend.PreMulSum(0.5), tensor.Float16, true},
		{backend.BXor(), tensor.Int64, true},
		{backend.PreMulSum(3), tensor.Int8, true},
		{backend.Avg(), tensor.Int32, false},
		{backend.BOr(), tensor.Float64, false},
		{backend.PreMulSum(0.5), tensor.Int32, false},
		{backend.Sum(), tensor.Bool, false},
		{backend.Sum(), tensor.Complex64, false},
		{backend.Custom("f", func(tensor.DType, []byte, []byte) {}), tensor.Float32, false},
	} {
		require.Equal(t, c.ok, Supports(c.op, c.d) == nil, "%v of %v", c.op, c.d)
	}
	// What has a kernel has a meaning.
	for _, d := range dtypes {
		for _, op := range append(operators, backend.Avg(), backend.PreMulSum(2), backend.PreMulSum(0.5), backend.PreMulSum(1<<60)) {
			_, err := op.Reduction(d, 2)
			require.Equal(t, err == nil, Supports(op, d) == nil, "%v of %v", op, d)
		}
	}
	r := must.Get(reduction(backend.Avg(), tensor.Float32, 3))
	require.Equal(t, reduced{by: 3}, r)
	r = must.Get(reduction(backend.Avg(), tensor.Float32, 4))
	require.Equal(t, reduced{by: 4, factor: uint64(math.Float32bits(0.25))}, r)
	r = must.Get(reduction(backend.PreMulSum(-2), tensor.Int8, 3))
	require.Equal(t, reduced{scaled: 1, dtype: 4, factor: math.MaxUint64 - 1}, r)
}

// TestShapeOf holds that every call fits the window, whatever the limits.
func TestShapeOf(t *testing.T) {
	for _, channels := range []int{1, 8, 100, 1024, 2048} {
		for _, blocks := range []int{1, 2, 16, 128} {
			for n := 1; n < 1<<29; n = n*3 + 1 {
				for _, ranks := range []int{2, 4} {
					s := ShapeOf(n, blocks, channels, ranks, Kind(n%4))
					require.Positive(t, s.Blocks)
					require.Positive(t, s.Threads)
					require.Zero(t, s.Threads%32)
					require.LessOrEqual(t, s.Threads, 512)
					require.LessOrEqual(t, s.Blocks, blocks)
					require.Positive(t, s.Channels())
					require.LessOrEqual(t, s.Channels(), channels)
				}
			}
		}
	}
	for _, x := range []struct {
		n, blocks, channels, ranks int
		kind                       Kind
		want                       Shape
	}{
		{8, 128, 2048, 2, Reduces, Shape{Blocks: 1, Threads: 256}},
		{256 << 10, 128, 2048, 2, Reduces, Shape{Blocks: 64, Threads: 256}},
		{256 << 10, 16, 256, 2, Moves, Shape{Blocks: 16, Threads: 512, Large: true}},
		{512 << 10, 128, 2048, 2, Gathers, Shape{Blocks: 128, Threads: 256}},
		{4 << 20, 128, 2048, 2, Moves, Shape{Blocks: 128, Threads: 512}},
		{8 << 20, 128, 2048, 2, Reduces, Shape{Blocks: 128, Threads: 256, Large: true}},
		{64 << 20, 128, 2048, 2, Reduces, Shape{Blocks: 128, Threads: 512, Large: true}},
		{64 << 20, 16, 2048, 2, Reduces, Shape{Blocks: 16, Threads: 512, Large: true}},
		{256 << 10, 128, 1024, 4, Reduces, Shape{Blocks: 64, Threads: 256}},
		{256 << 10, 128, 2048, 4, TwoShots, Shape{Blocks: 64, Threads: 256}},
		{2 << 20, 128, 2048, 4, Reduces, Shape{Blocks: 128, Threads: 512}},
		{4 << 20, 128, 2048, 4, Reduces, Shape{Blocks: 128, Threads: 512, Large: true}},
		{32 << 20, 128, 2048, 4, TwoShots, Shape{Blocks: 128, Threads: 512}},
		{64 << 20, 128, 2048, 4, TwoShots, Shape{Blocks: 128, Threads: 512, Large: true}},
		{64 << 20, 128, 2048, 4, Gathers, Shape{Blocks: 128, Threads: 512}},
		{1 << 20, 128, 2048, 4, Moves, Shape{Blocks: 128, Threads: 256, Large: true}},
		{64 << 20, 128, 2048, 4, Moves, Shape{Blocks: 128, Threads: 512, Large: true}},
	} {
		require.Equal(t, x.want, ShapeOf(x.n, x.blocks, x.channels, x.ranks, x.kind), "%+v", x)
	}
}

// TestOpen holds when a rank lets its peers write straight to its memory, and where.
func TestOpen(t *testing.T) {
	m := movement{dst: 0x1040, into: Into{Region: 3, At: 0x1000}}
	m.take = [window.MostRanks]Span{{0, 64}, {64, 0}, {128, 4096}} // this is rank 0
	into, open, told := m.open(0, 3, 4096)
	require.True(t, open && told)
	require.Equal(t, [window.MostRanks]Place{2: At(3, 0x40+128)}, into)

	none := [window.MostRanks]Place{}
	closed := func(change func(m *movement)) {
		t.Helper()
		x := m
		change(&x)
		into, open, told := x.open(0, 3, 4096)
		require.False(t, open || told)
		require.Equal(t, none, into)
	}
	closed(func(x *movement) { x.into = Into{} })
	closed(func(x *movement) { x.dst++ })
	closed(func(x *movement) { x.take[1] = Span{65, 1} })
	closed(func(x *movement) { x.take[2].N-- })

	m.take = [window.MostRanks]Span{{0, 4096}}
	_, open, told = m.open(0, 3, 4096)
	require.True(t, open, "it takes nothing of others")
	require.False(t, told)
}
