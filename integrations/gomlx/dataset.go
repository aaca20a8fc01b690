package gomlx

import (
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"
)

// Split returns a dataset with this rank's rows of each batch of ds. All ranks must read the same
// batches, so a shuffled ds needs the same source of random numbers on all ranks: see Rand. A
// batch is then the batch of a single process, and training goes the same way but for rounding. Each step
// compares checksums of the batches: if they differ, all ranks get an error.
//
// A batch of b rows is divided into parts that differ by one row at most. Gradients and metrics
// are weighted by the rows, for losses that are means over them. Tensors whose first dimension is
// not that of the first input are given whole. In a batch with fewer rows than ranks, such as the last one of
// an epoch, a rank without a row gets another rank's, with the weight 0.
//
// Do not give it to norm.UpdateBatchNormAverages: every rank would have statistics of its own rows. All
// ranks give it the whole ds. With a Split or Shard it fails.
//
// The trainer must get batches straight from the dataset that Split returns: nothing between them may
// read ahead.
func (p *Parallel) Split(ds train.Dataset) train.Dataset {
	if p.Size() == 1 {
		return ds
	}
	return p.part(ds, func(yield func(train.Batch, error) bool) {
		for batch, err := range ds.Iter() {
			if err == nil {
				batch, err = p.rowsOf(batch)
			}
			if !yield(batch, err) || err != nil {
				return
			}
		}
	})
}

// Shard returns a dataset with every n-th batch of ds, for n ranks: a step of all ranks then trains on n
// batches. All ranks must read the same batches. Batches at the end that are not enough for all
// ranks are left out; fewer batches than ranks in all are an error. The rules of Split for checksums, weights,
// reading ahead and norm.UpdateBatchNormAverages apply.
func (p *Parallel) Shard(ds train.Dataset) train.Dataset {
	if p.Size() == 1 {
		return ds
	}
	return p.part(ds, func(yield func(train.Batch, error) bool) {
		var mine train.Batch
		have, total, own := 0, 0, 0
		given, sum := false, uint32(0)
		for batch, err := range ds.Iter() {
			if err != nil {
				yield(train.Batch{}, err)
				return
			}
			rows := rowsIn(batch)
			total += rows
			if sum, err = checksum(sum, batch); err != nil {
				yield(train.Batch{}, fmt.Errorf("gomlx: Shard: %w", err))
				return
			}
			if have == p.Rank() {
				mine, own = batch, rows
			} else if err := batch.Finalize(); err != nil {
				yield(train.Batch{}, err)
				return
			}
			if have++; have < p.Size() {
				continue
			}
			p.weight, p.batch = float64(own*p.Size())/float64(total), sum
			if !yield(mine, nil) {
				return
			}
			have, total, given, sum = 0, 0, true, 0
		}
		if have > p.Rank() {
			if err := mine.Finalize(); err != nil {
				yield(train.Batch{}, err)
				return
			}
		}
		if !given && have > 0 {
			yield(train.Batch{}, fmt.Errorf("gomlx: Shard: the dataset has %d batches for %d ranks: use smaller batches, or Split", have, p.Size()))
		}
	})
}

// part returns a part of ds. It fails if a batch was for statistics of batch normalisation.
func (p *Parallel) part(ds train.Dataset, batches iter.Seq2[train.Batch, error]) train.Dataset {
	return &dataset{ds, func(yield func(train.Batch, error) bool) {
		p.norms = false
		for batch, err := range batches {
			if !yield(batch, err) {
				return
			}
			if p.norms && p.batch != 0 { // no step of training has taken the batch
				p.weight, p.batch = 1, 0
				yield(train.Batch{}, errors.New("gomlx: norm.UpdateBatchNormAverages got a dataset of Split or Shard, and this rank's statistics are now of its own rows: give it the whole dataset on all ranks"))
				return
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

// checksum adds the bytes of a batch to those of earlier ones.
func checksum(sum uint32, b train.Batch) (uint32, error) {
	for _, t := range slices.Concat(b.Inputs, b.Labels) {
		if err := t.ConstBytes(func(b []byte) { sum = crc32.Update(sum, castagnoli, b) }); err != nil {
			return 0, err
		}
	}
	return sum, nil
}

// castagnoli is the polynomial for which CPUs have instructions.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// evalShard has every size-th batch. It counts their rows, and has the checksum of all.
type evalShard struct {
	train.Dataset
	rank, size int
	rows       int
	sum        uint32
}

func (d *evalShard) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		i := 0
		for batch, err := range d.Dataset.Iter() {
			if err == nil {
				d.sum, err = checksum(d.sum, batch)
			}
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
	if rows == 0 {
		return train.Batch{}, errors.New("gomlx: Split: a batch without rows")
	}
	sum, err := checksum(0, b)
	if err != nil {
		return train.Batch{}, fmt.Errorf("gomlx: Split: %w", err)
	}
	from, to := rank*rows/size, (rank+1)*rows/size
	p.weight, p.batch = float64((to-from)*size)/float64(rows), sum
	if from == to {
		to++
	}
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
