package dataset

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Limits on the lengths in an IDX file. MNIST has 60 000 images of 28x28, EMNIST 814 255.
// maxBytes limits the memory for a damaged or hostile file.
const (
	maxSide  = 1 << 12
	maxBytes = 1 << 30
)

// ErrFormat is matched by the error of a file that is not a valid IDX file.
var ErrFormat = errors.New("not a valid IDX file")

// LoadIDX reads a data set from the four files that MNIST, Fashion-MNIST and
// others are distributed as (train-images-idx3-ubyte and so on), each plain or
// with ".gz". The t10k files are the held-out part.
func LoadIDX(dir string) (*Data, error) {
	d := &Data{Name: filepath.Base(filepath.Clean(dir))}
	for _, part := range []struct {
		name string
		set  *Set
	}{{"train", &d.Train}, {"t10k", &d.HeldOut}} {
		images, err := readIDX(filepath.Join(dir, part.name+"-images-idx3-ubyte"), 3)
		if err != nil {
			return nil, err
		}
		labels, err := readIDX(filepath.Join(dir, part.name+"-labels-idx1-ubyte"), 1)
		if err != nil {
			return nil, err
		}
		if *part.set, err = join(images, labels); err != nil {
			return nil, fmt.Errorf("dataset: %s: part %s: %w", dir, part.name, err)
		}
	}
	if d.Train.Features != d.HeldOut.Features {
		return nil, fmt.Errorf("dataset: %s: training images have %d pixels, held-out images %d", dir, d.Train.Features, d.HeldOut.Features)
	}
	d.Train.Classes = max(d.Train.Classes, d.HeldOut.Classes)
	d.HeldOut.Classes = d.Train.Classes
	return d, nil
}

func join(images, labels array) (Set, error) {
	n := images.dims[0]
	if n != labels.dims[0] {
		return Set{}, fmt.Errorf("%d images but %d labels", n, labels.dims[0])
	}
	if len(images.data) == 0 {
		return Set{}, errors.New("it has no pixels")
	}
	s := Set{Features: images.dims[1] * images.dims[2], Inputs: make([]float32, len(images.data)), Labels: labels.data}
	for i, p := range images.data {
		s.Inputs[i] = float32(p) / 255
	}
	for _, l := range labels.data {
		s.Classes = max(s.Classes, int(l)+1)
	}
	return s, nil
}

// readIDX reads path, or path with ".gz" if there is no such file.
func readIDX(path string, dims int) (array, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		path += ".gz"
		f, err = os.Open(path)
	}
	if err != nil {
		return array{}, fmt.Errorf("dataset: %w", err)
	}
	defer f.Close()
	a, err := parseIDX(f, dims)
	if err != nil {
		return array{}, fmt.Errorf("dataset: %s: %w", path, err)
	}
	return a, nil
}

// array is the content of an IDX file of bytes.
type array struct {
	dims []int
	data []byte
}

// parseIDX reads an IDX file with the given number of dimensions. The file has two zero
// bytes, the element type (8 is uint8), the number of dimensions, each dimension as a
// big-endian uint32, and the elements. It may be compressed by gzip. Memory grows with
// the bytes that were read, not with the lengths in the header.
func parseIDX(r io.Reader, dims int) (array, error) {
	in := bufio.NewReader(r)
	if head, err := in.Peek(2); err == nil && head[0] == 0x1f && head[1] == 0x8b {
		z, err := gzip.NewReader(in)
		if err != nil {
			return array{}, fmt.Errorf("%w: %v", ErrFormat, err)
		}
		in = bufio.NewReader(z)
	}
	head := make([]byte, 4+4*dims)
	if _, err := io.ReadFull(in, head); err != nil {
		return array{}, fmt.Errorf("%w: header: %v", ErrFormat, err)
	}
	if want := [4]byte{0, 0, 8, byte(dims)}; [4]byte(head) != want {
		return array{}, fmt.Errorf("%w: it begins with % x, expected % x", ErrFormat, head[:4], want)
	}
	a := array{dims: make([]int, dims)}
	size := int64(1)
	for i := range a.dims {
		n := int64(binary.BigEndian.Uint32(head[4+4*i:]))
		if i > 0 && n > maxSide {
			return array{}, fmt.Errorf("%w: dimension %d is %d, more than %d", ErrFormat, i, n, maxSide)
		}
		if n > 0 && size > maxBytes/n {
			return array{}, fmt.Errorf("%w: dimensions promise more than %d bytes", ErrFormat, maxBytes)
		}
		a.dims[i], size = int(n), size*n
	}
	var data bytes.Buffer
	n, err := io.Copy(&data, io.LimitReader(in, size+1))
	if err != nil {
		return array{}, fmt.Errorf("%w: %v", ErrFormat, err)
	}
	if n != size {
		return array{}, fmt.Errorf("%w: dimensions %v promise %d elements, the file has %s", ErrFormat, a.dims, size, count(n, size))
	}
	a.data = data.Bytes()
	return a, nil
}

func count(n, size int64) string {
	if n > size {
		return "more"
	}
	return fmt.Sprint(n)
}
