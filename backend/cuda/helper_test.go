package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// mutationSeeds is how many runs without a call may be in order by luck. With some calls three of
// four are, because a stream that does not wait for a word comes late enough.
const mutationSeeds = 400

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen.
const patience = 60 * time.Second

// world is the ranks of a group on one host.
type world struct {
	testing.TB
	ctx    context.Context
	m      *sim.Machine // nil for ranks that share a driver
	fabric *mem.Fabric
	ranks  []*rank // nil for those of other processes
}

// rank is one rank: a process with a driver, the backend, and what its caller has.
type rank struct {
	testing.TB
	ctx     context.Context
	w       *world
	d       driver.Driver
	b       *cuda.Backend
	cpu     backend.Backend // the same ranks without devices, as a reference
	stream  []driver.Stream // the caller's, one a device
	close   []interface{ Close() error }
	tensors []*tensor.Tensor
	layout  *int   // of what prepare makes; nil for any
	arena   *arena // that pairs lie in; nil if each has memory of its own

	mixes func(rng *rand.Rand) bool // whether a tensor is in CPU memory; nil if none is
}

// onVirtualTime runs f in a bubble of synctest: the streams' delays and the limits cost no time. There is no network,
// so s.native is false. Ranks that open each other's memory as processes do are in real time.
func onVirtualTime(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	if cuda.ProcessEach() {
		f(t)
		return
	}
	defer cuda.VirtualTime()()
	synctest.Test(t, f)
}

// virtually is f on virtual time.
func virtually(f func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) { onVirtualTime(t, f) }
}

type setup struct {
	size    int
	sim     sim.Config
	options cuda.Options
	native  bool // the host's part goes over gloo's native wire
	timeout time.Duration
	limit   time.Duration                // of the world's context; 0 means patience, or timeout if that is longer
	vary    func(o *cuda.Options, r int) // what differs from rank to rank; nil if nothing

	// sent, if not nil, is called with each message of the fabric.
	sent func(group string, from, to, bytes int)
}

func join(f *mem.Fabric) gloo.Options {
	return gloo.Options{Fabric: f}
}

func newWorld(tb testing.TB, s setup) *world {
	tb.Cleanup(cuda.Underway())
	s.sim.Devices = max(s.sim.Devices, 1)
	m := must.Get(sim.New(s.sim))
	limit := s.limit
	if limit == 0 {
		limit = max(patience, s.timeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	tb.Cleanup(cancel)
	w := &world{TB: tb, ctx: ctx, m: m, fabric: mem.NewFabric()}
	if s.sent != nil {
		w.fabric.DropIf(func(group string, from int, q *transport.Request) bool {
			s.sent(group, from, q.Peer, len(q.Buf))
			return false
		})
	}
	st := store.NewHash()
	tb.Cleanup(func() { st.Close() })
	for r := range s.size {
		d := must.Get(m.Process(fmt.Sprint("rank ", r)))
		x := &rank{TB: tb, ctx: ctx, w: w, d: d}
		require.NoError(tb, x.makeStreams(fmt.Sprint("caller ", r)))
		w.ranks = append(w.ranks, x)
	}
	w.each(func(x *rank, r int) error {
		o := s.options
		o.Driver = x.d
		if !s.native && o.CPUOptions == nil {
			o.CPUOptions = join(w.fabric)
		}
		if s.vary != nil {
			s.vary(&o, r)
		}
		bo := backend.Options{Store: st, Rank: r, Size: s.size, Timeout: max(s.timeout, 0), Group: "g", Specific: o}
		if s.timeout > 0 {
			bo.Timeout = patience // for the ranks to meet
		}
		reg, _ := backend.Lookup(cuda.Name)
		b := must.Get(reg.New(ctx, bo))
		x.b = b.(*cuda.Backend)
		x.b.SetTimeout(max(s.timeout, 0))
		x.cpu = must.Get(x.reference(bo))
		return nil
	})
	return w
}

// makeStreams gives the caller a stream on each device.
func (x *rank) makeStreams(name string) (err error) {
	defer must.Catch(&err)
	for i := range x.d.Count() {
		v := must.Get(x.d.Device(i))
		s := must.Get(v.NewStream(driver.StreamOptions{Name: fmt.Sprintf("%s.%d", name, i)}))
		x.stream = append(x.stream, s)
		x.close = append(x.close, s)
	}
	return nil
}

// reference makes a group of the same ranks for tensors in CPU memory.
func (x *rank) reference(o backend.Options) (backend.Backend, error) {
	o.Specific, o.Group, o.Store = join(x.w.fabric), o.Group+"/reference", nil
	return gloo.New(x.ctx, o)
}

// each calls f for every rank at the same time.
func (w *world) each(f func(x *rank, r int) error) {
	w.Helper()
	errs := make([]error, len(w.ranks))
	var wg sync.WaitGroup
	for r, x := range w.ranks {
		if x != nil {
			wg.Go(func() {
				defer must.Catch(&errs[r])
				errs[r] = f(x, r)
			})
		}
	}
	wg.Wait()
	// One that failed first may be the reason why others did.
	for r, err := range errs {
		if err != nil {
			errs[r] = fmt.Errorf("rank %d: %w", r, err)
		}
	}
	require.NoError(w, errors.Join(errs...))
}

// wait waits for what a call has returned.
func (x *rank) wait(v *work.Work, err error) error {
	if err != nil {
		return err
	}
	return v.Wait(x.ctx)
}

// end closes everything; the machine must have found nothing wrong.
func (w *world) end() {
	w.Helper()
	w.each(func(x *rank, r int) error {
		must.Do(x.b.Close())
		return x.cpu.Close()
	})
	for _, x := range w.ranks {
		if x != nil {
			x.free()
		}
	}
	if w.m != nil {
		require.NoError(w, w.m.Close())
	}
}

func (x *rank) free() {
	for _, c := range slices.Backward(x.close) {
		require.NoError(x, c.Close())
	}
	x.close = nil
}

// pair is a tensor on a device and one in CPU memory that begin with the same
// elements, and have the same strides.
type pair struct {
	dev, cpu *tensor.Tensor
	mem      driver.Memory
	storage  []byte     // of cpu
	host     []byte     // page-locked: what the storage begins with, and what comes back
	at       driver.Ptr // of host
	device   int
	seen     driver.Event
	twin     []byte // the storage of dev, if that is in CPU memory too
}

// shape is how a tensor lies in its storage.
type shape struct {
	dims, strides []int
	offset, len   int // of the storage
}

func flat(dims ...int) shape {
	s := shape{dims: dims, len: 1}
	for _, d := range slices.Backward(dims) {
		s.strides = append([]int{s.len}, s.strides...)
		s.len *= d
	}
	return s
}

// laid returns dims as one of several layouts: 0 contiguous, 1 in a larger
// storage, 2 transposed, 3 with holes.
func laid(kind int, dims ...int) shape {
	s := flat(dims...)
	switch kind {
	case 1:
		s.offset, s.len = 3, s.len+7
	case 2:
		slices.Reverse(s.dims)
		t := flat(s.dims...)
		slices.Reverse(s.dims)
		slices.Reverse(t.strides)
		s.strides = t.strides
	case 3:
		for i := range s.strides {
			s.strides[i] *= 3
		}
		s.offset, s.len = 2, 3*s.len+2
	}
	return s
}

// pattern is how many elements of a storage are drawn; the rest repeats them.
const pattern = 10_007

// pairOf makes a pair with small whole numbers, which every dtype adds exactly.
// The device's copy is still on its way when it returns, on the caller's stream.
func (x *rank) pairOf(rng *rand.Rand, d tensor.DType, device int, s shape, on bool) (_ *pair, err error) {
	defer must.Catch(&err)
	all, err := tensor.New(d, s.len)
	if err != nil {
		return nil, err
	}
	for i := range min(s.len, pattern) {
		v := float64(rng.IntN(3))
		if d == tensor.Bool {
			v = float64(rng.IntN(2))
		}
		must.Do(all.SetFloat64(v, i))
	}
	p := &pair{storage: all.Bytes(), device: device}
	for n := pattern * d.Size(); n < len(p.storage); n *= 2 {
		copy(p.storage[n:], p.storage[:n])
	}
	p.cpu = must.Get(all.AsStrided(s.dims, s.strides, s.offset))
	if x.mixes != nil && x.mixes(rng) {
		whole, err := tensor.FromBytes(d, bytes.Clone(p.storage), s.len)
		if err != nil {
			return nil, err
		}
		p.twin = whole.Bytes()
		p.dev, err = whole.AsStrided(s.dims, s.strides, s.offset)
		return p, err
	}
	must.Do(x.place(p))
	driver.HostAccess(x.d, "filling", driver.Writes(p.at, len(p.storage)))
	copy(p.host, p.storage)
	must.Do(x.stream[device].Copy(p.mem.Ptr(), p.at, len(p.storage)))
	m := p.mem
	if on {
		m = cuda.OnStream(m, x.stream[device])
	}
	whole, err := tensor.OnDevice(d, m, s.len)
	if err != nil {
		return nil, err
	}
	p.dev, err = whole.AsStrided(s.dims, s.strides, s.offset)
	return p, err
}

// place gives a pair its memory.
func (x *rank) place(p *pair) (err error) {
	defer must.Catch(&err)
	if x.arena != nil {
		return x.arena.place(x, p)
	}
	v := must.Get(x.d.Device(p.device))
	p.mem = must.Get(v.Alloc(len(p.storage)))
	x.close = append(x.close, p.mem)
	h := must.Get(x.d.AllocHost(2 * len(p.storage)))
	x.close = append(x.close, h)
	p.host, p.at = h.Bytes(), h.Ptr()
	return nil
}

// back starts the copy of a pair's storage to the host, on the caller's stream,
// and a write that must not be seen by what came before.
func (x *rank) back(p *pair) (err error) {
	defer must.Catch(&err)
	if p.mem == nil {
		return nil
	}
	s, n := x.stream[p.device], len(p.storage)
	must.Do(s.Copy(p.at+driver.Ptr(n), p.mem.Ptr(), n))
	must.Do(s.Memset(p.mem.Ptr(), 0xee, n))
	e, err := s.Record()
	p.seen = e
	return err
}

// check waits for the copy and compares the storages, holes and all.
func (x *rank) check(p *pair) error {
	if p.mem == nil {
		if err := same(p.twin, p.storage); err != nil {
			return fmt.Errorf("%v with strides %v: %w", p.dev, p.dev.Strides(), err)
		}
		return nil
	}
	err := p.seen.Sync(x.ctx)
	p.seen.Release()
	if err != nil {
		return err
	}
	n := len(p.storage)
	driver.HostAccess(x.d, "comparing", driver.Reads(p.at+driver.Ptr(n), n))
	if err := same(p.host[n:2*n], p.storage); err != nil {
		return fmt.Errorf("%v with strides %v: on the device %w", p.dev, p.dev.Strides(), err)
	}
	return nil
}

// same says where bytes begin to differ, and with what.
func same(got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if got[i] != want[i] {
			end := min(i+64, len(want))
			return fmt.Errorf("byte %d of %d and on is\n%x, want\n%x", i, len(want), got[i:end], want[i:end])
		}
	}
	return fmt.Errorf("%d bytes more than the %d wanted", len(got)-len(want), len(want))
}

// checks is check for all pairs of an operation that has ended with err: if that was
// not well, the streams may not go on before Close.
func (x *rank) checks(err error, all ...*pair) error {
	var errs []error
	for _, p := range all {
		if err != nil {
			p.seen.Release()
		} else {
			errs = append(errs, x.check(p))
		}
	}
	return errors.Join(append(errs, err)...)
}

func random(tb testing.TB, seed uint64) *rand.Rand {
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Log("seed", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 5))
}

// eachSeed runs f with the seeds, under both meanings of events in turn, on virtual time.
func eachSeed(t *testing.T, longer int, f func(t *testing.T, seed uint64, s sim.Semantics)) {
	inRealTime(t, longer, func(t *testing.T, seed uint64, s sim.Semantics) {
		onVirtualTime(t, func(t *testing.T) { f(t, seed, s) })
	})
}

// inRealTime is eachSeed for what waits for the network, or for other tests.
func inRealTime(t *testing.T, longer int, f func(t *testing.T, seed uint64, s sim.Semantics)) {
	n := max(testsize.Of(4, 8, 40)/longer, 2)
	for seed := range uint64(n) {
		s := sim.Semantics(seed % 2)
		t.Run(fmt.Sprintf("seed %d %v", seed, s), func(t *testing.T) { f(t, seed, s) })
	}
}

// aProcessEach has ranks share memory as those of processes of their own do, until the test ends.
func aProcessEach(t *testing.T) {
	if lonely {
		t.Skip("other systems share no memory between processes, which is not promised here")
	}
	t.Cleanup(cuda.OtherProcesses())
}
