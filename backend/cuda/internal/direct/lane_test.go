package direct_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// end is one end of a lane, with a stream and memory.
type end struct {
	l    *direct.Lane
	peer int
	send bool
	into direct.Into
	s    driver.Stream
	mem  driver.Memory
	host driver.HostMemory
}

// ends makes the ends of all lanes of a rank, with room for so many bytes.
func (m *member) ends(bytes int) (all []*end, closes func() error, err error) {
	closes = func() (err error) {
		for _, e := range all {
			err = errors.Join(err, e.s.Close(), e.mem.Close(), e.host.Close())
		}
		return err
	}
	for p := range m.ranks {
		for _, send := range []bool{true, false} {
			if p == m.rank {
				continue
			}
			e := &end{peer: p, send: send}
			if e.l, err = m.c.Lane(p, send); err != nil {
				return nil, closes, err
			}
			if e.s, err = m.v.NewStream(driver.StreamOptions{Name: fmt.Sprintf("rank %d lane %d %v", m.rank, p, send)}); err != nil {
				return nil, closes, err
			}
			if e.mem, err = m.v.Alloc(bytes); err != nil {
				return nil, closes, err
			}
			if e.host, err = m.d.AllocHost(bytes); err != nil {
				return nil, closes, err
			}
			all = append(all, e)
		}
	}
	// The first two receives go straight to their memory, if they are large.
	for i := range min(len(all), 4) {
		if all[i].into, err = m.into(all[i].mem); err != nil {
			return nil, closes, err
		}
	}
	return all, closes, m.meet()
}

// lanes sends messages on all lanes at once, each rank in an order of its own, with all_reduces on another
// stream between.
func lanes(m *member, rounds, most int) (err error) {
	all, closes, err := m.ends(most)
	defer func() { err = errors.Join(err, closes()) }()
	if err != nil {
		return err
	}
	sum, err := m.v.Alloc(64)
	if err != nil {
		return err
	}
	defer sum.Close()
	if err := errors.Join(m.s.Memset(sum.Ptr(), 0, 64), m.meet()); err != nil {
		return err
	}
	own := rand.New(rand.NewPCG(uint64(m.rank), 1))
	const each = 3
	for round := range rounds {
		length := func(from, to, k int) int {
			return rand.New(rand.NewPCG(uint64(from*m.ranks+to), uint64(round*each+k))).IntN(most/each + 1)
		}
		content := func(from, to, k int) []byte {
			b := make([]byte, length(from, to, k))
			fill(b, tensor.Uint8, uint64(round*each+k)<<16|uint64(from*m.ranks+to))
			return b
		}
		for i := range each * (len(all) + 1) {
			k := i / (len(all) + 1)
			if i%(len(all)+1) == 0 {
				own.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				if err := m.c.AllReduce(m.s, sum.Ptr(), sum.Ptr(), 16, tensor.Int32, backend.Sum(), direct.Form{}); err != nil {
					return err
				}
				continue
			}
			e := all[i%(len(all)+1)-1]
			off := k * (most / each)
			if !e.send {
				if err := e.l.Recv(e.s, e.mem.Ptr()+driver.Ptr(off), length(e.peer, m.rank, k), e.into); err != nil {
					return err
				}
				continue
			}
			b := content(m.rank, e.peer, k)
			copy(e.host.Bytes()[off:], b)
			if err := errors.Join(e.s.Copy(e.mem.Ptr()+driver.Ptr(off), e.host.Ptr()+driver.Ptr(off), len(b)), e.l.Send(e.s, e.mem.Ptr()+driver.Ptr(off), len(b))); err != nil {
				return err
			}
		}
		for _, e := range all {
			if !e.send {
				if err := e.s.Copy(e.host.Ptr(), e.mem.Ptr(), most); err != nil {
					return err
				}
			}
		}
		for _, e := range all {
			if err := m.after(e.s); err != nil {
				return err
			}
			for k := 0; k < each && !e.send; k++ {
				want := content(e.peer, m.rank, k)
				if got := e.host.Bytes()[k*(most/each):][:len(want)]; !bytes.Equal(got, want) {
					return fmt.Errorf("rank %d: message %d of round %d from rank %d, of %d bytes, is wrong", m.rank, k, round, e.peer, len(want))
				}
			}
		}
	}
	return m.sync()
}

// after waits for a stream.
func (m *member) after(s driver.Stream) error {
	e := must.Get(s.Record())
	defer e.Release()
	return errors.Join(e.Sync(m.ctx), m.w.Err())
}

// replayLanes replays a graph in which two ranks send each other what they have, with eager messages
// between.
func replayLanes(m *member, n, rounds int) (err error) {
	all, closes, err := m.ends(2 * n)
	defer func() { err = errors.Join(err, closes()) }()
	if err != nil {
		return err
	}
	out, in := all[0], all[1]
	pass := func(n int) error {
		if m.rank == 0 {
			return errors.Join(out.l.Send(m.s, out.mem.Ptr(), n), in.l.Recv(m.s, in.mem.Ptr(), n, in.into))
		}
		return errors.Join(in.l.Recv(m.s, in.mem.Ptr(), n, in.into), out.l.Send(m.s, out.mem.Ptr(), n))
	}
	g, err := driver.Capture(m.s, func() error { return errors.Join(pass(n), pass(3), pass(n/2), pass(n)) })
	if err != nil {
		return err
	}
	defer g.Close()
	if err := m.meet(); err != nil {
		return err
	}
	for i := range rounds {
		fill(out.host.Bytes()[:n], tensor.Uint8, uint64(2*i+m.rank))
		if err := m.s.Copy(out.mem.Ptr(), out.host.Ptr(), n); err != nil {
			return err
		}
		if i%3 == 1 {
			if err := pass(1 + i*9999%n); err != nil {
				return err
			}
		}
		if err := errors.Join(g.Launch(m.s), m.s.Copy(in.host.Ptr(), in.mem.Ptr(), n), m.sync()); err != nil {
			return err
		}
		want := make([]byte, n)
		fill(want, tensor.Uint8, uint64(2*i+1-m.rank))
		if !bytes.Equal(want, in.host.Bytes()[:n]) {
			return fmt.Errorf("rank %d: replay %d is wrong", m.rank, i)
		}
	}
	return nil
}

func init() {
	jobs["lanes"] = func(m *member) error {
		err := errors.Join(lanes(m, m.rounds, m.most), lanes(m, 2, 96<<20))
		if m.ranks == 2 {
			err = errors.Join(err, replayLanes(m, 1<<20, 100))
		}
		return err
	}
}

// TestLanes has GPUs send each other messages, with all_reduces between.
func TestLanes(t *testing.T) {
	gpus(t)
	t.Run("threads", func(t *testing.T) { threads(t, onGPUs(), one(gpus(t), gpuRanks), jobs["lanes"]) })
	t.Run("processes", func(t *testing.T) { processes(t, "lanes") })
}

// TestResidency holds that a multiprocessor has room for a block of each kernel, as the backend counts on when
// it reserves room for the kernels of several groups and of their messages.
func TestResidency(t *testing.T) {
	v := must.Get(gpus(t).Device(0))
	fit := func(image []byte, names ...string) {
		m := must.Get(v.Load(image))
		for _, name := range names {
			f := must.Get(m.Function(name))
			n := must.Get(f.Blocks(512, 0))
			t.Logf("%s: %d blocks of 512 threads on a multiprocessor", name, n)
			require.GreaterOrEqual(t, n, 1, name)
		}
		require.NoError(t, m.Close())
	}
	for _, ranks := range []int{2, window.MostRanks} {
		direct.Images(ranks, fit)
		direct.RingImage(fit)
	}
}

// TestSimulatedLanes is TestLanes for simulated devices.
func TestSimulatedLanes(t *testing.T) {
	for _, ranks := range []int{2, 4, 8} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d ranks, apart %v", ranks, apart), func(t *testing.T) {
				u := simulated(ranks)
				u.window.LaneChannels = 1
				threads(t, u, drivers(t, machine(t, ranks, uint64(ranks)), ranks, apart), func(m *member) error {
					err := lanes(m, 8, 60<<10) // more than a lane's ring
					if m.ranks == 2 {
						err = errors.Join(err, replayLanes(m, 3000, 50))
					}
					return err
				})
			})
		}
	}
}

// TestLaneFailures has rank 0 wait for a message that does not come, or comes with another length. Rank 1
// is named, also by ranks to which it is not the first in the lane.
func TestLaneFailures(t *testing.T) {
	for _, length := range []int{-1, 7} {
		for _, ranks := range []int{2, 4} {
			u := simulated(ranks)
			u.window.LaneChannels, u.direct.Limit = 1, 50*time.Millisecond
			const from = 1
			virtually(t, u, func(t *testing.T) []driver.Driver { return drivers(t, machine(t, ranks, 3), ranks, false) }, func(m *member) error {
				mem := must.Get(m.v.Alloc(64))
				defer mem.Close()
				must.Do(errors.Join(m.s.Memset(mem.Ptr(), 0, 64), m.sync(), m.meet()))
				switch {
				case m.rank == from && length >= 0:
					l, err := m.c.Lane(0, true)
					if err == nil {
						err = l.Send(m.s, mem.Ptr(), length)
					}
					if err != nil {
						return err
					}
					_ = m.sync() // its wait for rank 0 is too long
				case m.rank == 0:
					l, err := m.c.Lane(from, false)
					if err == nil {
						err = l.Recv(m.s, mem.Ptr(), 8, direct.Into{})
					}
					if err != nil {
						return err
					}
					var f *window.Failure
					if err := m.sync(); !errors.As(err, &f) || f.Peer != from || !f.Message || f.Unlike != (length >= 0) {
						return fmt.Errorf("a message of %d bytes for a receive of 8: %w", length, err)
					}
				}
				// After Reset the lane is as new.
				if err := m.w.Reset(m.ctx, m.tell); err != nil || m.rank > 1 {
					return err
				}
				l, err := m.c.Lane(1-m.rank, m.rank == from)
				if err == nil && m.rank == from {
					err = l.Send(m.s, mem.Ptr(), 8)
				} else if err == nil {
					err = l.Recv(m.s, mem.Ptr(), 8, direct.Into{})
				}
				return errors.Join(err, m.sync())
			})
		}
	}
}

// TestLaneRefusals holds what lanes refuse.
func TestLaneRefusals(t *testing.T) {
	u := simulated(2)
	u.window.LaneChannels = 1
	threads(t, u, drivers(t, machine(t, 2, 1), 2, false), func(m *member) error {
		_, err := m.c.Lane(m.rank, true)
		if err == nil {
			return errors.New("a rank has a lane to itself")
		}
		l, err := m.c.Lane(1-m.rank, true)
		if err == nil && l.Recv(m.s, 1, 1, direct.Into{}) == nil {
			err = errors.New("a lane to a rank receives")
		}
		return err
	})
	d := drivers(t, machine(t, 1, 1), 1, false)[0]
	v, err := d.Device(0)
	require.NoError(t, err)
	_, err = window.New(t.Context(), window.Options{Driver: d, Device: v, Ranks: 2, LaneChannels: -1})
	require.ErrorContains(t, err, "-1 channels of a lane")
}
