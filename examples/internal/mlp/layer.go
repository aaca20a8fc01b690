package mlp

import (
	"math"
	"slices"
)

// The functions here are the arithmetic of a training, of n images at a time.
// Every matrix is row-major. Each element of a result is summed in the order of the
// loops. Code that keeps this order gets the same bits.

// Linear sets the n rows of y to those of x times w plus b.
func Linear(y, x, w, b []float32, n, in, out int) {
	for k := range n {
		row := y[k*out : (k+1)*out]
		copy(row, b)
		for i, v := range x[k*in : (k+1)*in] {
			if v != 0 { // half of the pixels of an image are paper
				axpy(v, w[i*out:(i+1)*out], row)
			}
		}
	}
}

// Tanh replaces each element by its hyperbolic tangent.
func Tanh(y []float32) {
	for j, v := range y {
		y[j] = float32(math.Tanh(float64(v)))
	}
}

// Softmax returns the loss of one image, for the last layer's outputs y, and
// whether the image's class got the most. It sets delta, unless that is nil, to
// scale times the derivative of the loss by y.
func Softmax(delta, y []float32, label int, scale float32) (loss float64, right bool) {
	top := slices.Max(y)
	sum := 0.
	for _, v := range y {
		sum += math.Exp(float64(v - top))
	}
	loss, right = math.Log(sum)-float64(y[label]-top), y[label] == top
	if delta == nil {
		return loss, right
	}
	for j, v := range y {
		delta[j] = scale * float32(math.Exp(float64(v-top))/sum)
	}
	delta[label] -= scale
	return loss, right
}

// ParamGrad sets the gradients of a layer's weight and bias from its inputs x
// and the derivative delta by its outputs.
func ParamGrad(w, b, x, delta []float32, n, in, out int) {
	clear(b)
	clear(w)
	for k := range n {
		d := delta[k*out : (k+1)*out]
		axpy(1, d, b)
		for i, v := range x[k*in : (k+1)*in] {
			if v != 0 {
				axpy(v, d, w[i*out:(i+1)*out])
			}
		}
	}
}

// InputGrad sets dx to the derivative by what tanh made x from, where delta is
// the one by the layer's outputs.
func InputGrad(dx, x, w, delta []float32, n, in, out int) {
	for k := range n {
		d, to := delta[k*out:(k+1)*out], dx[k*in:(k+1)*in]
		for i, v := range x[k*in : (k+1)*in] {
			to[i] = (1 - v*v) * dot(w[i*out:(i+1)*out], d)
		}
	}
}

// Step moves parameters against their gradients.
func Step(value, velocity, grad []float32, rate, momentum float32) {
	for i, g := range grad {
		velocity[i] = momentum*velocity[i] + g
		value[i] -= rate * velocity[i]
	}
}

// axpy adds a*x to y, which are equally long.
func axpy(a float32, x, y []float32) {
	y = y[:len(x)]
	for i, v := range x {
		y[i] += a * v
	}
}

// dot keeps four sums so that an addition need not wait for the one before it.
func dot(x, y []float32) float32 {
	var s0, s1, s2, s3 float32
	y = y[:len(x)]
	i := 0
	for ; i+4 <= len(x); i += 4 {
		s0 += x[i] * y[i]
		s1 += x[i+1] * y[i+1]
		s2 += x[i+2] * y[i+2]
		s3 += x[i+3] * y[i+3]
	}
	for ; i < len(x); i++ {
		s0 += x[i] * y[i]
	}
	return s0 + s1 + (s2 + s3)
}
