package cuda_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkHostStages shows where the time of an all-reduce through the host goes. It
// measures the operation with one rank a GPU in one process, and each of its stages. Run
// it with -test.benchtime 1x; it prints a table. Times are medians. Where all ranks do
// the same at a time, they are those of the slowest rank.
func BenchmarkHostStages(b *testing.B) {
	d, err := openReal()
	if err != nil {
		b.Skip(err)
	}
	defer d.Close()
	for b.Loop() {
		for _, n := range []int{1, 2, 4} {
			if n <= d.Count() {
				hostStages(b, d, n)
			}
		}
	}
}

// stager is one rank of the stages.
type stager struct {
	v        driver.Device
	mem      driver.Memory
	down, up driver.Stream
	copy     driver.Function
	module   driver.Module
	args     driver.Args
	words    driver.HostMemory
	count    uint32
	trips    []time.Duration
}

const mostStaged = 256 << 20

func hostStages(b *testing.B, d driver.Driver, n int) {
	staging := must.Get(d.AllocHost((n + 1) * mostStaged / 4))
	defer staging.Close()
	ranks := make([]*stager, n)
	for r := range ranks {
		x := &stager{}
		ranks[r] = x
		x.v = must.Get(d.Device(r))
		x.mem = must.Get(x.v.Alloc(mostStaged))
		defer x.mem.Close()
		for _, s := range []*driver.Stream{&x.down, &x.up} {
			*s = must.Get(x.v.NewStream(driver.StreamOptions{High: true}))
			defer (*s).Close()
		}
		x.words = must.Get(d.AllocHost(4096))
		defer x.words.Close()
		x.module = must.Get(x.v.Load(kernels.PTX))
		defer x.module.Close()
		x.copy = must.Get(x.module.Function(kernels.Copy))
	}
	fmt.Printf("\n%d GPUs, %d CPUs, GOMAXPROCS %d\n", n, runtime.NumCPU(), runtime.GOMAXPROCS(0))
	// each runs f on all ranks at a time and returns the median, over the rounds, of
	// the slowest rank's time.
	each := func(rounds int, f func(x *stager, r int) error) time.Duration {
		times := make([][]time.Duration, n)
		start := newStart(n)
		var wg sync.WaitGroup
		errs := make([]error, n)
		for r, x := range ranks {
			wg.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				for range rounds + 2 {
					start.meet()
					t := time.Now()
					if err := f(x, r); err != nil {
						errs[r] = errors.Join(errs[r], err)
					}
					times[r] = append(times[r], time.Since(t))
				}
			})
		}
		wg.Wait()
		must.Do(errors.Join(errs...))
		worst := make([]time.Duration, rounds)
		for i := range worst {
			for r := range n {
				worst[i] = max(worst[i], times[r][i+2])
			}
		}
		slices.Sort(worst)
		return worst[rounds/2]
	}
	calls(each, staging)
	for r, x := range ranks {
		slices.Sort(x.trips)
		fmt.Printf(" from a word to GPU %d and back: %v, at least %v\n", r, x.trips[len(x.trips)/2], x.trips[0])
	}
	sizes := []int{4, 64 << 10, 1 << 20, 16 << 20, mostStaged}
	for _, size := range sizes {
		rounds := min(max(64<<20/size, 5), 100)
		at := func(r int) driver.Ptr { return staging.Ptr() + driver.Ptr(r*mostStaged/4) }
		// move copies in pieces that a slot would have, so that staging stays as small.
		move := func(s driver.Stream, r int, x *stager, up, kernel bool) error {
			for from := 0; from < size; from += 2 << 20 {
				k := min(size-from, 2<<20)
				host, dev := at(r)+driver.Ptr(from%(8<<20)), x.mem.Ptr()+driver.Ptr(from)
				dst, src := host, dev
				if up {
					dst, src = dev, host+driver.Ptr(16<<20)
				}
				var err error
				if kernel {
					err = s.Launch(&driver.Launch{
						Function: x.copy, Grid: kernels.Blocks(k), Block: driver.Dim{X: kernels.Block},
						Args: x.args.Reset().Ptr(dst).Ptr(0).Ptr(src).Uint64(uint64(k)),
					})
				} else {
					err = s.Copy(dst, src, k)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}
		// flag ends what a stream was given by a word that the host polls.
		flag := func(x *stager, streams ...driver.Stream) error {
			x.count++
			for i, s := range streams {
				if err := s.WriteValue(x.words.Ptr()+driver.Ptr(128*i), x.count); err != nil {
					return err
				}
			}
			for i := range streams {
				for x.words.Load32(128*i) != x.count {
				}
			}
			return nil
		}
		fmt.Printf("%9d B ", size)
		for _, kernel := range []bool{false, true} {
			if kernel && size > 1<<20 {
				continue
			}
			name := map[bool]string{false: "", true: " by kernel"}[kernel]
			fmt.Printf(" down%s %v", name, each(rounds, func(x *stager, r int) error {
				return errors.Join(move(x.down, r, x, false, kernel), flag(x, x.down))
			}))
			fmt.Printf(" up%s %v", name, each(rounds, func(x *stager, r int) error {
				return errors.Join(move(x.up, r, x, true, kernel), flag(x, x.up))
			}))
			fmt.Printf(" both%s %v", name, each(rounds, func(x *stager, r int) error {
				return errors.Join(move(x.down, r, x, false, kernel), move(x.up, r, x, true, kernel), flag(x, x.down, x.up))
			}))
		}
		for threads := 1; threads <= 16 && threads*n <= runtime.NumCPU() && n > 1; threads *= 2 {
			if threads > 1 && size < 256<<10 {
				break
			}
			fmt.Printf(" combine by %d %v", threads, each(min(rounds, 10), func(_ *stager, r int) error {
				return combineStaged(staging.Bytes(), r, n, size, threads)
			}))
		}
		if n > 1 {
			fmt.Printf(" all_reduce %v", wholeOperation(b, d, ranks, size, rounds))
		}
		fmt.Println()
	}
}

// calls shows what calls to the driver cost and how long words take between the
// host and a stream.
func calls(each func(int, func(*stager, int) error) time.Duration, staging driver.HostMemory) {
	const many = 50
	per := func(name string, f func(x *stager, r int) error) {
		t := each(30, func(x *stager, r int) error {
			for range many {
				must.Do(f(x, r))
			}
			return nil
		})
		fmt.Printf(" %s %v", name, t/many)
	}
	fmt.Print("a call:")
	word := func(x *stager, i int) driver.Ptr { return x.words.Ptr() + driver.Ptr(1024+128*i) }
	per("write value", func(x *stager, _ int) error { return x.down.WriteValue(word(x, 0), 1) })
	per("wait value", func(x *stager, _ int) error { return x.down.WaitValue(word(x, 0), 1, driver.Equal) })
	per("copy", func(x *stager, r int) error {
		return x.down.Copy(staging.Ptr()+driver.Ptr(r*4096), x.mem.Ptr(), 4)
	})
	per("launch", func(x *stager, r int) error {
		return x.down.Launch(&driver.Launch{Function: x.copy, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: kernels.Block},
			Args: x.args.Reset().Ptr(staging.Ptr() + driver.Ptr(r*4096)).Ptr(0).Ptr(x.mem.Ptr()).Uint64(4)})
	})
	per("record, wait, release", func(x *stager, _ int) error {
		e, err := x.down.Record()
		if err == nil {
			err = x.up.Wait(e)
			e.Release()
		}
		return err
	})
	per("stream err", func(x *stager, _ int) error { return x.down.Err() })
	each(100, func(x *stager, _ int) error {
		gate, flag := 2048, 2048+128
		x.count++
		must.Do(x.down.WaitValue(x.words.Ptr()+driver.Ptr(gate), x.count, driver.Equal))
		must.Do(x.down.WriteValue(x.words.Ptr()+driver.Ptr(flag), x.count))
		time.Sleep(200 * time.Microsecond) // the stream waits
		t := time.Now()
		x.words.Store32(gate, x.count)
		for x.words.Load32(flag) != x.count {
		}
		x.trips = append(x.trips, time.Since(t))
		return nil
	})
	fmt.Println()
}

// combineStaged combines a rank's share of n buffers, as an exchange does.
func combineStaged(mem []byte, r, n, size, threads int) (err error) {
	defer must.Catch(&err)
	red := must.Get(backend.Sum().Reduction(tensor.Float32, n))
	const slot, block = 2 << 20, 16 << 10
	var wg sync.WaitGroup
	for i := range threads {
		wg.Go(func() {
			for from := 0; from < size; from += slot {
				k := min(size-from, slot)
				share := (k/n + threads*64 - 1) / (threads * 64) * 64
				for lo := share * (r*threads + i); lo < min(share*(r*threads+i+1), k); lo += block {
					end := min(lo+block, share*(r*threads+i+1), k)
					slotAt := from % (8 << 20)
					out := mem[n*mostStaged/4+slotAt:][lo:end]
					for q := range n {
						in := mem[q*mostStaged/4+slotAt:][lo:end]
						if q == 0 {
							copy(out, in)
						} else {
							red.Combine(out[:len(out)&^3], in[:len(in)&^3])
						}
					}
				}
			}
		})
	}
	wg.Wait()
	return nil
}

// wholeOperation returns the median time of an all-reduce, from the call to when a
// stream that is ordered after it has come there.
func wholeOperation(b *testing.B, d driver.Driver, ranks []*stager, size, rounds int) time.Duration {
	st := store.NewHash()
	defer st.Close()
	n := len(ranks)
	times := make([][]time.Duration, n)
	errs := make([]error, n)
	start := newStart(n)
	var wg sync.WaitGroup
	for r, x := range ranks {
		wg.Go(func() {
			errs[r] = func() error {
				g, err := cuda.New(b.Context(), backend.Options{Store: st, Rank: r, Size: n, Timeout: patience, Group: "g",
					Specific: cuda.Options{Driver: d, AllReduce: cuda.HostWork, CPUOptions: gloo.Options{Interfaces: loopback("").Interfaces, Sums: gloo.SumsInRankOrder}}})
				if err != nil {
					return err
				}
				whole, err := tensor.OnDevice(tensor.Float32, x.mem, x.mem.Len()/4)
				if err != nil {
					return err
				}
				t, err := whole.Slice(0, 0, max(size/4, 1))
				ctx := cuda.WithStreams(b.Context(), x.down)
				for range rounds + 3 {
					if err != nil {
						return err
					}
					start.meet()
					from := time.Now()
					err = func() (err error) {
						defer must.Catch(&err)
						w, err := g.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: backend.Max()})
						if err != nil {
							return err
						}
						must.Do(w.Synchronize(x.down))
						e := must.Get(x.down.Record())
						defer e.Release()
						return e.Sync(b.Context())
					}()
					times[r] = append(times[r], time.Since(from))
				}
				return errors.Join(err, g.Close())
			}()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	worst := make([]time.Duration, rounds)
	for i := range worst {
		for r := range n {
			worst[i] = max(worst[i], times[r][i+3])
		}
	}
	slices.Sort(worst)
	return worst[rounds/2]
}

// start lets some goroutines begin at the same time, without sleeping.
type start struct {
	n     int32
	count atomic.Int32
}

func newStart(n int) *start { return &start{n: int32(n)} }

func (s *start) meet() {
	mine := s.count.Add(1)
	for until := (mine + s.n - 1) / s.n * s.n; s.count.Load() < until; {
		runtime.Gosched()
	}
}
