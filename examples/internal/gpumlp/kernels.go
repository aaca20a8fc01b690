package gpumlp

import (
	_ "embed"

	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/examples/internal/mlp"
)

//go:embed kernels.ptx
var ptx []byte

// The kernels' names.
const (
	linearName    = "c10d_mlp_linear"
	softmaxName   = "c10d_mlp_softmax"
	paramGradName = "c10d_mlp_param_grad"
	inputGradName = "c10d_mlp_input_grad"
	stepName      = "c10d_mlp_step"
)

// Kernels are the kernels as the simulator runs them, for sim.Config.
func Kernels() map[string]sim.Kernel {
	return map[string]sim.Kernel{
		linearName: linear, softmaxName: softmax, paramGradName: paramGrad, inputGradName: inputGrad, stepName: step,
	}
}

// run is a launch with the kernels' way to look at its parameters: i is a
// parameter, n a number of elements.
type run struct{ *sim.Run }

func (r run) int(i int) int { return int(r.Uint32(i)) }

func (r run) read(i, n int) []float32 { return sim.Slice[float32](r.Read(r.Ptr(i), 4*n)) }

func (r run) write(i, n int) []float32 { return sim.Slice[float32](r.Write(r.Ptr(i), 4*n)) }

func linear(k *sim.Run) error {
	r := run{k}
	n, in, out := r.int(4), r.int(5), r.int(6)
	y := r.write(0, n*out)
	mlp.Linear(y, r.read(1, n*in), r.read(2, in*out), r.read(3, out), n, in, out)
	if r.int(7) != 0 {
		mlp.Tanh(y)
	}
	return nil
}

func softmax(k *sim.Run) error {
	r := run{k}
	n, classes := r.int(5), r.int(6)
	loss, right := sim.Slice[float64](r.Write(r.Ptr(0), 8*n)), sim.Slice[uint32](r.Write(r.Ptr(1), 4*n))
	y, labels := r.read(3, n*classes), r.Read(r.Ptr(4), n)
	var delta []float32
	if r.Ptr(2) != 0 {
		delta = r.write(2, n*classes)
	}
	for i := range n {
		from, to := i*classes, (i+1)*classes
		var d []float32
		if delta != nil {
			d = delta[from:to]
		}
		one, ok := mlp.Softmax(d, y[from:to], int(labels[i]), r.Float32(7))
		loss[i], right[i] = one, 0
		if ok {
			right[i] = 1
		}
	}
	return nil
}

func paramGrad(k *sim.Run) error {
	r := run{k}
	n, in, out := r.int(4), r.int(5), r.int(6)
	mlp.ParamGrad(r.write(0, in*out), r.write(1, out), r.read(2, n*in), r.read(3, n*out), n, in, out)
	return nil
}

func inputGrad(k *sim.Run) error {
	r := run{k}
	n, in, out := r.int(4), r.int(5), r.int(6)
	mlp.InputGrad(r.write(0, n*in), r.read(1, n*in), r.read(2, in*out), r.read(3, n*out), n, in, out)
	return nil
}

func step(k *sim.Run) error {
	r := run{k}
	n := r.Int(3)
	mlp.Step(r.write(0, n), r.write(1, n), r.read(2, n), r.Float32(4), r.Float32(5))
	return nil
}
