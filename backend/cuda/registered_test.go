package cuda_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestRegisteredMemory runs long broadcasts and messages before, while and after the ranks map each other's memory.
// Memory is freed, and other memory takes its place. Results are right throughout, and Explain tells of the memory.
func TestRegisteredMemory(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		// Broadcasts of three ranks go through the rings, so only messages register memory there.
		const rounds = 10
		size := 2 + int(seed%2)
		o := onDevices(size)
		o.sim.Seed, o.sim.Semantics = seed, s
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
			var large, other *vector
			for round := range rounds {
				root, renew := rng.IntN(size), rng.IntN(4) == 0
				b := make([]byte, 257<<10+16*rng.IntN(100))
				rand.NewChaCha8([32]byte{byte(seed), byte(round)}).Read(b)
				mine := b
				if r != root {
					mine = make([]byte, len(b))
				}
				if large != nil && renew {
					must.Do(errors.Join(large.mem.Close(), large.h.Close()))
				}
				if large == nil || renew {
					large = must.Get(x.vector(tensor.Uint8, r, make([]byte, 264<<10)))
				}
				if other == nil {
					other = must.Get(x.vector(tensor.Uint8, r, make([]byte, 264<<10)))
				}
				must.Do(errors.Join(x.fillVector(large, r, mine), x.fillVector(other, r, make([]byte, len(b)))))
				part := must.Get(large.t.Slice(0, 0, len(b)))
				v, err := x.b.Broadcast(x.ctx, []*tensor.Tensor{part}, backend.BroadcastOptions{Root: root})
				if err == nil {
					err = v.Synchronize(x.stream[r])
				}
				if err != nil {
					return err
				}
				// The root sends the same to the next rank.
				if r == root {
					v, err = x.b.Send(x.ctx, part, (root+1)%size, backend.P2POptions{})
				} else if r == (root+1)%size {
					if part, err = other.t.Slice(0, 0, len(b)); err == nil {
						v, err = x.b.Recv(x.ctx, part, root, backend.P2POptions{})
					}
				}
				if err == nil {
					err = v.Synchronize(x.stream[r])
				}
				if err != nil {
					return err
				}
				got := must.Get(x.bytes(large, r))
				if !bytes.Equal(got[:len(b)], b) {
					return fmt.Errorf("round %d: rank %d has other bytes of the broadcast", round, r)
				}
				got = must.Get(x.bytes(other, r))
				if r == (root+1)%size && !bytes.Equal(got[:len(b)], b) {
					return fmt.Errorf("round %d: rank %d has other bytes of the message", round, r)
				}
				must.Do(v.Wait(x.ctx))
			}
			return nil
		})
		registered := 0
		for _, x := range w.ranks {
			told := false
			for _, c := range x.b.Explain().Choices {
				if c.Op == cuda.RegisteredMemory {
					told = true
					require.Regexp(t, "^[0-9] of 16 regions", c.Algorithm)
					registered += int(c.Algorithm[0] - '0')
				}
			}
			require.True(t, told, "Explain says nothing of registered memory")
		}
		require.Positive(t, registered)
		w.end()
	})
}

// TestRegisteredFreed: the ranks let go of freed memory and register the memory that takes its place, however
// often.
func TestRegisteredFreed(t *testing.T) {
	const rounds, size, most = 20, 2, 10_000
	w := newWorld(t, onDevices(size))
	registered := func(pattern string) bool {
		return !slices.ContainsFunc(w.ranks, func(x *rank) bool {
			return !slices.ContainsFunc(x.b.Explain().Choices, func(c backend.Choice) bool {
				return c.Op == cuda.RegisteredMemory && regexp.MustCompile(pattern).MatchString(c.Algorithm)
			})
		})
	}
	for round := range rounds {
		large := make([]*vector, size)
		w.each(func(x *rank, r int) (err error) {
			large[r], err = x.vector(tensor.Uint8, r, make([]byte, 264<<10))
			return err
		})
		// Memory is registered only when no operation is under way, and the last call may still be on the device.
		for k := 0; k < 3*size || round == rounds-1 && k < most && !registered("^[1-9]"); k++ {
			// The ranks take turns to be the first, when no operation is under way in the process.
			called := make(chan struct{})
			w.each(func(x *rank, r int) error {
				if r != k%size && round > 0 { // the first call connects the ranks
					<-called
				}
				v, err := x.b.Broadcast(x.ctx, []*tensor.Tensor{large[r].t}, backend.BroadcastOptions{Root: k / size % size})
				if r == k%size {
					close(called)
				}
				if err != nil {
					return err
				}
				return v.Wait(x.ctx)
			})
		}
		w.each(func(_ *rank, r int) error { return large[r].mem.Close() })
	}
	require.True(t, registered("^[1-9] of 16 regions"))
	w.end()
}

// TestRegisteredOutOfOrder receives into a tensor whose elements are not in order. Peers may not write straight into the
// registered memory that it lies in.
func TestRegisteredOutOfOrder(t *testing.T) { onVirtualTime(t, testRegisteredOutOfOrder) }

func testRegisteredOutOfOrder(t *testing.T) {
	const size, rows, columns, left = 2, 3, 40_000, 1000
	w := newWorld(t, onDevices(size))
	w.each(func(x *rank, r int) error {
		b := make([]byte, 4*rows*columns)
		for i := range b {
			b[i] = byte(i % 251)
		}
		v := must.Get(x.vector(tensor.Uint8, r, b))
		whole := must.Get(tensor.OnDevice(tensor.Float32, cuda.OnStream(v.mem, x.stream[r]), rows, columns))
		apart := must.Get(whole.Slice(1, 0, columns-left))
		for round := range 6 {
			part := whole
			if round > 3 { // the memory is registered by now
				part = apart
			}
			must.Do(x.fillVector(v, r, b))
			if r == 1 {
				must.Do(x.stream[r].Memset(v.mem.Ptr(), 0, len(b)))
			}
			must.Do(x.wait(x.b.Broadcast(x.ctx, []*tensor.Tensor{part}, backend.BroadcastOptions{})))
			got := must.Get(x.bytes(v, r))
			for row := range rows {
				at, n := 4*columns*row, 4*(columns-left)
				if !bytes.Equal(got[at:at+n], b[at:at+n]) {
					return fmt.Errorf("round %d: rank %d has other bytes in row %d", round, r, row)
				}
			}
		}
		return nil
	})
	w.end()
}

// fillVector has the caller's stream bring bytes to a vector, when it has ended what it was given.
func (x *rank) fillVector(y *vector, device int, b []byte) (err error) {
	defer must.Catch(&err)
	e := must.Get(x.stream[device].Record())
	defer e.Release()
	must.Do(e.Sync(x.ctx))
	driver.HostAccess(x.d, "filling", driver.Writes(y.h.Ptr(), len(b)))
	copy(y.h.Bytes(), b)
	return x.stream[device].Copy(y.mem.Ptr(), y.h.Ptr(), len(b))
}

// TestRegisteredLeft: a receive that has failed ends when the sender's kernel has left its device, because that may
// still write to the tensor.
func TestRegisteredLeft(t *testing.T) {
	defer cuda.SetGrace(time.Minute)()
	var hold atomic.Bool
	entered, release := make(chan struct{}), make(chan struct{})
	s := onDevices(2)
	s.sim.Quiet = true
	for name, f := range s.sim.Kernels {
		s.sim.Kernels[name] = func(k *sim.Run) error {
			if hold.CompareAndSwap(true, false) {
				close(entered)
				<-release
			}
			return f(k)
		}
	}
	w := newWorld(t, s)
	var works [2]*work.Work
	var vectors [2]*vector
	message := func(x *rank, r int) (err error) {
		if r == 0 {
			works[r], err = x.b.Send(x.ctx, vectors[r].t, 1, backend.P2POptions{})
		} else {
			works[r], err = x.b.Recv(x.ctx, vectors[r].t, 0, backend.P2POptions{})
		}
		return err
	}
	w.each(func(x *rank, r int) (err error) {
		if err = x.meetDirectly(r); err == nil {
			vectors[r], err = x.vector(tensor.Uint8, r, make([]byte, 512<<10))
		}
		for range 6 { // until the sender has mapped the tensor
			if err == nil {
				err = message(x, r)
			}
			if err == nil {
				err = works[r].Wait(x.ctx)
			}
		}
		return err
	})
	hold.Store(true)
	require.NoError(t, message(w.ranks[0], 0))
	<-entered
	require.NoError(t, message(w.ranks[1], 1))
	w.ranks[1].b.Abort(errors.New("no more"))
	ctx, cancel := context.WithTimeout(w.ctx, 200*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, works[1].Wait(ctx), context.DeadlineExceeded)
	require.False(t, works[1].IsCompleted())
	close(release)
	for _, v := range works {
		require.ErrorIs(t, v.Wait(w.ctx), work.ErrAborted)
	}
	w.drop(t)
}

// TestRegisteredReduce has the root of a long sum of two ranks read the other one's tensor. Only that rank registers
// memory.
func TestRegisteredReduce(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs 128 MiB for each rank")
	}
	const size, root, n, rounds = 2, 1, 128 << 20, 4
	w := newWorld(t, onDevices(size))
	w.each(func(x *rank, r int) error {
		v := must.Get(x.d.Device(r))
		m := must.Get(v.Alloc(n))
		x.close = append(x.close, m)
		ends := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		sum := must.Get(tensor.OnDevice(tensor.Float32, cuda.OnStream(m, x.stream[r]), n/4))
		for round := range rounds {
			// All bytes are 0x40, or 0x3f.
			must.Do(x.stream[r].Memset(m.Ptr(), byte(0x40-r), n))
			c, err := x.b.Reduce(x.ctx, sum, backend.ReduceOptions{Op: backend.Sum(), Root: root})
			if err == nil {
				err = c.Synchronize(x.stream[r])
			}
			if err == nil && r != root {
				err = x.stream[r].Memset(m.Ptr(), 0, n) // the root has read
			}
			if err == nil {
				err = errors.Join(x.stream[r].Copy(ends.mem.Ptr(), m.Ptr(), 4), x.stream[r].Copy(ends.mem.Ptr()+4, m.Ptr()+n-4, 4))
			}
			if err != nil {
				return err
			}
			got := must.Get(x.bytes(ends, r))
			want := float32(0)
			if r == root {
				want = math.Float32frombits(0x40404040) + math.Float32frombits(0x3f3f3f3f)
			}
			for i := range 2 {
				if f := math.Float32frombits(binary.NativeEndian.Uint32(got[4*i:])); f != want {
					return fmt.Errorf("round %d: rank %d has %v at end %d, want %v", round, r, f, i, want)
				}
			}
			must.Do(c.Wait(x.ctx))
		}
		return nil
	})
	for r, x := range w.ranks {
		for _, c := range x.b.Explain().Choices {
			if c.Op == cuda.RegisteredMemory {
				require.Equal(t, fmt.Sprintf("%d of 16 regions", 1-r), c.Algorithm, "rank %d", r)
				require.Contains(t, c.Why, "reads from it")
			}
		}
	}
	w.end()
}
