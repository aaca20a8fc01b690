package ddp

import (
	"slices"

	"github.com/c10d-go/c10d/tensor"
)

// item describes a parameter for the assignment of buckets.
type item struct {
	number int // what the buckets list
	bytes  int
	dtype  tensor.DType
	device tensor.Device
	alone  bool // a sparse gradient
}

// assign cuts items into buckets as c10d does. Items of one dtype and device share a bucket until
// it has limits[0] bytes or more, the next bucket until limits[1], and so on. The last limit
// applies to the rest. A bucket closes after the item that fills it, so a big item may exceed the
// limit by far.
//
// Full buckets come in the order in which they were filled. With sorted, all buckets are ordered
// by their smallest number, as for definition order. Otherwise the buckets left open follow the
// full ones, the latest kind first. That is the order in which libstdc++ lists the few keys of
// c10d's map.
func assign(items []item, limits []int, sorted bool) [][]int {
	type kind struct {
		dtype  tensor.DType
		device tensor.Device
	}
	type open struct {
		kind    kind
		numbers []int
		bytes   int
		limit   int // index into limits
	}
	var full [][]int
	var opens []*open
	for _, it := range items {
		if it.alone {
			full = append(full, []int{it.number})
			continue
		}
		k := kind{it.dtype, it.device}
		at := slices.IndexFunc(opens, func(o *open) bool { return o.kind == k })
		if at < 0 {
			at = len(opens)
			opens = append(opens, &open{kind: k})
		}
		o := opens[at]
		o.numbers = append(o.numbers, it.number)
		o.bytes += it.bytes
		if o.bytes >= limits[o.limit] {
			full = append(full, o.numbers)
			o.numbers, o.bytes = nil, 0
			o.limit = min(o.limit+1, len(limits)-1)
		}
	}
	for _, o := range slices.Backward(opens) {
		if len(o.numbers) > 0 {
			full = append(full, o.numbers)
		}
	}
	if sorted {
		slices.SortStableFunc(full, func(a, b []int) int { return slices.Min(a) - slices.Min(b) })
	}
	return full
}

// items describes the trained parameters in the given order; nil means the order of definition.
func (d *DDP) items(order []int) []item {
	items := make([]item, 0, len(d.train))
	add := func(p *param) {
		v := p.Value
		items = append(items, item{number: p.number, bytes: v.ByteLen(), dtype: v.DType(), device: v.Device(), alone: p.sparse()})
	}
	if order == nil {
		for _, p := range d.train {
			add(p)
		}
	}
	for _, k := range order {
		add(d.train[k])
	}
	return items
}
