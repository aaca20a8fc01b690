package ddp

import (
	"context"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ShardGroup is the part of a process group that a ShardedOptimizer uses; *pg.ProcessGroup implements
// it.
type ShardGroup interface {
	Group
	ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, op pg.ReduceOp, o ...pg.CallOptions) (*work.Work, error)
	AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o ...pg.CallOptions) (*work.Work, error)
}

// ShardedOptimizer trains with the optimizer's state divided over the ranks (ZeRO stage 1, Rajbhandari
// et al. 2020, section 5). Each rank owns an equal part of all parameters, its shard. A step
// reduce-scatters the gradients, so that each rank gets the averages of its shard. The rank updates
// its shard, and an all-gather gives the new parameters to all ranks. It sends as many bytes as DDP,
// and takes DDP's place: the trainer needs no DDP beside it.
//
// Use it from one goroutine. NewShardedOptimizer makes one; the zero value is not usable.
type ShardedOptimizer[T float32 | float64] struct {
	g             ShardGroup
	update        func(values, grads []T) error
	values, grads []T // this rank's shard
	params        [][]T
	gradients     [][]T
	pieces        []shardPiece[T]
	failed        error
}

// shardPiece is a range of all parameters' elements that one collective carries.
type shardPiece[T float32 | float64] struct {
	at    int // its first element
	n     int // without the zeros that make the parts equal
	part  int // elements of each rank
	shard int // its first element in the shard
	room  []T // for part elements of each rank

	whole, grads, values *tensor.Tensor // the room, and this rank's part in the shard
	work                 *work.Work
}

// NewShardedOptimizer gives every rank rank 0's parameters and divides them. The parameters and their
// gradients are contiguous tensors of T in CPU memory, the same on all ranks; a parameter without a
// gradient has NoGrad.
//
// Step calls update with this rank's shard, 1/n of the elements, rounded up for each
// 25 MiB. update changes values in place. It always gets the same elements in the same places,
// len(values) of them, so it keeps its state in slices of that length. The
// optimizer must treat each element alone, as SGD and Adam do; LARS needs norms of whole parameters.
// Results are then those of DDP with the same optimizer, except that averages may round differently.
func NewShardedOptimizer[T float32 | float64](ctx context.Context, g ShardGroup, params []Param, update func(values, grads []T) error) (*ShardedOptimizer[T], error) {
	return newSharded(ctx, g, params, update, defaultBucketCap)
}

func newSharded[T float32 | float64](ctx context.Context, g ShardGroup, params []Param, update func(values, grads []T) error, limit int) (*ShardedOptimizer[T], error) {
	if update == nil {
		return nil, errors.New("ddp: NewShardedOptimizer needs an update")
	}
	d, err := prepare(g, params)
	if err != nil {
		return nil, err
	}
	s := &ShardedOptimizer[T]{g: g, update: update}
	total := 0
	for _, p := range d.train {
		if p.Grad == nil {
			return nil, p.errorf("has no gradient, which a ShardedOptimizer needs")
		}
		value, err := tensor.Data[T](p.Value)
		if err != nil {
			return nil, p.wrap(err)
		}
		grad, err := tensor.Data[T](p.Grad)
		if err != nil {
			return nil, p.wrap(err)
		}
		s.params, s.gradients = append(s.params, value), append(s.gradients, grad)
		total += len(value)
	}
	if err := d.construct(ctx); err != nil {
		return nil, err
	}
	return s, s.divide(total, max(limit/tensor.DTypeOf[T]().Size(), 1))
}

// divide makes the pieces of total elements, each of about limit.
func (s *ShardedOptimizer[T]) divide(total, limit int) error {
	ranks, shard := s.g.Size(), 0
	for at := 0; at < total; at += limit {
		n := min(limit, total-at)
		part := (n + ranks - 1) / ranks
		s.pieces = append(s.pieces, shardPiece[T]{at: at, n: n, part: part, shard: shard})
		shard += part
	}
	s.values, s.grads = make([]T, shard), make([]T, shard)
	// Two pieces are under way at a time.
	var rooms [2][]T
	for k := range s.pieces {
		p := &s.pieces[k]
		if rooms[k%2] == nil {
			rooms[k%2] = make([]T, p.part*ranks)
		}
		p.room = rooms[k%2][:p.part*ranks]
		var err error
		for _, to := range []struct {
			t **tensor.Tensor
			v []T
		}{
			{&p.whole, p.room},
			{&p.grads, s.grads[p.shard : p.shard+p.part]},
			{&p.values, s.values[p.shard : p.shard+p.part]},
		} {
			if *to.t, err = tensor.Of(to.v); err != nil {
				return err
			}
		}
	}
	return nil
}

// Step averages the gradients over the ranks, updates this rank's shard, and gives every rank the new
// parameters. The gradients stay as they are. Every rank must call it. After an error the parameters
// are undefined, other ranks may have failed or not, and each later Step returns ErrFailed.
func (s *ShardedOptimizer[T]) Step(ctx context.Context) error {
	if s.failed != nil {
		return fmt.Errorf("%w: %w", ErrFailed, s.failed)
	}
	if err := s.step(ctx); err != nil {
		s.failed = err
		return err
	}
	return nil
}

func (s *ShardedOptimizer[T]) step(ctx context.Context) error {
	share := T(1 / float64(s.g.Size()))
	err := s.pipeline(ctx, "reduce_scatter of gradients", func(p *shardPiece[T]) (err error) {
		s.read(s.gradients, p.at, p.room[:p.n])
		for i := range p.room[:p.n] {
			p.room[i] *= share
		}
		clear(p.room[p.n:])
		p.work, err = s.g.ReduceScatterTensor(ctx, p.grads, p.whole, pg.Sum())
		return err
	}, func(p *shardPiece[T]) {
		from, to := p.mine(s.g.Rank())
		s.read(s.params, p.at+from, s.values[p.shard:p.shard+to-from])
	})
	if err != nil {
		return err
	}
	if err := s.update(s.values, s.grads); err != nil {
		return fmt.Errorf("ddp: update of a sharded optimizer: %w", err)
	}
	return s.pipeline(ctx, "all_gather of parameters", func(p *shardPiece[T]) (err error) {
		p.work, err = s.g.AllGatherIntoTensor(ctx, p.whole, p.values)
		return err
	}, func(p *shardPiece[T]) { s.write(p.at, p.room[:p.n]) })
}

// mine returns the range of a rank's elements within the piece, without the zeros at its end.
func (p *shardPiece[T]) mine(rank int) (from, to int) {
	return min(rank*p.part, p.n), min((rank+1)*p.part, p.n)
}

// pipeline starts each piece, and ends it when the next one is under way.
func (s *ShardedOptimizer[T]) pipeline(ctx context.Context, what string, start func(*shardPiece[T]) error, end func(*shardPiece[T])) error {
	for k := range len(s.pieces) + 1 {
		if k < len(s.pieces) {
			if err := start(&s.pieces[k]); err != nil {
				return fmt.Errorf("ddp: %s: %w", what, err)
			}
		}
		if k > 0 {
			p := &s.pieces[k-1]
			if err := p.work.Wait(ctx); err != nil {
				return fmt.Errorf("ddp: %s: %w", what, err)
			}
			end(p)
		}
	}
	return nil
}

// read copies the elements from at on of vs, one after the other, to dst.
func (s *ShardedOptimizer[T]) read(vs [][]T, at int, dst []T) {
	for _, v := range vs {
		if at >= len(v) {
			at -= len(v)
			continue
		}
		dst = dst[copy(dst, v[at:]):]
		at = 0
	}
}

// write copies src to the parameters' elements from at on.
func (s *ShardedOptimizer[T]) write(at int, src []T) {
	for _, v := range s.params {
		if at >= len(v) {
			at -= len(v)
			continue
		}
		src = src[copy(v[at:], src):]
		at = 0
	}
}
