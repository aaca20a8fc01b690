package main

import (
	"fmt"
	"math"
	"slices"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/weights"
)

const (
	side    = 8 // pixels of an image's edge
	white   = 16
	classes = 10
)

// maxElements bounds the memory that a trainer can make the server take: two sets of 64 MiB. It is a thousand times
// what the digits need.
const maxElements = 1 << 24

// network is a multi-layer perceptron with tanh between the layers: the layers' sizes from the pixels to the classes.
// Each layer has a weight of outputs x inputs, row by row, and then a bias, as torch.nn.Linear stores them.
type network []int

// networkOf returns the network with these parameters, which come from outside.
func networkOf(parameters []weights.Param) (network, error) {
	if len(parameters) == 0 || len(parameters)%2 != 0 {
		return nil, fmt.Errorf("serve: %d parameters are not the weights and biases of layers", len(parameters))
	}
	n := network{side * side}
	elements := 0
	for i := 0; i < len(parameters); i += 2 {
		w, b := parameters[i], parameters[i+1]
		if w.DType != tensor.Float32 || b.DType != tensor.Float32 {
			return nil, fmt.Errorf("serve: parameters %q and %q are %v and %v; float32 was expected", w.Name, b.Name, w.DType, b.DType)
		}
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

// elements is the number of all elements.
func (n network) elements() int {
	sum := 0
	for l := range len(n) - 1 {
		sum += (n[l] + 1) * n[l+1]
	}
	return sum
}

// probabilities returns how likely the image, of pixels within [0, 1], shows
// each digit. It may be called from many goroutines.
func (n network) probabilities(parameters [][]float32, image []float32) []float64 {
	x := image
	for l := range len(n) - 1 {
		in, out := n[l], n[l+1]
		weight, bias := parameters[2*l], parameters[2*l+1]
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
