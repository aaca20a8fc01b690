package cuda_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// arena is memory for a rank's pairs that is there before the ranks of a process
// begin: making and closing memory may wait for a device that they share. What lies
// between the pairs has to stay as it is.
type arena struct {
	devices []driver.Memory   // one a device
	pairs   [][]driver.Memory // in each of them
	host    driver.HostMemory // what goes up and comes back of the pairs, and then a copy of a device's
	used    int               // of host, by pairs
	delays  []*delay          // one a device
	cycles  uint64            // of a delay
}

// Between pairs lie at least guard bytes of this.
const poison = 0xa5

// newArena makes room for pairs of so many bytes on each device. Each pair finds the
// caller's stream busy for some clock cycles.
func (x *rank) newArena(bytes int, cycles uint64) (err error) {
	defer must.Catch(&err)
	a := &arena{cycles: cycles, pairs: make([][]driver.Memory, x.d.Count())}
	a.host = must.Get(x.d.AllocHost(3 * bytes))
	x.close = append(x.close, a.host)
	for i, s := range x.stream {
		v := must.Get(x.d.Device(i))
		m := must.Get(v.Alloc(bytes))
		a.devices, x.close = append(a.devices, m), append(x.close, m)
		must.Do(x.enqueue(s, func() error { return s.Memset(m.Ptr(), poison, bytes) }))
		y := must.Get(newDelay(x.d, v))
		a.delays, x.close = append(a.delays, y), append(x.close, y)
	}
	x.arena = a
	return nil
}

// enqueue waits for what f gives to a stream.
func (x *rank) enqueue(s driver.Stream, f func() error) error {
	if err := f(); err != nil {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(x.ctx)
}

// place gives a pair its memory, behind that of the last one.
func (a *arena) place(x *rank, p *pair) (err error) {
	defer must.Catch(&err)
	n, all := len(p.storage), a.devices[p.device]
	lo := all.Ptr() + guard
	if l := a.pairs[p.device]; len(l) > 0 {
		last := l[len(l)-1]
		lo = (last.Ptr() + driver.Ptr(last.Len()) + guard + 15) &^ 15
	}
	if room := all.Ptr() + driver.Ptr(all.Len()); lo+driver.Ptr(n)+guard > room || a.used+2*n > 2*all.Len() {
		return fmt.Errorf("no room for %d bytes in %d", n, all.Len())
	}
	v := must.Get(x.d.Device(p.device))
	at := lo
	if n == 0 {
		at = 0
	}
	p.mem = must.Get(v.Borrow(at, n))
	if n > 0 {
		a.pairs[p.device] = append(a.pairs[p.device], p.mem)
	}
	p.at, p.host = a.host.Ptr()+driver.Ptr(a.used), a.host.Bytes()[a.used:a.used+2*n]
	a.used += (2*n + 15) &^ 15
	return a.delays[p.device].hold(x.stream[p.device], a.cycles)
}

// clear looks at what lies between the pairs and makes room for others. The
// operations on them have ended.
func (a *arena) clear(x *rank) error {
	for i, all := range a.devices {
		l := a.pairs[i]
		if len(l) == 0 {
			continue
		}
		last := l[len(l)-1]
		n := int(last.Ptr()-all.Ptr()) + last.Len() + guard
		copied := a.host.Ptr() + driver.Ptr(2*all.Len())
		s := x.stream[i]
		if err := x.enqueue(s, func() error { return errors.Join(s.Copy(copied, all.Ptr(), n), s.Memset(all.Ptr(), poison, n)) }); err != nil {
			return err
		}
		driver.HostAccess(x.d, "looking at what lies between", driver.Reads(copied, n))
		got, at := a.host.Bytes()[2*all.Len():][:n], 0
		for _, p := range l {
			lo := int(p.Ptr() - all.Ptr())
			if err := clean(got[at:lo], at); err != nil {
				return fmt.Errorf("device %d: %w", i, err)
			}
			at = lo + p.Len()
			if err := p.Close(); err != nil {
				return err
			}
		}
		if err := clean(got[at:], at); err != nil {
			return fmt.Errorf("device %d: %w", i, err)
		}
		a.pairs[i] = l[:0]
	}
	a.used = 0
	return nil
}

func clean(b []byte, at int) error {
	if i := slices.IndexFunc(b, func(v byte) bool { return v != poison }); i >= 0 {
		return fmt.Errorf("byte %d, which is nobody's, is %#x", at+i, b[i])
	}
	return nil
}

// sharing is how large a group of ranks of one process is, which share a driver, and
// what it works with.
type sharing struct {
	group  string
	size   int
	apart  *apart // nil if all ranks are in this process
	room   int    // bytes for a rank's pairs on each device
	cycles uint64 // that a caller's stream is busy before each pair
	fill   int    // operations under way for which floods makes memory in advance
	way    way
	cuda.Options
}

func (o sharing) world(t *testing.T, d driver.Driver) *world {
	ctx, cancel := context.WithTimeout(context.Background(), 5*patience)
	t.Cleanup(cancel)
	w := &world{TB: t, ctx: ctx, fabric: mem.NewFabric(), ranks: make([]*rank, o.size)}
	var st store.Store
	host := join(w.fabric)
	if o.apart != nil {
		st, host = store.Prefix(o.group, o.apart.st), loopback("")
	} else {
		st = store.NewHash()
		t.Cleanup(func() { st.Close() })
	}
	for r := range o.size {
		if o.apart != nil && r != o.apart.rank {
			continue
		}
		x := &rank{TB: t, ctx: ctx, w: w, d: d}
		require.NoError(t, x.makeStreams(fmt.Sprintf("%s caller %d", o.group, r)))
		require.NoError(t, x.newArena(o.room, o.cycles))
		w.ranks[r] = x
	}
	o.Driver, o.CPUOptions = d, host
	w.each(func(x *rank, r int) (err error) {
		options := o.Options
		options.Slots = cmp.Or(o.way.slots(r), options.Slots)
		bo := backend.Options{Store: st, Rank: r, Size: o.size, Timeout: patience, Group: o.group, Specific: options}
		x.b = must.Get(cuda.New(ctx, bo))
		if o.apart == nil {
			x.cpu, err = x.reference(bo)
			return err
		}
		bo.Group, bo.Store, bo.Specific = o.group+"/reference", store.Prefix("reference", st), loopback("")
		x.cpu, err = gloo.New(ctx, bo)
		return err
	})
	return w
}

// promised reports whether a work does an operator on a dtype, and the sums of small
// numbers are exact.
func promised(way string, op backend.ReduceOp, d tensor.DType, size int) bool {
	_, err := op.Reduction(d, size)
	if err != nil || !addsExactly(d, size) {
		return false
	}
	switch way {
	case cuda.DirectWork, cuda.RingWork:
		name, _ := kernels.Combine(op.Kind(), d)
		return name != "" && direct.Supports(op, d) == nil
	}
	return true
}

// greatest is an operator of the caller's.
var greatest = backend.Custom("greatest", func(d tensor.DType, dst, src []byte) {
	for i, v := range src {
		dst[i] = max(dst[i], v)
	}
})

// allReduces does every work of all-reduce on every dtype and with every operator that
// it promises, in several sizes. With every above 0 it does each so manieth operator on
// a dtype, in one of the sizes in turn.
func allReduces(t *testing.T, d driver.Driver, o sharing, every int, sizes ...int) {
	for _, way := range ways {
		o.group, o.way, o.AllReduce = way.name, way, way.work
		if way.kernels() && o.size > d.Count() {
			continue
		}
		w := o.world(t, d)
		done := 0
		for _, dt := range tensor.DTypes() {
			for _, op := range append(deviceOps[:len(deviceOps):len(deviceOps)], backend.PreMulSum(2), greatest) {
				if !promised(way.work, op, dt, o.size) {
					continue
				}
				seed, these := uint64(done), sizes
				done++
				if every > 0 {
					if done%every != 0 {
						continue
					}
					these = sizes[done/every%len(sizes):][:1]
				}
				w.each(func(x *rank, r int) error {
					rng := rand.New(rand.NewPCG(seed, uint64(r)))
					if err := x.allReduces(dt, op, these, r, rng); err != nil {
						return fmt.Errorf("%s: %v of %v: %w", way.name, op, dt, err)
					}
					return x.arena.clear(x)
				})
			}
		}
		require.Equal(t, way.work, w.ranks[0].b.Explain().Choices[0].Algorithm)
		w.end()
		t.Logf("%d ranks, %s: %d operators on dtypes", o.size, way.name, done/max(every, 1))
	}
}

// allReduces all-reduces tensors of several sizes, all at a time.
func (x *rank) allReduces(d tensor.DType, op backend.ReduceOp, sizes []int, r int, rng *rand.Rand) (err error) {
	defer must.Catch(&err)
	var ps []*pair
	var works []*work.Work
	for _, n := range sizes {
		p := must.Get(x.pairOf(rng, d, r%len(x.stream), flat(n), true))
		v := must.Get(x.b.AllReduce(x.ctx, devs([]*pair{p}), backend.AllReduceOptions{Op: op}))
		must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
		ps, works = append(ps, p), append(works, v)
	}
	for i, p := range ps {
		v := must.Get(x.cpu.AllReduce(x.ctx, cpus([]*pair{p}), backend.AllReduceOptions{Op: op}))
		if err := work.WaitAll(x.ctx, works[i], v); err != nil {
			return fmt.Errorf("%d elements: %w", sizes[i], err)
		}
		must.Do(x.check(p))
	}
	return nil
}

// groupSizes returns how many ranks groups have on GPUs: two, which may share one, and
// four if each can have its own.
func groupSizes(d driver.Driver) []int {
	if d.Count() >= 4 {
		return []int{2, 4}
	}
	return []int{2}
}

// openSim opens simulated devices with all kernels; what goes wrong in them is an
// error of Close.
func openSim(t *testing.T, devices int, seed uint64) driver.Driver {
	t.Log("seed", seed)
	d, err := sim.Open(sim.Config{Devices: devices, Seed: seed, Kernels: simkernels.All(), Semantics: sim.Semantics(seed % 2)})
	require.NoError(t, err)
	return d
}

// closeSim closes simulated devices on which no stream has fetched from another device:
// on GPUs those that do wait for each other.
func closeSim(t *testing.T, d driver.Driver) {
	require.Zero(t, d.(*sim.Driver).Machine().Stats().Fetches, "copies that a stream of the target's device does")
	require.NoError(t, d.Close())
}

// ownWorks are the works before tests register others.
var ownWorks = cuda.AllReduceWorks()

// TestAllReduceWays holds that ways has every work for dense tensors that there is, but that of several clusters
// (TestF26Clusters).
func TestAllReduceWays(t *testing.T) {
	var known []string
	for _, w := range ways {
		known = append(known, w.work)
	}
	require.Contains(t, ownWorks, "direct")
	for _, name := range ownWorks {
		if name != cuda.ClustersWork {
			require.Contains(t, known, name)
		}
	}
}

// TestGPUWorks does all-reduces in every way.
func TestGPUWorks(t *testing.T) {
	d := openGPU(t)
	for _, n := range groupSizes(d) {
		o := sharing{size: n, room: 64 << 20, cycles: 1_000_000, Options: cuda.Options{Chunk: 1 << 19}}
		allReduces(t, d, o, 0, gpuSizes...)
	}
	require.NoError(t, d.Close())
}

// TestSimulatedWorks is TestGPUWorks on simulated devices.
func TestSimulatedWorks(t *testing.T) {
	for _, n := range []int{2, 4} {
		d := openSim(t, n, uint64(n/2))
		o := sharing{size: n, room: 256 << 10, Options: cuda.Options{Chunk: 4000}}
		allReduces(t, d, o, n-1, 1, 1023, 2003)
		closeSim(t, d)
	}
}

// everyCollective does every collective on some dtypes, with every root, in sizes of up
// to large rows.
func everyCollective(t *testing.T, d driver.Driver, o sharing, large int) {
	o.group = "collectives"
	w := o.world(t, d)
	dtypes := []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Int8, tensor.Float64, tensor.Bool, tensor.Complex64, tensor.Uint16}
	rng := rand.New(rand.NewPCG(2, 2))
	for i, name := range names {
		// Layout 2 is transposed, 3 has many runs of bytes in three times the memory.
		layout, large := i%4, large
		if layout > 1 {
			large /= 4
		}
		var small, larger []program
		for j, dt := range dtypes {
			p := draw(rng, name, o.size)
			p.dtype, p.root = dt, (i+j)%o.size
			for k := range deviceOps {
				if p.op = deviceOps[(i+j+k)%len(deviceOps)]; promised("", p.op, dt, o.size) {
					break
				}
			}
			if j%2 == 0 {
				small = append(small, p)
				continue
			}
			for k := range p.n {
				p.n[k] = large - k
			}
			larger = append(larger, p)
		}
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(uint64(i), uint64(r)))
			x.layout = nil
			must.Do(errors.Join(x.collectives(small, rng, r), x.arena.clear(x)))
			x.layout = new(int)
			*x.layout = layout
			return errors.Join(x.collectives(larger, rng, r), x.arena.clear(x))
		})
	}
	w.each(func(x *rank, _ int) error { return x.b.MonitoredBarrier(x.ctx, backend.MonitoredBarrierOptions{}) })
	w.end()
}

// TestGPUCollectives does all that goes through the host.
func TestGPUCollectives(t *testing.T) {
	d := openGPU(t)
	for _, n := range groupSizes(d) {
		everyCollective(t, d, sharing{size: n, room: 64 << 20, cycles: 1_000_000, Options: cuda.Options{Chunk: 1 << 18}}, 1<<15)
	}
	require.NoError(t, d.Close())
}

// TestSimulatedCollectives is TestGPUCollectives on simulated devices.
func TestSimulatedCollectives(t *testing.T) {
	for _, n := range []int{2, 3} {
		d := openSim(t, 2, uint64(n))
		everyCollective(t, d, sharing{size: n, room: 1 << 20, Options: cuda.Options{Chunk: 2000}}, 500)
		closeSim(t, d)
	}
}

// flood is a group whose ranks have many operations on their way at a time.
type flood struct {
	*world
	callers [][]*rank // of each rank, with streams and memory of their own
}

// floods lets a group for each way and one more, of the same ranks on the same devices issue so many operations
// altogether before any is waited for. Each group has a goroutine a rank.
func floods(t *testing.T, d driver.Driver, o sharing, seed uint64, operations, largest int) {
	t.Log("seed of what is called:", seed)
	groups := make([]*flood, len(ways)+1)
	for g := range groups {
		way := ways[g%len(ways)]
		o.group, o.way, o.AllReduce = fmt.Sprint("group ", g), way, way.work
		if g == len(ways) || way.kernels() && o.size > d.Count() {
			o.AllReduce = "" // whichever is best
		}
		f := &flood{world: o.world(t, d)}
		f.callers = make([][]*rank, o.size)
		for r, x := range f.ranks {
			if x == nil {
				continue
			}
			second := &rank{TB: t, ctx: x.ctx, w: x.w, d: d, b: x.b, cpu: x.cpu}
			require.NoError(t, second.makeStreams(fmt.Sprintf("%s caller %d again", o.group, r)))
			require.NoError(t, second.newArena(o.room, o.cycles))
			f.callers[r] = []*rank{x, second}
		}
		groups[g] = f
		// What operations make once is made here: a driver may wait in that for what others
		// have on their way.
		f.each(func(x *rank, r int) error {
			must.Do(x.allReduces(tensor.Float32, backend.Sum(), []int{16}, r, rand.New(rand.NewPCG(seed, uint64(r)))))
			plan, rng := rand.New(rand.NewPCG(seed, uint64(g))), rand.New(rand.NewPCG(seed, uint64(r)))
			for range 5 * len(floodKinds) {
				must.Do(f.alone(r, plan, rng))
			}
			return errors.Join(x.b.Fill(16*o.size*largest, o.fill), x.arena.clear(x))
		})
	}
	var all sync.WaitGroup
	errs := make([]error, len(groups)*o.size)
	for g, f := range groups {
		for r, x := range f.ranks {
			if x == nil {
				continue
			}
			all.Go(func() {
				if err := f.run(r, rand.New(rand.NewPCG(seed, uint64(g))), rand.New(rand.NewPCG(seed+1, uint64(g*o.size+r))), operations/len(groups), largest); err != nil {
					errs[g*o.size+r] = fmt.Errorf("group %d, rank %d: %w", g, r, err)
				}
			})
		}
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, f := range groups {
		for _, callers := range f.callers {
			if callers != nil {
				callers[1].free()
			}
		}
		f.end()
	}
}

var floodKinds = []string{"all_reduce", "all_reduce", "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}

// draw draws an operation with tensors of up to largest elements.
func (f *flood) draw(plan *rand.Rand, largest int) program {
	p := draw(plan, floodKinds[plan.IntN(len(floodKinds))], len(f.ranks))
	for p.dtype = deviceTypes[plan.IntN(len(deviceTypes))]; !promised(cuda.DirectWork, p.op, p.dtype, len(f.ranks)); {
		p.op = deviceOps[plan.IntN(len(deviceOps))]
	}
	// As many of 1 to 2 elements as of 2 to 4, and so on.
	n := 1 << plan.IntN(bits.Len(uint(largest)))
	n = min(n+plan.IntN(n), largest)
	if strings.Contains(p.name, "all_to") || strings.HasSuffix(p.name, "tensor") {
		n /= len(f.ranks)
	}
	for k := range p.n {
		p.n[k] = max(n/2, 1)
	}
	return p
}

// alone does an operation with small tensors, and waits for it.
func (f *flood) alone(r int, plan, rng *rand.Rand) error {
	x := f.callers[r][0]
	x.layout = new(int)
	if err := x.collectives([]program{f.draw(plan, 100)}, rng, r); err != nil {
		return err
	}
	return x.arena.clear(x)
}

// run issues operations, which plan draws alike on all ranks, and then compares the
// outcomes with those of the CPU.
func (f *flood) run(r int, plan, rng *rand.Rand, operations, largest int) (err error) {
	defer must.Catch(&err)
	type issued struct {
		program
		call
		by *rank
		w  *work.Work
	}
	var calls []issued
	for i := range operations {
		p := f.draw(plan, largest)
		x := f.callers[r][i%2]
		x.layout = new(int)
		c, err := x.prepare(x.ctx, p, r, rng, true)
		if err != nil {
			return fmt.Errorf("%d: %w", i, err)
		}
		v, err := c.run(x.b, func(q *pair) *tensor.Tensor { return q.dev })
		if err != nil {
			return fmt.Errorf("%d: %+v: %w", i, p, err)
		}
		for _, s := range x.stream {
			if err := v.Synchronize(s); err != nil {
				return fmt.Errorf("%d: %+v: %w", i, p, err)
			}
		}
		for _, q := range c.all {
			must.Do(x.back(q))
		}
		calls = append(calls, issued{p, c, x, v})
	}
	for i, c := range calls {
		v := must.Get(c.run(c.by.cpu, func(q *pair) *tensor.Tensor { return q.cpu }))
		if err := work.WaitAll(c.by.ctx, c.w, v); err != nil {
			return fmt.Errorf("%d: %+v: %w", i, c.program, err)
		}
		for _, q := range c.all {
			if err := c.by.check(q); err != nil {
				return fmt.Errorf("%d: %+v: %w", i, c.program, err)
			}
		}
	}
	for _, x := range f.callers[r] {
		must.Do(x.arena.clear(x))
	}
	return nil
}

// TestGPUConcurrent has a thousand operations on their way, of ranks in processes of
// their own.
func TestGPUConcurrent(t *testing.T) {
	d := openGPU(t)
	sizes := groupSizes(d)
	require.NoError(t, d.Close())
	for _, n := range sizes {
		runApart(t, "floods", n, "")
	}
}

// TestSimulatedConcurrentApart is TestGPUConcurrent on simulated devices.
func TestSimulatedConcurrentApart(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("simulated devices of several processes are not promised here")
	}
	runApart(t, "floods", 2, t.TempDir())
}

// TestSimulatedConcurrent has a hundred on simulated devices.
func TestSimulatedConcurrent(t *testing.T) {
	for seed, n := range []int{2, 2, 4} {
		d := openSim(t, n, uint64(seed))
		floods(t, d, sharing{size: n, room: 512 << 10, Options: cuda.Options{Chunk: 2000}}, uint64(seed), 100, 1<<11)
		require.NoError(t, d.Close())
	}
}
