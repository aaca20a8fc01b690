package main

import (
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
)

// job has the images and the schedule for ranks of both kinds. Python ranks get it as JSON,
// with bytes in base64 and float32s little-endian.
type job struct {
	Torch     string  `json:"torch"`   // version on the Python ranks
	Timeout   float64 `json:"timeout"` // seconds
	Sizes     []int   `json:"sizes"`   // of the layers, pixels first
	Batch     int     `json:"batch"`   // images of a step, on all ranks together
	Rate      float64 `json:"rate"`
	Momentum  float64 `json:"momentum"`
	BucketKiB int     `json:"bucket_kib"`
	OddRank   int     `json:"odd_rank"` // has one more neuron; -1: none

	Images        []byte `json:"images"` // float32
	Labels        []byte `json:"labels"`
	HeldOutImages []byte `json:"held_out_images"` // float32
	HeldOutLabels []byte `json:"held_out_labels"`

	// Orders has the order of the images in each epoch. A step takes the next Batch
	// places. Of these, rank r takes those whose number leaves r when divided by the
	// number of ranks.
	Orders [][]int `json:"orders"`

	// Initial has rank 0's parameters in PyTorch's layout.
	Initial []byte `json:"initial"` // float32
}

func newJob(c *config, torch string) (*job, error) {
	data, err := dataset.Digits()
	if err != nil {
		return nil, err
	}
	j := &job{
		Torch: torch, Timeout: c.timeout.Seconds(), Sizes: []int{data.Train.Features, 128, 64, data.Train.Classes},
		Batch: c.batch, Rate: c.rate, Momentum: c.momentum, BucketKiB: c.bucketKiB, OddRank: c.mismatch,
		Images: appendFloats(nil, data.Train.Inputs), Labels: data.Train.Labels,
		HeldOutImages: appendFloats(nil, data.HeldOut.Inputs), HeldOutLabels: data.HeldOut.Labels,
	}
	if strings.HasPrefix(j.Torch, "2.1.") {
		return nil, fmt.Errorf("ddp: PyTorch %s: the store of 2.1 is neither that of 2.0 nor that of 2.2, and is not supported", j.Torch)
	}
	all, err := ddp.NewDistributedSampler(data.Train.Len(), c.batch, 0, 1, c.seed)
	if err != nil {
		return nil, err
	}
	for epoch := range c.epochs {
		all.SetEpoch(epoch)
		var order []int
		for step := range all.Steps() {
			order = append(order, all.Batch(step).Indices...)
		}
		j.Orders = append(j.Orders, order)
	}
	model, err := mlp.New(j.Sizes, c.seed)
	if err != nil {
		return nil, err
	}
	layout, err := newLayout(model)
	if err != nil {
		return nil, err
	}
	j.Initial, err = pack(nil, layout.values)
	return j, err
}
