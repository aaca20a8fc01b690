package mlp

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func batch(n, features, classes int, seed uint64) ([]float32, []uint8) {
	random := rand.New(rand.NewPCG(seed, 1))
	x, y := make([]float32, n*features), make([]uint8, n)
	for i := range x {
		x[i] = max(0, random.Float32()*2-.5)
	}
	for i := range y {
		y[i] = uint8(random.IntN(classes))
	}
	return x, y
}

// TestGradient holds Backward against central differences of Forward. With a
// step h the difference of two float32 losses is good to about 1e-6/h and the
// formula to about h*h, both 1e-4 for h = 1e-2.
func TestGradient(t *testing.T) {
	for _, sizes := range [][]int{{7, 4}, {6, 5, 3}, {9, 8, 7, 5}} {
		m := must.Get(New(sizes, 3))
		x, y := batch(11, sizes[0], sizes[len(sizes)-1], 5)
		const scale = 1. / 11
		loss, correct := m.Backward(x, y, scale, nil)
		again, correctAgain := m.Forward(x, y)
		require.Equal(t, loss, again)
		require.Equal(t, correct, correctAgain)
		for _, p := range m.Params() {
			for i := range p.Value {
				const h = 1e-2
				old := p.Value[i]
				p.Value[i] = old + h
				up, _ := m.Forward(x, y)
				p.Value[i] = old - h
				down, _ := m.Forward(x, y)
				p.Value[i] = old
				require.InDelta(t, (up-down)/(2*h)*scale, p.Grad[i], 2e-3, "%v %s[%d]", sizes, p.Name, i)
			}
		}
	}
}

// TestReady checks that each gradient is final when it is announced, and that
// the last layer's comes first.
func TestReady(t *testing.T) {
	m := must.Get(New([]int{6, 5, 4, 3}, 1))
	x, y := batch(9, 6, 3, 2)
	var order []int
	final := make(map[int][]float32)
	m.Backward(x, y, .5, func(i int) {
		order = append(order, i)
		final[i] = append([]float32(nil), m.Params()[i].Grad...)
	})
	require.Equal(t, []int{5, 4, 3, 2, 1, 0}, order)
	for i, p := range m.Params() {
		require.Equal(t, p.Grad, final[i], p.Name)
	}
}

// TestShards is what data parallel training rests on: the gradients of the
// parts of a batch add up to the gradient of the batch.
func TestShards(t *testing.T) {
	m := must.Get(New([]int{6, 5, 3}, 1))
	x, y := batch(10, 6, 3, 2)
	sum := make([][]float64, len(m.Params()))
	loss := 0.
	for _, cut := range [][2]int{{0, 3}, {3, 3}, {3, 10}} { // one of them empty
		l, _ := m.Backward(x[cut[0]*6:cut[1]*6], y[cut[0]:cut[1]], .1, nil)
		loss += l
		for k, p := range m.Params() {
			sum[k] = append(sum[k], make([]float64, len(p.Grad)-len(sum[k]))...)
			for i, g := range p.Grad {
				sum[k][i] += float64(g)
			}
		}
	}
	whole, _ := m.Backward(x, y, .1, nil)
	require.InDelta(t, whole, loss, 1e-9)
	for k, p := range m.Params() {
		for i, g := range p.Grad {
			require.InDelta(t, g, sum[k][i], 1e-6, "%s[%d]", p.Name, i)
		}
	}
}

func TestSeed(t *testing.T) {
	a, _ := New([]int{4, 3, 2}, 7)
	b, _ := New([]int{4, 3, 2}, 7)
	c, _ := New([]int{4, 3, 2}, 8)
	require.Equal(t, a.Params(), b.Params())
	require.NotEqual(t, a.Params()[0].Value, c.Params()[0].Value)
	for _, v := range a.Params()[0].Value {
		require.LessOrEqual(t, math.Abs(float64(v)), math.Sqrt(3./4))
	}
}

func TestSizes(t *testing.T) {
	for _, sizes := range [][]int{nil, {3}, {3, 0}, {3, -1, 2}} {
		_, err := New(sizes, 1)
		require.Error(t, err, "%v", sizes)
	}
}

// TestSGD follows PyTorch's formula by hand: v1 = g, v2 = 0.5 g + g.
func TestSGD(t *testing.T) {
	p := &Param{Value: []float32{10, 20}, Grad: []float32{1, 2}}
	s := SGD{Rate: .5, Momentum: .5}
	s.Step([]*Param{p})
	require.Equal(t, []float32{9.5, 19}, p.Value)
	s.Step([]*Param{p})
	require.Equal(t, []float32{8.75, 17.5}, p.Value)
	require.Equal(t, [][]float32{{1.5, 3}}, s.Velocity([]*Param{p}))
}

// TestLearns fits a small random problem by heart.
func TestLearns(t *testing.T) {
	m := must.Get(New([]int{8, 32, 4}, 1))
	x, y := batch(32, 8, 4, 3)
	s := SGD{Rate: .1, Momentum: .9}
	for range 300 {
		m.Backward(x, y, 1./32, nil)
		s.Step(m.Params())
	}
	loss, correct := m.Forward(x, y)
	require.Equal(t, 32, correct)
	require.Less(t, loss/32, .05)
}
