package weights

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/c10d-go/c10d/tensor"
)

// Param describes a parameter.
type Param struct {
	Name  string `json:"name"`
	DType string `json:"dtype"` // PyTorch's name, without "torch."
	Shape []int  `json:"shape"`
}

// layout is what publisher and receiver agree on before an update: the parameters, and how they are
// cut into buckets. A bucket is at most `Bucket` bytes of one parameter.
type layout struct {
	Bucket int     `json:"bucket"`
	Params []Param `json:"params"`

	dtypes  []tensor.DType
	buckets []bucket
	bytes   int64
}

// bucket is a range of bytes of a parameter. Deltas count its units: its elements, or halves of
// elements of 16 bytes.
type bucket struct {
	param, from, to int
	unit            int
}

func (b bucket) size() int { return b.to - b.from }

// Limits of what a layout may say.
const (
	maxLayout = 16 << 20 // bytes of its JSON text
	maxParams = 1 << 18
	minBucket = 1 << 10
	maxBucket = 1 << 28
)

// parseLayout reads a layout. A model of more than limit bytes is refused.
func parseLayout(text []byte, limit int64) (*layout, error) {
	l := new(layout)
	if err := json.Unmarshal(text, l); err != nil {
		return nil, fmt.Errorf("weights: the layout cannot be read: %w", err)
	}
	return l, l.plan(limit)
}

// plan checks l and cuts the buckets.
func (l *layout) plan(limit int64) error {
	switch {
	case len(l.Params) == 0 || len(l.Params) > maxParams:
		return fmt.Errorf("weights: %d parameters, want 1 to %d", len(l.Params), maxParams)
	case l.Bucket < minBucket || l.Bucket > maxBucket || l.Bucket%64 != 0:
		return fmt.Errorf("weights: buckets of %d bytes, want a multiple of 64 from %d to %d", l.Bucket, minBucket, maxBucket)
	}
	names := make(map[string]bool, len(l.Params))
	sizes := make([]int, 0, len(l.Params))
	for _, p := range l.Params {
		d, err := tensor.ParseDType(p.DType)
		if err != nil {
			return fmt.Errorf("weights: parameter %q: %w", p.Name, err)
		}
		if names[p.Name] {
			return fmt.Errorf("weights: two parameters have the name %q", p.Name)
		}
		names[p.Name] = true
		size, err := bytesOf(d, p.Shape)
		if err != nil {
			return fmt.Errorf("weights: parameter %q: %w", p.Name, err)
		}
		if l.bytes += int64(size); l.bytes > limit {
			return fmt.Errorf("weights: the parameters have more than %d bytes (ReceiverOptions.MaxBytes)", limit)
		}
		l.dtypes, sizes = append(l.dtypes, d), append(sizes, size)
	}
	if count := l.bytes/int64(l.Bucket) + int64(len(sizes)); count > 1<<24 {
		return fmt.Errorf("weights: %d bytes in buckets of %d are too many buckets", l.bytes, l.Bucket)
	}
	for i, size := range sizes {
		for from := 0; from < size; from += l.Bucket {
			l.buckets = append(l.buckets, bucket{i, from, min(from+l.Bucket, size), min(l.dtypes[i].Size(), 8)})
		}
	}
	return nil
}

// bytesOf returns the bytes of a contiguous tensor.
func bytesOf(d tensor.DType, shape []int) (int, error) {
	size := d.Size()
	for _, n := range shape {
		if n < 0 {
			return 0, fmt.Errorf("shape %v has a negative size", shape)
		}
	}
	if slices.Contains(shape, 0) {
		return 0, nil
	}
	for _, n := range shape {
		if n > math.MaxInt/size {
			return 0, errors.New("the shape is too large")
		}
		size *= n
	}
	return size, nil
}

// equal reports whether l and m have the same parameters and buckets.
func (l *layout) equal(m *layout) bool {
	return l.Bucket == m.Bucket && slices.EqualFunc(l.Params, m.Params, func(a, b Param) bool {
		return a.Name == b.Name && a.DType == b.DType && slices.Equal(a.Shape, b.Shape)
	})
}

// memory returns zeroed memory for each parameter, aligned for its elements.
func (l *layout) memory() [][]byte {
	m := make([][]byte, len(l.Params))
	for i, d := range l.dtypes {
		size, _ := bytesOf(d, l.Params[i].Shape) // plan has checked it
		m[i] = alignedBytes(size)
	}
	return m
}
