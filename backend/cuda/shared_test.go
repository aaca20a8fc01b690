package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

const throughShared = "through page-locked memory that the ranks share"

// how says how rank r's all-reduces go.
func (w *world) how(r int) string { return w.ranks[r].b.Explain().Choices[0].Why }

// TestExchange all-reduces through memory that the ranks share, with crews of several
// goroutines, several operations at a time. Ranks differ in how their tensors lie,
// on which device, and how many there are.
func TestExchange(t *testing.T) {
	defer cuda.SetCrew(3, 128)()
	all := func(t *testing.T, longer int) {
		eachSeed(t, longer, func(t *testing.T, seed uint64, s sim.Semantics) {
			w := exchanges(t, seed, s, func(*world) {})
			require.Contains(t, w.how(0), throughShared)
			w.end()
		})
	}
	t.Run("one process", func(t *testing.T) { all(t, 1) })
	t.Run("a process each", func(t *testing.T) {
		if lonely {
			t.Skip("other systems share no memory between processes")
		}
		defer cuda.OtherProcesses()()
		all(t, 4)
	})
	t.Run("a device each", func(t *testing.T) {
		aProcessEach(t)
		all := 0
		eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
			var launched *atomic.Int32
			w := exchanges(t, seed, s, func(w *world) { launched = w.launches() }, func(s *setup) {
				s.sim.Devices, s.sim.Kernels, s.options.Chunk = s.size, simkernels.All(), 4*s.options.Chunk
			})
			all += int(launched.Load())
			w.end()
		})
		require.Greater(t, all, 10, "small ones are a kernel")
	})
	t.Run("more chunks than a word counts", func(t *testing.T) {
		defer cuda.SetFirstChunk(1<<32 - 7)()
		all(t, 4)
	})
	t.Run("memory that some ranks cannot page-lock", func(t *testing.T) {
		eachSeed(t, 4, func(t *testing.T, seed uint64, s sim.Semantics) {
			refused := errors.New("refused")
			var failed atomic.Int32
			w := exchanges(t, seed, s, func(w *world) {
				w.m.Inject(func(c sim.Call) error {
					if c.Name == "RegisterHost" && failed.Add(1) <= 1+int32(seed%2) {
						return refused
					}
					return nil
				})
			})
			w.m.Inject(nil)
			said := int32(0)
			for r := range w.ranks {
				if strings.Contains(w.how(r), "this rank's host copies") {
					require.Contains(t, w.how(r), "refused")
					said++
				}
			}
			require.Equal(t, 1+int32(seed%2), said)
			w.end()
		})
	})
}

// exchanges runs random all-reduces, after what prepare does, and compares them with
// those of tensors in CPU memory.
func exchanges(t *testing.T, seed uint64, s sim.Semantics, prepare func(w *world), change ...func(s *setup)) *world {
	dtypes := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Int8, tensor.Complex64, tensor.Float64, tensor.Bool}
	rng := random(t, seed)
	size := 2 + rng.IntN(3)
	u := setup{
		size: size, timeout: patience, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s},
		options: cuda.Options{AllReduce: cuda.HostWork, Chunk: 64 + rng.IntN(3000), Slots: 1 + rng.IntN(4)},
	}
	for _, f := range change {
		f(&u)
	}
	w := newWorld(t, u)
	prepare(w)
	type program struct {
		d  tensor.DType
		op func(rank int) backend.ReduceOp
		n  int
	}
	var ps []program
	for range 6 {
		p := program{d: dtypes[rng.IntN(len(dtypes))], op: func(int) backend.ReduceOp { return backend.Sum() }, n: 1 + rng.IntN(3000)}
		if p.d == tensor.Float32 {
			k := rng.IntN(4)
			p.op = func(rank int) backend.ReduceOp {
				return []backend.ReduceOp{backend.Avg(), backend.Max(), backend.PreMulSum(float64(1 + rank)), backend.Product()}[k]
			}
		}
		ps = append(ps, p)
	}
	w.each(func(x *rank, r int) error {
		rng := rand.New(rand.NewPCG(seed, uint64(r)))
		var calls [][]*pair
		var works []*work.Work
		for _, p := range ps {
			var all []*pair
			var ts []*tensor.Tensor
			for range 1 + rng.IntN(4)/3 {
				device := rng.IntN(4) / 3
				if len(x.stream) >= size {
					device = (r + device) % size
				}
				q := must.Get(x.pairOf(rng, p.d, device, laid(rng.IntN(6)/2, p.n), true))
				all, ts = append(all, q), append(ts, q.dev)
			}
			v := must.Get(x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: p.op(r)}))
			calls, works = append(calls, all), append(works, v)
		}
		for i, all := range calls {
			for _, q := range all {
				must.Do(works[i].Synchronize(x.stream[q.device]))
				must.Do(x.back(q))
			}
		}
		for i, all := range calls {
			var ts []*tensor.Tensor
			for _, q := range all {
				ts = append(ts, q.cpu)
			}
			v := must.Get(x.cpu.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: ps[i].op(r)}))
			must.Do(work.WaitAll(x.ctx, works[i], v))
			for _, q := range all {
				must.Do(x.check(q))
			}
		}
		return nil
	})
	return w
}

// TestSharedCommands counts what the group's streams get for an all-reduce through memory that the ranks share.
func TestSharedCommands(t *testing.T) {
	aProcessEach(t)
	w := newWorld(t, hostOnly())
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	for n, want := range map[int][]string{
		1:         {"up Wait", "up Launch", "up Record"},
		128 << 10: {"up Wait", "up Launch", "up Record"},
		132 << 10: {"down Wait", "down Copy", "down WriteValue", "up WaitValue", "up Copy", "up Record"},
	} {
		var got []string
		w.each(func(x *rank, r int) error {
			y := must.Get(x.vector(tensor.Uint8, r, make([]byte, n)))
			if r == 0 {
				w.m.Inject(func(c sim.Call) error {
					if _, line, own := strings.Cut(c.Stream, "rank 0 "); own {
						got = append(got, strings.TrimSuffix(line, ".0")+" "+c.Name)
					}
					return nil
				})
			}
			return x.wait(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
		})
		w.m.Inject(nil)
		require.Equal(t, want, got, "%d bytes", n)
	}
	w.end()
}

// TestSharedRefused has the system refuse each thing that shared memory needs, to the
// first rank that asks or to a later one. The group works without shared memory, and each
// rank knows why.
func TestSharedRefused(t *testing.T) {
	if lonely {
		t.Skip("other systems are not asked for anything")
	}
	defer cuda.OtherProcesses()()
	for _, c := range []struct {
		call string
		k    int
		err  error
		rank string
	}{
		{"memfd_create", 0, syscall.EPERM, "rank 0"},
		{"memfd_create", 0, syscall.ENOSYS, "rank 0"},
		{"fallocate", 0, syscall.ENOSPC, "rank 0"},
		{"fallocate", 0, syscall.ENOMEM, "rank 0"},
		{"mmap", 0, syscall.ENOMEM, "rank 0"},
		{"mmap", 1, syscall.ENOMEM, "rank"},
		{"open", 0, syscall.EACCES, "rank"},
		{"open", 1, syscall.ENOENT, "rank"},
	} {
		t.Run(fmt.Sprintf("%s %d %v", c.call, c.k, c.err), func(t *testing.T) {
			var asked atomic.Int32
			defer cuda.SetBefore(func(call string, n int) error {
				if n != cuda.PageSize && call == c.call && int(asked.Add(1)) == c.k+1 {
					return c.err
				}
				return nil
			})()
			w := exchanges(t, 1, sim.Snapshot, func(*world) {})
			require.Greater(t, int(asked.Load()), c.k)
			for r := range w.ranks {
				for _, text := range []string{"not memory that the ranks share: " + c.rank, c.err.Error()} {
					require.Contains(t, w.how(r), text)
				}
				require.Equal(t, w.how(0), w.how(r))
			}
			w.end()
		})
	}
}

// TestSharedNot holds when ranks share no memory, and what they say of it.
func TestSharedNot(t *testing.T) {
	for name, c := range map[string]struct {
		change func(o *cuda.Options, r int)
		why    string
	}{
		"other slots": {func(o *cuda.Options, r int) { o.Slots = 1 + r }, "rank 1: shared memory has"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{size: 2, timeout: patience, vary: c.change})
			require.Contains(t, w.how(1), c.why)
			w.each(func(x *rank, r int) error {
				b := must.Get(x.bucket(r))
				must.Do(x.fill(r, b))
				return must.Err(x.run(b.t))
			})
			w.end()
		})
	}
}

// TestSharedMismatch lets a rank run far ahead of the other. Then the board does not have its
// call any more.
func TestSharedMismatch(t *testing.T) {
	defer cuda.SetMostQueued(1 << 20)()
	w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 1, Quiet: true}})
	ahead := make(chan struct{})
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		b := must.Get(x.bucket(r))
		if r == 1 {
			<-ahead
		}
		first, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{Op: []backend.ReduceOp{backend.Sum(), backend.Max()}[r]})
		if err != nil {
			return err
		}
		for range 200 * (1 - r) {
			must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
		}
		if r == 0 {
			close(ahead)
		}
		return first.Wait(x.ctx)
	})
	for r, err := range errs {
		named(t, err, r, 0)
	}
	require.ErrorIs(t, errors.Join(errs...), work.ErrMismatch)
	require.ErrorContains(t, errors.Join(errs...), "all_reduce (max) of 100 elements")
	w.drop(t)
}
