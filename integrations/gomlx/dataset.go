package gomlx

import (
	"fmt"
	"iter"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"
)

// Split returns a dataset with this rank's rows of each batch of ds. All ranks must read the same
// batches, so a shuffled ds needs the same source of random numbers on all ranks: see Rand. A
// batch is then the batch of a single process, and training goes the same way but for rounding.
//
// A batch of b rows is divided into parts that differ by one row at most. Gradients and metrics
// are weighted by the rows, for losses that are means over them. Tensors whose first dimension is
// not that of the first input are given whole. A batch must have a row for each rank.
//
// The trainer must get batches straight from the dataset that Split returns: nothing between them may
// read ahead.
func (p *Parallel) Split(ds train.Dataset) train.Dataset {
	return &dataset{ds, func(yield func(train.Batch, error) bool) {
		for batch, err := range ds.Iter() {
			if err == nil && p.Size() > 1 {
				batch, err = p.rowsOf(batch)
			}
			if !yield(batch, err) || err != nil {
				return
			}
		}
	}}
}

// Shard returns a dataset with every n-th batch of ds, for n ranks: a step of all ranks then trains on n
// batches. All ranks must read the same batches. Batches at the end that are not enough for all
// ranks are left out. The rules of Split for weights and for reading ahead apply.
func (p *Parallel) Shard(ds train.Dataset) train.Dataset {
	return &dataset{ds, func(yield func(train.Batch, error) bool) {
		var mine train.Batch
		have, total, own := 0, 0, 0
		for batch, err := range ds.Iter() {
			if err != nil {
				yield(train.Batch{}, err)
				return
			}
			rows := rowsIn(batch)
			total += rows
			if have == p.Rank() {
				mine, own = batch, rows
			} else if err := batch.Finalize(); err != nil {
				yield(train.Batch{}, err)
				return
			}
			if have++; have < p.Size() {
				continue
			}
			p.weight = float64(own*p.Size()) / float64(total)
			if !yield(mine, nil) {
				return
			}
			have, total = 0, 0
		}
		if have > p.Rank() {
			if err := mine.Finalize(); err != nil {
				yield(train.Batch{}, err)
			}
		}
	}}
}

// dataset is a part of another dataset.
type dataset struct {
	train.Dataset
	batches iter.Seq2[train.Batch, error]
}

func (d *dataset) Iter() iter.Seq2[train.Batch, error] { return d.batches }

// evalShard has every size-th batch, and counts their rows.
type evalShard struct {
	train.Dataset
	rank, size int
	rows       int
}

func (d *evalShard) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		i := 0
		for batch, err := range d.Dataset.Iter() {
			if err == nil && i%d.size != d.rank {
				i++
				if err = batch.Finalize(); err == nil {
					continue
				}
			}
			i++
			d.rows += max(rowsIn(batch), 1)
			if !yield(batch, err) {
				return
			}
		}
	}
}

// rowsIn returns the first dimension of the first input, 1 for a scalar.
func rowsIn(b train.Batch) int {
	if len(b.Inputs) == 0 || b.Inputs[0].Shape().Rank() == 0 {
		return 1
	}
	return b.Inputs[0].Shape().Dimensions[0]
}

// rowsOf returns this rank's rows of a batch, which it takes over.
func (p *Parallel) rowsOf(b train.Batch) (train.Batch, error) {
	rows, rank, size := rowsIn(b), p.Rank(), p.Size()
	if rows < size {
		return train.Batch{}, fmt.Errorf("gomlx: Split: a batch of %d rows for %d ranks: use larger batches, and drop the last one if it is smaller", rows, size)
	}
	from, to := rank*rows/size, (rank+1)*rows/size
	part := train.Batch{Spec: b.Spec}
	for _, side := range []struct{ from, to *[]*tensors.Tensor }{{&b.Inputs, &part.Inputs}, {&b.Labels, &part.Labels}} {
		for _, t := range *side.from {
			x, err := slice(t, rows, from, to)
			if err != nil {
				return train.Batch{}, fmt.Errorf("gomlx: Split: %w", err)
			}
			*side.to = append(*side.to, x)
		}
	}
	p.weight = float64((to-from)*size) / float64(rows)
	return part, b.Finalize()
}

// slice copies rows of a tensor, or all of one that has other rows.
func slice(t *tensors.Tensor, rows, from, to int) (*tensors.Tensor, error) {
	shape := t.Shape().Clone()
	if shape.Rank() == 0 || shape.Dimensions[0] != rows {
		return t.LocalClone()
	}
	shape.Dimensions[0] = to - from
	x := tensors.FromShape(shape)
	var failed error
	err := t.ConstBytes(func(src []byte) {
		failed = x.MutableBytes(func(dst []byte) {
			row := len(src) / rows
			copy(dst, src[from*row:to*row])
		})
	})
	if failed != nil {
		return nil, failed
	}
	return x, err
}
