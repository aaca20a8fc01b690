package simulate

import (
	"math"
	"math/bits"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
)

// Formula returns the time of an algorithm by the formulas of textbooks, on an even network
// with one rank a host. The package's documentation defines alpha, beta and gamma; delta is
// the time of a copied byte. All but the first three formulas are from Thakur, Rabenseifner
// and Gropp, "Optimization of collective communication operations in MPICH", 2005. With P
// ranks, and n bytes of an operand or of all blocks:
//
//	all-reduce      ring                2 (P-1) (alpha + n/P beta) + (P-1) n/P gamma
//	                binomial            2 log P (alpha + n beta) + log P n gamma
//	                recursive-doubling  log P (alpha + n beta + n gamma) + n delta
//	                halving-doubling    2 log P alpha + 2 (P-1)/P n beta
//	                                      + (P-1)/P n gamma
//	reduce          binomial            log P (alpha + n beta + n gamma)
//	reduce-scatter  ring                (P-1) (alpha + n/P (beta + gamma))
//	                halving             log P alpha + (P-1)/P n (beta + gamma) + n/P delta
//	all-gather      ring                (P-1) (alpha + n/P beta) + n/P delta
//	                recursive-doubling  log P alpha + (P-1)/P n beta + n/P delta
//	                bruck               the same + n delta
//	broadcast       binomial            log P (alpha + n beta)
//	                chain               (P-1) (alpha + c beta) + (s-1) c beta, s chunks of c
//	                scatter-doubling    2 log P alpha + 2 (P-1)/P n beta
//	                scatter-ring        (log P + P-1) alpha + 2 (P-1)/P n beta
//	barrier         dissemination       log P alpha
//
// log P is rounded up: formulas with it are exact for powers of two. Those of rings are
// exact if blocks are not cut into chunks. Ok is false for other algorithms.
func Formula(a *plan.Algorithm, c plan.Call, n Network) (t time.Duration, ok bool) {
	p := float64(c.Size)
	log := float64(bits.Len(uint(c.Size - 1)))
	bytes := float64(c.Bytes)
	switch a.Op {
	case plan.OpAllReduce, plan.OpReduce, plan.OpBroadcast:
	default:
		bytes *= p
	}
	alpha := (n.Latency + 2*n.Overhead).Seconds()
	beta, gamma, delta := inverse(n.Bandwidth), inverse(n.Reduce), inverse(n.Copy)
	block, most := bytes/p, bytes*(p-1)/p
	var s float64
	switch a.String() {
	case "all_reduce ring":
		s = 2*(p-1)*(alpha+block*beta) + (p-1)*block*gamma
	case "all_reduce binomial":
		s = 2*log*(alpha+bytes*beta) + log*bytes*gamma
	case "all_reduce recursive-doubling":
		s = log*(alpha+bytes*(beta+gamma)) + bytes*delta
	case "all_reduce halving-doubling":
		s = 2*log*alpha + most*(2*beta+gamma)
	case "reduce binomial":
		s = log * (alpha + bytes*(beta+gamma))
	case "reduce_scatter ring":
		s = (p - 1) * (alpha + block*(beta+gamma))
	case "reduce_scatter halving":
		s = log*alpha + most*(beta+gamma) + block*delta
	case "all_gather ring":
		s = (p-1)*(alpha+block*beta) + block*delta
	case "all_gather recursive-doubling":
		s = log*alpha + most*beta + block*delta
	case "all_gather bruck":
		s = log*alpha + most*beta + (block+bytes)*delta
	case "broadcast binomial":
		s = log * (alpha + bytes*beta)
	case "broadcast chain":
		parts := max(1, math.Ceil(bytes/float64(a.ChunkOf(c))))
		s = (p-1)*(alpha+bytes/parts*beta) + (parts-1)*bytes/parts*beta
	case "broadcast scatter-doubling":
		s = 2*log*alpha + 2*most*beta
	case "broadcast scatter-ring":
		s = (log+p-1)*alpha + 2*most*beta
	case "barrier dissemination":
		s = log * alpha
	default:
		return 0, false
	}
	if c.Size == 1 || bytes == 0 && a.Op != plan.OpBarrier {
		s = 0
	}
	return time.Duration(math.Round(s * 1e9)), true
}

func inverse(bandwidth float64) float64 {
	if bandwidth == 0 {
		return 0
	}
	return 1 / bandwidth
}
