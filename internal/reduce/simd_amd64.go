//go:build amd64 && !purego

package reduce

import (
	"golang.org/x/sys/cpu"

	"github.com/c10d-go/c10d/tensor"
)

// assemblies returns the sets of loops that this processor and its system can run, the slowest
// first. A set has only loops that are clearly faster than those of the sets before it.
func assemblies() []fast {
	var sets []fast
	if cpu.X86.HasAVX2 && hasF16C() {
		sets = append(sets, withAVX2())
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ {
			sets = append(sets, withAVX512())
		}
	}
	return sets
}

func copier() func(dst, src []byte) {
	if cpu.X86.HasAVX {
		return uncachedAVX
	}
	return nil
}

func withAVX2() fast {
	all := loops{
		tensor.Float32:    {Sum: sumF32AVX2, Product: productF32AVX2, Min: minF32AVX2, Max: maxF32AVX2},
		tensor.Float64:    {Sum: sumF64AVX2, Product: productF64AVX2, Min: minF64AVX2, Max: maxF64AVX2},
		tensor.Complex64:  {Sum: sumF32AVX2},
		tensor.Complex128: {Sum: sumF64AVX2},
		tensor.BFloat16:   {Sum: sumBF16AVX2, Product: productBF16AVX2, Min: minBF16AVX2, Max: maxBF16AVX2},
		tensor.Float16:    {Sum: sumF16AVX2, Product: productF16AVX2, Min: minF16AVX2, Max: maxF16AVX2},
		tensor.Int8:       {Sum: sumI8AVX2, Min: minI8AVX2, Max: maxI8AVX2},
		tensor.Uint8:      {Sum: sumI8AVX2, Min: minU8AVX2, Max: maxU8AVX2},
		tensor.Int32:      {Sum: sumI32AVX2, Product: productI32AVX2, Min: minI32AVX2, Max: maxI32AVX2},
		tensor.Uint32:     {Sum: sumI32AVX2, Product: productI32AVX2},
		tensor.Int64:      {Sum: sumI64AVX2, Product: productI64AVX2, Min: minI64AVX2, Max: maxI64AVX2},
		tensor.Uint64:     {Sum: sumI64AVX2, Product: productI64AVX2},
		tensor.Bool: {
			Sum: orBoolAVX2, Max: orBoolAVX2, BOr: orBoolAVX2,
			Product: andBoolAVX2, Min: andBoolAVX2, BAnd: andBoolAVX2,
			BXor: xorBoolAVX2,
		},
	}
	all.addBitwise(andAVX2, orAVX2, xorAVX2)
	return fast{
		name:    "avx2",
		kernels: all.kernels(),
		joiners: map[pair]joiner{
			{Sum, tensor.Float32}: joinF32AVX2,
			{Sum, tensor.Float64}: joinF64AVX2,
		},
		dividers: map[tensor.DType]scaler{
			tensor.Float32:    divideF32AVX2,
			tensor.Float64:    divideF64AVX2,
			tensor.Complex64:  divideF32AVX2,
			tensor.Complex128: divideF64AVX2,
			tensor.BFloat16:   divideBF16AVX2,
			tensor.Float16:    divideF16AVX2,
		},
		multipliers: map[tensor.DType]scaler{
			tensor.Float32:    multiplyF32AVX2,
			tensor.Float64:    multiplyF64AVX2,
			tensor.Complex64:  multiplyF32AVX2,
			tensor.Complex128: multiplyF64AVX2,
			tensor.BFloat16:   multiplyBF16AVX2,
			tensor.Float16:    multiplyF16AVX2,
		},
	}
}

func withAVX512() fast {
	all := loops{tensor.BFloat16: {Sum: sumBF16AVX512, Product: productBF16AVX512}}
	return fast{
		name:        "avx512",
		kernels:     all.kernels(),
		dividers:    map[tensor.DType]scaler{tensor.BFloat16: divideBF16AVX512},
		multipliers: map[tensor.DType]scaler{tensor.BFloat16: multiplyBF16AVX512},
	}
}
