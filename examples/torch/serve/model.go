package main

import (
	"fmt"
	"math"
	"slices"
)

const (
	side    = 8 // pixels of an image's edge
	white   = 16
	classes = 10
)

// maxElements bounds the memory that a trainer can make the server take: two
// sets of 64 MiB. It is a thousand times what the digits need.
const maxElements = 1 << 24

// parameter is a tensor of the model as the trainer announces it.
type parameter struct {
	Name  string `json:"name"`
	Shape []int  `json:"shape"`
}

// network is a multi-layer perceptron with tanh between the layers: the layers'
// sizes from the pixels to the classes. One slice has all parameters, as torch.nn.Linear
// stores them: for each layer a weight of outputs x inputs, row by row, and then a bias.
type network []int

// networkOf returns the network with these parameters, which come from outside.
func networkOf(parameters []parameter) (network, error) {
	if len(parameters) == 0 || len(parameters)%2 != 0 {
		return nil, fmt.Errorf("serve: %d parameters are not the weights and biases of layers", len(parameters))
	}
	n := network{side * side}
	elements := 0
	for i := 0; i < len(parameters); i += 2 {
		w, b := parameters[i], parameters[i+1]
		if len(w.Shape) != 2 || w.Shape[1] != n[len(n)-1] {
			return nil, fmt.Errorf("serve: parameter %q has shape %v; a weight with %d inputs was expected", w.Name, w.Shape, n[len(n)-1])
		}
		out := w.Shape[0]
		if !slices.Equal(b.Shape, []int{out}) {
			return nil, fmt.Errorf("serve: parameter %q has shape %v; a bias for %q, which is %v, was expected", b.Name, b.Shape, w.Name, w.Shape)
		}
		if out < 1 || out > maxElements/(w.Shape[1]+1) {
			return nil, fmt.Errorf("serve: parameter %q has shape %v; outputs must be at least 1, and all elements at most %d", w.Name, w.Shape, maxElements)
		}
		if elements += out * (w.Shape[1] + 1); elements > maxElements {
			return nil, fmt.Errorf("serve: the model has more than %d elements", maxElements)
		}
		n = append(n, out)
	}
	if n[len(n)-1] != classes {
		return nil, fmt.Errorf("serve: the model has %d outputs; %d digits were expected", n[len(n)-1], classes)
	}
	return n, nil
}

// lengths are the parameters' numbers of elements.
func (n network) lengths() []int {
	var lengths []int
	for l := range len(n) - 1 {
		lengths = append(lengths, n[l]*n[l+1], n[l+1])
	}
	return lengths
}

func (n network) elements() int {
	sum := 0
	for _, k := range n.lengths() {
		sum += k
	}
	return sum
}

// probabilities returns how likely the image, of pixels within [0, 1], shows
// each digit. It may be called from many goroutines.
func (n network) probabilities(parameters, image []float32) []float64 {
	x := image
	for l := range len(n) - 1 {
		in, out := n[l], n[l+1]
		weight, bias := parameters[:in*out], parameters[in*out:(in+1)*out]
		parameters = parameters[(in+1)*out:]
		y := make([]float32, out)
		for o := range y {
			sum := bias[o]
			for i, w := range weight[o*in : (o+1)*in] {
				sum += w * x[i]
			}
			if l < len(n)-2 {
				sum = float32(math.Tanh(float64(sum)))
			}
			y[o] = sum
		}
		x = y
	}
	p := make([]float64, len(x))
	top, sum := slices.Max(x), 0.
	for i, v := range x {
		p[i] = math.Exp(float64(v - top))
		sum += p[i]
	}
	for i := range p {
		p[i] /= sum
	}
	return p
}
