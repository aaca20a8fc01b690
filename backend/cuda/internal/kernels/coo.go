package kernels

import (
	_ "embed"
	"encoding/binary"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// COO has the kernels that coalesce entries of sparse tensors, for devices of compute capability 8.0 and later. A
// key is the row-major number of coordinates. All numbers are uint64.
//
//go:embed coo.ptx
var COO []byte

// The kernels of COO.
const (
	CooKey    = "c10d_coo_key"    // (keys, at, outside, n, size, mark): keys[i] = keys[i]*size + at[i]
	CooAt     = "c10d_coo_at"     // (keys, at, n, size): the way back
	CooMerge  = "c10d_coo_merge"  // (sorted, to, keys, from, n, width): merges each two runs, and takes from along
	CooFirst  = "c10d_coo_first"  // (marks, keys, n): 1 for the first of equal keys, else 0
	CooScan   = "c10d_coo_scan"   // (sums, marks, n, step): sums[i] = marks[i] + marks[i-step]
	CooUnique = "c10d_coo_unique" // (starts, once, keys, sums, n): where the entries of each key begin
	CooAdd    = "c10d_coo_add"    // (out, values, entries, starts, n, row, size, kind uint32): adds those of each key
)

// CooNames are their names.
var CooNames = []string{CooKey, CooAt, CooMerge, CooFirst, CooScan, CooUnique, CooAdd}

// How CooAdd adds, as coo.cu numbers it.
const (
	cooWhole = iota
	cooFloat32
	cooFloat64
	cooFloat16
	cooBFloat16
	cooBool
)

// CooAdded is how CooAdd adds elements of a dtype, each of which is so many Parts of Size bytes.
type CooAdded struct{ Parts, Size, Kind int }

// CooAdds returns it, false if CooAdd does not add the dtype.
func CooAdds(d tensor.DType) (a CooAdded, ok bool) {
	a = CooAdded{1, d.Size(), cooWhole}
	switch d {
	case tensor.Float32:
		a.Kind = cooFloat32
	case tensor.Float64:
		a.Kind = cooFloat64
	case tensor.Complex64:
		a = CooAdded{2, 4, cooFloat32}
	case tensor.Complex128:
		a = CooAdded{2, 8, cooFloat64}
	case tensor.Float16:
		a.Kind = cooFloat16
	case tensor.BFloat16:
		a.Kind = cooBFloat16
	case tensor.Bool:
		a.Kind = cooBool
	default:
		return a, d.IsInteger()
	}
	return a, true
}

// DType returns a dtype that is added in the same way. It is for kernels in Go.
func (a CooAdded) DType() tensor.DType {
	for _, d := range tensor.DTypes() {
		if b, ok := CooAdds(d); ok && b == a {
			return d
		}
	}
	return tensor.Invalid
}

// Coo makes launches of a device's kernels.
type Coo struct{ functions map[string]driver.Function }

// LoadCoo loads the kernels.
func LoadCoo(v driver.Device) (driver.Module, *Coo, error) {
	m, all, err := Open(v, COO, CooNames...)
	return m, &Coo{all}, err
}

// launch returns a launch of a thread for each of n. Its parameters are addresses, each with what is used there, and
// numbers.
func (k *Coo) launch(name string, n int, uses []driver.Access, numbers ...uint64) *driver.Launch {
	l := &driver.Launch{Function: k.functions[name], Grid: Blocks(16 * n), Block: driver.Dim{X: Block}, Args: new(driver.Args)}
	for _, a := range uses {
		l.Args.Ptr(a.Ptr)
		if a.Len > 0 {
			l.Access = append(l.Access, a)
		}
	}
	for _, v := range numbers {
		l.Args.Uint64(v)
	}
	return l
}

// Key adds a dimension to n keys. A coordinate outside of it sets the number at outside to mark plus its place.
func (k *Coo) Key(keys, at, outside driver.Ptr, n, size int, mark uint64) *driver.Launch {
	uses := []driver.Access{driver.Writes(keys, 8*n), driver.Reads(at, 8*n), driver.Writes(outside, 8)}
	return k.launch(CooKey, n, uses, uint64(n), uint64(size), mark)
}

// At takes the last dimension off n keys.
func (k *Coo) At(keys, at driver.Ptr, n, size int) *driver.Launch {
	return k.launch(CooAt, n, []driver.Access{driver.Writes(keys, 8*n), driver.Writes(at, 8*n)}, uint64(n), uint64(size))
}

// CooScratch returns how much memory Coalesce needs besides the keys.
func CooScratch(n int) int { return 4 * cooEach(n) }

// cooEach is the memory of n numbers and one more.
func cooEach(n int) int { return (8*(n+1) + 255) &^ 255 }

// Coalesced are the entries of each key.
type Coalesced struct {
	Keys    driver.Ptr // each once
	Entries driver.Ptr // their numbers, in the order of the keys, and of the entries where keys are equal
	Starts  driver.Ptr // where those of a key begin in Entries, and n after the last key
	Count   driver.Ptr // where the number of keys is
}

// Coalesce has do launch the kernels that sort n keys, at least one, and find those that are equal. It uses the memory
// of the keys, too.
func (k *Coo) Coalesce(do func(*driver.Launch), keys, scratch driver.Ptr, n int) Coalesced {
	at := func(i int) driver.Ptr { return scratch + driver.Ptr(i*cooEach(n)) }
	all := func(p driver.Ptr) driver.Access { return driver.Reads(p, 8*n) }
	to := func(p driver.Ptr) driver.Access { return driver.Writes(p, 8*n) }
	other, entries, spare, starts := at(0), driver.Ptr(0), at(1), at(3)
	for width := 1; width == 1 || width < n; width *= 2 {
		from := all(entries)
		next := entries
		if entries == 0 {
			from, next = driver.Access{}, at(2)
		}
		do(k.launch(CooMerge, n, []driver.Access{to(other), to(spare), all(keys), from}, uint64(n), uint64(width)))
		keys, other, entries, spare = other, keys, spare, next
	}
	do(k.launch(CooFirst, n, []driver.Access{to(other), all(keys)}, uint64(n)))
	sums := other
	for step := 1; step < n; step *= 2 {
		do(k.launch(CooScan, n, []driver.Access{to(spare), all(sums)}, uint64(n), uint64(step)))
		sums, spare = spare, sums
	}
	do(k.launch(CooUnique, n, []driver.Access{driver.Writes(starts, 8*n+8), to(spare), all(keys), all(sums)}, uint64(n)))
	return Coalesced{Keys: spare, Entries: entries, Starts: starts, Count: sums + driver.Ptr(8*(n-1))}
}

// Add adds the rows of values of each of the first keys. There are n entries in all.
func (k *Coo) Add(out, values driver.Ptr, c Coalesced, keys, n, row int, a CooAdded) *driver.Launch {
	bytes := row * a.Parts * a.Size
	l := k.launch(CooAdd, keys*row*a.Parts, []driver.Access{
		driver.Writes(out, keys*bytes), driver.Reads(values, n*bytes), driver.Reads(c.Entries, 8*n), driver.Reads(c.Starts, 8*keys+8),
	}, uint64(keys), uint64(row*a.Parts))
	l.Args.Uint32(uint32(a.Size)).Uint32(uint32(a.Kind))
	return l
}

// Numbers are uint64 in memory, for kernels in Go.
type Numbers []byte

// At returns number i.
func (b Numbers) At(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }

// Set sets number i.
func (b Numbers) Set(i int, v uint64) { binary.NativeEndian.PutUint64(b[8*i:], v) }
