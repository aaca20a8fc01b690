package main

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"sync/atomic"
	"time"
)

// label tells which parameters a set holds.
type label struct {
	Trainer  int       `json:"trainer"` // number of the trainer, from 1
	Version  int64     `json:"version"` // the trainer's steps
	Epoch    int64     `json:"epoch"`
	Accuracy float64   `json:"accuracy"` // on held-out images, as the trainer says
	CRC32    uint32    `json:"crc32"`
	Received time.Time `json:"received"`
}

// set is all parameters of the model at one moment of the training. It does not change.
type set struct {
	label
	network    network
	parameters []float32
}

// weights have the newest complete set. An update is received into a new set, which then
// takes the place of the current one. A prediction therefore never waits for the network
// and never sees half of an update.
type weights struct {
	current  atomic.Pointer[set] // nil until the first
	received atomic.Int64
}

// receive makes a new set current. fill writes all parameters and returns what
// they are; if it fails, the current set stays.
func (w *weights) receive(n network, fill func(parameters []float32) (label, error)) error {
	s := &set{network: n, parameters: make([]float32, n.elements())}
	var err error
	if s.label, err = fill(s.parameters); err != nil {
		return err
	}
	w.current.Store(s)
	w.received.Add(1)
	return nil
}

// checksum is the CRC-32 (IEEE) of the parameters' bytes in little-endian.
func checksum(parameters []float32) uint32 {
	b := make([]byte, 0, 4*len(parameters))
	for _, v := range parameters {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return crc32.ChecksumIEEE(b)
}
