// Package exact adds floating-point numbers so that the order does not matter:
// as if the sum were computed without error and rounded once, to nearest even.
//
//	sum, err := exact.Sum(tensor.Float32)
//	...
//	sum(dst, operands) // dst[i] = operands[0][i] + operands[1][i] + ...
//
// # What it is for
//
// An all-reduce whose bits depend on nothing but the numbers: neither on the
// algorithm nor on the length of the buffer nor on the order of the ranks, and
// on their number only as far as the real sum does. Ranks that add zeros change
// nothing; nor does spreading the same numbers over more ranks, as long as what
// a rank has added up by itself was exact. (A rank that adds its own numbers
// with rounding, which most do, makes different operands; no collective can
// undo that.)
//
// The operands of an element have to come together in one place, unlike in a
// ring, which passes on rounded partial sums. So an all-reduce that is exact
// sends rank j every rank's j-th share (an all-to-all), adds, and spreads the
// results (an all-gather); a small one gathers everything everywhere. The first
// sends (P-1)/P of the buffer twice, as any good all-reduce does: exactness costs
// no byte on the wire. It takes scratch memory of the size of the buffer, and
// time.
//
// # How
//
// Operands are added in float64, each addition with its error (Knuth, The Art of
// Computer Programming, volume 2, section 4.2.2). Where all errors are zero the
// sum is exact: always for float16 and fp8 up to some thousand operands, and
// mostly for bfloat16 and float32, whose significands are much shorter than that
// of float64. The errors of float64s are added too, and where that is exact, one
// more addition rounds. Else the element is added again in fixed point, wide
// enough for every exponent (Kulisch and Miranker, "The arithmetic of the digital
// computer: a new approach", 1986): 9 words of 32 bits for float32, 67 for
// float64, of which only those in use are touched.
//
// BenchmarkSum tells what that costs. Of normally distributed numbers, eight
// operands in cache, a busy server core took 4 to 8 ns an operand for float32,
// as much for float64, and 9 to 20 for the narrow types, where adding with
// rounding, in assembly, took 0.1 to 0.5. A rank of P adds only its share of a
// long buffer, P operands of n/P elements each.
//
// # Special values
//
// A NaN among the operands, or infinities of both signs, give the same quiet
// NaN, whatever NaN it was. An infinity else gives itself, and so does a sum that
// rounds beyond the largest number (fp8 E4M3, which has no infinity, as tensor
// converts). A sum of zero is +0, but -0 if all operands are.
//
// Integers need none of this: they wrap, and any order gives the same bits. Nor
// is there an exact product: its digits would be those of all factors together.
package exact
