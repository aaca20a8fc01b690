// Package checkpoint writes the state of a training run to a file and reads it
// back: a description as JSON, and the numbers.
//
// A file is, with integers in little-endian:
//
//	8 bytes   "c10dckpt"
//	uint32    version, 1
//	uint32    length of the description
//	          the description, JSON
//	uint32    number of slices
//	          each slice: uint64 number of elements, float32 elements
//	32 bytes  SHA-256 of all before it
//
// It is written under another name, synced and renamed, so that under its name
// there is at any time a whole checkpoint, the old one or the new one, whenever
// the process or the machine dies.
package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
)

const (
	magic   = "c10dckpt"
	version = 1
)

// ErrDamaged is matched by the error of a file that is no whole checkpoint.
var ErrDamaged = errors.New("damaged checkpoint")

// ErrVersion is matched by the error of a checkpoint of another format version.
var ErrVersion = errors.New("checkpoint of another version")

// Write replaces the file at path with a checkpoint.
func Write(path string, description any, slices [][]float32) error {
	b, err := encode(description, slices)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if err := replace(path, b); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// Read returns the slices of the checkpoint at path and decodes the
// description into what description points to.
func Read(path string, description any) ([][]float32, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	slices, err := decode(b, description)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", path, err)
	}
	return slices, nil
}

func encode(description any, slices [][]float32) ([]byte, error) {
	text, err := json.Marshal(description)
	if err != nil {
		return nil, err
	}
	b := binary.LittleEndian.AppendUint32([]byte(magic), version)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	b = append(b, text...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(slices)))
	for _, s := range slices {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
		for _, v := range s {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

func decode(b []byte, description any) ([][]float32, error) {
	if !bytes.HasPrefix(b, []byte(magic)) {
		return nil, fmt.Errorf("%w: it does not begin with %q", ErrDamaged, magic)
	}
	if len(b) >= len(magic)+4 {
		if v := binary.LittleEndian.Uint32(b[len(magic):]); v != version {
			return nil, fmt.Errorf("%w: it has %d, this program reads %d", ErrVersion, v, version)
		}
	}
	n := len(b) - sha256.Size
	if n < len(magic)+4 || sha256.Sum256(b[:n]) != [sha256.Size]byte(b[n:]) {
		return nil, fmt.Errorf("%w: the checksum does not fit its %d bytes", ErrDamaged, len(b))
	}
	r := reader{b: b[len(magic)+4 : n]}
	text := r.take(uint64(r.uint32()))
	slices := [][]float32{}
	for n := r.uint32(); n > 0 && !r.short; n-- {
		data := r.take(4 * min(r.uint64(), 1<<40))
		s := make([]float32, len(data)/4)
		for i := range s {
			s[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		slices = append(slices, s)
	}
	if r.short || len(r.b) != 0 {
		return nil, fmt.Errorf("%w: its lengths do not fit its size", ErrDamaged)
	}
	if err := json.Unmarshal(text, description); err != nil {
		return nil, fmt.Errorf("%w: description: %v", ErrDamaged, err)
	}
	return slices, nil
}

// reader takes pieces from the front of b. Once a piece is not there, short is
// set and all further pieces are empty.
type reader struct {
	b     []byte
	short bool
}

func (r *reader) take(n uint64) []byte {
	if r.short || n > uint64(len(r.b)) {
		r.short = true
		return nil
	}
	piece := r.b[:n]
	r.b = r.b[n:]
	return piece
}

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// replace puts b into the file at path in one step.
func replace(path string, b []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if _, err = f.Write(b); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a rename survive a power cut. Windows has no such call.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
