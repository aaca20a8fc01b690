package run

import (
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/tensor"
)

// inPlace calls f with the bytes of t. If they are not contiguous, f gets a packed copy, which is
// written back unless readOnly is set.
func (e *engine) inPlace(t *tensor.Tensor, readOnly bool, f func(buf []byte) error) error {
	if buf := t.Bytes(); buf != nil || t.Len() == 0 {
		return f(buf)
	}
	buf := grow(&e.packed, t.ByteLen())
	if err := t.Pack(buf); err != nil {
		return err
	}
	if err := f(buf); err != nil || readOnly {
		return err
	}
	return t.Unpack(buf)
}

// pair gives the bytes of an output and an input to f, packed where they must be.
func (e *engine) pair(out, in []*tensor.Tensor, f func(out, in []byte) error) error {
	var o, i []byte
	needOut, needIn := !flat(out, &o), !flat(in, &i)
	n, m := 0, 0
	if needOut {
		n = total(out)
	}
	if needIn {
		m = total(in)
	}
	// Both halves aligned for every element type.
	n16 := (n + 15) &^ 15
	buf := grow(&e.packed, n16+m)
	if needOut {
		o = buf[:n]
	}
	if needIn {
		i = buf[n16 : n16+m]
		if err := pack(i, in); err != nil {
			return err
		}
	}
	if err := f(o, i); err != nil || !needOut {
		return err
	}
	return unpack(out, o)
}

// flat sets *b to the bytes of a list that needs no packing and reports whether it is one.
func flat(ts []*tensor.Tensor, b *[]byte) bool {
	if len(ts) == 0 {
		return true
	}
	if len(ts) == 1 && (ts[0].Len() == 0 || ts[0].Bytes() != nil) {
		*b = ts[0].Bytes()
		return true
	}
	return false
}

// list returns the bytes of each tensor, nil if one needs packing. A single tensor
// instead of a list is cut in parts of so many bytes. There are two lists in an engine.
func (e *engine) list(i int, ts []*tensor.Tensor, counts []int64) [][]byte {
	l := e.lists[i][:0]
	var whole []byte
	if cut := len(ts) == 1 && len(counts) > 1; cut && flat(ts, &whole) {
		for _, n := range counts {
			l, whole = append(l, whole[:n:n]), whole[n:]
		}
	} else if !cut {
		for _, t := range ts {
			l = append(l, t.Bytes())
		}
	}
	e.lists[i] = l
	for j, buf := range l {
		if buf == nil && len(l) == len(ts) && ts[j].Len() > 0 {
			return nil
		}
	}
	if len(l) == 0 {
		return nil
	}
	return l
}

// slices returns the memory of parts, in a list of the engine.
func (e *engine) slices(parts []cluster.Part, of func(p *cluster.Part) []byte) [][]byte {
	l := e.lists[0][:0]
	for i := range parts {
		l = append(l, of(&parts[i]))
	}
	e.lists[0] = l
	return l
}
