package simkernels

import (
	"sort"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
)

// The kernels of sparse sums. Their loops are over the entries, as those of coo.cu are over threads.

// numbers returns n numbers at a parameter, for reading or writing.
func numbers(k *sim.Run, param, n int, write bool) kernels.Numbers {
	if write {
		return k.Write(k.Ptr(param), 8*n)
	}
	return k.Read(k.Ptr(param), 8*n)
}

func cooKey(k *sim.Run) error {
	n, size := k.Int(3), k.Uint64(4)
	at, keys, outside := numbers(k, 1, n, false), numbers(k, 0, n, true), numbers(k, 2, 1, true)
	for i := range n {
		if at.At(i) >= size {
			outside.Set(0, k.Uint64(5)+uint64(i))
		}
		keys.Set(i, keys.At(i)*size+at.At(i))
	}
	return nil
}

func cooAt(k *sim.Run) error {
	n, size := k.Int(2), k.Uint64(3)
	keys, at := numbers(k, 0, n, true), numbers(k, 1, n, true)
	for i := range n {
		at.Set(i, keys.At(i)%size)
		keys.Set(i, keys.At(i)/size)
	}
	return nil
}

func cooMerge(k *sim.Run) error {
	n, width := k.Int(4), k.Int(5)
	keys, from := numbers(k, 2, n, false), make(kernels.Numbers, 8*n)
	for i := range n {
		from.Set(i, uint64(i))
	}
	if k.Ptr(3) != 0 {
		from = numbers(k, 3, n, false)
	}
	sorted, to := numbers(k, 0, n, true), numbers(k, 1, n, true)
	for i := range n {
		key, run := keys.At(i), i/width
		second, other := run&1, min((run^1)*width, n)
		before := sort.Search(min(width, n-other), func(j int) bool {
			x := keys.At(other + j)
			return x > key || x == key && second == 0
		})
		place := i - second*width + before
		sorted.Set(place, key)
		to.Set(place, from.At(i))
	}
	return nil
}

func cooFirst(k *sim.Run) error {
	n := k.Int(2)
	keys, marks := numbers(k, 1, n, false), numbers(k, 0, n, true)
	for i := range n {
		marks.Set(i, 0)
		if i == 0 || keys.At(i) != keys.At(i-1) {
			marks.Set(i, 1)
		}
	}
	return nil
}

func cooScan(k *sim.Run) error {
	n, step := k.Int(2), k.Int(3)
	marks, sums := numbers(k, 1, n, false), numbers(k, 0, n, true)
	for i := range n {
		sums.Set(i, marks.At(i))
		if i >= step {
			sums.Set(i, marks.At(i)+marks.At(i-step))
		}
	}
	return nil
}

func cooUnique(k *sim.Run) error {
	n := k.Int(4)
	keys, sums := numbers(k, 2, n, false), numbers(k, 3, n, false)
	starts, once := numbers(k, 0, n+1, true), numbers(k, 1, n, true)
	for i := range n {
		u := int(sums.At(i))
		if i == 0 || int(sums.At(i-1)) != u {
			starts.Set(u-1, uint64(i))
			once.Set(u-1, keys.At(i))
		}
	}
	starts.Set(int(sums.At(n-1)), uint64(n))
	return nil
}

func cooAdd(k *sim.Run) error {
	n, row := k.Int(4), k.Int(5)
	a := kernels.CooAdded{Parts: 1, Size: int(k.Uint32(6)), Kind: int(k.Uint32(7))}
	red, err := backend.Sum().Reduction(a.DType(), 1)
	if err != nil {
		return err
	}
	bytes := row * a.Size
	starts := numbers(k, 3, n+1, false)
	entries := numbers(k, 2, int(starts.At(n)), false)
	out, values := k.Write(k.Ptr(0), n*bytes), k.Read(k.Ptr(1), int(starts.At(n))*bytes)
	for u := range n {
		sum := out[u*bytes:][:bytes]
		for e := starts.At(u); e < starts.At(u+1); e++ {
			v := values[int(entries.At(int(e)))*bytes:][:bytes]
			if e == starts.At(u) {
				copy(sum, v)
			} else {
				red.Combine(sum, v)
			}
		}
	}
	return nil
}
