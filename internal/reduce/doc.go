// Package reduce combines packed elements. It is the arithmetic of a reduction, without
// communication.
//
// [Kernel] returns the function for a kind of reduction and a dtype:
//
//	add, err := reduce.Kernel(reduce.Sum, tensor.BFloat16)
//	...
//	add(mine, received) // mine[i] += received[i]
//
// Two kinds need more than a kernel. Avg is Sum, then the function of [Divide]
// once over the result. PreMulSum is the function of [PreMul] over each rank's
// operand, then Sum. Custom has no kernel: the user brings one.
//
// # Semantics
//
// Results are those of PyTorch's Gloo backend, to the bit, so that a Go rank in a PyTorch group
// computes the same as its peers:
//
//   - Min is src < dst ? src : dst and Max is dst < src ? src : dst. A comparison with NaN is
//     false, so the result is the local operand, dst.
//   - float16 and bfloat16 are widened to float32, combined, and rounded to
//     nearest even, at every call. Min and Max pick one operand's bits. The fp8
//     types, which Gloo lacks, do the same.
//   - Integers wrap. All widths, signed and unsigned, are supported.
//   - Complex numbers have Sum, Avg and PreMulSum, as pairs of reals. Other kinds
//     are refused, as in c10d.
//   - Unlike in Gloo, bool is logical. Gloo adds bools as bytes, and its sum of 256 trues is
//     false. Sum, Max and BOr are or; Product, Min and BAnd are and; BXor is exclusive or. Any
//     byte but 0 is true; results are 0 or 1.
//   - Avg divides, it does not multiply by an inverse. Integers and bool have no
//     Avg, bools no PreMulSum, and only integers and bool the bitwise kinds.
//
// Other combinations return an [*UnsupportedError].
//
// # Memory
//
// Slices hold elements in the host's byte order, as tensors do. They need no alignment; the
// portable loops are slower on unaligned ones. A function works on at most 1 MiB at a time: the
// scheduler cannot stop a loop in assembly, so a longer one would delay a garbage collection.
// Functions have no state, and many goroutines may call them.
//
// # Processors
//
// Every loop exists in Go. The most frequent reductions also have loops in assembly, which the
// program in the module asm writes:
//
//   - sum, product, min and max of float32, float64, float16, bfloat16, int32 and int64
//   - sum, min and max of int8 and uint8
//   - the bitwise kinds of all integers, and all kinds of bool
//   - Divide and PreMul of float32, float64, float16 and bfloat16
//
// Complex numbers share the loops of their parts. uint32 and uint64 share the sums and
// products of int32 and int64. Go's loops do the rest: fp8, 16-bit integers, products
// of bytes, min and max of uint32 and uint64, PreMul of integers.
//
// A loop in assembly takes multiples of 64 bytes. Its caller pads the rest.
//
// On amd64 the loops need AVX2 and F16C. A processor with AVX-512 (F, BW, DQ) has others for
// bfloat16. AVX-512's own conversion to bfloat16 cannot be used, because it takes subnormal
// numbers for zeros. The loops for arm64 use NEON, which cannot multiply 64-bit integers. They
// were tested under an emulator (make arm64), and never timed.
//
// All loops give the same bits, with one exception. The sum or product of two NaNs is
// either of them, because Go may exchange the operands of its own loops.
//
// BenchmarkTwins compares the loops. Sums of 1 MiB, in GB/s of one operand, in the
// second-level cache of a core of an AMD EPYC 9004, where a copy runs at 55:
//
//	              Go   AVX2  AVX-512
//	float32       13   48
//	float16       1.3  25
//	bfloat16      1.4  20    26
//	uint8         2.8  48
//	int16         5.2
//	float8_e4m3fn 1.5
//
// GODEBUG switches off loops at run time: cpu.avx512f=off those of AVX-512, cpu.avx2=off all on
// amd64, and cpu.asimd=off those of NEON, which Go's runtime reports as unknown. The build tag purego leaves out all
// loops.
package reduce
