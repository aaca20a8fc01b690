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
// alignment, for a wire puts bytes anywhere; unaligned ones take a slower path.
// A function works on at most 1 MiB at a stretch, so that a kernel in
// assembly, which the scheduler cannot stop, never holds up a garbage
// collection for long. Functions keep no state and may be called from many
// goroutines.
package reduce
