package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// kind is the language of a rank.
type kind string

const (
	goRank     kind = "go"
	pythonRank kind = "python"
)

// result is the result of one rank of either kind.
type result struct {
	Rank     int     `json:"rank"`
	Kind     kind    `json:"kind"`
	Torch    string  `json:"torch"`
	Loss     float64 `json:"loss"`     // over the images of the last epoch, of all ranks
	Accuracy float64 `json:"accuracy"` // on the held-out images, of all ranks

	Gradients string `json:"gradients"` // SHA-256 of the averaged gradients of all steps
	Buffers   string `json:"buffers"`   // SHA-256 of the buffers at the end
	Params    []byte `json:"params"`    // float32s in PyTorch's layout, little-endian
	Buckets   []int  `json:"buckets"`   // bytes of each
}

// report is the last line of the output.
type report struct {
	Ranks    int     `json:"ranks"`
	Kinds    []kind  `json:"kinds"`
	Torch    string  `json:"torch,omitempty"`
	Loss     float64 `json:"loss"`
	Accuracy float64 `json:"accuracy"`

	// The averaged gradients of every step, the buffers and the buckets have
	// the same bits on all ranks.
	GradsIdentical   bool  `json:"grads_identical"`
	BuffersIdentical bool  `json:"buffers_identical"`
	Buckets          []int `json:"bucket_bytes"`

	// ParamsIdentical tells whether the parameters have the same bits on all ranks of a
	// kind, and diff how much they differ between a Python and a Go rank.
	ParamsIdentical map[kind]bool `json:"params_identical"`
	diff

	Seconds float64              `json:"seconds"`
	Compare map[kind]*comparison `json:"compare,omitempty"`
}

// diff is the difference of two models.
type diff struct {
	MaxAbs float64 `json:"max_param_diff"` // the largest difference of two parameters
	MaxRel float64 `json:"max_param_diff_rel"`
	Norm   float64 `json:"param_diff_norm"` // length of the difference over the length of the parameters
	Equal  float64 `json:"params_equal"`    // share of the parameters with the same bits
}

// comparison compares another training with the mixed one.
type comparison struct {
	Accuracy float64 `json:"accuracy"`
	Loss     float64 `json:"loss"`
	diff
}

func newReport(kinds []kind, results []result) (*report, error) {
	r := &report{
		Ranks: len(kinds), Kinds: kinds, Loss: results[0].Loss, Accuracy: results[0].Accuracy, Buckets: results[0].Buckets,
		GradsIdentical: true, BuffersIdentical: true, ParamsIdentical: map[kind]bool{}, diff: diff{Equal: 1},
	}
	first := map[kind]result{}
	for rank, x := range results {
		if x.Rank != rank || x.Kind != kinds[rank] {
			return nil, fmt.Errorf("ddp: the result of rank %d (%s) says that it is rank %d (%s)", rank, kinds[rank], x.Rank, x.Kind)
		}
		if !slices.Equal(x.Buckets, r.Buckets) {
			return nil, fmt.Errorf("ddp: buckets of %v bytes on rank %d, of %v on rank 0", x.Buckets, rank, r.Buckets)
		}
		r.GradsIdentical = r.GradsIdentical && x.Gradients == results[0].Gradients
		r.BuffersIdentical = r.BuffersIdentical && x.Buffers == results[0].Buffers
		if _, ok := first[x.Kind]; !ok {
			first[x.Kind], r.ParamsIdentical[x.Kind] = x, true
		}
		r.ParamsIdentical[x.Kind] = r.ParamsIdentical[x.Kind] && string(x.Params) == string(first[x.Kind].Params)
	}
	var err error
	if len(first) == 2 {
		r.diff, err = difference(first[goRank], first[pythonRank])
	}
	return r, err
}

func difference(a, b result) (diff, error) {
	x, y := floats(a.Params), floats(b.Params)
	if len(x) != len(y) || len(x) == 0 {
		return diff{}, fmt.Errorf("ddp: %d parameters on rank %d (%s), %d on rank %d (%s)", len(x), a.Rank, a.Kind, len(y), b.Rank, b.Kind)
	}
	var d diff
	var sum, norm, equal float64
	for i, v := range x {
		e := math.Abs(float64(v) - float64(y[i]))
		if e == 0 {
			equal++
		} else {
			d.MaxRel = max(d.MaxRel, e/max(math.Abs(float64(v)), math.Abs(float64(y[i]))))
		}
		d.MaxAbs = max(d.MaxAbs, e)
		sum += e * e
		norm += float64(v) * float64(v)
	}
	if sum > 0 {
		d.Norm = math.Sqrt(sum / norm)
	}
	d.Equal = round(equal/float64(len(x)), 4)
	return d, nil
}

func floats(b []byte) []float32 {
	out := make([]float32, len(b)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return out
}

func appendFloats(b []byte, v []float32) []byte {
	for _, f := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}
