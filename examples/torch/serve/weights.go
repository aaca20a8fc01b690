package main

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// label tells which parameters a set holds.
type label struct {
	Trainer  int       `json:"trainer"` // which of those that came, from 1
	Version  int64     `json:"version"` // the trainer's steps
	Epoch    int64     `json:"epoch"`
	Accuracy float64   `json:"accuracy"` // on held-out images, as the trainer says
	CRC32    uint32    `json:"crc32"`
	Received time.Time `json:"received"`
}

// set is all parameters of the model at one moment of the training.
type set struct {
	// mu is held for reading by predictions and for writing while the set is
	// being received.
	mu sync.RWMutex
	label
	network    network
	parameters []float32
}

// weights are two sets: the current one, which predictions use, and the spare
// one, which the next parameters are received into. When those are complete the
// two change places, by one store of a pointer. So a prediction never waits for
// the network and never sees half of an update, and however large the model is
// there are two of it in memory.
type weights struct {
	current  atomic.Pointer[set]
	spare    *set // the receiver's alone
	received atomic.Int64
}

// use calls f with the newest complete set, which stays as it is until f
// returns. It returns false if there is none yet.
func (w *weights) use(f func(*set)) bool {
	for {
		s := w.current.Load()
		if s == nil {
			return false
		}
		// It fails only if since the Load another set has become current and
		// this one is being received into. Waiting for that would be to wait
		// for the trainer.
		if s.mu.TryRLock() {
			defer s.mu.RUnlock()
			f(s)
			return true
		}
	}
}

// receive makes a new set current. fill writes all parameters and returns what
// they are; if it fails, the set is dropped and the current one stays. One
// goroutine at a time may call receive. It waits for predictions that still use
// the set before the current one.
func (w *weights) receive(n network, fill func(parameters []float32) (label, error)) error {
	if w.spare == nil {
		w.spare = new(set)
	}
	s := w.spare
	s.mu.Lock()
	s.network = n
	if k := n.elements(); len(s.parameters) != k {
		s.parameters = make([]float32, k)
	}
	l, err := fill(s.parameters)
	s.label = l
	s.mu.Unlock()
	if err != nil {
		return err
	}
	w.spare = w.current.Swap(s)
	w.received.Add(1)
	return nil
}

// checksum is the CRC-32 (IEEE) of the parameters' bytes in little-endian.
func checksum(parameters []float32) uint32 {
	var sum uint32
	var buf [4096]byte
	for len(parameters) > 0 {
		n := min(len(parameters), len(buf)/4)
		for i, v := range parameters[:n] {
			binary.LittleEndian.PutUint32(buf[4*i:], math.Float32bits(v))
		}
		sum = crc32.Update(sum, crc32.IEEETable, buf[:4*n])
		parameters = parameters[n:]
	}
	return sum
}
