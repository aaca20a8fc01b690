package main

import (
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/tensor"
)

// layout has an mlp's parameters in PyTorch's layout. PyTorch's nn.Linear computes
// x Wᵀ + b, so its weight is {outputs, inputs}. The weight of package mlp is the transpose.
// Values and gradients are therefore views with the dimensions exchanged. DDP also compares
// strides, which must be those of nn.Linear's weight, so DDP synchronises a copy.
type layout struct {
	params []ddp.Param      // Grad is a view of the model's gradient
	values []*tensor.Tensor // views of the model's parameters
	grads  []*tensor.Tensor
}

func newLayout(model *mlp.Model) (*layout, error) {
	l := new(layout)
	for _, p := range model.Params() {
		value, err := torchView(p.Value, p.Shape)
		if err != nil {
			return nil, err
		}
		grad, err := torchView(p.Grad, p.Shape)
		if err != nil {
			return nil, err
		}
		synced, err := tensor.New(tensor.Float32, value.Shape()...)
		if err != nil {
			return nil, err
		}
		if err := synced.CopyFrom(value); err != nil {
			return nil, err
		}
		l.params = append(l.params, ddp.Param{Name: p.Name, Value: synced, Grad: grad})
		l.values, l.grads = append(l.values, value), append(l.grads, grad)
	}
	return l, nil
}

func torchView(data []float32, shape []int) (*tensor.Tensor, error) {
	t, err := tensor.Of(data, shape...)
	if err != nil || len(shape) < 2 {
		return t, err
	}
	return t.Transpose(0, 1)
}

// adopt copies the parameters that DDP gave this rank into the model.
func (l *layout) adopt() error {
	for i, p := range l.params {
		if err := l.values[i].CopyFrom(p.Value); err != nil {
			return err
		}
	}
	return nil
}

// centre subtracts the running mean of the images from each image, as Centre in trainer.py.
// Its state is the model's buffers.
type centre struct {
	mean    []float32
	batches []int64 // one
	buffers []ddp.Buffer
}

func newCentre(features int) (*centre, error) {
	c := &centre{mean: make([]float32, features), batches: make([]int64, 1)}
	mean, err := tensor.Of(c.mean)
	if err != nil {
		return nil, err
	}
	batches, err := tensor.Of(c.batches, []int{}...) // no dimension, as PyTorch's counters
	if err != nil {
		return nil, err
	}
	c.buffers = []ddp.Buffer{{Name: "mean", Value: mean}, {Name: "batches", Value: batches}}
	return c, nil
}

// forward centres rows of pixels in place. In training it then moves the mean towards that
// of the images, by a tenth.
func (c *centre) forward(rows []float32, training bool) {
	n := len(rows) / len(c.mean)
	sums := make([]float32, len(c.mean))
	for k := range n {
		row := rows[k*len(c.mean):]
		for i, m := range c.mean {
			sums[i] += row[i]
			row[i] -= m
		}
	}
	if !training || n == 0 {
		return
	}
	for i, s := range sums {
		c.mean[i] += 0.1 * (s/float32(n) - c.mean[i])
	}
	c.batches[0]++
}
