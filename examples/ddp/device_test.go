package main

import (
	"errors"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
)

// sameBits tells that Go computes a*b + c as two operations, as the simulated
// kernels do through package mlp in any case and the real ones by their PTX.
const sameBits = runtime.GOARCH == "amd64"

// TestSim trains on simulated GPUs, one a rank, with the simulator's checker on:
// a missing order between streams fails the ranks. The sum of two operands does not
// depend on their order, and halving is exact. The parameters therefore have the bits of
// two ranks on the CPU, from device to device, through the host, and after a resume.
func TestSim(t *testing.T) {
	t.Parallel()
	state := filepath.Join(t.TempDir(), "state")
	few := []string{"-batch", "512"} // three steps an epoch
	cpu := demo(t, 2, append(few, "-epochs", "2")...)
	first := demo(t, 2, append(few, "-epochs", "1", "-device", "sim", "-check", "-compare", "-checkpoint", state)...)
	require.Equal(t, []string{onSim, "simulated GPU"}, []string{first.Device, first.GPU})
	require.True(t, first.ParamsIdentical)
	if runtime.GOOS != "windows" {
		require.Equal(t, cuda.DirectWork, first.Work)
	}
	require.Equal(t, cpu.Buckets, first.Buckets)
	require.LessOrEqual(t, first.Compare.Relative, compareTolerance)
	require.InDelta(t, first.Compare.Accuracy, first.Accuracy, 2./359)
	require.InDelta(t, first.Compare.Loss, first.Loss, 1e-4)

	second := demo(t, 2, append(few, "-epochs", "2", "-device", "sim", "-work", "host", "-resume", "-checkpoint", state)...)
	require.Equal(t, cuda.HostWork, second.Work)
	require.InDelta(t, cpu.Loss, second.Loss, 1e-4)
	if sameBits {
		require.Equal(t, cpu.ParamsSHA256, second.ParamsSHA256)
	}
}

// TestSimAlone: a group of one on a device computes the bits of a process on the CPU.
func TestSimAlone(t *testing.T) {
	r := demo(t, 1, "-epochs", "1", "-batch", "512", "-device", "sim", "-compare")
	require.LessOrEqual(t, r.Compare.Relative, compareTolerance)
	if sameBits {
		require.Zero(t, r.Compare.MaxAbs)
	}
}

// TestCUDA is the demo on the machine's GPUs, which ranks share if there are
// fewer.
func TestCUDA(t *testing.T) {
	needGPU(t)
	r := demo(t, 2, "-device", "cuda", "-epochs", "8", "-compare")
	require.Equal(t, onCUDA, r.Device)
	require.NotEmpty(t, r.GPU)
	require.True(t, r.ParamsIdentical)
	require.Greater(t, r.Accuracy, 0.93)
	require.LessOrEqual(t, r.Compare.Relative, compareTolerance)
	alone := demo(t, 1, "-device", "cuda", "-epochs", "4", "-compare")
	t.Logf("2 ranks differ by %v, 1 rank by %v from the CPU", r.Compare.Relative, alone.Compare.Relative)
	require.LessOrEqual(t, alone.Compare.Relative, compareTolerance)
}

func needGPU(t *testing.T) {
	t.Helper()
	d, err := nvidia.Open()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.NoError(t, d.Close())
}

// TestNoGPU: where there is none, a rank says so before it joins a group.
func TestNoGPU(t *testing.T) {
	cmd := program(t, "-device", "cuda")
	cmd.Env = append(cmd.Env, "CUDA_VISIBLE_DEVICES=") // hides those that there are
	says, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Regexp(t, `^ddp: -device cuda: driver: Open: no usable device.*\n$`, string(says), "one line")
}
