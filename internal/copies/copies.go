// Package copies copies memory that other CPUs use too, and asks for its cache lines.
//
// AMD's string instruction (REP MOVSB) does not read a line before it writes all of it. The built-in copy reads the
// lines of the destination first, which is slow if they are in the caches of another CPU. So are those of memory that
// processes share. Times in us on two CPUs of an EPYC (Zen 5), where one has written the source and read the
// destination, and the other copies (BenchmarkBytes):
//
//	          copy   Bytes
//	4 KiB     0.56    0.39
//	16 KiB     2.8     1.1
//	64 KiB     9.8     3.7
//	256 KiB     43      16
//	1 MiB       62      66
//
// From 1 MiB on copy goes past the caches. In a CPU's own caches both take about the same time. On 32 CPUs of a Xeon (Sapphire Rapids) the
// instruction took 0.8 to 1.0 of the time for such a copy, and collectives took the same time. So Bytes is copy there.
package copies

// Fast reports whether Bytes is faster than copy on this machine.
func Fast() bool { return fast }

// Bytes is the built-in copy. As with that, a goroutine cannot be stopped while it copies.
func Bytes(dst, src []byte) int { return bytes(dst, src) }

// Uncached is Bytes past this CPU's caches, where Bytes is fast. It does not wait for lines that are in the cache of another CPU.
// That gains if the two CPUs share no cache: see docs/decisions/0052-far-cpus.md. Two processes on one CPU lose.
func Uncached(dst, src []byte) int { return uncached(dst, src) }

// line is the size of a cache line.
const line = 64
