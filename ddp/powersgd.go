package ddp

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// PowerSGDOptions are the options of NewPowerSGD: those of PyTorch's PowerSGDState. All ranks must
// choose the same.
type PowerSGDOptions struct {
	// Rank is the rank of the approximation: matrix_approximation_rank. 0 means 1.
	Rank int

	// Start is the iteration, counted from 0, with which compression begins: start_powerSGD_iter.
	// Iterations before it average all gradients. 0 means 1000; the least is 2, because buckets
	// change after the first iteration.
	Start int

	// Seed chooses the first approximation.
	Seed uint64
}

// PowerSGD averages gradients as products of two thin matrices (Vogels et al. 2019): PyTorch's
// powerSGD_hook, with error feedback and warm start. Its method Hook is for Options.Hook. Each DDP
// needs its own. NewPowerSGD makes one; the zero value is not usable.
//
// A gradient of n rows and m columns, all dimensions after the first, costs (n+m)*Rank elements
// instead of n*m, in two all-reduces. The second begins in Finish. Gradients that this would not
// make at least twice as small are averaged whole, as are buckets that are not float32 in CPU memory.
//
// An infinite gradient, or one that is not a number, spoils the gradients of its iteration on all ranks. The
// bucket then forgets its error feedback and its approximation, so the next iteration has good gradients again.
// PyTorch's hook keeps the values, and all its later gradients are not numbers.
//
// In an Elastic it begins anew in each epoch, with iteration 0: newcomers have nothing of earlier ones.
type PowerSGD struct {
	o             PowerSGDOptions
	formed        int // DDP.formed when iteration 0 began
	iteration     int
	buckets       map[int]*powerBucket
	before, after int
}

// powerBucket is the state of a bucket.
type powerBucket struct {
	parts []powerPart
	lost  []float32 // error feedback: what earlier iterations have not sent
	whole []float32 // the input of this iteration
	first []float32 // of the first all-reduce: gradients that are not compressed, then all p
	q     []float32 // of the second
	sent  [2]*tensor.Tensor

	random *rand.Rand // the same numbers on all ranks
}

// powerPart is a gradient's place in the bucket.
type powerPart struct {
	at, n, m, rank int // rank 0: not compressed
	p, q           int // its place in first and q
}

// NewPowerSGD returns a PowerSGD for one DDP.
func NewPowerSGD(opts ...PowerSGDOptions) (*PowerSGD, error) {
	o := option.Last(opts)
	if o.Rank == 0 {
		o.Rank = 1
	}
	if o.Start == 0 {
		o.Start = 1000
	}
	if o.Rank < 0 || o.Start < 2 {
		return nil, fmt.Errorf("ddp: PowerSGD: Rank is %d and Start %d: they must be at least 1 and 2", o.Rank, o.Start)
	}
	return &PowerSGD{o: o, buckets: make(map[int]*powerBucket)}, nil
}

// Compression returns how many gradient elements the hook got, and how many elements this rank gave
// to all-reduces for them. Call it between iterations.
func (s *PowerSGD) Compression() (before, after int) { return s.before, s.after }

// Hook averages a bucket.
func (s *PowerSGD) Hook(ctx context.Context, b *Bucket) (*work.Work, error) {
	if s.formed != b.d.formed {
		s.formed, s.iteration = b.d.formed, 0
		clear(s.buckets)
	}
	start := s.iteration >= s.o.Start
	if b.IsLast() {
		s.iteration++
	}
	n := b.Buffer().Len()
	s.before += n
	if !start || b.dev != nil || b.IsSparse() || b.Buffer().DType() != tensor.Float32 {
		s.after += n
		return AllReduceHook(ctx, b)
	}
	p := s.buckets[b.Index()]
	if p == nil || len(p.whole) != n {
		var err error
		if p, err = s.divide(b); err != nil {
			return nil, err
		}
		s.buckets[b.Index()] = p
	}
	s.after += len(p.first) + len(p.q)
	p.compress(data[float32](b.Buffer()))
	b.After(func(b *Bucket) error { return p.finish(ctx, b) })
	return b.d.g.AllReduce(ctx, p.sent[0], pg.Sum())
}

// divide finds the parts of a bucket.
func (s *PowerSGD) divide(b *Bucket) (*powerBucket, error) {
	n := b.Buffer().Len()
	p := &powerBucket{random: rand.New(rand.NewPCG(s.o.Seed, uint64(b.Index()))), lost: make([]float32, n), whole: make([]float32, n)}
	at, first, q := 0, 0, 0
	for _, g := range b.Gradients() {
		part := powerPart{at: at, n: 1, m: g.Len(), p: first, q: q}
		if g.Dims() > 1 && g.Dim(0) > 0 && g.IsContiguous() {
			part.n, part.m = g.Dim(0), g.Len()/g.Dim(0)
			if r := min(part.n, part.m, s.o.Rank); 2*(part.n+part.m)*r < part.n*part.m {
				part.rank = r
			}
		}
		if part.rank == 0 {
			first += g.Len()
		} else {
			first += part.n * part.rank
			q += part.m * part.rank
		}
		at += g.Len()
		p.parts = append(p.parts, part)
	}
	p.first, p.q = make([]float32, first), make([]float32, q)
	for k, v := range [][]float32{p.first, p.q} {
		t, err := tensor.Of(v)
		if err != nil {
			return nil, err
		}
		p.sent[k] = t
	}
	return p, nil
}

// compress sets p = M q for each gradient M, with what was lost before.
func (p *powerBucket) compress(grads []float32) {
	for i, v := range grads {
		p.whole[i] = v + p.lost[i]
	}
	for _, x := range p.parts {
		if x.rank == 0 {
			copy(p.first[x.p:], p.whole[x.at:x.at+x.n*x.m])
			continue
		}
		q := p.q[x.q : x.q+x.m*x.rank]
		p.refill(q, x.rank)
		orthogonalize(q, x.m, x.rank)
		for i := range x.n {
			row := p.whole[x.at+i*x.m:][:x.m]
			for c := range x.rank {
				var sum float32
				for j, v := range row {
					sum += v * q[j*x.rank+c]
				}
				p.first[x.p+i*x.rank+c] = sum
			}
		}
	}
}

// refill replaces columns of zeros by random ones: all at first, and later those that a gradient of
// lower rank did not need. Every rank has the bits of q, so all refill the same columns.
func (p *powerBucket) refill(q []float32, columns int) {
	for c := range columns {
		empty := true
		for i := c; i < len(q); i += columns {
			empty = empty && q[i] == 0
		}
		for i := c; empty && i < len(q); i += columns {
			q[i] = float32(p.random.NormFloat64())
		}
	}
}

// finish sets q = M^T p, averages it, and writes p q^T to the bucket.
func (p *powerBucket) finish(ctx context.Context, b *Bucket) error {
	size := float32(b.d.g.Size())
	clear(p.q)
	for _, x := range p.parts {
		if x.rank == 0 {
			continue
		}
		left, q := p.first[x.p:][:x.n*x.rank], p.q[x.q:]
		orthogonalize(left, x.n, x.rank)
		for i := range x.n {
			for j, v := range p.whole[x.at+i*x.m:][:x.m] {
				for c := range x.rank {
					q[j*x.rank+c] += v * left[i*x.rank+c]
				}
			}
		}
	}
	if len(p.q) > 0 {
		w, err := b.d.g.AllReduce(ctx, p.sent[1], pg.Sum())
		if err != nil {
			return err
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
	quotient(p.q, p.q, size)
	out := data[float32](b.Buffer())
	// All ranks have the bits of both sums, so all forget alike. A rank whose own input is not finite makes
	// its elements of first so.
	good := finite(p.first) && finite(p.q)
	for _, x := range p.parts {
		if x.rank == 0 {
			quotient(out[x.at:x.at+x.n*x.m], p.first[x.p:x.p+x.n*x.m], size)
			continue
		}
		left, q := p.first[x.p:], p.q[x.q:]
		for i := range x.n {
			for j := range x.m {
				var sum float32
				for c := range x.rank {
					sum += left[i*x.rank+c] * q[j*x.rank+c]
				}
				k := x.at + i*x.m + j
				out[k], p.lost[k] = sum, p.whole[k]-sum
				if p.lost[k]-p.lost[k] != 0 { // too large for a float32
					p.lost[k] = 0
				}
			}
		}
	}
	if !good {
		clear(p.lost)
		clear(p.q)
	}
	return nil
}

// finite reports whether no element is infinite or not a number.
func finite(v []float32) bool {
	for _, x := range v {
		if x-x != 0 {
			return false
		}
	}
	return true
}

// orthogonalize makes the columns of a row-major matrix orthonormal, by Gram and Schmidt. A column
// that the columns before it explain but for 1e-5 of its length, float32's rounding, becomes zeros.
func orthogonalize(a []float32, rows, columns int) {
	for c := range columns {
		var length float64
		for i := range rows {
			length += float64(a[i*columns+c]) * float64(a[i*columns+c])
		}
		for before := range c {
			var dot float64
			for i := range rows {
				dot += float64(a[i*columns+c]) * float64(a[i*columns+before])
			}
			for i := range rows {
				a[i*columns+c] = float32(float64(a[i*columns+c]) - dot*float64(a[i*columns+before])) // dot can be too large for a float32
			}
		}
		var norm float64
		for i := range rows {
			norm += float64(a[i*columns+c]) * float64(a[i*columns+c])
		}
		f := 1 / math.Sqrt(norm) // may be too large for a float32. NaN stays NaN: a training that diverges shows it
		if norm <= 1e-10*length {
			f = 0
		}
		for i := range rows {
			a[i*columns+c] = float32(float64(a[i*columns+c]) * f)
		}
	}
}
