package gloo_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
)

// TestLists: tensors of a list go as they lie, or packed if one cannot, also in place.
func TestLists(t *testing.T) {
	const p, root = 3, 1
	block := func(from, to int) *tensor.Tensor { return vec(float32(10*from+to), float32(from), float32(to)) }
	strided := func(from, to int) *tensor.Tensor {
		wide, err := tensor.New(tensor.Float32, 3, 2)
		assert.NoError(t, err)
		column, err := wide.Select(1, 0)
		assert.NoError(t, err)
		assert.NoError(t, column.CopyFrom(block(from, to)))
		return column
	}
	equal := func(t *testing.T, what string, want, got *tensor.Tensor) {
		packed := make([]byte, got.ByteLen())
		assert.NoError(t, got.Pack(packed))
		assert.Equal(t, want.Bytes(), packed, what)
	}
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, gloo.GroupTimeout, same(wire, p)...)
		for name, make := range map[string]func(from, to int) *tensor.Tensor{"contiguous": block, "strided": strided} {
			t.Run(name, func(t *testing.T) {
				var wg sync.WaitGroup
				for r, b := range bs {
					wg.Go(func() {
						fresh := func() (ts []*tensor.Tensor) {
							for range p {
								ts = append(ts, make(-1, -1))
							}
							return ts
						}
						toAll := func() (ts []*tensor.Tensor) {
							for to := range p {
								ts = append(ts, make(r, to))
							}
							return ts
						}
						for _, inPlace := range []bool{false, true} {
							out, in := fresh(), make(-1, -1)
							if inPlace {
								in = out[r]
							}
							assert.NoError(t, in.CopyFrom(block(r, r)))
							assert.NoError(t, wait(b.AllGather(t.Context(), out, in, backend.AllGatherOptions{})))
							for from, got := range out {
								equal(t, "all_gather", block(from, from), got)
							}

							var ins, outs []*tensor.Tensor
							got, in := make(-1, -1), make(r, r)
							if r == root {
								ins, outs = toAll(), fresh()
								if inPlace {
									got, in = ins[r], outs[r]
									assert.NoError(t, in.CopyFrom(block(r, r)))
								}
							}
							assert.NoError(t, wait(b.Scatter(t.Context(), got, ins, backend.ScatterOptions{Root: root})))
							equal(t, "scatter", block(root, r), got)
							assert.NoError(t, wait(b.Gather(t.Context(), outs, in, backend.GatherOptions{Root: root})))
							for from, got := range outs {
								equal(t, "gather", block(from, from), got)
							}
						}
						out := fresh()
						assert.NoError(t, wait(b.AllToAll(t.Context(), out, toAll(), backend.AllToAllOptions{})))
						for from, got := range out {
							equal(t, "all_to_all", block(from, r), got)
						}
					})
				}
				gloo.Finish(t, "all ranks", &wg)
			})
		}
	})
}
