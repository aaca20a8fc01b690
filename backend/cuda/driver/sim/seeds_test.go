package sim_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// tree is the local broadcast of Gloo's CUDA code with its faults: a binary tree that
// takes only powers of two of buffers. It has one event for each stream, which is
// recorded again and again.
type tree struct {
	bufs    []driver.Memory
	streams []driver.Stream
	events  []*sim.RawEvent
	n       int
}

func newTree(h *host, buffers, n int) *tree {
	t := &tree{n: n}
	for i := range buffers {
		t.bufs = append(t.bufs, h.alloc(i, n))
		t.streams = append(t.streams, h.stream(i, fmt.Sprint("s", i)))
		t.events = append(t.events, h.d.NewRawEvent())
	}
	return t
}

func (t *tree) run(source driver.Ptr) error {
	errs := []error{t.streams[0].Copy(t.bufs[0].Ptr(), source, t.n), t.events[0].Record(t.streams[0])}
	for step := len(t.bufs) / 2; step > 0; step /= 2 {
		for a := 0; a < len(t.bufs); a += 2 * step {
			b := a + step
			errs = append(errs,
				t.events[b].Record(t.streams[b]),
				t.events[b].Wait(t.streams[a]),
				t.streams[a].Copy(t.bufs[b].Ptr(), t.bufs[a].Ptr(), t.n),
				t.events[a].Record(t.streams[a]),
				t.events[a].Wait(t.streams[b]),
				t.events[b].Record(t.streams[b]),
			)
		}
	}
	return errors.Join(errs...)
}

// TestT1 runs Gloo's tree (T1): it is right when a wait means the record that was
// the latest when it was called, as in CUDA, and deadlocks when it may mean a
// later one. This is why events of package driver are used once.
func TestT1(t *testing.T) {
	for _, buffers := range []int{2, 4, 8} {
		for _, semantics := range []sim.Semantics{sim.Snapshot, sim.LateBinding} {
			t.Run(fmt.Sprintf("%d buffers, %v", buffers, semantics), func(t *testing.T) {
				runs := testsize.Of(10, 10, 100)
				h := open(t, sim.Config{Devices: buffers, Semantics: semantics, Seed: uint64(buffers)})
				tr := newTree(h, buffers, 64)
				source, sum := h.pinned(64), []driver.Function{}
				total := []driver.Memory{}
				for i := range buffers {
					sum = append(sum, h.kernel(i, "sum"))
					total = append(total, h.alloc(i, 64))
					require.NoError(t, tr.streams[i].Memset(total[i].Ptr(), 0, 64))
				}
				for i := range source.Bytes() {
					source.Bytes()[i] = byte(i)
				}
				for range runs {
					// The users' kernels, before and after.
					for i, s := range tr.streams {
						require.NoError(t, s.Memset(tr.bufs[i].Ptr(), 0xee, 64))
					}
					require.NoError(t, tr.run(source.Ptr()))
					for i, s := range tr.streams {
						h.launch(s, sum[i], driver.Writes(total[i].Ptr(), 64), driver.Reads(tr.bufs[i].Ptr(), 64))
					}
				}
				err := h.m.Settle(h.ctx)
				if semantics == sim.LateBinding {
					stuck := must.As[*sim.Stuck](t, err)
					require.ErrorAs(t, h.close(), &stuck)
					return
				}
				require.NoError(t, err)
				want := make([]byte, 64)
				for i := range want {
					want[i] = byte(i * runs)
				}
				for i, s := range tr.streams {
					out := h.pinned(64)
					require.NoError(t, s.Copy(out.Ptr(), total[i].Ptr(), 64))
					h.wait(s)
					require.Equal(t, want, out.Bytes(), "buffer %d", i)
				}
				require.NoError(t, h.close())
			})
		}
	}
}

// TestLateBindingCycle is the shortest program that late binding closes to a
// cycle, of five calls.
func TestLateBindingCycle(t *testing.T) {
	for _, semantics := range []sim.Semantics{sim.Snapshot, sim.LateBinding} {
		h := open(t, sim.Config{Semantics: semantics})
		u, s, word := h.stream(0, "u"), h.stream(0, "h"), h.pinned(4)
		e, f := h.d.NewRawEvent(), h.d.NewRawEvent()
		require.NoError(t, s.WaitValue(word.Ptr(), 1, driver.Equal)) // all is enqueued before h begins
		require.NoError(t, e.Record(u))
		require.NoError(t, e.Wait(s))
		require.NoError(t, f.Record(s))
		require.NoError(t, f.Wait(u))
		require.NoError(t, e.Record(u))
		word.Store32(0, 1)
		err := h.m.Settle(h.ctx)
		var stuck *sim.Stuck
		if semantics == sim.Snapshot {
			require.NoError(t, err)
			require.NoError(t, e.Sync(h.ctx))
			require.NoError(t, h.close())
			continue
		}
		require.ErrorAs(t, err, &stuck)
		require.Len(t, stuck.Waits, 2)
		require.ErrorAs(t, h.close(), &stuck)
	}
}

// TestT5 has a source that another stream makes, late, at a root that is not 0
// (T5): Gloo's tree does not wait for it.
func TestT5(t *testing.T) {
	h := open(t, sim.Config{Devices: 4, Quiet: true})
	tr := newTree(h, 4, 1000)
	producer := h.stream(2, "producer")
	require.NoError(t, producer.Memset(tr.bufs[2].Ptr(), 7, 1000))
	require.NoError(t, tr.run(tr.bufs[2].Ptr()))
	require.Positive(t, races(h.settle()))

	h = open(t, sim.Config{Devices: 4})
	tr = newTree(h, 4, 1000)
	producer = h.stream(2, "producer")
	require.NoError(t, producer.Memset(tr.bufs[2].Ptr(), 7, 1000))
	h.order(tr.streams[0], producer)
	h.order(tr.streams[2], producer)
	require.NoError(t, tr.run(tr.bufs[2].Ptr()))
	require.NoError(t, h.m.Settle(h.ctx))
	out := h.pinned(1000)
	require.NoError(t, tr.streams[3].Copy(out.Ptr(), tr.bufs[3].Ptr(), 1000))
	h.wait(tr.streams[3])
	require.Equal(t, bytes.Repeat([]byte{7}, 1000), out.Bytes())
	require.NoError(t, h.close())
}

// exchange is the part of a cluster-to-cluster all-reduce with two streams. In each step another
// cluster's partial sums arrive on one stream and are reduced on the other. With deferral the
// receives are only enqueued at the end of the group, as they are by a library that collects
// them.
func exchange(h *host, clusters int, deferral, hostSync bool) {
	const n = 1 << 20
	user, hetero := h.stream(0, "user"), h.stream(0, "hetero")
	sum := h.kernel(0, "sum")
	total := h.alloc(0, n)
	require.NoError(h, user.Memset(total.Ptr(), 1, n))
	var group []func()
	p2p := func(f func()) {
		if deferral {
			group = append(group, f)
			return
		}
		f()
	}
	for c := 1; c < clusters; c++ {
		from, in := h.alloc(1, n), h.alloc(0, n)
		remote := h.stream(1, fmt.Sprint("cluster", c))
		require.NoError(h, remote.Memset(from.Ptr(), byte(10*c), n))
		h.order(hetero, remote)
		p2p(func() { require.NoError(h, hetero.Copy(in.Ptr(), from.Ptr(), n)) })
		if hostSync {
			h.wait(hetero)
		} else {
			h.order(user, hetero)
		}
		h.launch(user, sum, driver.Writes(total.Ptr(), n), driver.Reads(in.Ptr(), n))
		if hostSync {
			h.wait(user)
		}
	}
	for _, f := range group {
		f()
	}
}

// TestT6 runs it with and without deferral (T6).
func TestT6(t *testing.T) {
	for clusters := 2; clusters <= 4; clusters++ {
		for _, deferral := range []bool{false, true} {
			h := open(t, sim.Config{Devices: 2, Seed: uint64(clusters), Quiet: deferral})
			exchange(h, clusters, deferral, false)
			err := h.settle()
			if !deferral {
				require.NoError(t, err, "%d clusters", clusters)
				continue
			}
			// The reductions do not wait for the receives. One report stands for all
			// that come from the same two lines.
			require.Equal(t, 1, races(err), "%d clusters: %v", clusters, err)
			require.ErrorContains(t, err, "stream hetero")
			require.ErrorContains(t, err, "Launch of sum")
		}
	}
}

// pipelined is the event program of a cluster-to-cluster all-reduce. Two events are recorded again in each
// step. One says how far the user's stream is, the other one how far the other stream is. Each step has a
// collective inside the cluster on the user's stream and messages on the other one. At its end the streams
// wait for each other. For n clusters there are n-2 steps before the sum of all and n-1 after it. Record
// and wait are those of an event, by number.
func pipelined(h *host, clusters int, record, wait func(event int, s driver.Stream) error) {
	const n = 1 << 10
	user, hetero := h.stream(0, "user"), h.stream(0, "hetero")
	buf, inbox := h.alloc(0, n), h.alloc(0, n)
	gate := h.pinned(4)
	// The host enqueues everything before the device begins.
	require.NoError(h, hetero.WaitValue(gate.Ptr(), 1, driver.Equal))
	sync := func() {
		require.NoError(h, errors.Join(record(0, user), wait(0, hetero), record(1, hetero), wait(1, user)))
	}
	require.NoError(h, user.Memset(buf.Ptr(), 1, n))
	sync()
	for range clusters - 2 {
		require.NoError(h, errors.Join(user.Memset(buf.Ptr(), 2, n), hetero.Memset(inbox.Ptr(), 3, n)))
		sync()
	}
	require.NoError(h, user.Copy(buf.Ptr(), inbox.Ptr(), n))
	sync()
	for range clusters - 1 {
		require.NoError(h, errors.Join(user.Memset(buf.Ptr(), 4, n), hetero.Memset(inbox.Ptr(), 5, n)))
		sync()
	}
	require.NoError(h, user.Copy(buf.Ptr(), inbox.Ptr(), n))
	gate.Store32(0, 1)
}

// TestF26EventsUsedAgain: the program records events again. It is right where a wait means the latest
// record, and hangs where it may mean a later one. With an event for each record it is right in both cases
// (F-26).
func TestF26EventsUsedAgain(t *testing.T) {
	for clusters := 2; clusters <= 4; clusters++ {
		for _, semantics := range []sim.Semantics{sim.Snapshot, sim.LateBinding} {
			t.Run(fmt.Sprintf("%d clusters, %v", clusters, semantics), func(t *testing.T) {
				h := open(t, sim.Config{Semantics: semantics, Seed: uint64(clusters)})
				events := []*sim.RawEvent{h.d.NewRawEvent(), h.d.NewRawEvent()}
				pipelined(h, clusters, func(e int, s driver.Stream) error { return events[e].Record(s) }, func(e int, s driver.Stream) error { return events[e].Wait(s) })
				err := h.m.Settle(h.ctx)
				if semantics == sim.LateBinding {
					stuck := must.As[*sim.Stuck](t, err)
					require.ErrorAs(t, h.close(), &stuck)
				} else {
					require.NoError(t, err)
					require.NoError(t, h.close())
				}

				h = open(t, sim.Config{Semantics: semantics, Seed: uint64(clusters)})
				once := make([]driver.Event, 2)
				record := func(e int, s driver.Stream) (err error) {
					once[e], err = s.Record()
					return err
				}
				wait := func(e int, s driver.Stream) error {
					defer once[e].Release()
					return s.Wait(once[e])
				}
				pipelined(h, clusters, record, wait)
				require.NoError(t, h.settle())
			})
		}
	}
}

// TestT15 compares the virtual times of three stages on streams ordered by events
// with those of a host that waits after each (T15).
func TestT15(t *testing.T) {
	const chunks, n = 24, 1 << 20
	run := func(seed uint64, hostSync bool) time.Duration {
		// Stages of equal length.
		h := open(t, sim.Config{Devices: 3, Seed: seed, Timeline: true, Topology: sim.Topology{LinkBandwidth: 100e9}})
		ring := []driver.Stream{h.stream(0, "one"), h.stream(1, "two"), h.stream(2, "three")}
		bufs := []driver.Memory{h.alloc(0, chunks*n), h.alloc(1, chunks*n), h.alloc(2, chunks*n), h.alloc(0, chunks*n)}
		for c := range chunks {
			at := driver.Ptr(c * n)
			for i, s := range ring {
				require.NoError(t, s.Copy(bufs[i+1].Ptr()+at, bufs[i].Ptr()+at, n))
				switch {
				case hostSync:
					h.wait(s)
				case i < 2:
					h.order(ring[i+1], s)
				}
			}
		}
		require.NoError(t, h.m.Settle(h.ctx))
		span := must.Get(h.m.Makespan())
		steps := must.Get(h.m.Timeline())
		copies := 0
		for _, s := range steps {
			if s.End > s.Start {
				copies++
			}
		}
		require.Equal(t, 3*chunks, copies)
		require.NoError(t, h.close())
		return span
	}
	events, host := run(1, false), run(1, true)
	require.LessOrEqual(t, float64(events), 0.7*float64(host), "%v and %v", events, host)
	for seed := range uint64(5) {
		require.Equal(t, events, run(seed, false), "the virtual clock does not know of seeds")
		require.Equal(t, host, run(seed, true))
	}
	stage := 2*time.Microsecond + n*time.Second/100e9
	require.InDelta(t, float64((chunks+2)*stage), float64(events), float64(stage), "the stages overlap")
	require.InDelta(t, float64(3*chunks*stage), float64(host), float64(stage), "they do not")
}
