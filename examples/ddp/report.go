package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// report is the last line of the output.
type report struct {
	Ranks           int         `json:"ranks"`
	Accuracy        float64     `json:"accuracy"`      // share of held-out images that are right
	Loss            float64     `json:"loss"`          // mean over the training images of the last epoch
	HeldOutLoss     float64     `json:"held_out_loss"` // mean over the held-out images, at the end
	ParamsIdentical bool        `json:"params_identical"`
	ParamsSHA256    string      `json:"params_sha256"`
	Seconds         float64     `json:"seconds"`           // from the start of rank 0 to the end of the training
	ImagesPerSecond float64     `json:"images_per_second"` // all ranks together, evaluation included
	Epochs          int         `json:"epochs"`
	Batch           int         `json:"batch"`
	Params          int         `json:"params"`
	Buckets         int         `json:"buckets"`
	Images          int         `json:"images,omitempty"`      // that all ranks have trained on; with -elastic
	Compression     float64     `json:"compression,omitempty"` // elements of gradients divided by elements sent for them; with -powersgd
	Backend         string      `json:"backend"`
	Device          string      `json:"device,omitempty"` // where the model was, if not in CPU memory
	GPU             string      `json:"gpu,omitempty"`    // rank 0's
	Work            string      `json:"work,omitempty"`   // how gradients in device memory were averaged: device or host
	Store           string      `json:"store"`
	Compare         *comparison `json:"compare,omitempty"`
}

// comparison is the result of -compare: the difference to a single process.
type comparison struct {
	MaxAbs   float64 `json:"max_abs"`  // largest difference of a parameter
	Relative float64 `json:"relative"` // |difference| / |parameters|, Euclidean norms
	Accuracy float64 `json:"accuracy"` // of the single process
	Loss     float64 `json:"loss"`
	Seconds  float64 `json:"seconds"`
}

// compareTolerance is the largest comparison.Relative that -compare accepts. Rounding gives
// less than 2e-6 (README.md). One gradient that is too small by 1/64 gives 1.6e-4 after 4
// epochs (TestCompareSees), 4e-5 after 20.
const compareTolerance = 1e-5

var (
	errDiffer    = errors.New("ddp: the ranks' parameters differ")
	errDisagrees = errors.New("ddp: the single process came to other parameters")
)

func (r *rank) report(identical bool, sum [32]byte) *report {
	h := &r.history
	last := len(h.Train) - 1
	n := 0
	for _, p := range r.model.Params() {
		n += len(p.Value)
	}
	rep := &report{
		Ranks: r.size, Epochs: r.config.epochs, Batch: r.config.batch, Params: n,
		Accuracy: round(h.Accuracy[last], 6), Loss: round(h.Train[last], 6), HeldOutLoss: round(h.HeldOut[last], 6),
		ParamsIdentical: identical, ParamsSHA256: hex.EncodeToString(sum[:]),
		Backend: r.config.backend, Store: storeName(r.config.init),
	}
	if r.config.device != onCPU {
		rep.Device = r.config.device
	}
	return rep
}

// publish prints the report. Its error says what is wrong with the result.
func (r *rank) publish(stdout io.Writer, rep *report) error {
	line, err := json.Marshal(rep)
	if err != nil {
		return fmt.Errorf("ddp: the training diverged, its loss is %v: %w", rep.Loss, err)
	}
	if _, err := fmt.Fprintf(stdout, "%s\n", line); err != nil {
		return err
	}
	switch {
	case !rep.ParamsIdentical:
		return errDiffer
	case rep.Compare != nil && rep.Compare.Relative > compareTolerance:
		return fmt.Errorf("%w: relative difference %.2g, more than %.2g", errDisagrees, rep.Compare.Relative, compareTolerance)
	}
	return nil
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}
