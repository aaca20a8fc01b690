package gpumlp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/ddp/gpu"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/tensor"
)

// Model is a multi-layer perceptron with its optimizer in device memory. One
// goroutine may use it at a time.
type Model struct {
	driver driver.Driver
	device driver.Device
	stream driver.Stream
	host   *mlp.Model
	sizes  []int
	most   int

	module                                     driver.Module
	linear, softmax, paramGrad, inputGrad, sgd driver.Function

	values, velocities []driver.Memory // of each parameter
	params             []ddp.Param

	// One row for every image of the current batch.
	inputs, labels  driver.Memory
	outputs, deltas []driver.Memory // of each layer
	losses, rights  driver.Memory

	batchIn, batchLabels driver.HostMemory // copied to the device
	lossOut, rightOut    driver.HostMemory // copied from the device
	hostInputs           []float32
	hostLosses           []float64
	hostRights           []uint32

	images int          // of the current pass
	passed driver.Event // passes when its results are on the host; nil if they were read

	closers []interface{ Close() error }
	args    driver.Args
	access  []driver.Access
}

// New returns a model like host. Upload and Download copy parameters from and to host. It
// takes batches of at most the given number of images, and enqueues on stream, which must
// be one of device's. The parameters in device memory are undefined until Upload.
func New(d driver.Driver, device driver.Device, stream driver.Stream, host *mlp.Model, images int) (*Model, error) {
	if images < 1 {
		return nil, fmt.Errorf("gpumlp: batches of %d images, want 1 or more", images)
	}
	m := &Model{driver: d, device: device, stream: stream, host: host, sizes: host.Sizes(), most: images}
	for _, init := range []func() error{m.load, m.allocParams, m.allocBatch} {
		if err := init(); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

func (m *Model) load() (err error) {
	if m.module, err = m.device.Load(ptx); err != nil {
		return err
	}
	m.closers = append(m.closers, m.module)
	for name, f := range map[string]*driver.Function{
		linearName: &m.linear, softmaxName: &m.softmax, paramGradName: &m.paramGrad, inputGradName: &m.inputGrad, stepName: &m.sgd,
	} {
		if *f, err = m.module.Function(name); err != nil {
			return err
		}
	}
	return nil
}

// alloc returns device memory that Close frees.
func (m *Model) alloc(n int) (driver.Memory, error) {
	mem, err := m.device.Alloc(n)
	if err == nil {
		m.closers = append(m.closers, mem)
	}
	return mem, err
}

func (m *Model) allocParams() error {
	for _, p := range m.host.Params() {
		value, err := m.alloc(4 * len(p.Value))
		if err != nil {
			return err
		}
		velocity, err := m.alloc(4 * len(p.Value))
		if err != nil {
			return err
		}
		t, err := tensor.OnDevice(tensor.Float32, value, p.Shape...)
		if err != nil {
			return err
		}
		m.values, m.velocities = append(m.values, value), append(m.velocities, velocity)
		m.params = append(m.params, ddp.Param{Name: p.Name, Value: t})
	}
	return nil
}

func (m *Model) allocBatch() (err error) {
	layers := len(m.sizes) - 1
	m.outputs, m.deltas = make([]driver.Memory, layers), make([]driver.Memory, layers)
	for l, n := range m.sizes[1:] {
		for _, to := range [][]driver.Memory{m.outputs, m.deltas} {
			if to[l], err = m.alloc(4 * n * m.most); err != nil {
				return err
			}
		}
	}
	for _, a := range []struct {
		dev   *driver.Memory
		host  *driver.HostMemory
		bytes int
	}{
		{&m.inputs, &m.batchIn, 4 * m.sizes[0] * m.most},
		{&m.labels, &m.batchLabels, m.most},
		{&m.losses, &m.lossOut, 8 * m.most},
		{&m.rights, &m.rightOut, 4 * m.most},
	} {
		if *a.dev, err = m.alloc(a.bytes); err != nil {
			return err
		}
		if *a.host, err = m.driver.AllocHost(a.bytes); err != nil {
			return err
		}
		m.closers = append(m.closers, *a.host)
	}
	if m.hostInputs, err = elements[float32](m.batchIn.Bytes()); err != nil {
		return err
	}
	if m.hostLosses, err = elements[float64](m.lossOut.Bytes()); err != nil {
		return err
	}
	m.hostRights, err = elements[uint32](m.rightOut.Bytes())
	return err
}

// elements returns page-locked bytes as elements.
func elements[T tensor.Element](b []byte) ([]T, error) {
	d := tensor.DTypeOf[T]()
	t, err := tensor.FromBytes(d, b, len(b)/d.Size())
	if err != nil {
		return nil, err
	}
	return tensor.Data[T](t)
}

// Params returns the parameters for package ddp. They have no gradients: Backward writes
// them to other tensors.
func (m *Model) Params() []ddp.Param { return slices.Clone(m.params) }

// Batch returns page-locked memory for a batch's images and labels. The caller may write to
// it after the Result of the last pass and before any other call.
func (m *Model) Batch() (inputs []float32, labels []uint8) {
	driver.HostAccess(m.driver, "batch", driver.Writes(m.batchIn.Ptr(), m.batchIn.Len()), driver.Writes(m.batchLabels.Ptr(), m.batchLabels.Len()))
	return m.hostInputs, m.batchLabels.Bytes()
}

// Forward enqueues the pass over the first n images of the batch that
// computes what Result returns.
func (m *Model) Forward(n int) error { return m.forward(n, 0, 0) }

// Backward enqueues the same pass and the backward pass. That pass writes scale times the
// gradients of the summed loss into the tensors that grad returns. Backward calls ready
// when it has enqueued the kernel of a gradient, last layer first. Without images all
// gradients are zero.
func (m *Model) Backward(n int, scale float32, grad func(param int) *tensor.Tensor, ready func(param int) error) error {
	last := len(m.sizes) - 2
	if err := m.forward(n, m.deltas[last].Ptr(), scale); err != nil {
		return err
	}
	for l := last; l >= 0; l-- {
		in, out := m.sizes[l], m.sizes[l+1]
		x, delta := m.inputs.Ptr(), m.deltas[l].Ptr()
		if l > 0 {
			x = m.outputs[l-1].Ptr()
		}
		w, err := gpu.Ptr(grad(2 * l))
		if err != nil {
			return err
		}
		b, err := gpu.Ptr(grad(2*l + 1))
		if err != nil {
			return err
		}
		m.args.Reset().Ptr(w).Ptr(b).Ptr(x).Ptr(delta).Uint32(uint32(n)).Uint32(uint32(in)).Uint32(uint32(out))
		if err := m.launch(m.paramGrad, (in+1)*out,
			driver.Writes(w, 4*in*out), driver.Writes(b, 4*out), driver.Reads(x, 4*n*in), driver.Reads(delta, 4*n*out)); err != nil {
			return err
		}
		for _, p := range []int{2*l + 1, 2 * l} {
			if err := ready(p); err != nil {
				return err
			}
		}
		if l == 0 {
			break
		}
		dx, weight := m.deltas[l-1].Ptr(), m.values[2*l].Ptr()
		m.args.Reset().Ptr(dx).Ptr(x).Ptr(weight).Ptr(delta).Uint32(uint32(n)).Uint32(uint32(in)).Uint32(uint32(out))
		if err := m.launch(m.inputGrad, n*in,
			driver.Writes(dx, 4*n*in), driver.Reads(x, 4*n*in), driver.Reads(weight, 4*in*out), driver.Reads(delta, 4*n*out)); err != nil {
			return err
		}
	}
	return nil
}

// forward enqueues a pass and the copies of its results to the host.
func (m *Model) forward(n int, delta driver.Ptr, scale float32) error {
	switch {
	case n < 0 || n > m.most:
		return fmt.Errorf("gpumlp: a batch of %d images, want 0 to %d", n, m.most)
	case m.passed != nil:
		return errors.New("gpumlp: a pass before the Result of the last one was read")
	}
	m.images = n
	if n == 0 {
		return nil
	}
	if err := m.stream.Copy(m.inputs.Ptr(), m.batchIn.Ptr(), 4*n*m.sizes[0]); err != nil {
		return err
	}
	if err := m.stream.Copy(m.labels.Ptr(), m.batchLabels.Ptr(), n); err != nil {
		return err
	}
	x, last := m.inputs.Ptr(), len(m.outputs)-1
	for l, mem := range m.outputs {
		in, out := m.sizes[l], m.sizes[l+1]
		y, w, b, tanh := mem.Ptr(), m.values[2*l].Ptr(), m.values[2*l+1].Ptr(), uint32(1)
		if l == last {
			tanh = 0
		}
		m.args.Reset().Ptr(y).Ptr(x).Ptr(w).Ptr(b).Uint32(uint32(n)).Uint32(uint32(in)).Uint32(uint32(out)).Uint32(tanh)
		if err := m.launch(m.linear, n*out,
			driver.Writes(y, 4*n*out), driver.Reads(x, 4*n*in), driver.Reads(w, 4*in*out), driver.Reads(b, 4*out)); err != nil {
			return err
		}
		x = y
	}
	classes, loss, right, labels := m.sizes[last+1], m.losses.Ptr(), m.rights.Ptr(), m.labels.Ptr()
	deltas := 4 * n * classes
	if delta == 0 {
		deltas = 0
	}
	m.args.Reset().Ptr(loss).Ptr(right).Ptr(delta).Ptr(x).Ptr(labels).Uint32(uint32(n)).Uint32(uint32(classes)).Float32(scale)
	if err := m.launch(m.softmax, n, driver.Writes(loss, 8*n), driver.Writes(right, 4*n),
		driver.Writes(delta, deltas), driver.Reads(x, 4*n*classes), driver.Reads(labels, n)); err != nil {
		return err
	}
	if err := m.stream.Copy(m.lossOut.Ptr(), loss, 8*n); err != nil {
		return err
	}
	if err := m.stream.Copy(m.rightOut.Ptr(), right, 4*n); err != nil {
		return err
	}
	var err error
	m.passed, err = m.stream.Record()
	return err
}

// Result waits until the last pass is done and returns the summed loss over its
// images and how many of them the model got right. It does not wait for kernels that were
// enqueued later.
func (m *Model) Result(ctx context.Context) (loss float64, correct int, err error) {
	if m.passed == nil {
		return 0, 0, nil
	}
	if err := m.passed.Sync(ctx); err != nil {
		return 0, 0, err
	}
	m.passed.Release()
	m.passed = nil
	n := m.images
	driver.HostAccess(m.driver, "result", driver.Reads(m.lossOut.Ptr(), 8*n), driver.Reads(m.rightOut.Ptr(), 4*n))
	for k := range n {
		loss += m.hostLosses[k]
		correct += int(m.hostRights[k])
	}
	return loss, correct, nil
}

// Step enqueues the optimizer's step: stochastic gradient descent with
// momentum, as mlp.SGD computes it.
func (m *Model) Step(rate, momentum float32, grad func(param int) *tensor.Tensor) error {
	for i, p := range m.params {
		g, err := gpu.Ptr(grad(i))
		if err != nil {
			return err
		}
		n, value, velocity := p.Value.Len(), m.values[i].Ptr(), m.velocities[i].Ptr()
		m.args.Reset().Ptr(value).Ptr(velocity).Ptr(g).Uint64(uint64(n)).Float32(rate).Float32(momentum)
		if err := m.launch(m.sgd, n, driver.Writes(value, 4*n), driver.Writes(velocity, 4*n), driver.Reads(g, 4*n)); err != nil {
			return err
		}
	}
	return nil
}

// Upload copies the host model's parameters, and the velocities, to the device. velocities
// has a slice for each parameter.
func (m *Model) Upload(ctx context.Context, velocities [][]float32) error {
	return m.move(ctx, velocities, true)
}

// Download waits for the stream, and copies the device's parameters to the host model and
// its velocities to velocities.
func (m *Model) Download(ctx context.Context, velocities [][]float32) error {
	return m.move(ctx, velocities, false)
}

// move copies all parameters and velocities one way, through page-locked memory.
func (m *Model) move(ctx context.Context, velocities [][]float32, up bool) error {
	var floats [][]float32
	for _, p := range m.host.Params() {
		floats = append(floats, p.Value)
	}
	floats = append(floats, velocities...)
	memory, total := slices.Concat(m.values, m.velocities), 0
	if !slices.EqualFunc(floats, memory, func(s []float32, mem driver.Memory) bool { return 4*len(s) == mem.Len() }) {
		return fmt.Errorf("gpumlp: the velocities are not those of %d parameters", len(m.values))
	}
	for _, mem := range memory {
		total += mem.Len()
	}
	staging, err := m.driver.AllocHost(total)
	if err != nil {
		return err
	}
	staged, err := elements[float32](staging.Bytes())
	if err != nil {
		return errors.Join(err, staging.Close())
	}
	if up {
		driver.HostAccess(m.driver, "parameters", driver.Writes(staging.Ptr(), total))
		copy(staged, slices.Concat(floats...))
	}
	at := staging.Ptr()
	for _, mem := range memory {
		dst, src := at, mem.Ptr()
		if up {
			dst, src = src, dst
		}
		if err = m.stream.Copy(dst, src, mem.Len()); err != nil {
			break
		}
		at += driver.Ptr(mem.Len())
	}
	if err := errors.Join(err, m.Sync(ctx)); err != nil {
		m.closers = append(m.closers, staging) // the stream may still use it
		return err
	}
	if !up {
		driver.HostAccess(m.driver, "parameters", driver.Reads(staging.Ptr(), total))
		for _, s := range floats {
			staged = staged[copy(s, staged):]
		}
	}
	return staging.Close()
}

// Sync waits until all enqueued work has ended.
func (m *Model) Sync(ctx context.Context) error {
	e, err := m.stream.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(ctx)
}

const (
	threads   = 256
	mostGrids = 1 << 16 // the kernels loop over further elements
)

// launch runs a kernel with m.args on a number of elements.
func (m *Model) launch(f driver.Function, elements int, access ...driver.Access) error {
	if elements == 0 {
		return nil
	}
	m.access = append(m.access[:0], access...)
	return m.stream.Launch(&driver.Launch{
		Function: f, Args: &m.args, Access: m.access,
		Grid: driver.Dim{X: uint32(min((elements-1)/threads+1, mostGrids))}, Block: driver.Dim{X: threads},
	})
}

// Close frees the model's memory. Nothing may be using it: see Sync. It may be
// called more than once.
func (m *Model) Close() error {
	var errs []error
	if m.passed != nil {
		_, err := m.passed.Done()
		errs = append(errs, err)
		m.passed.Release()
		m.passed = nil
	}
	for _, c := range slices.Backward(m.closers) {
		errs = append(errs, c.Close())
	}
	m.closers = nil
	return errors.Join(errs...)
}
