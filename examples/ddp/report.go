package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/examples/internal/plot"
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
	Overlap         *float64    `json:"overlap,omitempty"` // share of the time of communication that was hidden behind computing; not for a device
	Data            string      `json:"data"`
	Backend         string      `json:"backend"`
	Device          string      `json:"device,omitempty"` // where the model was, if not in CPU memory
	GPU             string      `json:"gpu,omitempty"`    // rank 0's
	Work            string      `json:"work,omitempty"`   // how gradients in device memory were averaged: device or host
	Store           string      `json:"store"`
	Compare         *comparison `json:"compare,omitempty"`
}

// comparison is what -compare finds: how far the parameters are from those of a
// single process.
type comparison struct {
	MaxAbs   float64 `json:"max_abs"`  // largest difference of a parameter
	Relative float64 `json:"relative"` // |difference| / |parameters|, Euclidean norms
	Accuracy float64 `json:"accuracy"` // of the single process
	Loss     float64 `json:"loss"`
	Seconds  float64 `json:"seconds"`
}

// compareTolerance is the largest comparison.Relative that -compare takes for
// agreement. Rounding alone has stayed below 2e-6 (README.md); one gradient that is
// too small by 1/64 gives 1.6e-4 after 4 epochs (TestCompareSees), 4e-5 after 20.
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
		Data: r.data.Name, Backend: r.config.backend, Store: storeName(r.config.init),
	}
	if r.config.device != onCPU {
		rep.Device = r.config.device
	}
	return rep
}

// publish draws the plot, prints the report, and returns what is wrong with the result.
func (r *rank) publish(stdout io.Writer, rep *report, single *history) error {
	if r.config.plot != "" {
		if err := r.chart(single).WriteFile(r.config.plot); err != nil {
			return err
		}
	}
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

// chart shows the training, and the one of a single process where there is one.
func (r *rank) chart(single *history) *plot.Chart {
	sizes := make([]string, 0, len(r.config.hidden)+2)
	for _, s := range r.state(0).Sizes {
		sizes = append(sizes, strconv.Itoa(s))
	}
	ranks := fmt.Sprintf("%d ranks", r.size)
	if r.size == 1 {
		ranks = "1 rank"
	}
	h := &r.history
	loss := plot.Panel{Title: "training loss", Log: true, Curves: []plot.Curve{
		{Label: "each step", Style: plot.Faint, X: places(len(h.Steps), r.sampler.Steps()), Y: h.Steps},
		{Label: "each epoch", X: places(len(h.Train), 1), Y: h.Train},
	}}
	accuracy := plot.Panel{Title: "held-out accuracy", Percent: true, Curves: []plot.Curve{
		{Label: ranks, X: places(len(h.Accuracy), 1), Y: h.Accuracy},
	}}
	if single != nil {
		x := places(len(single.Train), 1)
		loss.Curves = append(loss.Curves, plot.Curve{Label: "one process", Style: plot.Dashed, X: x, Y: single.Train})
		accuracy.Curves = append(accuracy.Curves, plot.Curve{Label: "one process", Style: plot.Dashed, X: x, Y: single.Accuracy})
	}
	return &plot.Chart{
		Title:  fmt.Sprintf("%s, MLP %s, %s, global batch %d", r.data.Name, strings.Join(sizes, "-"), ranks, r.config.batch),
		XLabel: "epoch",
		Panels: []plot.Panel{loss, accuracy},
	}
}

// places are the ends of n steps, of which an epoch has the given number, in epochs.
func places(n, perEpoch int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(i+1) / float64(perEpoch)
	}
	return x
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}
