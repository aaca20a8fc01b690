package directway

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/work"
)

// Sparse is a rank's part of a sparse all_reduce: the entries of its tensors, on the group's device.
type Sparse struct {
	What   string // what all ranks need alike, in words
	Shape  []int  // of the dimensions that have coordinates
	Row    int    // elements of an entry's values
	Added  kernels.CooAdded
	NNZ    []int        // entries of each tensor
	At     []driver.Ptr // their coordinates
	Values driver.Ptr   // of all tensors, one after the other
}

// SparseSum is what all ranks' entries add up to, coalesced, on the group's device.
type SparseSum struct {
	NNZ        int
	At, Values driver.Ptr
}

// sums is what sparse all_reduces keep.
type sums struct {
	kernels *kernels.Coo
	stream  driver.Stream                   // of the last one; the engine's
	from    [window.MostRanks]driver.Memory // where a rank's keys and sums are for the others; nil before it has some
	told    [window.MostRanks][]byte        // the handles of from
	own     []driver.Memory                 // what this rank has made, the last one in from
	opened  []driver.Memory                 // of other ranks
}

// sparseText is how much of Sparse.What the others are told.
const sparseText = 160

// SumSparse adds the entries of all ranks. It is the host's part of an operation with memory near the group's device.
//
// Each rank sorts its entries, and adds those of equal coordinates. It tells the others how many are left, and where.
// Streams of copies fetch them. Then the hosts meet again, and each device adds all entries in the order of the ranks.
// No kernel waits for another rank. So later calls may be on the devices before, on some ranks and not on others.
func (d *Group) SumSparse(q *group.Operation, x *Sparse) (SparseSum, error) {
	s := &sum{d: d, q: q, Sparse: x, bytes: x.Row * x.Added.Parts * x.Added.Size}
	d.sums.stream = q.On(d.Dev)
	n, why := s.own()
	mine := append(binary.LittleEndian.AppendUint64(nil, uint64(n)), make([]byte, sparseText)...)
	copy(mine[8:], x.What)
	told, failed := d.sums.tell(d.Rank())
	why = cmp.Or(why, failed)
	reason, all, err := d.hear(q, why, append(mine, told...))
	if err = cmp.Or(err, why, reason); err != nil {
		return SparseSum{}, err
	}
	for r, b := range all {
		if theirs := b[8:][:sparseText]; !bytes.Equal(theirs, mine[8:]) {
			return SparseSum{}, fmt.Errorf("%w: sparse tensors do not match: rank %d has %s, rank %d %s",
				work.ErrMismatch, d.B.Rank, bytes.TrimRight(mine[8:], "\x00"), d.Of(r), bytes.TrimRight(theirs, "\x00"))
		}
	}
	keys, values, total, why := s.fetch(all)
	reason, _, err = d.hear(q, why, nil) // nobody reads this rank's any more
	if err = cmp.Or(err, why, reason); err != nil || total == 0 {
		return SparseSum{}, err
	}
	return s.total(keys, values, total)
}

// sum is a sparse all_reduce on its way.
type sum struct {
	*Sparse
	d     *Group
	q     *group.Operation
	bytes int // of an entry's values
}

// behind is where the values are in memory of n keys and values.
func behind(n int) driver.Ptr { return driver.Ptr(group.Align(8 * n)) }

// coalesce finds out what entries have equal keys. It fetches the number of keys, and another one.
func (s *sum) coalesce(keys, scratch, also driver.Ptr, n int, before func(c *group.AtOnce, x driver.Stream)) (c kernels.Coalesced, count int, other uint64, err error) {
	k := s.d.sums.kernels
	err = s.q.Do(s.d.Dev, func(a *group.AtOnce, x driver.Stream) {
		before(a, x)
		c = k.Coalesce(func(l *driver.Launch) { a.Launch(x, l) }, keys, scratch, n)
		a.Copy(x, also+8, c.Count, 8)
	})
	b := make(kernels.Numbers, 16)
	if err == nil {
		err = s.q.Fetch(s.d.Dev, b, also)
	}
	return c, int(b.At(1)), b.At(0), err
}

// own adds this rank's entries, and returns how many keys they have. The keys are at the beginning of the memory that
// the others read, and the sums behind them.
func (s *sum) own() (int, error) {
	n := 0
	for _, k := range s.NNZ {
		n += k
	}
	if n == 0 {
		return 0, nil
	}
	memory, err := s.q.Scratch(s.d.Dev, 8*n+256+kernels.CooScratch(n)+16)
	if err != nil {
		return 0, err
	}
	keys, scratch := memory, memory+driver.Ptr(group.Align(8*n))
	also := scratch + driver.Ptr(kernels.CooScratch(n))
	c, count, outside, err := s.coalesce(keys, scratch, also, n, func(a *group.AtOnce, x driver.Stream) {
		a.Memset(x, keys, 0, 8*n)
		a.Memset(x, also, 0, 16)
		from := keys
		for i, k := range s.NNZ {
			for dim, size := range s.Shape {
				if k > 0 {
					mark := uint64(1+i*len(s.Shape)+dim) << outsideShift
					a.Launch(x, s.d.sums.kernels.Key(from, s.At[i]+driver.Ptr(8*k*dim), also, k, size, mark))
				}
			}
			from += driver.Ptr(8 * k)
		}
	})
	if err == nil && outside != 0 {
		err = s.outside(outside)
	}
	if err == nil {
		err = s.d.sums.room(s.d, int(behind(count))+count*s.bytes)
	}
	if err != nil {
		return 0, err
	}
	to := s.d.sums.from[s.d.Rank()].Ptr()
	return count, s.q.Do(s.d.Dev, func(a *group.AtOnce, x driver.Stream) {
		a.Copy(x, to, c.Keys, 8*count)
		if s.bytes > 0 {
			a.Launch(x, s.d.sums.kernels.Add(to+behind(count), s.Values, c, count, n, s.Row, s.Added))
		}
	})
}

// outsideShift is how many bits the number of an entry has, where a coordinate is outside of its dimension.
const outsideShift = 40

// outside returns the error for a coordinate that is outside.
func (s *sum) outside(mark uint64) error {
	of, entry := int(mark>>outsideShift)-1, int(mark&(1<<outsideShift-1))
	i, dim := of/len(s.Shape), of%len(s.Shape)
	at := make(kernels.Numbers, 8)
	if err := s.q.Fetch(s.d.Dev, at, s.At[i]+driver.Ptr(8*(dim*s.NNZ[i]+entry))); err != nil {
		return err
	}
	return fmt.Errorf("tensor %d: index %d of entry %d is outside dimension %d of size %d", i, int64(at.At(0)), entry, dim, s.Shape[dim])
}

// fetch copies the keys and sums of all ranks to new memory, in the order of the ranks.
func (s *sum) fetch(all [][]byte) (keys, values driver.Ptr, total int, err error) {
	counts := make([]int, len(all))
	for r, b := range all {
		counts[r] = int(binary.LittleEndian.Uint64(b))
		total += counts[r]
	}
	for r, b := range all {
		if err == nil && r != s.d.Rank() && counts[r] > 0 {
			err = s.d.sums.open(s.d.window, r, b[8+sparseText:])
		}
	}
	if err != nil || total == 0 {
		return 0, 0, total, err
	}
	keys, err = s.q.Scratch(s.d.Dev, int(behind(total))+total*s.bytes)
	if err != nil {
		return 0, 0, 0, err
	}
	values = keys + behind(total)
	return keys, values, total, s.q.Do(s.d.Dev, func(a *group.AtOnce, x driver.Stream) {
		at := 0
		for r, n := range counts {
			if n == 0 {
				continue
			}
			from := s.d.sums.from[r].Ptr()
			a.Copy(x, keys+driver.Ptr(8*at), from, 8*n)
			if s.bytes > 0 {
				a.Copy(x, values+driver.Ptr(at*s.bytes), from+behind(n), n*s.bytes)
			}
			at += n
		}
	})
}

// total adds the entries of all ranks.
func (s *sum) total(keys, values driver.Ptr, n int) (y SparseSum, err error) {
	scratch, err := s.q.Scratch(s.d.Dev, kernels.CooScratch(n)+16)
	if err != nil {
		return y, err
	}
	also := scratch + driver.Ptr(kernels.CooScratch(n))
	c, count, _, err := s.coalesce(keys, scratch, also, n, func(*group.AtOnce, driver.Stream) {})
	if err != nil {
		return y, err
	}
	at := group.Align(8 * count * len(s.Shape))
	if y.At, err = s.q.Scratch(s.d.Dev, at+count*s.bytes+1); err != nil {
		return y, err
	}
	y.NNZ, y.Values = count, y.At+driver.Ptr(at)
	return y, s.q.Do(s.d.Dev, func(a *group.AtOnce, x driver.Stream) {
		k := s.d.sums.kernels
		if s.bytes > 0 {
			a.Launch(x, k.Add(y.Values, values, c, count, n, s.Row, s.Added))
		}
		for dim := len(s.Shape) - 1; dim >= 0; dim-- {
			a.Launch(x, k.At(c.Keys, y.At+driver.Ptr(8*count*dim), count, s.Shape[dim]))
		}
	})
}

// room makes sure that the others can read so many bytes. Memory that is too short stays mapped until the group is
// closed: to unmap it, CUDA may wait for kernels that wait for this rank.
func (s *sums) room(d *Group, n int) error {
	had, m := 0, s.from[d.Rank()]
	if m != nil {
		had = m.Len()
	}
	if n <= had {
		return nil
	}
	const page = 2 << 20 // nothing else lies in what other processes open
	m, err := d.v.Alloc((max(n, 2*had) + page - 1) / page * page)
	if err == nil {
		s.from[d.Rank()], s.own = m, append(s.own, m)
	}
	return err
}

// tell returns the handle of a rank's own memory, and its address for ranks of the same process.
func (s *sums) tell(rank int) ([]byte, error) {
	told, m := make([]byte, driver.MemoryHandleSize+8), s.from[rank]
	if m == nil {
		return told, nil
	}
	h, err := m.Export()
	if err == nil {
		_, err = h.AppendBinary(told[:0])
	}
	binary.LittleEndian.PutUint64(told[driver.MemoryHandleSize:], uint64(m.Ptr()))
	return told, err
}

// open makes sure that the memory of another rank is mapped.
func (s *sums) open(w *window.Window, r int, told []byte) error {
	if bytes.Equal(told, s.told[r]) {
		return nil
	}
	var h driver.MemoryHandle
	if err := h.UnmarshalBinary(told[:driver.MemoryHandleSize]); err != nil {
		return err
	}
	m, err := w.Reach(h, driver.Ptr(binary.LittleEndian.Uint64(told[driver.MemoryHandleSize:])))
	if err != nil {
		return fmt.Errorf("the entries of rank %d: %w", r, err)
	}
	s.from[r], s.told[r], s.opened = m, bytes.Clone(told), append(s.opened, m)
	return nil
}

// close lets go of the other ranks' memory.
func (s *sums) close() error {
	all := s.opened
	s.opened = nil
	return closeAll(all)
}

// free frees this rank's, which nobody reads any more.
func (s *sums) free() error {
	all := s.own
	s.own = nil
	return closeAll(all)
}

func closeAll[T interface{ Close() error }](all []T) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
