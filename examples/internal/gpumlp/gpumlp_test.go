package gpumlp

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestText: the compiler contracted nothing.
func TestText(t *testing.T) {
	require.NotRegexp(t, `\b(fma|mad)(\.\w+)*\.f(32|64)|\b(add|sub|mul)\.f(32|64)`, string(ptx),
		"a multiplication and an addition that may be made one")
}

// onDrivers runs a test on the simulator and on the machine's GPU, if it has one.
func onDrivers(t *testing.T, f func(t *testing.T, d driver.Driver)) {
	t.Run("sim", func(t *testing.T) {
		d := must.Get(sim.Open(sim.Config{Kernels: Kernels(), Seed: 1}))
		f(t, d)
		require.NoError(t, d.Close(), "what the simulator found")
	})
	t.Run("nvidia", func(t *testing.T) {
		d, err := nvidia.Open()
		if errors.Is(err, driver.ErrNoDevice) {
			t.Skip(err)
		}
		require.NoError(t, err)
		f(t, d)
		require.NoError(t, d.Close())
	})
}

// fixture is a model on a device with a stream and gradients.
type fixture struct {
	*Model
	t     *testing.T
	d     driver.Driver
	grads []*tensor.Tensor
	close []interface{ Close() error }
}

func newFixture(t *testing.T, d driver.Driver, host *mlp.Model, images int) *fixture {
	v := must.Get(d.Device(0))
	s := must.Get(v.NewStream(driver.StreamOptions{Name: "trainer"}))
	m := must.Get(New(d, v, s, host, images))
	f := &fixture{Model: m, t: t, d: d, close: []interface{ Close() error }{m, s}}
	for _, p := range host.Params() {
		mem := must.Get(v.Alloc(4 * len(p.Value)))
		g := must.Get(tensor.OnDevice(tensor.Float32, mem, p.Shape...))
		f.grads, f.close = append(f.grads, g), append(f.close, mem)
	}
	return f
}

func (f *fixture) grad(i int) *tensor.Tensor { return f.grads[i] }

func (f *fixture) end() {
	require.NoError(f.t, f.Sync(f.t.Context()))
	for _, c := range f.close {
		require.NoError(f.t, c.Close())
	}
}

// read returns the floats of device memory.
func (f *fixture) read(p driver.Ptr, n int) []float32 {
	f.t.Helper()
	h, err := f.d.AllocHost(max(4*n, 4))
	require.NoError(f.t, err)
	defer h.Close()
	require.NoError(f.t, f.stream.Copy(h.Ptr(), p, 4*n))
	require.NoError(f.t, f.Sync(f.t.Context()))
	driver.HostAccess(f.d, "read", driver.Reads(h.Ptr(), 4*n))
	s, err := elements[float32](h.Bytes())
	require.NoError(f.t, err)
	return slices.Clone(s[:n])
}

func (f *fixture) readGrad(i int) []float32 {
	return f.read(f.grads[i].Memory().(driver.Memory).Ptr(), f.grads[i].Len())
}

// random fills a batch.
func (f *fixture) random(r *rand.Rand, n int) (inputs []float32, labels []uint8) {
	x, y := f.Batch()
	features, classes := f.sizes[0], f.sizes[len(f.sizes)-1]
	for i := range n * features {
		x[i] = max(0, r.Float32()*2-.5)
	}
	for k := range n {
		y[k] = uint8(r.IntN(classes))
	}
	return slices.Clone(x[:n*features]), slices.Clone(y[:n])
}

// reference computes a pass in float64 from the definitions alone.
func reference(m *mlp.Model, x []float32, labels []uint8, scale float64) (loss float64, correct int, grads [][]float64) {
	sizes, params := m.Sizes(), m.Params()
	for _, p := range params {
		grads = append(grads, make([]float64, len(p.Value)))
	}
	for k, label := range labels {
		layers := [][]float64{nil}
		for _, v := range x[k*sizes[0] : (k+1)*sizes[0]] {
			layers[0] = append(layers[0], float64(v))
		}
		last := len(sizes) - 2
		for l := range last + 1 {
			y := make([]float64, sizes[l+1])
			for j := range y {
				y[j] = float64(params[2*l+1].Value[j])
				for i, v := range layers[l] {
					y[j] += v * float64(params[2*l].Value[i*sizes[l+1]+j])
				}
				if l < last {
					y[j] = math.Tanh(y[j])
				}
			}
			layers = append(layers, y)
		}
		y, sum := layers[last+1], 0.
		for _, v := range y {
			sum += math.Exp(v)
		}
		loss += math.Log(sum) - y[label]
		if slices.Max(y) == y[label] {
			correct++
		}
		delta := make([]float64, len(y))
		for j, v := range y {
			delta[j] = scale * math.Exp(v) / sum
		}
		delta[label] -= scale
		for l := last; l >= 0; l-- {
			before := make([]float64, sizes[l])
			for i, v := range layers[l] {
				for j, d := range delta {
					grads[2*l][i*sizes[l+1]+j] += v * d
					before[i] += float64(params[2*l].Value[i*sizes[l+1]+j]) * d
				}
				before[i] *= 1 - v*v
			}
			for j, d := range delta {
				grads[2*l+1][j] += d
			}
			delta = before
		}
	}
	return loss, correct, grads
}

// TestPass holds the kernels against the definitions, and against the CPU's.
func TestPass(t *testing.T) {
	random := must.Rand(t)
	onDrivers(t, func(t *testing.T, d driver.Driver) {
		for _, sizes := range [][]int{{1, 2}, {7, 4}, {6, 5, 3}, {9, 18, 7, 5}, {64, 33, 10}} {
			host, err := mlp.New(sizes, random.Uint64())
			require.NoError(t, err)
			for _, p := range host.Params() {
				for i := range p.Value {
					p.Value[i] += float32(random.NormFloat64()) / 4
				}
			}
			f := newFixture(t, d, host, 13)
			velocities := new(mlp.SGD).Velocity(host.Params())
			require.NoError(t, f.Upload(t.Context(), velocities))
			for _, n := range []int{13, 1, 0, 5} {
				x, labels := f.random(random, n)
				scale := random.Float32()
				var order []int
				require.NoError(t, f.Backward(n, scale, f.grad, func(i int) error { order = append(order, i); return nil }))
				loss, correct, err := f.Result(t.Context())
				require.NoError(t, err)
				for i := range order {
					require.Equal(t, len(f.grads)-1-i, order[i])
				}
				wantLoss, wantCorrect, want := reference(host, x, labels, float64(scale))
				require.InDelta(t, wantLoss, loss, 1e-4, "%v of %d", sizes, n)
				require.Equal(t, wantCorrect, correct)
				cpuLoss, cpuCorrect := host.Backward(x, labels, scale, nil)
				require.InDelta(t, cpuLoss, loss, 1e-9*float64(max(n, 1)))
				require.Equal(t, cpuCorrect, correct)
				for i, p := range host.Params() {
					got := f.readGrad(i)
					for e, w := range want[i] {
						require.InDelta(t, w, got[e], 1e-5, "%v of %d: %s[%d]", sizes, n, p.Name, e)
						// The same sums in the same order; only tanh and exp may have been rounded elsewhere.
						require.InDelta(t, p.Grad[e], got[e], 1e-6, "%v of %d: %s[%d]", sizes, n, p.Name, e)
						if d.Name() == "sim" && runtime.GOARCH == "amd64" {
							require.Equal(t, p.Grad[e], got[e])
						}
					}
				}
				f.random(random, n)
				require.NoError(t, f.Forward(n))
				_, _, err = f.Result(t.Context())
				require.NoError(t, err)
			}
			f.end()
		}
	})
}

// TestTraining takes a few steps on a device and on the CPU.
func TestTraining(t *testing.T) {
	random := must.Rand(t)
	onDrivers(t, func(t *testing.T, d driver.Driver) {
		host := must.Get(mlp.New([]int{12, 16, 4}, 3))
		cpu, err := mlp.New([]int{12, 16, 4}, 3)
		require.NoError(t, err)
		f := newFixture(t, d, host, 20)
		hostSGD, cpuSGD := mlp.SGD{}, mlp.SGD{Rate: .1, Momentum: .9}
		velocities := hostSGD.Velocity(host.Params())
		require.NoError(t, f.Upload(t.Context(), velocities))
		for range 10 {
			x, labels := f.random(random, 20)
			require.NoError(t, f.Backward(20, .05, f.grad, func(int) error { return nil }))
			require.NoError(t, f.Step(.1, .9, f.grad))
			_, _, err := f.Result(t.Context())
			require.NoError(t, err)
			cpu.Backward(x, labels, .05, nil)
			cpuSGD.Step(cpu.Params())
		}
		require.NoError(t, f.Download(t.Context(), velocities))
		for i, p := range cpu.Params() {
			require.InDeltaSlice(t, p.Value, host.Params()[i].Value, 1e-5, p.Name)
			require.InDeltaSlice(t, cpuSGD.Velocity(nil)[i], velocities[i], 1e-5, p.Name)
		}
		// And up again.
		for _, p := range host.Params() {
			clear(p.Value)
		}
		require.NoError(t, f.Upload(t.Context(), velocities))
		require.Equal(t, make([]float32, 4), f.read(f.values[3].Ptr(), 4))
		f.end()
	})
}

// TestFunctions holds exp, log and tanh of the kernels to their limits: a layer
// of one input and no bias is tanh, and a loss of two classes the logarithm.
func TestFunctions(t *testing.T) {
	onDrivers(t, func(t *testing.T, d driver.Driver) {
		host, err := mlp.New([]int{1, 1, 2}, 1)
		require.NoError(t, err)
		p := host.Params()
		p[0].Value[0], p[2].Value[0], p[2].Value[1] = 1, 300, 0
		x := []float32{0, 1e-20, -1e-20, 9e-4, 1.1e-3, -.01, .3, -.5, 1, 2.5, -8, 9, 19, -21, 1000, float32(math.Inf(1)), float32(math.NaN())}
		f := newFixture(t, d, host, len(x))
		require.NoError(t, f.Upload(t.Context(), new(mlp.SGD).Velocity(p)))
		inputs, labels := f.Batch()
		copy(inputs, x)
		clear(labels)
		require.NoError(t, f.Forward(len(x)))
		_, _, err = f.Result(t.Context())
		require.NoError(t, err)
		tanh := f.read(f.outputs[0].Ptr(), len(x))
		for i, v := range x {
			want := math.Tanh(float64(v))
			if math.IsNaN(want) {
				require.True(t, math.IsNaN(float64(tanh[i])) && math.IsNaN(f.hostLosses[i]))
				continue
			}
			require.InEpsilon(t, want+1e-30, float64(tanh[i])+1e-30, 1e-7, "tanh %v", v)
			wantLoss := math.Log1p(math.Exp(-300 * float64(tanh[i])))
			require.InDelta(t, wantLoss, f.hostLosses[i], 1e-4, "the loss of %v", v)
		}
		f.end()
	})
}

func TestRefused(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Kernels: Kernels()}))
	host, err := mlp.New([]int{3, 2}, 1)
	require.NoError(t, err)
	f := newFixture(t, d, host, 4)
	_, err = New(d, f.device, f.stream, host, 0)
	require.EqualError(t, err, "gpumlp: batches of 0 images, want 1 or more")
	require.EqualError(t, f.Forward(5), "gpumlp: a batch of 5 images, want 0 to 4")
	require.EqualError(t, f.Upload(t.Context(), nil), "gpumlp: the velocities are not those of 2 parameters")
	require.NoError(t, f.Upload(t.Context(), new(mlp.SGD).Velocity(host.Params())))
	f.random(rand.New(rand.NewPCG(1, 1)), 2)
	require.NoError(t, f.Forward(2))
	require.EqualError(t, f.Forward(2), "gpumlp: a pass before the Result of the last one was read")
	_, _, err = f.Result(t.Context())
	require.NoError(t, err)
	cpu := must.Get(tensor.New(tensor.Float32, 6))
	require.ErrorIs(t, f.Step(1, 1, func(int) *tensor.Tensor { return cpu }), driver.ErrInvalid)
	f.end()
	require.NoError(t, d.Close())

	bare := must.Get(sim.Open(sim.Config{}))
	v := must.Get(bare.Device(0))
	s, err := v.NewStream()
	require.NoError(t, err)
	_, err = New(bare, v, s, host, 4)
	require.ErrorIs(t, err, driver.ErrNotFound)
	require.NoError(t, s.Close())
	require.NoError(t, bare.Close(), "New has left something behind")
}
