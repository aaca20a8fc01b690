package mlp

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Param is a weight matrix or a bias vector.
type Param struct {
	Name  string
	Shape []int     // {inputs, outputs} of a weight, {outputs} of a bias
	Value []float32 // row-major
	Grad  []float32 // written by Backward
}

// Model is a multi-layer perceptron. One goroutine may use it at a time.
type Model struct {
	sizes  []int
	params []*Param // weight and bias of each layer, in forward order

	// One row of each for every image of the batch at hand.
	outputs [][]float32 // of each layer, after tanh except for the last
	deltas  [][]float32 // derivative of the loss by the layer's output before tanh
}

// New returns a model with layers between the given sizes: pixels first,
// classes last. Weights are drawn uniformly with variance 1/inputs (LeCun's rule
// for tanh), the same for one seed; biases are 0.
func New(sizes []int, seed uint64) (*Model, error) {
	if len(sizes) < 2 || slices.Min(sizes) < 1 {
		return nil, fmt.Errorf("mlp: sizes %v: at least two are needed, each at least 1", sizes)
	}
	layers := len(sizes) - 1
	m := &Model{sizes: slices.Clone(sizes), outputs: make([][]float32, layers), deltas: make([][]float32, layers)}
	random := rand.New(rand.NewPCG(seed, 0))
	for l := range layers {
		in, out := sizes[l], sizes[l+1]
		w := &Param{Name: fmt.Sprintf("layer%d.weight", l), Shape: []int{in, out}, Value: make([]float32, in*out), Grad: make([]float32, in*out)}
		b := &Param{Name: fmt.Sprintf("layer%d.bias", l), Shape: []int{out}, Value: make([]float32, out), Grad: make([]float32, out)}
		bound := math.Sqrt(3 / float64(in))
		for i := range w.Value {
			w.Value[i] = float32((2*random.Float64() - 1) * bound)
		}
		m.params = append(m.params, w, b)
	}
	return m, nil
}

// Sizes returns the sizes of the layers, pixels first, classes last.
func (m *Model) Sizes() []int { return slices.Clone(m.sizes) }

// Params returns the parameters in the order of the forward pass. They are the
// model's own.
func (m *Model) Params() []*Param { return m.params }

// Forward returns the summed loss over the images and how many of them the
// model got right. inputs has a row of pixels for every label.
func (m *Model) Forward(inputs []float32, labels []uint8) (loss float64, correct int) {
	return m.forward(inputs, labels, nil, 0)
}

// Backward does what Forward does and sets every gradient to scale times the derivative
// of the summed loss. A scale of 1/len(labels) gives the gradient of the mean. Backward
// calls ready, unless it is nil, with the index of each parameter whose gradient is final,
// last layer first. Without images all gradients are zero.
func (m *Model) Backward(inputs []float32, labels []uint8, scale float32, ready func(param int)) (loss float64, correct int) {
	n, last := len(labels), len(m.sizes)-2
	m.deltas[last] = resize(m.deltas[last], n*m.sizes[last+1])
	loss, correct = m.forward(inputs, labels, m.deltas[last], scale)
	if ready == nil {
		ready = func(int) {}
	}
	for l := last; l >= 0; l-- {
		in, out := m.sizes[l], m.sizes[l+1]
		x, delta := inputs, m.deltas[l]
		if l > 0 {
			x = m.outputs[l-1]
		}
		w, b := m.params[2*l], m.params[2*l+1]
		ParamGrad(w.Grad, b.Grad, x, delta, n, in, out)
		ready(2*l + 1)
		ready(2 * l)
		if l == 0 {
			break
		}
		m.deltas[l-1] = resize(m.deltas[l-1], n*in)
		InputGrad(m.deltas[l-1], x, w.Value, delta, n, in, out)
	}
	return loss, correct
}

// forward fills outputs, and delta with scale times the derivative of the
// summed loss by the last layer's outputs unless delta is nil.
func (m *Model) forward(inputs []float32, labels []uint8, delta []float32, scale float32) (loss float64, correct int) {
	n, x := len(labels), inputs
	last := len(m.sizes) - 2
	for l := range m.outputs {
		in, out := m.sizes[l], m.sizes[l+1]
		w, b := m.params[2*l].Value, m.params[2*l+1].Value
		m.outputs[l] = resize(m.outputs[l], n*out)
		Linear(m.outputs[l], x, w, b, n, in, out)
		if l < last {
			Tanh(m.outputs[l])
		}
		x = m.outputs[l]
	}
	classes := m.sizes[last+1]
	for k, label := range labels {
		var d []float32
		if delta != nil {
			d = delta[k*classes : (k+1)*classes]
		}
		one, right := Softmax(d, x[k*classes:(k+1)*classes], int(label), scale)
		loss += one
		if right {
			correct++
		}
	}
	return loss, correct
}

func resize(s []float32, n int) []float32 {
	return slices.Grow(s[:0], n)[:n]
}

// SGD is stochastic gradient descent with momentum as PyTorch computes it:
// v = Momentum v + gradient, value = value - Rate v.
type SGD struct {
	Rate, Momentum float32
	velocity       [][]float32
}

// Velocity returns the optimizer's state, a slice for each parameter: what a
// checkpoint must hold beside the parameters.
func (s *SGD) Velocity(params []*Param) [][]float32 {
	if s.velocity == nil {
		for _, p := range params {
			s.velocity = append(s.velocity, make([]float32, len(p.Value)))
		}
	}
	return s.velocity
}

// Step moves the parameters against their gradients.
func (s *SGD) Step(params []*Param) {
	for k, v := range s.Velocity(params) {
		Step(params[k].Value, v, params[k].Grad, s.Rate, s.Momentum)
	}
}
