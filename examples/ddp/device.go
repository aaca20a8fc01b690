package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/ddp/gpu"
	"github.com/c10d-go/c10d/examples/internal/gpumlp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Values of -device.
const (
	onCPU  = "cpu"
	onSim  = "sim"
	onCUDA = "cuda"
)

// openDriver returns the devices that the parameters lie on, nil for CPU memory. Ranks
// that "c10d run" started share a simulated host with a GPU for each. Other ranks have a
// simulated host each, and average through CPU memory.
func openDriver(c *config) (driver.Driver, error) {
	var d driver.Driver
	var err error
	switch c.device {
	case onSim:
		o := sim.Config{Kernels: gpumlp.Kernels(), NoDelays: !c.checkSim, NoCheck: !c.checkSim, Seed: c.seed}
		maps.Copy(o.Kernels, simkernels.All())
		if o.Dir = os.Getenv("C10D_SCRATCH_DIR"); runtime.GOOS == "windows" {
			o.Dir = "" // the simulator cannot share memory there
		}
		if o.Dir != "" {
			if o.Devices = pg.LocalSize(); o.Devices == 0 {
				return nil, errors.New("ddp: the launcher does not say how many ranks are on this host")
			}
		}
		d, err = sim.Open(o)
	case onCUDA:
		d, err = cuda.Default()
	}
	if err != nil {
		return nil, fmt.Errorf("ddp: -device %s: %w", c.device, err)
	}
	return d, nil
}

// groupOptions returns the options of a group for tensors in CPU memory and on d's devices.
func groupOptions(c *config, d driver.Driver) pg.Options {
	o := pg.Options{Backend: c.backend, Timeout: c.timeout}
	if d != nil {
		o.Backend = "cpu:" + c.backend + ",cuda:" + cuda.Name
		o.BackendOptions = pg.BackendOptions{cuda.Options{Driver: d, CPU: c.backend, AllReduce: c.work}}
	}
	return o
}

// allReduceWork tells how gradients in device memory are averaged: from device to device, or
// through CPU memory.
func allReduceWork(g *pg.ProcessGroup) string {
	for _, e := range g.Explain() {
		for _, c := range e.Choices {
			if e.Backend == cuda.Name && c.Op == work.AllReduce.String() {
				return c.Algorithm
			}
		}
	}
	return ""
}

// device is the engine in device memory.
type device struct {
	t      *trainer
	stream driver.Stream // of all kernels; the group's operations are ordered with it
	own    *gpu.Device   // for DDP
	model  *gpumlp.Model
	ddp    *ddp.DDP
	name   string
}

// newDevice returns the engine on one of d's devices. Local rank r takes device r modulo
// their number.
func newDevice(d driver.Driver, t *trainer, images int) (*device, error) {
	local := pg.LocalRank()
	if local < 0 {
		local = t.rank
	}
	dev, err := d.Device(local % d.Count())
	if err != nil {
		return nil, err
	}
	e := &device{t: t, name: dev.Info().Name}
	if e.stream, err = dev.NewStream(driver.StreamOptions{Name: "trainer"}); err != nil {
		return nil, err
	}
	if e.own, err = gpu.New(dev, e.stream); err != nil {
		return nil, err
	}
	e.model, err = gpumlp.New(d, dev, e.stream, t.model, images)
	return e, err
}

func (e *device) batch() ([]float32, []uint8) { return e.model.Batch() }

func (e *device) forward(n int) error { return e.model.Forward(n) }

func (e *device) backward(n int, scale float32, ready func(param int) error) error {
	return e.model.Backward(n, scale, e.grad, ready)
}

// grad returns the gradient of a parameter, which is in a bucket.
func (e *device) grad(param int) *tensor.Tensor { return e.ddp.GradView(param) }

func (e *device) step() error {
	return e.model.Step(e.t.optimizer.Rate, e.t.optimizer.Momentum, e.grad)
}

func (e *device) result(ctx context.Context) (float64, int, error) { return e.model.Result(ctx) }

func (e *device) push(ctx context.Context) error {
	return e.model.Upload(ctx, e.t.optimizer.Velocity(e.t.model.Params()))
}

// pull also returns errors of the averages since the last pull.
func (e *device) pull(ctx context.Context) error {
	if err := e.ddp.Wait(ctx); err != nil {
		return err
	}
	return e.model.Download(ctx, e.t.optimizer.Velocity(e.t.model.Params()))
}

func (e *device) params() ([]ddp.Param, ddp.Options, error) {
	return e.model.Params(), ddp.Options{Device: e.own, GradientAsBucketView: true}, nil
}

func (e *device) reduced(d *ddp.DDP) { e.ddp = d }

func (e *device) close(ctx context.Context) error {
	if err := e.model.Sync(ctx); err != nil {
		return err
	}
	return errors.Join(e.model.Close(), e.own.Close(), e.stream.Close())
}
