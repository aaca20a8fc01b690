package edges_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

// program is run by one goroutine, so that its calls come in the same order each
// time. It returns what it noticed itself; the simulator may notice more.
type program func(r *rig) error

// on runs a program. Its error is what it returns or gives to must.
func (p program) on(r *rig) (err error) {
	defer must.Catch(&err)
	return p(r)
}

// broadcast sends what a caller's stream has made on one device to n devices, as
// a binomial tree that starts at the root. Each device has a caller's stream that
// uses the buffer before and after.
func broadcast(n, root, size int) program {
	return func(r *rig) error {
		callers, streams := make([]driver.Stream, n), make([]driver.Stream, n)
		bufs := make([]driver.Ptr, n)
		for i := range n {
			callers[i], streams[i] = r.stream(i, fmt.Sprint("caller", i)), r.stream(i, fmt.Sprint("s", i))
			bufs[i] = r.alloc(i, size)
			// What the caller still does with the buffer when it calls.
			must.Do(callers[i].Memset(bufs[i], byte(100+i), size))
		}
		b := r.t.Batch()
		for i := range n {
			b.Before(callers[i], driver.Writes(bufs[i], size))
		}
		at := func(i int) int { return (i + root) % n }
		for step := 1 << bits.Len(uint(n-1)) >> 1; step > 0; step >>= 1 {
			for i := 0; i+step < n; i += 2 * step {
				b.Copy(streams[at(i)], bufs[at(i+step)], bufs[at(i)], size)
			}
		}
		for i := range n {
			b.After(callers[i], driver.Writes(bufs[i], size))
		}
		p := must.Get(r.enqueue(b))
		defer p.Release()
		out := r.host(n * size)
		for i := range n {
			must.Do(callers[i].Copy(out.Ptr()+driver.Ptr(i*size), bufs[i], size))
			must.Do(callers[i].Memset(bufs[i], 0, size))
		}
		var ends []driver.Event
		for i := range n {
			e := must.Get(callers[i].Record())
			defer e.Release()
			ends = append(ends, e)
		}
		for _, e := range ends {
			must.Do(e.Sync(r.ctx))
		}
		must.Get(p.Done())
		driver.HostAccess(r.d, "comparing", driver.Reads(out.Ptr(), out.Len()))
		if !bytes.Equal(out.Bytes(), bytes.Repeat([]byte{byte(100 + root)}, n*size)) {
			return errors.New("wrong bytes")
		}
		return nil
	}
}

// pipeline moves chunks to the host, lets it change them, and moves them back,
// through slots of page-locked memory and on two streams.
func pipeline(chunks, slots int) program {
	const chunk = 64
	return func(r *rig) error {
		caller, down, up := r.stream(0, "caller"), r.stream(0, "down"), r.stream(0, "up")
		data := r.alloc(0, chunk*chunks)
		staging := r.host(chunk * slots)
		line := must.Get(r.t.Host("host"))
		must.Do(caller.Memset(data, 1, chunk*chunks))
		b := r.t.Batch()
		b.Before(caller, driver.Writes(data, chunk*chunks))
		turns := make([]int, chunks)
		for c := range chunks {
			slot, part := staging.Ptr()+driver.Ptr(c%slots*chunk), data+driver.Ptr(c*chunk)
			b.Copy(down, slot, part, chunk)
			turns[c] = b.Host(line, driver.Writes(slot, chunk))
			b.Copy(up, part, slot, chunk)
		}
		b.After(caller, driver.Writes(data, chunk*chunks))
		p := must.Get(r.enqueue(b))
		defer p.Release()
		defer p.Abort()
		out := r.host(chunk * chunks)
		must.Do(caller.Copy(out.Ptr(), data, chunk*chunks))
		e := must.Get(caller.Record())
		defer e.Release()
		ended, end := context.WithCancel(r.ctx)
		end()
		for c, turn := range turns {
			// When nothing goes on by itself any more, the turn has come or never will.
			var stuck *sim.Stuck
			if err := r.m.Quiesce(r.ctx); err != nil && !errors.As(err, &stuck) {
				return err
			}
			if err := p.Begin(ended, turn); err != nil {
				p.Abort()
				r.t.GiveUp() // what it waits for may have been left out
				return errors.Join(err, e.Sync(r.ctx), p.Sync(r.ctx))
			}
			slot := staging.Bytes()[c%slots*chunk:][:chunk]
			for i := range slot {
				slot[i] += byte(c + 1)
			}
			p.End(turn)
		}
		if err := r.m.Quiesce(r.ctx); err != nil {
			p.Abort()
			return err
		}
		must.Do(errors.Join(e.Sync(r.ctx), p.Sync(r.ctx)))
		driver.HostAccess(r.d, "comparing", driver.Reads(out.Ptr(), out.Len()))
		for i, x := range out.Bytes() {
			if want := byte(2 + i/chunk); x != want {
				return fmt.Errorf("byte %d is %d, want %d", i, x, want)
			}
		}
		return nil
	}
}

// anything runs batches of random operations, which depend on each other.
func anything(seed uint64, batches int) program {
	return func(r *rig) error {
		rng := random(r, seed)
		const n = 64
		var streams []driver.Stream
		for i := range 4 {
			streams = append(streams, r.stream(i%len(r.devices), fmt.Sprint("s", i)))
		}
		var all []*buffer
		for i := range 4 {
			all = append(all, &buffer{ptr: r.alloc(i%len(r.devices), n), want: make([]byte, n)})
		}
		piece := func() (*buffer, int, int) {
			lo := rng.IntN(n)
			return all[rng.IntN(len(all))], lo, lo + 1 + rng.IntN(n-lo)
		}
		var pending []*edges.Pending
		defer func() {
			for _, p := range pending {
				p.Release()
			}
		}()
		for range batches {
			b := r.t.Batch()
			for i, x := range all {
				if len(pending) == 0 {
					b.Memset(streams[i], x.ptr, 0, n)
				}
			}
			for range 10 {
				random1(r, rng, b, streams, piece)
			}
			p := must.Get(r.enqueue(b))
			pending = append(pending, p)
		}
		for _, p := range slices.Backward(pending) {
			must.Do(p.Sync(r.ctx))
		}
		return nil
	}
}

// mutate runs a program without each of the calls of some names, and wants every
// one to be missed.
func mutate(t *testing.T, devices int, run program, names ...string) {
	var calls []sim.Call
	r := newRig(t, devices, 1)
	r.m.Skip(func(c sim.Call) bool {
		calls = append(calls, c)
		return false
	})
	require.NoError(t, run.on(r))
	require.NoError(t, r.close(), "the program itself")
	tried := 0
	for _, c := range calls {
		if !slices.Contains(names, c.Name) {
			continue
		}
		tried++
		r := newRigOf(t, sim.Config{Devices: devices, Seed: uint64(c.N), Quiet: true})
		r.m.Skip(func(o sim.Call) bool { return o.N == c.N })
		err := run.on(r)
		require.Error(t, errors.Join(err, r.close()), "nobody noticed that %v was left out", c)
	}
	require.True(t, tried > 0 || devices == 1)
	t.Logf("%d of %d calls were left out, and each was missed", tried, len(calls))
}

// TestT3T4 leaves out each wait and each record of some programs (T3, T4).
func TestT3T4(t *testing.T) {
	t.Run("broadcast", func(t *testing.T) {
		for n := 1; n <= 6; n++ {
			mutate(t, n, broadcast(n, n/2, 100), "Record", "Wait")
		}
	})
	t.Run("pipeline with one slot", func(t *testing.T) {
		mutate(t, 1, pipeline(5, 1), "Record", "Wait", "WaitValue", "WriteValue")
	})
	t.Run("pipeline with two slots", func(t *testing.T) {
		// A word that is not written comes late, with the next one.
		mutate(t, 1, pipeline(6, 2), "Record", "Wait", "WaitValue")
	})
	t.Run("one batch", func(t *testing.T) {
		eachSeed(t, 5, func(t *testing.T, seed uint64) { mutate(t, 2, anything(seed, 1), "Record", "Wait") })
	})
	t.Run("three batches", func(t *testing.T) {
		// The events at the end of a batch are not needed if those of the next are
		// waited for.
		eachSeed(t, 5, func(t *testing.T, seed uint64) { mutate(t, 2, anything(seed, 3), "Wait") })
	})
}

// TestT2 broadcasts from every root to up to 17 devices, whose buffers the
// callers use before and afterwards (T2, T11, F-01, F-03).
func TestT2(t *testing.T) {
	for _, semantics := range []sim.Semantics{sim.Snapshot, sim.LateBinding} {
		for n := 1; n <= 17; n++ {
			for root := range n {
				for _, size := range []int{1, 255} {
					r := newRigOf(t, sim.Config{Devices: n, Seed: uint64(n*root + size), Semantics: semantics})
					copies := 0
					r.m.Skip(func(c sim.Call) bool {
						if c.Name == "Copy" {
							copies++
						}
						return false
					})
					require.NoError(t, broadcast(n, root, size).on(r), "%d devices, root %d", n, root)
					require.Equal(t, n-1+n, copies, "n-1, and n to look at the result")
					require.NoError(t, r.close(), "%d devices, root %d", n, root)
				}
			}
		}
	}
}

// TestT7 lets each call of programs fail in turn: there is one error, nothing is
// left, and no stream waits for ever (T7).
func TestT7(t *testing.T) {
	injected := errors.New("injected")
	for name, c := range map[string]struct {
		devices int
		run     program
	}{
		"broadcast": {5, broadcast(5, 2, 100)},
		"pipeline":  {1, pipeline(5, 2)},
	} {
		t.Run(name, func(t *testing.T) {
			for k := 0; ; k++ {
				r := newRigOf(t, sim.Config{Devices: c.devices, Seed: uint64(k), Quiet: true})
				r.lenient = true
				failed, fail := false, sim.FailCall(k, injected)
				r.m.Inject(func(c sim.Call) error {
					err := fail(c)
					failed = failed || err != nil
					return err
				})
				err := safely(func() error { return c.run.on(r) })
				r.m.Inject(nil)
				if !failed {
					require.NoError(t, err)
					require.NoError(t, r.close())
					return
				}
				require.ErrorIs(t, err, injected, "call %d", k)
				// What was enqueued still ends.
				require.NoError(t, r.settle(), "call %d", k)
				err = r.close()
				var unused *sim.Unused
				var race *sim.Race
				var leak *sim.Leak
				require.False(t, errors.As(err, &leak), "call %d: %v", k, err)
				for _, f := range r.m.Findings() {
					// Orders that went through the host end with its turns.
					ok := errors.As(f, &unused) || name == "pipeline" && errors.As(f, &race)
					require.True(t, ok, "call %d: %v", k, f)
				}
			}
		})
	}
}
