package ddp

import (
	"fmt"
	"math/rand/v2"
)

// DistributedSampler deals out the n samples of a data set to the ranks, in each epoch in another order. The rule is that
// of PyTorch's DistributedSampler: every rank shuffles the same list with the same seed, and rank r of N takes the places
// r, r+N, r+2N and so on. The ranks exchange nothing.
//
// PyTorch's makes the shares equal: it repeats samples until N divides their number, or leaves some out (drop_last). The
// last step of an epoch then differs from that of a single process. Here shares differ by up to one sample, and each is
// used once. A rank multiplies the gradient of its summed loss by Batch.Scale; the average of these gradients over the
// ranks is then the gradient of the mean over the global batch.
type DistributedSampler struct {
	samples, batch, rank, ranks int
	seed                        uint64
	order                       []int
}

// NewDistributedSampler returns the sampler of a rank of ranks. batch is the global batch: the number of samples that all
// ranks together take in a step. Call SetEpoch before Batch.
func NewDistributedSampler(samples, batch, rank, ranks int, seed uint64) (*DistributedSampler, error) {
	switch {
	case samples < 1:
		return nil, fmt.Errorf("ddp: DistributedSampler: %d samples", samples)
	case batch < 1:
		return nil, fmt.Errorf("ddp: DistributedSampler: a global batch of %d samples", batch)
	case rank < 0 || rank >= ranks:
		return nil, fmt.Errorf("ddp: DistributedSampler: rank %d of %d", rank, ranks)
	}
	return &DistributedSampler{samples: samples, batch: batch, rank: rank, ranks: ranks, seed: seed}, nil
}

// SetEpoch shuffles for an epoch. The order depends on the seed and the epoch alone.
func (s *DistributedSampler) SetEpoch(epoch int) {
	s.order = rand.New(rand.NewPCG(s.seed, uint64(epoch))).Perm(s.samples)
}

// Steps returns the number of steps in an epoch. The last one may have fewer samples.
func (s *DistributedSampler) Steps() int { return (s.samples + s.batch - 1) / s.batch }

// Batch is a rank's part of one step.
type Batch struct {
	Indices []int   // the rank's samples; possibly none
	Global  int     // the number of samples of all ranks
	Scale   float32 // ranks/Global
}

// Batch returns the rank's part of a step.
func (s *DistributedSampler) Batch(step int) Batch {
	begin := step * s.batch
	end := min(begin+s.batch, s.samples)
	b := Batch{Global: end - begin, Scale: float32(s.ranks) / float32(end-begin)}
	first := begin + (s.rank-begin%s.ranks+s.ranks)%s.ranks
	for i := first; i < end; i += s.ranks {
		b.Indices = append(b.Indices, s.order[i])
	}
	return b
}
