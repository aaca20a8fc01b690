//go:build !race

package cuda_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestF26Mutations leaves out each record and wait, of events and of words, that rank 0 makes for a collective of two
// clusters in chunks; somebody has to notice every one (T3, T4). The race detector would too.
//
// The first copies up of an all_gather come after the caller's stream alone. To the checker all goroutines of a process
// are one host. Once that host has seen the rank's own data, a missing record stays unseen. So with odd seeds the
// caller's stream of rank 0 is held until the other cluster's data are there. To go on then is an order too: it hides
// that a copy up does not wait for the data, which even seeds find.
func TestF26Mutations(t *testing.T) {
	const n = 400
	var arrived atomic.Int64 // bytes from the other cluster at rank 0
	all := func(b byte) []byte { return bytes.Repeat([]byte{b}, n) }
	type call = func(x *rank, out, in *tensor.Tensor) (*work.Work, error)
	allReduce := func(x *rank, out, _ *tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduce(x.ctx, []*tensor.Tensor{out}, backend.AllReduceOptions{})
	}
	defer cuda.SetCloseLimit(200 * time.Millisecond)()
	for _, c := range []struct {
		name    string
		sizes   []int
		hosts   bool // do the steps inside
		in, out int  // bytes
		call    call
		want    []byte // in out, on rank 0
		hold    int64  // with odd seeds, hold rank 0's stream until so many bytes have arrived
	}{
		{"all_reduce", []int{2, 2}, false, 0, n, allReduce, all(10), 0},
		{"all_reduce of one device in each cluster", []int{1, 1}, false, 0, n, allReduce, all(3), 0},
		{"all_reduce, the hosts do the steps inside", []int{2, 2}, true, 0, n, allReduce, all(10), 0},
		{"broadcast", []int{2, 2}, false, 0, n, func(x *rank, out, _ *tensor.Tensor) (*work.Work, error) {
			return x.b.Broadcast(x.ctx, []*tensor.Tensor{out}, backend.BroadcastOptions{Root: 3})
		}, all(4), 0},
		{"reduce", []int{2, 2}, false, 0, n, func(x *rank, out, _ *tensor.Tensor) (*work.Work, error) {
			return x.b.Reduce(x.ctx, out, backend.ReduceOptions{})
		}, all(10), 0},
		{"reduce_scatter", []int{2, 2}, false, n, n / 4, func(x *rank, out, in *tensor.Tensor) (*work.Work, error) {
			return x.b.ReduceScatterTensor(x.ctx, out, in, backend.ReduceScatterOptions{})
		}, bytes.Repeat([]byte{10}, n/4), 0},
		{"all_gather", []int{2, 2}, false, n / 4, n, func(x *rank, out, in *tensor.Tensor) (*work.Work, error) {
			return x.b.AllGatherIntoTensor(x.ctx, out, in, backend.AllGatherOptions{})
		}, slices.Concat(bytes.Repeat([]byte{1}, n/4), bytes.Repeat([]byte{2}, n/4), bytes.Repeat([]byte{3}, n/4), bytes.Repeat([]byte{4}, n/4)), n / 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := clustered(c.sizes...)
			if c.hosts {
				s.sim.Kernels = nil
			}
			s.options = cuda.Options{Chunk: 80}
			s.sent = func(group string, from, to, n int) {
				if to == 0 && from >= 2 && !strings.Contains(group, "reference") {
					arrived.Add(int64(n))
				}
			}
			mutate(t, s, func(x *rank, r int, seed uint64) error {
				hold := c.hold > 0 && seed%2 == 1
				must.Get(x.warm(r))
				open := func() {}
				if hold {
					if r == 0 {
						gate := must.Get(x.gate(x.caller(r)))
						open = sync.OnceFunc(gate)
						defer open()
						arrived.Store(0)
					}
					// Nobody calls before the count is 0.
					w := must.Get(x.cpu.Barrier(x.ctx, backend.BarrierOptions{}))
					must.Do(w.Wait(x.ctx))
				}
				fill := func(n int) (*vector, error) {
					return x.vector(tensor.Int8, r, bytes.Repeat([]byte{byte(r + 1)}, n))
				}
				out := must.Get(fill(c.out))
				in := &vector{}
				if c.in > 0 {
					in = must.Get(fill(c.in))
				}
				v := must.Get(c.call(x, out.t, in.t))
				for hold && r == 0 && arrived.Load() < c.hold && !v.IsCompleted() {
					time.Sleep(10 * time.Microsecond)
				}
				open()
				s := x.caller(r)
				if err := v.Synchronize(s); err != nil {
					return errors.Join(err, v.Wait(x.ctx))
				}
				// The caller's stream uses the tensors before the Work has ended.
				must.Do(s.Copy(out.h.Ptr(), out.mem.Ptr(), c.out))
				for _, y := range []*vector{out, in} {
					if y.mem == nil {
						continue
					}
					must.Do(s.Memset(y.mem.Ptr(), 0xee, y.mem.Len()))
				}
				e := must.Get(s.Record())
				defer e.Release() // the stream may not go on before Close
				must.Do(v.Wait(x.ctx))
				if err := e.Sync(x.ctx); err != nil || r > 0 {
					return err
				}
				return same(out.h.Bytes(), c.want)
			})
		})
	}
}

// mutate runs f on all ranks. Then it leaves out each of the orders in turn that rank 0 makes after its first call, under
// one semantics of events, in make nightly under both. Without an order f has to fail with some seed. It may fail by a
// timeout only if the order is a word for the host.
func mutate(t *testing.T, s setup, f func(x *rank, r int, seed uint64) error) {
	run := func(w *world) error {
		return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error { return f(x, r, s.sim.Seed) })...)
	}
	s.timeout = patience
	s.sim.Seed, s.sim.Quiet = 3, true
	var calls []sim.Call
	began := false
	orders := map[string]bool{"Record": true, "Wait": true, "WaitValue": true, "WriteValue": true}
	streams := map[string]bool{"rank 0/rank 0 direct": true, "rank 0/rank 0 down.0": true, "rank 0/rank 0 up.0": true, "rank 0/caller 0.0": true}
	onVirtualTime(t, func(t *testing.T) {
		w := newWorld(t, s)
		w.m.Skip(func(c sim.Call) bool {
			began = began || c.Stream == "rank 0/caller 0.0" && c.Name == "Record" && c.K == 1
			if began && orders[c.Name] && streams[c.Stream] {
				calls = append(calls, c)
			}
			return false
		})
		require.NoError(t, run(w))
		w.m.Skip(nil)
		w.end()
	})
	// A word that is not written comes late, with the next one; but not a stream's last. The mark of the operation's
	// end, which is the last word of the stream up, comes late too: from the host.
	const up = "rank 0/rank 0 up.0"
	last, mark := map[string]int{}, -1
	for i, c := range calls {
		switch {
		case c.Name != "WriteValue":
			continue
		case c.Stream != up:
			last[c.Stream] = i
		case mark >= 0:
			last[up] = mark
		}
		if c.Stream == up {
			mark = i
		}
	}
	s.timeout = 300 * time.Millisecond
	tried := map[string]int{}
	before := map[string]int{} // the stream's call before
	for i, m := range calls {
		k, any := before[m.Stream]
		before[m.Stream] = i
		if n, ok := last[m.Stream]; m.Name == "WriteValue" && (!ok || i != n) {
			continue
		}
		// Two events order no stream. One is behind the wait of the caller's stream for a mark: the mark's memory stays
		// until then. The other one is behind the end of a mark, for the host.
		if any && m.Name == "Record" && (calls[k].Name == "WaitValue" && m.Stream == "rank 0/caller 0.0" ||
			k == mark) {
			continue
		}
		both := []sim.Semantics{sim.Snapshot, sim.LateBinding}
		for _, s.sim.Semantics = range testsize.Of(both[i%2:][:1], both[i%2:][:1], both) {
			var err error
			for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
				s.sim.Seed = seed
				onVirtualTime(t, func(t *testing.T) { err = withoutCall(t, s, m, run) })
				var race *sim.Race
				if m.Name != "WriteValue" && errors.Is(err, work.ErrTimeout) && !errors.As(err, &race) {
					err = nil // the machine may be busy
				}
			}
			if err == nil {
				t.Errorf("nobody noticed that %v, number %d of them there, was left out (%v)", m, m.K, s.sim.Semantics)
			}
		}
		tried[m.Name]++
	}
	t.Log("left out, each of them missed:", tried)
	for name := range orders {
		require.NotZero(t, tried[name], name)
	}
}
