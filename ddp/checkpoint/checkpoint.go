// Package checkpoint writes the state of a training run to a file and reads it
// back.
//
// A file is the SHA-256 of the rest, and then, in package gob's format, a description and
// slices of numbers. Save writes it under another name, syncs and renames it. The file is
// therefore always a whole checkpoint, also after the process or the machine dies.
package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// ErrDamaged is matched by the error of a file that is not a whole checkpoint.
var ErrDamaged = errors.New("damaged checkpoint")

// Save replaces the file at path with a checkpoint.
func Save(path string, description any, slices [][]float32) error {
	var b bytes.Buffer
	enc := gob.NewEncoder(&b)
	err := errors.Join(enc.Encode(description), enc.Encode(slices))
	if err == nil {
		sum := sha256.Sum256(b.Bytes())
		err = replace(path, append(sum[:], b.Bytes()...))
	}
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// Load returns the slices of the checkpoint at path and decodes the
// description into what description points to.
func Load(path string, description any) (slices [][]float32, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	n := min(sha256.Size, len(b))
	if sum := sha256.Sum256(b[n:]); !bytes.Equal(sum[:], b[:n]) {
		return nil, fmt.Errorf("checkpoint: %s: %w: the checksum does not fit its %d bytes", path, ErrDamaged, len(b))
	}
	dec := gob.NewDecoder(bytes.NewReader(b[n:]))
	if err := errors.Join(dec.Decode(description), dec.Decode(&slices)); err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w: %w", path, ErrDamaged, err)
	}
	return slices, nil
}

// replace puts b into the file at path in one step.
func replace(path string, b []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // it has another name if all went well
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil || runtime.GOOS == "windows" {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close()) // so that the rename survives a power cut
}
