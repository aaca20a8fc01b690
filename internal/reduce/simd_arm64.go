//go:build arm64 && !purego

package reduce

import (
	"golang.org/x/sys/cpu"

	"github.com/c10d-go/c10d/tensor"
)

// assemblies returns the loops of NEON, which cannot multiply 64-bit integers.
// Every processor has it, unless GODEBUG says otherwise.
func assemblies() []fast {
	if !cpu.ARM64.HasASIMD {
		return nil
	}
	all := loops{
		tensor.Float32:    {Sum: sumF32NEON, Product: productF32NEON, Min: minF32NEON, Max: maxF32NEON},
		tensor.Float64:    {Sum: sumF64NEON, Product: productF64NEON, Min: minF64NEON, Max: maxF64NEON},
		tensor.Complex64:  {Sum: sumF32NEON},
		tensor.Complex128: {Sum: sumF64NEON},
		tensor.BFloat16:   {Sum: sumBF16NEON, Product: productBF16NEON, Min: minBF16NEON, Max: maxBF16NEON},
		tensor.Float16:    {Sum: sumF16NEON, Product: productF16NEON, Min: minF16NEON, Max: maxF16NEON},
		tensor.Int8:       {Sum: sumI8NEON, Min: minI8NEON, Max: maxI8NEON},
		tensor.Uint8:      {Sum: sumI8NEON, Min: minU8NEON, Max: maxU8NEON},
		tensor.Int32:      {Sum: sumI32NEON, Product: productI32NEON, Min: minI32NEON, Max: maxI32NEON},
		tensor.Uint32:     {Sum: sumI32NEON, Product: productI32NEON},
		tensor.Int64:      {Sum: sumI64NEON, Min: minI64NEON, Max: maxI64NEON},
		tensor.Uint64:     {Sum: sumI64NEON},
		tensor.Bool: {
			Sum: orBoolNEON, Max: orBoolNEON, BOr: orBoolNEON,
			Product: andBoolNEON, Min: andBoolNEON, BAnd: andBoolNEON,
			BXor: xorBoolNEON,
		},
	}
	all.addBitwise(andNEON, orNEON, xorNEON)
	return []fast{{
		name:    "neon",
		kernels: all.kernels(),
		dividers: map[tensor.DType]scaler{
			tensor.Float32:    divideF32NEON,
			tensor.Float64:    divideF64NEON,
			tensor.Complex64:  divideF32NEON,
			tensor.Complex128: divideF64NEON,
			tensor.BFloat16:   divideBF16NEON,
			tensor.Float16:    divideF16NEON,
		},
		multipliers: map[tensor.DType]scaler{
			tensor.Float32:    multiplyF32NEON,
			tensor.Float64:    multiplyF64NEON,
			tensor.Complex64:  multiplyF32NEON,
			tensor.Complex128: multiplyF64NEON,
			tensor.BFloat16:   multiplyBF16NEON,
			tensor.Float16:    multiplyF16NEON,
		},
	}}
}

func copier() func(dst, src []byte) { return nil }
