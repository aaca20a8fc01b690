package tensor

import "slices"

// coo is what a sparse tensor has instead of a storage.
type coo struct {
	indices   *Tensor // int64 [sparseDims, nnz], contiguous
	values    *Tensor // dtype [nnz, denseDims...], contiguous
	coalesced bool
}

// Sparse returns a sparse COO tensor of the given dense shape. indices is an
// int64 tensor of shape [s, nnz]: column k says where values[k] lies in the
// first s dimensions; values has shape [nnz, shape[s:]...]. Both are used
// without a copy if they are contiguous. Equal coordinates add up. An index
// outside the shape is an error.
func Sparse(indices, values *Tensor, shape ...int) (*Tensor, error) {
	const op = "Sparse"
	if indices == nil || values == nil {
		return nil, invalid(op, "nil indices or values")
	}
	if indices.dtype != Int64 || indices.Dims() != 2 || indices.layout != Strided {
		return nil, invalid(op, "indices must be int64 of two dimensions, got %v", indices)
	}
	if values.layout != Strided || values.device != indices.device {
		return nil, invalid(op, "values must be strided and on %v, got %v", indices.device, values)
	}
	n, err := checkedCount(op, values.dtype, shape)
	if err != nil {
		return nil, err
	}
	s, nnz := indices.shape[0], indices.shape[1]
	if s > len(shape) {
		return nil, invalid(op, "%d sparse dimensions but shape %v", s, shape)
	}
	want := append([]int{nnz}, shape[s:]...)
	if !slices.Equal(values.shape, want) {
		return nil, invalid(op, "values must have shape %v, got %v", want, values.shape)
	}
	if indices.device.Type == CPU {
		if indices, err = indices.Contiguous(); err != nil {
			return nil, err
		}
		if values, err = values.Contiguous(); err != nil {
			return nil, err
		}
		at, err := Data[int64](indices)
		if err != nil {
			return nil, err
		}
		for k, i := range at {
			if dim := k / max(nnz, 1); i < 0 || i >= int64(shape[dim]) {
				return nil, invalid(op, "index %d of entry %d is outside dimension %d of size %d", i, k%nnz, dim, shape[dim])
			}
		}
	}
	return &Tensor{
		dtype: values.dtype, layout: SparseCOO, device: values.device, count: n,
		shape: slices.Clone(shape), sparse: &coo{indices: indices, values: values},
	}, nil
}

// Indices returns the coordinates of a sparse tensor, int64 [SparseDims, NNZ]; nil for a strided one.
func (t *Tensor) Indices() *Tensor {
	if t.sparse == nil {
		return nil
	}
	return t.sparse.indices
}

// Values returns the values of a sparse tensor, [NNZ, dense dimensions...]; nil for a strided one.
func (t *Tensor) Values() *Tensor {
	if t.sparse == nil {
		return nil
	}
	return t.sparse.values
}

// SparseDims returns how many leading dimensions of a sparse tensor have coordinates, 0 for a strided one.
func (t *Tensor) SparseDims() int {
	if t.sparse == nil {
		return 0
	}
	return t.sparse.indices.shape[0]
}

// NNZ returns the number of entries of a sparse tensor, equal coordinates counted apart.
func (t *Tensor) NNZ() int {
	if t.sparse == nil {
		return 0
	}
	return t.sparse.indices.shape[1]
}

// IsCoalesced reports whether a sparse tensor came out of Coalesce: coordinates ascending and unique.
func (t *Tensor) IsCoalesced() bool { return t.sparse != nil && t.sparse.coalesced }

func (t *Tensor) cloneSparse() (*Tensor, error) {
	indices, err := t.sparse.indices.Clone()
	if err != nil {
		return nil, err
	}
	values, err := t.sparse.values.Clone()
	if err != nil {
		return nil, err
	}
	c := *t
	c.shape = slices.Clone(t.shape)
	c.sparse = &coo{indices: indices, values: values, coalesced: t.sparse.coalesced}
	return &c, nil
}
