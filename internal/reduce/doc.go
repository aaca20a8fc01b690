// Package reduce combines packed elements: the arithmetic of a reduction,
// without a word of who sent what to whom.
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
// They are those of PyTorch's Gloo backend wherever that has any, to the bit,
// so that a Go rank in a PyTorch group computes what its peers expect:
//
//   - Min is src < dst ? src : dst and Max is dst < src ? src : dst. A comparison
//     with NaN is false, so the local operand, dst, stays.
//   - float16 and bfloat16 are widened to float32, combined, and rounded to
//     nearest even, at every call. Min and Max pick one operand's bits. The fp8
//     types, which Gloo lacks, do the same.
//   - Integers wrap. Signed and unsigned ones of every width are there.
//   - Complex numbers have Sum, Avg and PreMulSum, as pairs of reals. Other kinds
//     are refused, as in c10d.
//   - Bool is logical, which is a difference: Gloo adds bools as bytes, and its
//     sum of 256 trues is false. Sum, Max and BOr are or; Product, Min and BAnd
//     are and; BXor is exclusive or. Any byte but 0 is true; results are 0 or 1.
//   - Avg divides, it does not multiply by an inverse. Integers and bool have no
//     Avg, bools no PreMulSum, and only integers and bool the bitwise kinds.
//
// What has no meaning is refused with an [*UnsupportedError].
//
// # Memory
//
// Slices hold elements in the host's byte order, as tensors do. They need no
// alignment, for a wire puts bytes anywhere; the portable loops take a slower
// path for unaligned ones. A function works on at most 1 MiB at a stretch, so
// that a loop in assembly, which the scheduler cannot stop, never holds up a
// garbage collection for long. Functions keep no state and may be called from
// many goroutines.
//
// # Processors
//
// Every loop exists in Go. On amd64 with AVX2 and F16C all dtypes go by loops in
// assembly, which a program in the module below, asm, writes; only fp8 is scaled in
// Go. With AVX-512 (F, BW, DQ) there are others again where they gain something:
// for bfloat16, fp8, and the products, minima and maxima of float16 and of 64-bit
// integers. The rest goes as fast as memory with AVX2, beyond a first-level cache.
// AVX-512's own sums of bfloat16 are not for use: they take subnormal numbers for
// zeros.
//
// On arm64 loops of NEON, written by the same program, do all but fp8, and but for
// what multiplies 64-bit integers, which NEON cannot. The tests hold them against
// the others under an emulator (make arm64). They have not been timed.
//
// All give the same bits. Not even a NaN differs, but for one case: of two NaNs a
// sum or product has either one, for Go may exchange the operands of its own loops.
//
// BenchmarkTwins sets them side by side. On a core of a Sapphire Rapids server and
// in its undisturbed moments, for others worked on it too, sums of 1 MiB in a
// second-level cache go at these GB/s, where a copy goes at 29:
//
//	              Go   AVX2  AVX-512
//	float32       10   28
//	float16       1.4  23
//	bfloat16      1.4  13    21
//	float8_e5m2   1.5  4.5   6.6
//	float8_e4m3fn 1.5  3.0   5.0
//
// GODEBUG=cpu.avx512f=off leaves out the loops of AVX-512 at run time,
// cpu.avx2=off all of them, and cpu.asimd=off those of NEON, though Go's runtime
// says that it knows no such feature; the build tag purego does at build time.
package reduce
