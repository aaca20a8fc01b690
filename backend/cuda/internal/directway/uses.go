package directway

import (
	"cmp"
	"iter"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// common returns the bytes that two lists have in common, as b uses them. Both are in order of their addresses. To the
// tracker, Before's bytes are the operation's own. So no others may be among them.
func common(a, b []driver.Access) (all []driver.Access) {
	end := func(x driver.Access) driver.Ptr { return x.Ptr + driver.Ptr(x.Len) }
	for len(a) > 0 && len(b) > 0 {
		lo, hi := max(a[0].Ptr, b[0].Ptr), min(end(a[0]), end(b[0]))
		if lo < hi {
			all = append(all, driver.Access{Ptr: lo, Len: int(hi - lo), Mode: b[0].Mode})
		}
		if end(a[0]) < end(b[0]) {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return all
}

// sortUses brings uses in the order of their addresses.
func sortUses(uses []driver.Access) {
	slices.SortFunc(uses, func(a, b driver.Access) int { return cmp.Compare(a.Ptr, b.Ptr) })
}

// meeting returns the numbers of the uses in a that share bytes with one in b of a mode, 0 for any. Both are in
// order of their addresses.
func meeting(a, b []driver.Access, mode driver.Mode) iter.Seq[int] {
	return func(yield func(int) bool) {
		k := 0
		for i, x := range a {
			for k < len(b) && (mode != 0 && b[k].Mode != mode || b[k].Ptr+driver.Ptr(b[k].Len) <= x.Ptr) {
				k++
			}
			if k == len(b) || b[k].Ptr < x.Ptr+driver.Ptr(x.Len) && !yield(i) {
				return
			}
		}
	}
}

// conflicts reports whether two operations need an order.
func conflicts(a, b []driver.Access) bool {
	for _, mode := range []driver.Mode{driver.Read, driver.Write, driver.Shared} {
		for i := range meeting(a, b, mode) {
			if mode.Conflicts(a[i].Mode) {
				return true
			}
		}
	}
	return false
}
