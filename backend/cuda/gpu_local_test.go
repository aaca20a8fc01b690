package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
)

// combining is how PTX combines elements of a dtype: the type in memory, the one of
// registers, the suffix of operations on them and the registers' prefix.
var combining = []struct {
	d                          tensor.DType
	memory, register, op, name string
}{
	{tensor.Float32, "f32", "f32", "f32", "%f"},
	{tensor.Float64, "f64", "f64", "f64", "%fd"},
	{tensor.Int8, "s8", "b32", "s32", "%v"},
	{tensor.Uint8, "u8", "b32", "u32", "%v"},
	{tensor.Int32, "s32", "b32", "s32", "%v"},
	{tensor.Int64, "s64", "b64", "s64", "%v"},
}

const combinePTX = `
.visible .entry NAME(
	.param .u64 NAME_c,
	.param .u64 NAME_a,
	.param .u64 NAME_b,
	.param .u64 NAME_n
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<5>;
	.reg .b64 %rd<15>;
	.reg .REG V<4>;
	ld.param.u64 %rd1, [NAME_c];
	ld.param.u64 %rd2, [NAME_a];
	ld.param.u64 %rd3, [NAME_b];
	ld.param.u64 %rd4, [NAME_n];
	cvta.to.global.u64 %rd5, %rd1;
	cvta.to.global.u64 %rd6, %rd2;
	cvta.to.global.u64 %rd7, %rd3;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mov.u32 %r4, %nctaid.x;
	mul.wide.u32 %rd8, %r1, %r2;
	cvt.u64.u32 %rd9, %r3;
	add.u64 %rd8, %rd8, %rd9;
	mul.wide.u32 %rd10, %r4, %r2;
NAME_NEXT:
	setp.ge.u64 %p1, %rd8, %rd4;
	@%p1 bra NAME_END;
	mul.lo.u64 %rd11, %rd8, SIZE;
	add.u64 %rd12, %rd6, %rd11;
	add.u64 %rd13, %rd7, %rd11;
	add.u64 %rd14, %rd5, %rd11;
	ld.global.MEM V1, [%rd12];
	ld.global.MEM V2, [%rd13];
	OP.TYPE V3, V1, V2;
	st.global.MEM [%rd14], V3;
	add.u64 %rd8, %rd8, %rd10;
	bra.uni NAME_NEXT;
NAME_END:
	ret;
}
`

// combinePTXs has the kernels of kernelOps for the dtypes of combining, by the names
// that kernelName gives them.
func combinePTXs() []byte {
	var b strings.Builder
	b.WriteString(".version 6.0\n.target sm_60\n.address_size 64\n")
	for _, c := range combining {
		for _, o := range kernelOps {
			op := map[backend.ReduceKind]string{
				backend.Sum().Kind(): "add", backend.Product().Kind(): "mul", backend.Min().Kind(): "min", backend.Max().Kind(): "max",
			}[o.Kind()]
			switch arithmetic := op == "add" || op == "mul"; {
			case arithmetic && c.d.IsFloat():
				op += ".rn"
			case op == "mul":
				op += ".lo"
			}
			b.WriteString(strings.NewReplacer("NAME", kernelName(o.Kind(), c.d), "REG", c.register, "V", c.name, "SIZE", fmt.Sprint(c.d.Size()),
				"MEM", c.memory, "OP", op, "TYPE", c.op).Replace(combinePTX))
		}
	}
	return []byte(b.String())
}

// combineNames has the names of those kernels, and none for what is not among them.
func combineNames(k backend.ReduceKind, d tensor.DType) string {
	for _, c := range combining {
		if c.d == d {
			return kernelName(k, d)
		}
	}
	return ""
}

// everyLocal does every operation of a Local on five tensors of every dtype and with every
// operator, with each root in turn, with kernels and without.
func everyLocal(t *testing.T, d driver.Driver, counts ...int) {
	const tensors = 5
	ops := append(deviceOps[:len(deviceOps):len(deviceOps)], backend.PreMulSum(2), greatest)
	done := 0
	for _, image := range []cuda.Kernels{{}, {Image: combinePTXs(), Combine: combineNames}} {
		for _, dt := range tensor.DTypes() {
			if image.Image != nil && combineNames(backend.Sum().Kind(), dt) == "" {
				continue // the host combines
			}
			for _, n := range counts {
				x := localsOn(t, d, image, tensors, dt, n, rand.New(rand.NewPCG(uint64(n), uint64(dt))))
				run := func(kind string, op backend.ReduceOp) {
					root := done % tensors
					done++
					require.NoError(t, localProgram(kind, root, op)(x), "%s of %d x %v, root %d, %v, kernels %v", kind, n, dt, root, op, image.Image != nil)
				}
				run("broadcast", backend.Sum())
				if _, err := backend.Max().Reduction(dt, tensors); err == nil {
					run("from", backend.Sum())
				}
				for _, op := range ops {
					if _, err := op.Reduction(dt, tensors); err != nil {
						continue
					}
					run("reduce", op)
					run("all-reduce", op)
					run("to", op)
				}
				require.NoError(t, x.free())
			}
		}
	}
	t.Logf("%d operations", done)
}

// TestGPULocal uses all devices of the process.
func TestGPULocal(t *testing.T) {
	d := openGPU(t)
	everyLocal(t, d, 1, 1023, 100_003)
	require.NoError(t, d.Close())
}

// TestSimulatedLocal is TestGPULocal on simulated devices.
func TestSimulatedLocal(t *testing.T) {
	var dtypes []tensor.DType
	for _, c := range combining {
		dtypes = append(dtypes, c.d)
	}
	ks, _ := combiners(dtypes...)
	const seed = 5
	t.Log("seed", seed)
	d, err := sim.Open(sim.Config{Devices: 3, Seed: seed, Kernels: ks})
	require.NoError(t, err)
	everyLocal(t, d, 255)
	closeSim(t, d)
}
