package main

import (
	"context"

	"github.com/c10d-go/c10d/ddp"
)

// engine computes in CPU or in device memory. On a device forward, backward and step enqueue
// and return. result waits for the last pass, but not for work that was enqueued after it.
type engine interface {
	// batch returns the memory for the next pass's images and labels.
	batch() (inputs []float32, labels []uint8)

	// forward starts a pass over the first n images of the batch.
	forward(n int) error

	// backward starts a pass and the backward pass, which computes scale times the
	// gradients of the summed loss. It calls ready for each parameter whose gradient is
	// computed or, on a device, enqueued.
	backward(n int, scale float32, ready func(param int) error) error

	// step runs the optimizer.
	step() error

	// result returns the summed loss of the last pass, and how many of its
	// images the model got right.
	result(ctx context.Context) (loss float64, correct int, err error)

	// push copies parameters and velocities from the trainer's model and optimizer to the
	// engine, pull copies them back.
	push(ctx context.Context) error
	pull(ctx context.Context) error

	// params returns the parameters and the options for DDP.
	params() ([]ddp.Param, ddp.Options, error)

	// reduced gives the engine the DDP that reduces the gradients.
	reduced(d *ddp.DDP)

	// close waits for enqueued work, and frees everything.
	close(ctx context.Context) error
}

// host is the engine in CPU memory: the trainer's own model.
type host struct {
	t       *trainer
	inputs  []float32
	labels  []uint8
	loss    float64
	correct int
}

func newHost(t *trainer, images int) *host {
	return &host{t: t, inputs: make([]float32, images*t.data.Train.Features), labels: make([]uint8, images)}
}

func (h *host) batch() ([]float32, []uint8) { return h.inputs, h.labels }

// of returns the first n images of the batch.
func (h *host) of(n int) ([]float32, []uint8) {
	return h.inputs[:n*h.t.data.Train.Features], h.labels[:n]
}

func (h *host) forward(n int) error {
	h.loss, h.correct = h.t.model.Forward(h.of(n))
	return nil
}

func (h *host) backward(n int, scale float32, ready func(param int) error) (err error) {
	x, y := h.of(n)
	h.loss, h.correct = h.t.model.Backward(x, y, scale, func(param int) {
		if err == nil {
			err = ready(param)
		}
	})
	return err
}

func (h *host) step() error {
	h.t.optimizer.Step(h.t.model.Params())
	return nil
}

func (h *host) result(context.Context) (float64, int, error) { return h.loss, h.correct, nil }

func (h *host) push(context.Context) error  { return nil }
func (h *host) pull(context.Context) error  { return nil }
func (h *host) close(context.Context) error { return nil }
func (h *host) reduced(*ddp.DDP)            {}

func (h *host) params() ([]ddp.Param, ddp.Options, error) {
	p, err := tensors(h.t.model.Params())
	return p, ddp.Options{}, err
}
