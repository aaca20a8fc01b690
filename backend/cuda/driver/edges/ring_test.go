package edges_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

// rank is one process of a ring all-reduce on device memory.
type rank struct {
	d       *sim.Driver
	t       *edges.Tracker
	v       driver.Device
	in, out driver.Stream
	caller  driver.Stream
	sum     driver.Function
	data    driver.Memory
	inbox   driver.Memory // two slots, which the left writes
	words   driver.Memory // how far the left has sent, and the right has taken
	closers []interface{ Close() error }

	// The neighbours' memory, as this process has it mapped.
	rightInbox, rightSent, leftTaken driver.Ptr
}

func add(k *sim.Run) error {
	n := k.Int(2)
	dst, src := k.Write(k.Ptr(0), n), k.Read(k.Ptr(1), n)
	for i := range dst {
		dst[i] += src[i]
	}
	return nil
}

// ring sums data over world processes. It returns what went wrong by itself; the
// rest comes from closing the machine.
func ring(tb testing.TB, m *sim.Machine, world, chunk int) error {
	r := &rig{TB: tb, m: m}
	ranks := make([]*rank, world)
	for i := range ranks {
		d, err := m.Process(fmt.Sprint("rank", i))
		require.NoError(r, err)
		k := &rank{d: d, t: edges.New(d)}
		ranks[i] = k
		keep := func(c interface{ Close() error }, err error) {
			require.NoError(r, err)
			k.closers = append(k.closers, c)
		}
		k.v = must.Get(d.Device(i))
		for _, s := range []*driver.Stream{&k.in, &k.out, &k.caller} {
			name := []string{"in", "out", "caller"}[len(k.closers)]
			*s, err = k.v.NewStream(driver.StreamOptions{Name: name})
			keep(*s, err)
		}
		for _, x := range []struct {
			m *driver.Memory
			n int
		}{{&k.data, world * chunk}, {&k.inbox, 2 * chunk}, {&k.words, 8}} {
			*x.m, err = k.v.Alloc(x.n)
			keep(*x.m, err)
		}
		mod, err := k.v.Load(sim.Image("add"))
		keep(mod, err)
		k.sum = must.Get(mod.Function("add"))
		// Words begin at 0 before anybody else hears of them.
		require.NoError(r, k.caller.Memset(k.words.Ptr(), 0, 8))
		e := must.Get(k.caller.Record())
		require.NoError(r, e.Sync(tb.Context()))
		e.Release()
	}
	defer func() {
		for _, k := range ranks {
			for _, c := range slices.Backward(k.closers) {
				require.NoError(r, c.Close())
			}
			require.NoError(r, k.t.Close())
		}
	}()
	for i, k := range ranks {
		if world == 1 {
			break
		}
		mapped := func(x driver.Memory) driver.Ptr {
			h := must.Get(x.Export())
			o := must.Get(k.v.OpenMemory(h))
			k.closers = append(k.closers, o)
			return o.Ptr()
		}
		right, left := ranks[(i+1)%world], ranks[(i+world-1)%world]
		k.rightInbox, k.rightSent, k.leftTaken = mapped(right.inbox), mapped(right.words), mapped(left.words)+4
	}
	mod := func(x int) int { return ((x % world) + world) % world }
	pending := make([]*edges.Pending, world)
	for i, k := range ranks {
		n := world * chunk
		require.NoError(r, k.caller.Memset(k.data.Ptr(), byte(i+1), n))
		b := k.t.Batch()
		b.Before(k.caller, driver.Writes(k.data.Ptr(), n))
		sent, taken := k.words.Ptr(), k.words.Ptr()+4
		for s := range 2 * (world - 1) {
			slot := driver.Ptr(s % 2 * chunk)
			away := k.data.Ptr() + driver.Ptr(mod(i-s)*chunk)
			comes := k.data.Ptr() + driver.Ptr(mod(i-s-1)*chunk)
			if s >= 2 {
				b.WaitValue(k.out, taken, uint32(s-1), driver.AtLeast)
			}
			b.Copy(k.out, k.rightInbox+slot, away, chunk)
			b.WriteValue(k.out, k.rightSent, uint32(s+1), driver.Writes(k.rightInbox+slot, chunk))
			mine := k.inbox.Ptr() + slot
			b.WaitValue(k.in, sent, uint32(s+1), driver.AtLeast, driver.Writes(mine, chunk))
			if s < world-1 {
				b.Launch(k.in, &driver.Launch{
					Function: k.sum, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
					Args:   new(driver.Args).Ptr(comes).Ptr(mine).Int64(int64(chunk)),
					Access: []driver.Access{driver.Writes(comes, chunk), driver.Reads(mine, chunk)},
				})
			} else {
				b.Copy(k.in, comes, mine, chunk)
			}
			b.WriteValue(k.in, k.leftTaken, uint32(s+1), driver.Writes(mine, chunk))
		}
		if world > 1 {
			// The right has taken all before anything is freed.
			b.WaitValue(k.out, taken, uint32(2*(world-1)), driver.AtLeast)
		}
		b.After(k.caller, driver.Writes(k.data.Ptr(), n))
		p := must.Get(b.Run())
		pending[i] = p
	}
	out := make([]driver.HostMemory, world)
	for i, k := range ranks {
		h := must.Get(k.d.AllocHost(world * chunk))
		out[i] = h
		require.NoError(r, k.caller.Copy(h.Ptr(), k.data.Ptr(), world*chunk))
	}
	errs := []error{m.Quiesce(tb.Context())}
	for i, k := range ranks {
		if errs[0] == nil {
			e := must.Get(k.caller.Record())
			errs = append(errs, e.Sync(tb.Context()), pending[i].Sync(tb.Context()))
			e.Release()
			driver.HostAccess(k.d, "comparing", driver.Reads(out[i].Ptr(), out[i].Len()))
			if want := byte(world * (world + 1) / 2); slices.ContainsFunc(out[i].Bytes(), func(x byte) bool { return x != want }) {
				errs = append(errs, fmt.Errorf("rank %d: %d, want all %d", i, out[i].Bytes(), want))
			}
		}
		pending[i].Release()
		k.closers = append(k.closers, out[i])
	}
	return errors.Join(errs...)
}

// TestRing runs worlds of 1 to 9 processes under both semantics of events.
func TestRing(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64) {
		for world := 1; world <= 9; world++ {
			m, err := sim.New(sim.Config{Devices: world, Seed: seed, Semantics: sim.Semantics(seed % 2), Kernels: map[string]sim.Kernel{"add": add}})
			require.NoError(t, err)
			require.NoError(t, ring(t, m, world, 16), "%d ranks", world)
			require.NoError(t, m.Close(), "%d ranks", world)
		}
	})
}

// TestRingMutations leaves out each word of one of three ranks. Its events are not all
// needed: a chunk that comes back also says that it was sent. A tracker cannot know that,
// because it sees one process.
func TestRingMutations(t *testing.T) {
	run := func(seed uint64, skip func(sim.Call) bool) error {
		m, err := sim.New(sim.Config{Devices: 3, Seed: seed, Quiet: true, Kernels: map[string]sim.Kernel{"add": quietAdd}})
		require.NoError(t, err)
		m.Skip(skip)
		err = ring(t, m, 3, 16)
		m.Skip(nil)
		return errors.Join(err, m.Close())
	}
	var calls []sim.Call
	require.NoError(t, run(0, func(c sim.Call) bool { calls = append(calls, c); return false }))
	tried := 0
	for i, c := range calls {
		if c.Stream != "rank1/in" && c.Stream != "rank1/out" || c.Name != "WaitValue" && c.Name != "WriteValue" {
			continue
		}
		if c.Name == "WriteValue" && slices.ContainsFunc(calls[i+1:], func(o sim.Call) bool { return o.Name == c.Name && o.Stream == c.Stream }) {
			continue // the next one says it too, only later
		}
		tried++
		// A stream that waits for a word may see a later one, and be in order by luck:
		// not in every run.
		var err error
		for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
			err = run(seed, func(o sim.Call) bool { return o.N == c.N })
		}
		require.Error(t, err, "nobody noticed that %v was left out", c)
	}
	t.Logf("%d of %d calls were left out, and each was missed", tried, len(calls))
}

//go:norace
func quietAdd(k *sim.Run) error {
	n := k.Int(2)
	dst, src := k.Write(k.Ptr(0), n), k.Read(k.Ptr(1), n)
	for i := range dst {
		dst[i] += src[i]
	}
	return nil
}
