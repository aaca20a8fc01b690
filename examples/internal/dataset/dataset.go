package dataset

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Set is a number of images with their labels.
type Set struct {
	Features int       // pixels of an image
	Classes  int       // labels are 0 to Classes-1
	Inputs   []float32 // Len() rows of Features values within [0, 1]
	Labels   []uint8
}

// Len returns the number of images.
func (s *Set) Len() int { return len(s.Labels) }

// Gather copies the images with the given indices to the front of inputs and labels, and
// returns the parts that it filled. Both must have room for them.
func (s *Set) Gather(inputs []float32, labels []uint8, indices []int) ([]float32, []uint8) {
	for k, i := range indices {
		copy(inputs[k*s.Features:(k+1)*s.Features], s.Inputs[i*s.Features:])
		labels[k] = s.Labels[i]
	}
	return inputs[:len(indices)*s.Features], labels[:len(indices)]
}

// Data is a data set in its two parts.
type Data struct {
	Train, HeldOut Set
}

//go:embed digits.csv.gz
var digits []byte

const (
	digitsCount    = 1797
	digitsFeatures = 64
	digitsWhite    = 16 // the largest value of a pixel
)

// Digits returns the embedded data set. Every fifth image is held out, from the
// fifth on: 359 of 1797. The images are ordered by writer, so that both parts
// have images of every writer.
func Digits() (*Data, error) {
	d, err := parseDigits(digits)
	if err != nil {
		return nil, fmt.Errorf("dataset: embedded digits: %w", err)
	}
	return d, nil
}

func parseDigits(b []byte) (*Data, error) {
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	rows := csv.NewReader(z)
	rows.FieldsPerRecord = digitsFeatures + 1
	rows.ReuseRecord = true
	d := new(Data)
	d.Train = Set{Features: digitsFeatures, Classes: 10}
	d.HeldOut = d.Train
	n := 0
	for ; ; n++ {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		part := &d.Train
		if n%5 == 4 {
			part = &d.HeldOut
		}
		for i, field := range row {
			v, err := strconv.ParseUint(field, 10, 8)
			switch {
			case err != nil:
				return nil, fmt.Errorf("image %d: %w", n, err)
			case i == digitsFeatures && v < 10:
				part.Labels = append(part.Labels, uint8(v))
			case i < digitsFeatures && v <= digitsWhite:
				part.Inputs = append(part.Inputs, float32(v)/digitsWhite)
			default:
				return nil, fmt.Errorf("image %d: field %d is %d", n, i, v)
			}
		}
	}
	if n != digitsCount {
		return nil, fmt.Errorf("%d images where %d are expected", n, digitsCount)
	}
	return d, nil
}
