package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/weights"
)

// label tells which parameters a set holds.
type label struct {
	Trainer   int64     `json:"trainer"` // the trainer's process
	Version   uint64    `json:"version"` // the trainer's steps
	Epoch     int64     `json:"epoch"`
	Accuracy  float64   `json:"accuracy"` // on held-out images, as the trainer says
	Published time.Time `json:"published"`
}

// The trainer publishes one more tensor after its parameters: aboutLen int64, which are its process, its epoch, its
// accuracy in millionths, and the time in milliseconds since 1970. So they change with the parameters, as one version.
const (
	about    = "about"
	aboutLen = 4
)

// set is one version of all parameters. Its user releases it soon.
type set struct {
	label
	weights.Version
	network    network
	parameters [][]float32 // the layers' weights and biases in turn
}

// accept refuses parameters that are not those of a network.
func accept(params []weights.Param) error {
	if n := len(params) - 1; n < 0 || params[n].Name != about || params[n].DType != tensor.Int64 || !slices.Equal(params[n].Shape, []int{aboutLen}) {
		return fmt.Errorf("serve: the last parameter must be %q, %d int64", about, aboutLen)
	}
	_, err := networkOf(params[:len(params)-1])
	return err
}

// acquire returns the newest set of a receiver that accepts, and false before the first.
func acquire(r *weights.Receiver) (set, bool) {
	v, ok := r.Acquire()
	if !ok {
		return set{}, false
	}
	s, params := set{Version: v}, v.Params()
	n := len(params) - 1
	numbers, err := tensor.Data[int64](v.Tensor(about))
	if err == nil {
		s.label = label{numbers[0], v.Number(), numbers[1], float64(numbers[2]) / 1e6, time.UnixMilli(numbers[3])}
		s.network, err = networkOf(params[:n])
	}
	for _, p := range params[:n] {
		var data []float32
		if err == nil {
			data, err = tensor.Data[float32](v.Tensor(p.Name))
		}
		s.parameters = append(s.parameters, data)
	}
	if err != nil {
		panic(err) // accept has seen the same parameters
	}
	return s, true
}
