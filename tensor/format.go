package tensor

import (
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Format implements fmt.Formatter: %+v prints the elements as Dump does, every
// other verb the description of String.
func (t *Tensor) Format(s fmt.State, verb rune) {
	if verb == 'v' && s.Flag('+') {
		_, _ = io.WriteString(s, t.Dump())
		return
	}
	fmt.Fprintf(s, fmt.FormatString(s, verb), t.String())
}

// Beyond dumpMax elements Dump shows the first and last dumpEdge of each
// dimension. The numbers are PyTorch's defaults.
const (
	dumpMax  = 1000
	dumpEdge = 3
)

// Dump returns the description and the elements of a CPU tensor in nested
// brackets, each number as short as tells it from its neighbours. Of more than
// a thousand elements it shows three at either end of a dimension.
func (t *Tensor) Dump() string {
	switch {
	case t.device.Type != CPU:
		return t.String()
	case t.layout == SparseCOO:
		return fmt.Sprintf("%v\nindices %s\nvalues %s", t, t.sparse.indices.Dump(), t.sparse.values.Dump())
	}
	d := dumper{t: t}
	brackets := 1 // elements, if there are some
	for _, n := range t.shape {
		brackets *= max(n, 1)
		d.elide = d.elide || brackets > dumpMax
	}
	d.walk(0, t.offset, func(at int) { d.width = max(d.width, len(d.text(at))) }, func(string) {})
	d.out.WriteString(t.String() + "\n")
	d.walk(0, t.offset,
		func(at int) { fmt.Fprintf(&d.out, "%*s", d.width, d.text(at)) },
		func(s string) { d.out.WriteString(s) })
	return d.out.String()
}

type dumper struct {
	t     *Tensor
	elide bool
	width int
	out   strings.Builder
}

// walk visits the shown elements in row-major order, with the punctuation
// between them.
func (d *dumper) walk(dim, at int, element func(at int), punct func(string)) {
	if dim == len(d.t.shape) {
		element(at)
		return
	}
	n, inner := d.t.shape[dim], dim == len(d.t.shape)-1
	sep := ", "
	if !inner {
		sep = "," + strings.Repeat("\n", len(d.t.shape)-1-dim) + strings.Repeat(" ", dim+1)
	}
	punct("[")
	for i := 0; i < n; i++ {
		if i > 0 {
			punct(sep)
		}
		if d.elide && i == dumpEdge && n > 2*dumpEdge {
			punct("..." + sep)
			i = n - dumpEdge
		}
		d.walk(dim+1, at+i*d.t.strides[dim], element, punct)
	}
	punct("]")
}

func (d *dumper) text(at int) string {
	dtype := d.t.dtype
	es := dtype.Size()
	b := d.t.data[at*es : (at+1)*es]
	size := 32
	if dtype == Float64 || dtype == Complex128 {
		size = 64
	}
	switch v := load(dtype, b); {
	case dtype == Bool:
		return strconv.FormatBool(v != 0)
	case dtype.IsUnsigned():
		return strconv.FormatUint(bits(b), 10)
	case dtype.IsInteger():
		return strconv.FormatInt(signed(b), 10)
	case dtype.IsComplex():
		return strings.Trim(strconv.FormatComplex(v, 'g', -1, 2*size), "()")
	default:
		return strconv.FormatFloat(real(v), 'g', -1, size)
	}
}
