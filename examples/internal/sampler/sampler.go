// Package sampler deals the images of a data set out to the ranks that train on it.
//
// The rule is that of PyTorch's DistributedSampler. Every rank shuffles the same list with
// the same seed, a new one for each epoch. Rank r of N takes the places r, r+N, r+2N and
// so on. The ranks exchange nothing. The places of all ranks in one step are consecutive,
// so the ranks see together the images that a single process with the same global batch
// sees.
//
// DistributedSampler makes the shares equal: it repeats images until N divides their
// number, or leaves some out (drop_last). The last step of an epoch would then differ from
// that of a single process. Here shares differ by up to one image. No image is repeated or
// left out. A rank multiplies the gradient of its summed loss by [Batch.Scale]. The
// average of these gradients over the ranks is then the gradient of the mean over the
// global batch:
//
//	1/N * sum over ranks ( N/B * sum over the rank's images ) = 1/B * sum over the batch
package sampler

import (
	"fmt"
	"math/rand/v2"
)

// Sampler deals out the images of one epoch after another to one rank.
type Sampler struct {
	images, batch, rank, ranks int
	seed                       uint64
	order                      []int
}

// New returns the sampler of a rank. batch is the global batch: the number of images that
// all ranks together take in a step. SetEpoch must be called before Batch.
func New(images, batch, rank, ranks int, seed uint64) (*Sampler, error) {
	switch {
	case images < 1:
		return nil, fmt.Errorf("sampler: %d images", images)
	case batch < 1:
		return nil, fmt.Errorf("sampler: a global batch of %d images", batch)
	case rank < 0 || rank >= ranks:
		return nil, fmt.Errorf("sampler: rank %d of %d", rank, ranks)
	}
	return &Sampler{images: images, batch: batch, rank: rank, ranks: ranks, seed: seed}, nil
}

// SetEpoch shuffles for an epoch. The order depends on the seed and the epoch alone.
func (s *Sampler) SetEpoch(epoch int) {
	s.order = rand.New(rand.NewPCG(s.seed, uint64(epoch))).Perm(s.images)
}

// Steps returns the number of steps in an epoch. The last one may have fewer images.
func (s *Sampler) Steps() int { return (s.images + s.batch - 1) / s.batch }

// Batch is a rank's part of one step.
type Batch struct {
	Indices []int   // the rank's images; possibly none
	Global  int     // the number of images of all ranks
	Scale   float32 // ranks/Global
}

// Batch returns the rank's part of a step.
func (s *Sampler) Batch(step int) Batch {
	begin := step * s.batch
	end := min(begin+s.batch, s.images)
	b := Batch{Global: end - begin, Scale: float32(s.ranks) / float32(end-begin)}
	first := begin + (s.rank-begin%s.ranks+s.ranks)%s.ranks
	for i := first; i < end; i += s.ranks {
		b.Indices = append(b.Indices, s.order[i])
	}
	return b
}
