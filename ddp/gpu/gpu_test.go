package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/ddp/gpu"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience turns a hang into a failure.
const patience = 2 * time.Minute

// rank is a rank with a device, its trainer's stream, and what lies there.
type rank struct {
	context.Context
	rank, size int
	g          *pg.ProcessGroup
	driver     driver.Driver
	device     driver.Device
	stream     driver.Stream
	own        *gpu.Device
	spare      map[tensor.DType]*tensor.Tensor // for buffers; CUDA may not make memory while kernels of another rank wait
	closers    []interface{ Close() error }
}

// machine opens the drivers of a host, one a rank, and closes the host.
type machine struct {
	open  func(rank int) (driver.Driver, error)
	close func() error
}

func simulated(t *testing.T, seed uint64) machine {
	return newMachine(t, sim.Config{Devices: 2, Seed: seed})
}

func newMachine(t *testing.T, c sim.Config) machine {
	m := must.Get(sim.New(c))
	return machine{
		open:  func(r int) (driver.Driver, error) { return m.Process(fmt.Sprint("rank ", r)) },
		close: m.Close,
	}
}

// onMachines runs a test on the simulator, whose findings fail it, and on the
// machine's GPUs, if it has any. The simulator runs it twice: averages go through
// the host, and from device to device.
func onMachines(t *testing.T, f func(t *testing.T, m machine)) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	t.Run("sim", func(t *testing.T) {
		m := simulated(t, seed)
		f(t, m)
		require.NoError(t, m.close())
	})
	withKernels(t, seed, f)
}

// withKernels is onMachines without the simulator that has no kernels.
func withKernels(t *testing.T, seed uint64, f func(t *testing.T, m machine)) {
	t.Run("sim direct", func(t *testing.T) {
		m := newMachine(t, sim.Config{Devices: 2, Seed: seed, Kernels: simkernels.All()})
		f(t, m)
		require.NoError(t, m.close())
	})
	t.Run("nvidia", func(t *testing.T) {
		d, err := nvidia.Open()
		if errors.Is(err, driver.ErrNoDevice) {
			t.Skip(err)
		}
		require.NoError(t, err)
		defer d.Close()
		f(t, machine{open: func(int) (driver.Driver, error) { return nvidia.Open() }})
	})
}

// run runs f on every rank of a group at the same time.
func run(t *testing.T, m machine, size int, f func(x *rank) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	st, join := store.NewHash(), gloo.Options{Fabric: gloo.NewFabric()}
	defer st.Close()
	errs := make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			x := &rank{Context: ctx, rank: r, size: size}
			errs[r] = x.begin(m, st, join)
			if errs[r] == nil {
				errs[r] = func() (err error) {
					defer must.Catch(&err)
					return f(x)
				}()
			}
			errs[r] = errors.Join(errs[r], x.end())
		})
	}
	wg.Wait()
	for r, err := range errs {
		require.NoError(t, err, "rank %d", r)
	}
}

func (x *rank) begin(m machine, st store.Store, join gloo.Options) (err error) {
	if x.driver, err = m.open(x.rank); err != nil {
		return err
	}
	x.closers = append(x.closers, x.driver)
	if x.device, err = x.driver.Device(x.rank % x.driver.Count()); err != nil {
		return err
	}
	if x.stream, err = x.device.NewStream(driver.StreamOptions{Name: fmt.Sprint("trainer ", x.rank)}); err != nil {
		return err
	}
	x.closers = append(x.closers, x.stream)
	if x.own, err = gpu.New(x.device, x.stream); err != nil {
		return err
	}
	x.closers = append(x.closers, x.own)
	x.g, err = pg.New(x, st, x.rank, x.size, pg.Options{
		Backend: "cpu:gloo,cuda:cuda", Timeout: patience,
		BackendOptions: pg.BackendOptions{join, cuda.Options{Driver: x.driver, CPUOptions: join}},
	})
	return err
}

func (x *rank) end() error {
	var errs []error
	if x.stream != nil {
		e, err := x.stream.Record()
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			err = e.Sync(ctx)
			cancel()
			e.Release()
		}
		errs = append(errs, err)
	}
	if x.g != nil {
		errs = append(errs, x.g.Close())
	}
	for _, c := range slices.Backward(x.closers) {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// tensor returns a tensor of device memory.
func (x *rank) tensor(dt tensor.DType, shape ...int) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	n := dt.Size()
	for _, d := range shape {
		n *= d
	}
	m := must.Get(x.device.Alloc(n))
	x.closers = append(x.closers, m)
	return tensor.OnDevice(dt, m, shape...)
}

// set enqueues values for a tensor, in CPU memory at once.
func (x *rank) set(t *tensor.Tensor, value func(i int) float64) error {
	flat := must.Get(tensor.New(t.DType(), t.Len()))
	for i := range t.Len() {
		must.Do(flat.SetFloat64(value(i), i))
	}
	if t.Device().Type == tensor.CPU {
		return t.Unpack(flat.Bytes())
	}
	h := must.Get(x.driver.AllocHost(t.ByteLen()))
	x.closers = append(x.closers, h)
	driver.HostAccess(x.driver, "set", driver.Writes(h.Ptr(), h.Len()))
	copy(h.Bytes(), flat.Bytes())
	return x.stream.Copy(must.Get(gpu.Ptr(t)), h.Ptr(), h.Len())
}

// values waits for a tensor's elements.
func (x *rank) values(t *tensor.Tensor) ([]float64, error) {
	flat, err := tensor.New(t.DType(), t.Len())
	if err != nil {
		return nil, err
	}
	if t.Device().Type == tensor.CPU {
		err = t.Pack(flat.Bytes())
	} else {
		err = x.get(flat.Bytes(), t)
	}
	if err != nil {
		return nil, err
	}
	out := make([]float64, t.Len())
	for i := range out {
		if out[i], err = flat.Float64At(i); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (x *rank) get(b []byte, t *tensor.Tensor) error {
	h := must.Get(x.driver.AllocHost(len(b)))
	x.closers = append(x.closers, h)
	p := must.Get(gpu.Ptr(t))
	must.Do(x.stream.Copy(h.Ptr(), p, len(b)))
	e := must.Get(x.stream.Record())
	defer e.Release()
	must.Do(e.Sync(x))
	driver.HostAccess(x.driver, "get", driver.Reads(h.Ptr(), h.Len()))
	copy(b, h.Bytes())
	return nil
}

// expect compares a tensor with what it should hold.
func (x *rank) expect(what string, t *tensor.Tensor, want func(i int) float64) error {
	got := must.Get(x.values(t))
	for i, v := range got {
		if w := want(i); v-w > 1e-5 || w-v > 1e-5 {
			return fmt.Errorf("%s: element %d is %v, want %v", what, i, v, w)
		}
	}
	return nil
}

// model returns parameters on the device, one in CPU memory among them, which
// differ from rank to rank.
func (x *rank) model(grads bool) (_ []ddp.Param, err error) {
	defer must.Catch(&err)
	var params []ddp.Param
	for i, shape := range [][]int{{5, 3}, {7}, {2, 2}, {1}, {6}} {
		dt := tensor.Float32
		if i == 2 {
			dt = tensor.Float64
		}
		make := func() (*tensor.Tensor, error) { return x.tensor(dt, shape...) }
		if i == 3 {
			make = func() (*tensor.Tensor, error) { return tensor.New(dt, shape...) }
		}
		v := must.Get(make())
		must.Do(x.set(v, func(e int) float64 { return float64(100*x.rank + 10*i + e) }))
		p := ddp.Param{Name: fmt.Sprint("p", i), Value: v}
		if grads {
			p.Grad = must.Get(make())
		}
		params = append(params, p)
	}
	return params, nil
}

// gradient is what rank r computes for an element in an iteration; the mean
// over ranks is gradient(mean of ranks).
func gradient(r float64, iteration, param, element int) float64 {
	return (1+r)*float64(iteration+1) + float64(param) + float64(element)/8
}

// TestAverage runs iterations in every way in which gradients get into buckets.
func TestAverage(t *testing.T) {
	plain := func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
		return b.AllReduce(ctx, pg.Avg())
	}
	for name, o := range map[string]ddp.Options{
		"plain":           {},
		"small buckets":   {BucketCap: 40, FirstBucket: 40},
		"views":           {GradientAsBucketView: true, BucketCap: 40, FirstBucket: 40},
		"find unused":     {FindUnused: true},
		"static graph":    {StaticGraph: true, BucketCap: 40, FirstBucket: 40},
		"the usual hook":  {Hook: ddp.AllReduceHook},
		"a hook":          {Hook: plain, BucketCap: 40, FirstBucket: 40},
		"another buffer":  {Hook: elsewhere(plain)},
		"PyTorch's words": {PyTorch: true},
	} {
		t.Run(name, func(t *testing.T) {
			onMachines(t, func(t *testing.T, m machine) {
				run(t, m, 3, func(x *rank) error { return x.iterate(o, name == "find unused") })
			})
		})
	}
}

// elsewhere makes a hook reduce a buffer of its own.
func elsewhere(hook ddp.Hook) ddp.Hook {
	return func(ctx context.Context, b *ddp.Bucket) (_ *work.Work, err error) {
		defer must.Catch(&err)
		if b.Buffer().Device().Type == tensor.CPU {
			return hook(ctx, b)
		}
		x := b.Group().(*withRank).x
		t := must.Get(x.spare[b.Buffer().DType()].Slice(0, 0, b.Buffer().Len()))
		must.Do(x.own.Copy(t, b.Buffer()))
		b.SetBuffer(t)
		b.After(func(b *ddp.Bucket) error { return nil })
		return hook(ctx, b)
	}
}

// withRank is a group that knows its rank's device.
type withRank struct {
	*pg.ProcessGroup
	x *rank
}

func (x *rank) iterate(o ddp.Options, unused bool) error {
	params := must.Get(x.model(!o.GradientAsBucketView))
	o.Device = x.own
	x.spare = map[tensor.DType]*tensor.Tensor{}
	for _, dt := range []tensor.DType{tensor.Float32, tensor.Float64} {
		x.spare[dt] = must.Get(x.tensor(dt, 64))
	}
	d := must.Get(ddp.New(x, &withRank{x.g, x}, params, o))
	for i, p := range params {
		must.Do(x.expect("parameter of rank 0", p.Value, func(e int) float64 { return float64(10*i + e) }))
	}
	if o.GradientAsBucketView {
		for i := range params {
			must.Do(x.expect("fresh gradient", d.GradView(i), func(int) float64 { return 0 }))
		}
	}
	const iterations = 4
	mean := float64(x.size-1) / 2
	for it := range iterations {
		must.Do(d.Begin(x))
		if o.GradientAsBucketView && it > 0 { // perhaps in another bucket now
			for i := range params {
				if err := x.expect("gradient of the last iteration", d.GradView(i), func(e int) float64 { return gradient(mean, it-1, i, e) }); err != nil {
					return err
				}
			}
		}
		skip := -1 // in iteration 1 rank 1 does not use this one, in iteration 2 nobody does
		if unused && (it == 1 && x.rank == 1 || it == 2) {
			skip = 1
		}
		for i := range slices.Backward(params) {
			if i == skip {
				continue
			}
			grad := params[i].Grad
			if grad == nil {
				grad = d.GradView(i)
			}
			must.Do(x.set(grad, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }))
			must.Do(d.Ready(i))
		}
		must.Do(d.Finish(x))
		for i, p := range params {
			grad := p.Grad
			if grad == nil {
				grad = d.GradView(i)
			}
			if err := x.expect(fmt.Sprintf("iteration %d, gradient %d", it, i), grad, func(e int) float64 {
				switch {
				case unused && it == 1 && i == 1:
					return (gradient(0, it, i, e) + gradient(2, it, i, e)) / 3
				case unused && it == 2 && i == 1:
					return (gradient(0, 1, i, e) + gradient(2, 1, i, e)) / 3 // the last one's
				}
				return gradient(mean, it, i, e)
			}); err != nil {
				return err
			}
		}
	}
	return d.Wait(x)
}

// TestNoWaiting: a whole iteration is enqueued while the stream stands still.
func TestNoWaiting(t *testing.T) {
	onMachines(t, func(t *testing.T, m machine) {
		run(t, m, 2, func(x *rank) error {
			params := must.Get(x.model(true))
			params = slices.Delete(params, 3, 4) // the one in CPU memory, for which Finish waits
			d := must.Get(ddp.New(x, x.g, params, ddp.Options{Device: x.own}))
			word := must.Get(x.driver.AllocHost(4))
			x.closers = append(x.closers, word)
			computed := make([]*tensor.Tensor, len(params)) // allocating memory may wait for the stream
			for i, p := range params {
				computed[i] = must.Get(x.tensor(p.Value.DType(), p.Value.Shape()...))
			}
			for it := range 4 {
				for i, c := range computed {
					must.Do(x.set(c, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }))
				}
				must.Do(d.Begin(x))
				// In the first two iterations buckets are made, and the group's own memory.
				still := it >= 2
				if still {
					must.Do(x.stream.WaitValue(word.Ptr(), uint32(it), driver.AtLeast))
				}
				err := func() (err error) {
					defer must.Catch(&err)
					for i, p := range params {
						must.Do(x.own.Copy(p.Grad, computed[i]))
						must.Do(d.Ready(i))
					}
					must.Do(d.Finish(x))
					e := must.Get(x.stream.Record())
					defer e.Release()
					if done, err := e.Done(); err != nil || still && done {
						return fmt.Errorf("the stream went on by itself (%v)", err)
					}
					return nil
				}()
				word.Store32(0, uint32(it))
				if err != nil {
					return err
				}
				for i, p := range params {
					must.Do(x.expect("gradient", p.Grad, func(e int) float64 { return gradient(.5, it, i, e) }))
				}
			}
			return d.Wait(x)
		})
	})
}

// TestAccumulate: iterations that reduce nothing, and buffers on the device,
// which are rank 0's in each iteration after one that reduces.
func TestAccumulate(t *testing.T) {
	onMachines(t, func(t *testing.T, m machine) {
		run(t, m, 2, func(x *rank) error {
			params := must.Get(x.model(true))
			var buffers []ddp.Buffer
			for i := range 2 {
				b := must.Get(x.tensor(tensor.Int32, 3+i))
				must.Do(x.set(b, func(int) float64 { return float64(x.rank + 1) }))
				buffers = append(buffers, ddp.Buffer{Name: fmt.Sprint("b", i), Value: b})
			}
			d := must.Get(ddp.New(x, x.g, params, ddp.Options{Device: x.own, Buffers: buffers}))
			pass := func(it int) (err error) {
				defer must.Catch(&err)
				must.Do(d.Begin(x))
				for i, p := range params {
					must.Do(x.set(p.Grad, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }))
					must.Do(d.Ready(i))
				}
				return d.Finish(x)
			}
			for it := range 3 {
				must.Do(d.NoSync(func() error { return pass(it) }))
				for i, p := range params {
					if err := x.expect("own gradient", p.Grad, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }); err != nil {
						return err
					}
				}
				must.Do(pass(it))
				for i, p := range params {
					must.Do(x.expect("average", p.Grad, func(e int) float64 { return gradient(.5, it, i, e) }))
				}
				for _, b := range buffers {
					must.Do(x.set(b.Value, func(int) float64 { return float64(10*it + x.rank) }))
				}
				must.Do(d.Evaluate(x))
				for _, b := range buffers {
					must.Do(x.expect("buffer of rank 0", b.Value, func(int) float64 { return float64(10 * it) }))
				}
				// Another iteration that reduces, so that the next Begin takes the buffers again.
				must.Do(pass(it))
			}
			return d.Wait(x)
		})
	})
}

// TestJoin: ranks with unequal numbers of iterations.
func TestJoin(t *testing.T) {
	for _, byActive := range []bool{false, true} {
		t.Run(fmt.Sprint("by active ", byActive), func(t *testing.T) {
			onMachines(t, func(t *testing.T, m machine) {
				run(t, m, 3, func(x *rank) error {
					var err error
					params := must.Get(x.model(true))
					d := must.Get(ddp.New(x, x.g, params, ddp.Options{Device: x.own, BucketCap: 40, FirstBucket: 40}))
					err = d.Join(x, func() (err error) {
						defer must.Catch(&err)
						for it := range 2 + x.rank {
							must.Do(d.Begin(x))
							for i, p := range params {
								if err := x.set(p.Grad, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }); err != nil {
									return err
								}
								must.Do(d.Ready(i))
							}
							must.Do(d.Finish(x))
							for i, p := range params {
								if err := x.expect(fmt.Sprintf("iteration %d, gradient %d", it, i), p.Grad, func(e int) float64 {
									sum, active := 0., 0.
									for r := range x.size {
										if it < 2+r {
											sum += gradient(float64(r), it, i, e)
											active++
										}
									}
									if byActive {
										return sum / active
									}
									return sum / float64(x.size)
								}); err != nil {
									return err
								}
							}
						}
						// What the last to finish has is everybody's in the end.
						for i, p := range params {
							must.Do(x.set(p.Value, func(e int) float64 { return float64(1000*x.rank + 10*i + e) }))
						}
						return nil
					}, ddp.JoinOptions{DivideByActive: byActive})
					if err != nil {
						return err
					}
					for i, p := range params {
						if err := x.expect("parameter of rank 2", p.Value, func(e int) float64 { return float64(2000 + 10*i + e) }); err != nil {
							return err
						}
					}
					return d.Wait(x)
				})
			})
		})
	}
}

// TestFailure: what went wrong behind Finish comes out of Wait, and of Begin.
func TestFailure(t *testing.T) {
	m := simulated(t, 1)
	run(t, m, 2, func(x *rank) error {
		var err error
		params := must.Get(x.model(true))
		params = slices.Delete(params, 3, 4)
		d := must.Get(ddp.New(x, x.g, params, ddp.Options{Device: x.own, BucketCap: 40, FirstBucket: 40}))
		iteration := func() (err error) {
			defer must.Catch(&err)
			must.Do(d.Begin(x))
			for i, p := range params {
				must.Do(x.set(p.Grad, func(int) float64 { return 1 }))
				must.Do(d.Ready(i))
			}
			return d.Finish(x)
		}
		must.Do(iteration())
		must.Do(d.Wait(x))
		if x.rank == 1 {
			x.g.Abort(errors.New("out of paper"))
			return nil
		}
		var failed *work.Error
		for err == nil {
			if err = iteration(); err == nil {
				err = d.Wait(x)
			}
		}
		if !errors.As(err, &failed) {
			return fmt.Errorf("the error of an operation expected, got %w", err)
		}
		for _, again := range []error{d.Begin(x), d.Wait(x)} {
			if !errors.Is(again, ddp.ErrFailed) {
				return fmt.Errorf("ErrFailed expected, got %v", again)
			}
		}
		return nil
	})
	require.NoError(t, m.close())
}

// late is a group whose all-reduces of device tensors end when they are told to.
type late struct {
	*pg.ProcessGroup
	promises []*work.Promise
}

func (g *late) AllReduce(context.Context, *tensor.Tensor, pg.ReduceOp, ...pg.CallOptions) (*work.Work, error) {
	p := work.NewPromise(work.Info{Op: work.AllReduce})
	p.RunBy(ordered{})
	g.promises = append(g.promises, p)
	return p.Work(), nil
}

// ordered orders streams at once.
type ordered struct{}

func (ordered) Abort(error)             {}
func (ordered) Order(work.Stream) error { return nil }

// TestLateFailure: a collective that fails after Finish has returned.
func TestLateFailure(t *testing.T) {
	lost := errors.New("lost on the way")
	for name, next := range map[string]func(x *rank, d *ddp.DDP) error{
		"Wait":   func(x *rank, d *ddp.DDP) error { return d.Wait(x) },
		"Begin":  func(x *rank, d *ddp.DDP) error { return d.Begin(x) },
		"Finish": func(x *rank, d *ddp.DDP) error { return d.Finish(x) },
	} {
		t.Run(name, func(t *testing.T) {
			m := simulated(t, 1)
			run(t, m, 1, func(x *rank) error {
				var err error
				params := must.Get(x.model(true))
				g := &late{ProcessGroup: x.g}
				d := must.Get(ddp.New(x, g, params[:2], ddp.Options{Device: x.own}))
				pass := func(finish bool) error {
					err := d.Begin(x)
					for i := range params[:2] {
						if err == nil {
							err = d.Ready(i)
						}
					}
					if err == nil && finish {
						err = d.Finish(x)
					}
					return err
				}
				must.Do(pass(true))
				ended, cancel := context.WithCancel(x)
				cancel()
				if err := d.Wait(ended); !errors.Is(err, context.Canceled) {
					return fmt.Errorf("Wait of a context that has ended returned %v", err)
				}
				g.promises[0].Complete(nil)
				must.Do(d.Wait(x))
				must.Do(pass(true))
				if name == "Finish" {
					must.Do(pass(false))
				}
				g.promises[1].Complete(lost)
				err = next(x, d)
				var bucket *ddp.BucketError
				if !errors.Is(err, lost) || !errors.As(err, &bucket) || bucket.Bucket != 0 {
					return fmt.Errorf("the error of bucket 0 expected, got %v", err)
				}
				if err := d.Begin(x); !errors.Is(err, ddp.ErrFailed) || !errors.Is(err, lost) {
					return fmt.Errorf("ErrFailed expected, got %v", err)
				}
				for _, p := range g.promises[2:] {
					p.Complete(nil)
				}
				return nil
			})
			require.NoError(t, m.close())
		})
	}
}

// TestMemory: what buckets do not use any more is given back.
func TestMemory(t *testing.T) {
	m := simulated(t, 1)
	run(t, m, 1, func(x *rank) error {
		params := must.Get(x.model(true))
		machine := x.driver.(*sim.Driver).Machine()
		before := machine.Stats().Memories
		d := must.Get(ddp.New(x, x.g, params, ddp.Options{Device: x.own}))
		for range 3 {
			must.Do(d.Begin(x))
			for i, p := range params {
				must.Do(x.set(p.Grad, func(int) float64 { return 1 }))
				must.Do(d.Ready(i))
			}
			must.Do(d.Finish(x))
		}
		if _, err := x.values(params[0].Grad); err != nil { // the stream has done everything
			return err
		}
		must.Get(x.own.Alloc(1))
		// One bucket of each dtype on the device, and what was just allocated.
		if n := machine.Stats().Memories - before; n != 3 {
			return fmt.Errorf("%d pieces of memory in use, want 3", n)
		}
		must.Do(x.own.Close())
		if n := machine.Stats().Memories - before; n != 0 {
			return fmt.Errorf("%d pieces of memory left behind", n)
		}
		return x.own.Close()
	})
	require.NoError(t, m.close())
}

// TestRefused: what New and the calls of an iteration do not take.
func TestRefused(t *testing.T) {
	m := simulated(t, 1)
	run(t, m, 1, func(x *rank) error {
		var err error
		good := must.Get(x.model(true))
		other := must.Get(x.driver.Device(1))
		far := must.Get(other.Alloc(28))
		x.closers = append(x.closers, far)
		away := must.Get(tensor.OnDevice(tensor.Float32, far, 7))
		square := must.Get(x.tensor(tensor.Float32, 4, 4))
		gaps := must.Get(square.Slice(1, 0, 2))
		turned := must.Get(square.AsStrided([]int{4, 4}, []int{1, 4}, 0))
		overlap := must.Get(square.AsStrided([]int{2, 3}, []int{5, 0}, 0))
		cpu := must.Get(tensor.New(tensor.Float32, 4, 4))
		sparse := must.Get(tensor.FromDense(cpu, 1))
		on := ddp.Options{Device: x.own}
		for _, c := range []struct {
			params []ddp.Param
			o      ddp.Options
			want   string
		}{
			{good, ddp.Options{}, "is not in CPU memory, and there is no Options.Device"},
			{[]ddp.Param{{Value: away}}, on, "is neither in CPU memory nor on Options.Device, which is cuda:0"},
			{[]ddp.Param{{Value: gaps}}, on, "overlap or leave gaps"},
			{[]ddp.Param{{Value: overlap}}, on, "overlap or leave gaps"},
			{[]ddp.Param{{Value: square, Grad: turned}}, on, "expected a gradient on cuda:0 with strides [4 1]"},
			{[]ddp.Param{{Value: square, Grad: cpu}}, on, "expected a gradient on cuda:0"},
			{[]ddp.Param{{Value: square, Grad: sparse}}, on, "both must be in CPU memory"},
			{[]ddp.Param{{Value: cpu, Grad: square}}, on, "is not in CPU memory"},
			{good, ddp.Options{Device: x.own, Buffers: []ddp.Buffer{{Value: away}}}, "is neither in CPU memory nor on Options.Device"},
		} {
			if _, err := ddp.New(x, x.g, c.params, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
				return fmt.Errorf("want an error with %q, got %v", c.want, err)
			}
		}
		for _, c := range []struct {
			hook ddp.Hook
			want string
		}{
			{func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
				b.Divide()
				return b.AllReduce(ctx, pg.Sum())
			}, "only gradients in CPU memory can be divided"},
			{ddp.FP16CompressHook, "can be cast only if Options.Device has a method Cast"},
		} {
			o := ddp.Options{Device: struct{ ddp.Device }{x.own}, Hook: c.hook} // without Cast
			d := must.Get(ddp.New(x, x.g, good[:2], o))
			must.Do(d.Begin(x))
			err = errors.Join(x.set(good[1].Grad, func(int) float64 { return 1 }), x.set(good[0].Grad, func(int) float64 { return 1 }))
			if err != nil {
				return err
			}
			if err := errors.Join(d.Ready(1), d.Ready(0)); err == nil || !strings.Contains(err.Error(), c.want) {
				return fmt.Errorf("want an error with %q, got %v", c.want, err)
			}
		}
		return nil
	})
	require.NoError(t, m.close())
}

func TestDevice(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Devices: 2}))
	v := must.Get(d.Device(0))
	w := must.Get(d.Device(1))
	s := must.Get(v.NewStream())
	require.EqualError(t, must.Err(gpu.New(nil, s)), "gpu: New needs a device and a stream of it")
	require.EqualError(t, must.Err(gpu.New(w, s)), "gpu: the stream is one of cuda:0, want one of cuda:1")
	own := must.Get(gpu.New(v, s))

	a := must.Get(own.Alloc(8))
	b := must.Get(own.Alloc(16))
	x := must.Get(tensor.OnDevice(tensor.Float32, a, 2))
	y := must.Get(tensor.OnDevice(tensor.Float32, b, 4))
	cpu := must.Get(tensor.New(tensor.Float32, 2))
	require.ErrorIs(t, own.Copy(x, y), driver.ErrInvalid)
	require.ErrorIs(t, own.Copy(x, cpu), driver.ErrInvalid)
	require.ErrorIs(t, own.Copy(cpu, x), driver.ErrInvalid)
	require.ErrorIs(t, own.Zero(cpu), driver.ErrInvalid)
	require.ErrorIs(t, must.Err(gpu.Ptr(nil)), driver.ErrInvalid)
	require.Equal(t, b.(driver.Memory).Ptr()+12, must.Get(gpu.Ptr(must.Get(y.Slice(0, 3, 4)))))

	foreign := must.Get(v.Alloc(4))
	require.ErrorIs(t, own.Free(foreign), driver.ErrInvalid)
	require.NoError(t, own.Zero(x))
	require.NoError(t, own.Free(a))
	require.ErrorIs(t, own.Free(a), driver.ErrInvalid, "twice")
	e := must.Get(s.Record())
	require.NoError(t, e.Sync(t.Context()))
	e.Release()
	pool.Begin()
	must.Get(own.Alloc(4))
	require.EqualValues(t, 4, d.Machine().Stats().Memories, "none is freed while an operation is under way")
	pool.Underway.Add(-1)
	must.Get(own.Alloc(4))
	require.EqualValues(t, 4, d.Machine().Stats().Memories)
	require.NoError(t, own.Close())
	require.ErrorIs(t, must.Err(own.Alloc(4)), driver.ErrClosed)
	require.NoError(t, foreign.Close())
	require.NoError(t, s.Close())
	require.NoError(t, d.Close())
}

// TestRandom: models, buckets and orders of readiness from a seed, against the mean.
func TestRandom(t *testing.T) {
	onMachines(t, func(t *testing.T, m machine) {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		run(t, m, 2, func(x *rank) error {
			r := rand.New(rand.NewPCG(seed, 1)) // the same on both ranks
			for model := range 4 {
				var params []ddp.Param
				for i := range 1 + r.IntN(6) {
					dt := []tensor.DType{tensor.Float32, tensor.Float64}[r.IntN(2)]
					n := r.IntN(40) * model // the first has no elements at all
					v := must.Get(x.tensor(dt, n))
					g := must.Get(x.tensor(dt, n))
					params = append(params, ddp.Param{Name: fmt.Sprint("p", i), Value: v, Grad: g})
				}
				d, err := ddp.New(x, x.g, params, ddp.Options{Device: x.own, BucketCap: 1 + r.IntN(200), FirstBucket: 1 + r.IntN(100), NoInitSync: true})
				if err != nil {
					return err
				}
				for it := range 2 {
					must.Do(d.Begin(x))
					for _, i := range r.Perm(len(params)) {
						p := params[i]
						if p.Grad.Len() > 0 {
							must.Do(x.set(p.Grad, func(e int) float64 { return gradient(float64(x.rank), it, i, e) }))
						}
						must.Do(d.Ready(i))
					}
					must.Do(d.Finish(x))
					for i, p := range params {
						if p.Grad.Len() == 0 {
							continue
						}
						must.Do(x.expect("gradient", p.Grad, func(e int) float64 { return gradient(.5, it, i, e) }))
					}
				}
				must.Do(d.Wait(x))
			}
			return nil
		})
	})
}

// TestLastBucket: the all-reduce of the last bucket is a launch in the trainer's stream. Earlier ones
// run beside it, and with a hook all do.
func TestLastBucket(t *testing.T) {
	const iterations = 4 // the first has one bucket
	for name, c := range map[string]struct {
		bucket        int
		hook          ddp.Hook
		within, apart int // all-reduces of a rank
	}{
		"one bucket":  {bucket: 1 << 20, within: iterations},
		"two buckets": {bucket: 64, within: iterations, apart: iterations - 1},
		"with a hook": {bucket: 1 << 20, apart: iterations, hook: func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
			return b.AllReduce(ctx, pg.Avg())
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := must.Get(sim.New(sim.Config{Devices: 2, Timeline: true, Kernels: simkernels.All()}))
			run(t, machine{open: func(r int) (driver.Driver, error) { return m.Process(fmt.Sprint("rank ", r)) }}, 2, func(x *rank) error {
				var params []ddp.Param
				for i := range 2 {
					v := must.Get(x.tensor(tensor.Float32, 16+i))
					params = append(params, ddp.Param{Name: fmt.Sprint("p", i), Value: v})
				}
				d := must.Get(ddp.New(x, x.g, params, ddp.Options{
					Device: x.own, GradientAsBucketView: true, FirstBucket: c.bucket, BucketCap: c.bucket, Hook: c.hook,
				}))
				for range iterations {
					must.Do(d.Begin(x))
					for i := range params {
						must.Do(d.Ready(i))
					}
					must.Do(d.Finish(x))
				}
				return d.Wait(x)
			})
			steps := must.Get(m.Timeline())
			within, apart := 0, 0
			for _, s := range steps {
				switch {
				case !strings.Contains(s.Operation, "c10d_direct_gradients"):
				case s.Stream == "rank 0/trainer 0":
					within++
				case s.Stream == "rank 0/rank 0 direct":
					apart++
				}
			}
			require.Equal(t, []int{c.within, c.apart}, []int{within, apart}, "launches in the trainer's stream and in the group's")
			require.NoError(t, m.Close())
		})
	}
}
