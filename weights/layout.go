package weights

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/c10d-go/c10d/internal/hostmem"
	"github.com/c10d-go/c10d/tensor"
)

// Param describes a parameter.
type Param struct {
	Name  string
	DType tensor.DType
	Shape []int
}

// layout is what publisher and receiver agree on before an update: the parameters, and how they are
// cut into buckets. A bucket is at most `bucket` bytes of one parameter.
type layout struct {
	bucket int
	params []Param

	sizes   []int // bytes of each parameter
	bytes   int64 // of all
	buckets []bucket
}

// bucket is a range of bytes of a parameter. Deltas count its units: its elements, or halves of
// elements of 16 bytes.
type bucket struct {
	param, from, to int
	unit            int
}

// Limits of what a layout may say.
const (
	maxLayout = 16 << 20 // bytes of its text
	maxParams = 1 << 18
	maxDims   = 64
	minBucket = 64 << 10 // the tables of a receiver have 72 bytes for each bucket
	maxBucket = 1 << 28
)

var errLayout = errors.New("weights: the list of parameters ends too early or too late")

// encode returns the payload of an init frame, which wire.go describes.
func (l *layout) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(l.bucket))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(l.params)))
	for _, p := range l.params {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(p.Name)))
		b = append(b, p.Name...)
		b = append(b, byte(len(p.DType.String())))
		b = append(b, p.DType.String()...)
		b = append(b, byte(len(p.Shape)))
		for _, n := range p.Shape {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
	}
	return b
}

// parseLayout reads the payload of an init frame. It cuts no buckets.
func parseLayout(text []byte) (*layout, error) {
	short := false
	take := func(n int) []byte { // zeros if there are fewer than n
		if short = short || n > len(text); short {
			return make([]byte, n)
		}
		part := text[:n:n]
		text = text[n:]
		return part
	}
	l := &layout{bucket: int(min(binary.LittleEndian.Uint32(take(4)), maxBucket+1))}
	count := binary.LittleEndian.Uint32(take(4))
	if count > maxParams || int(count) > len(text)/4 {
		return nil, fmt.Errorf("weights: %d parameters in %d bytes, at most %d are possible", count, len(text), maxParams)
	}
	l.params = make([]Param, count)
	for i := range l.params {
		p := &l.params[i]
		p.Name = string(take(int(binary.LittleEndian.Uint16(take(2)))))
		dtype := string(take(int(take(1)[0])))
		p.Shape = make([]int, take(1)[0])
		for d := range p.Shape {
			p.Shape[d] = int(binary.LittleEndian.Uint64(take(8))) // check refuses negative ones
		}
		if short {
			return nil, errLayout
		}
		var err error
		if p.DType, err = tensor.ParseDType(dtype); err != nil {
			return nil, fmt.Errorf("weights: parameter %.100q: %w", p.Name, err)
		}
	}
	if short || len(text) != 0 {
		return nil, errLayout
	}
	return l, l.check()
}

// check reports what is wrong with l, and measures the parameters.
func (l *layout) check() error {
	switch {
	case len(l.params) == 0 || len(l.params) > maxParams:
		return fmt.Errorf("weights: %d parameters, want 1 to %d", len(l.params), maxParams)
	case l.bucket < minBucket || l.bucket > maxBucket || l.bucket%64 != 0:
		return fmt.Errorf("weights: buckets of %d bytes, want a multiple of 64 from %d to %d", l.bucket, minBucket, maxBucket)
	}
	names := make(map[string]bool, len(l.params))
	l.sizes = make([]int, 0, len(l.params))
	for _, p := range l.params {
		if len(p.Name) > math.MaxUint16 || len(p.Shape) > maxDims {
			return fmt.Errorf("weights: parameter %.100q has a name of %d bytes and %d dimensions, at most %d and %d are possible", p.Name, len(p.Name), len(p.Shape), math.MaxUint16, maxDims)
		}
		if names[p.Name] {
			return fmt.Errorf("weights: two parameters have the name %.100q", p.Name)
		}
		names[p.Name] = true
		size, err := bytesOf(p.DType, p.Shape)
		if err != nil {
			return fmt.Errorf("weights: parameter %.100q: %w", p.Name, err)
		}
		if l.bytes += int64(size); l.bytes < 0 {
			return errors.New("weights: the parameters have more than 8 EiB")
		}
		l.sizes = append(l.sizes, size)
	}
	return nil
}

// cut makes the buckets.
func (l *layout) cut() {
	for i, size := range l.sizes {
		for from := 0; from < size; from += l.bucket {
			l.buckets = append(l.buckets, bucket{i, from, min(from+l.bucket, size), min(l.params[i].DType.Size(), 8)})
		}
	}
}

// bytesOf returns the bytes of a contiguous tensor.
func bytesOf(d tensor.DType, shape []int) (int, error) {
	size := d.Size()
	if len(shape) > 0 && slices.Min(shape) < 0 {
		return 0, fmt.Errorf("shape %v has a negative size", shape)
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
	return l.bucket == m.bucket && slices.EqualFunc(l.params, m.params, func(a, b Param) bool {
		return a.Name == b.Name && a.DType == b.DType && slices.Equal(a.Shape, b.Shape)
	})
}

// memory returns zeroed memory for each parameter, aligned for its elements.
func (l *layout) memory() [][]byte {
	m := make([][]byte, len(l.params))
	for i, size := range l.sizes {
		m[i] = alignedBytes(size)
		hostmem.LargePages(m[i])
	}
	return m
}
