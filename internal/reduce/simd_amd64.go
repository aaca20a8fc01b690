//go:build amd64 && !purego

package reduce

import (
	"golang.org/x/sys/cpu"

	"github.com/c10d-go/c10d/tensor"
)

// assemblies returns the sets of loops that this processor and its system can
// run, the slowest first. A set has only what it does clearly faster than those
// before it.
func assemblies() []fast {
	var sets []fast
	if cpu.X86.HasAVX2 && hasF16C() {
		sets = append(sets, withAVX2())
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasBMI2 {
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
		tensor.Float8E5M2: {Sum: sumE5M2AVX2, Product: productE5M2AVX2, Min: minE5M2AVX2, Max: maxE5M2AVX2},
		tensor.Float8E4M3: {Sum: sumE4M3AVX2, Product: productE4M3AVX2, Min: minE4M3AVX2, Max: maxE4M3AVX2},
		tensor.Int8:       {Sum: sumI8AVX2, Product: productI8AVX2, Min: minI8AVX2, Max: maxI8AVX2},
		tensor.Uint8:      {Sum: sumI8AVX2, Product: productI8AVX2, Min: minU8AVX2, Max: maxU8AVX2},
		tensor.Int16:      {Sum: sumI16AVX2, Product: productI16AVX2, Min: minI16AVX2, Max: maxI16AVX2},
		tensor.Uint16:     {Sum: sumI16AVX2, Product: productI16AVX2, Min: minU16AVX2, Max: maxU16AVX2},
		tensor.Int32:      {Sum: sumI32AVX2, Product: productI32AVX2, Min: minI32AVX2, Max: maxI32AVX2},
		tensor.Uint32:     {Sum: sumI32AVX2, Product: productI32AVX2, Min: minU32AVX2, Max: maxU32AVX2},
		tensor.Int64:      {Sum: sumI64AVX2, Product: productI64AVX2, Min: minI64AVX2, Max: maxI64AVX2},
		tensor.Uint64:     {Sum: sumI64AVX2, Product: productI64AVX2, Min: minU64AVX2, Max: maxU64AVX2},
		tensor.Bool: {
			Sum: orBoolAVX2, Max: orBoolAVX2, BOr: orBoolAVX2,
			Product: andBoolAVX2, Min: andBoolAVX2, BAnd: andBoolAVX2,
			BXor: xorBoolAVX2,
		},
	}
	for d, loops := range all {
		if d.IsInteger() {
			loops[BAnd], loops[BOr], loops[BXor] = andAVX2, orAVX2, xorAVX2
		}
	}
	f := fast{name: "avx2", kernels: tabled(all)}
	f.dividers = map[tensor.DType]scaler{
		tensor.Float32:    divideF32AVX2,
		tensor.Float64:    divideF64AVX2,
		tensor.Complex64:  divideF32AVX2,
		tensor.Complex128: divideF64AVX2,
		tensor.BFloat16:   divideBF16AVX2,
		tensor.Float16:    divideF16AVX2,
	}
	f.multipliers = map[tensor.DType]scaler{
		tensor.Float32:    multiplyF32AVX2,
		tensor.Float64:    multiplyF64AVX2,
		tensor.Complex64:  multiplyF32AVX2,
		tensor.Complex128: multiplyF64AVX2,
		tensor.BFloat16:   multiplyBF16AVX2,
		tensor.Float16:    multiplyF16AVX2,
		tensor.Int8:       multiplyI8AVX2,
		tensor.Uint8:      multiplyI8AVX2,
		tensor.Int16:      multiplyI16AVX2,
		tensor.Uint16:     multiplyI16AVX2,
		tensor.Int32:      multiplyI32AVX2,
		tensor.Uint32:     multiplyI32AVX2,
		tensor.Int64:      multiplyI64AVX2,
		tensor.Uint64:     multiplyI64AVX2,
	}
	return f
}

func withAVX512() fast {
	return fast{
		name: "avx512",
		kernels: tabled(loops{
			tensor.BFloat16:   {Sum: sumBF16AVX512, Product: productBF16AVX512, Min: minBF16AVX512, Max: maxBF16AVX512},
			tensor.Float16:    {Product: productF16AVX512, Min: minF16AVX512, Max: maxF16AVX512},
			tensor.Float8E5M2: {Sum: sumE5M2AVX512, Product: productE5M2AVX512},
			tensor.Float8E4M3: {Sum: sumE4M3AVX512, Product: productE4M3AVX512},
			tensor.Int64:      {Product: productI64AVX512, Min: minI64AVX512, Max: maxI64AVX512},
			tensor.Uint64:     {Product: productI64AVX512, Min: minU64AVX512, Max: maxU64AVX512},
		}),
		dividers: map[tensor.DType]scaler{
			tensor.BFloat16: divideBF16AVX512,
		},
		multipliers: map[tensor.DType]scaler{
			tensor.BFloat16: multiplyBF16AVX512,
			tensor.Int64:    multiplyI64AVX512,
			tensor.Uint64:   multiplyI64AVX512,
		},
	}
}
