package run_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/overlaptest"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
)

// TestOverlap: a call whose inputs and outputs share memory is refused, or right, on every wire.
func TestOverlap(t *testing.T) {
	defer run.SetClusterSizes(512, 3000)()
	seed := must.Seed(t)
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		overlapping(t, seed, connected(t, run.GroupTimeout, same(wire, 3)...))
	})
	t.Run("clusters", func(t *testing.T) { overlapping(t, seed, clustered(t, 2, 1, 2)) })
	t.Run("tcp, sums in rank order", func(t *testing.T) {
		o := gloo.Options{Wire: gloo.WireTCP, Sums: gloo.SumsInRankOrder}
		bs := grouped(t, o, o, o)
		overlapping(t, seed, bs)
	})
	t.Run("one rank", func(t *testing.T) { overlapping(t, seed, connected(t, run.GroupTimeout, gloo.WireTCP)) })
}

func overlapping(t *testing.T, seed uint64, bs []*gloo.Backend) {
	common := rand.New(rand.NewPCG(seed, 0))
	var calls []*overlaptest.Call
	counts := map[string]int{}
	for i := range testsize.Of(2, 3, 20) * len(overlaptest.Names) {
		c := overlaptest.Draw(common, overlaptest.Names[i%len(overlaptest.Names)], len(bs))
		calls = append(calls, c)
		switch {
		case c.AnyRefused():
			counts["refused"]++
		case c.InPlace():
			counts["in place"]++
		default:
			counts["apart"]++
		}
	}
	if len(bs) > 1 { // a group of one has few that are refused
		require.Positive(t, min(counts["refused"], counts["in place"], counts["apart"]), "%v", counts)
	}
	onAll(t, bs, func(rank int, b *gloo.Backend) {
		for i, c := range calls {
			if !overlappingCall(t, b, c) {
				t.Errorf("rank %d, call %d: %v", rank, i, c)
				b.Abort(nil)
				return
			}
		}
	})
}

// overlappingCall makes one rank's call, if the other ranks can make theirs or this one is refused.
func overlappingCall(t *testing.T, b *gloo.Backend, c *overlaptest.Call) bool {
	r := b.Rank()
	if c.AnyRefused() && !c.Refused(r) {
		return true
	}
	memory := c.Before(r)
	var arenas [overlaptest.Arenas]*tensor.Tensor
	for a := range memory {
		arenas[a] = of(t, memory[a], len(memory[a]))
	}
	seq := b.Seq()
	w, err := c.Run(context.Background(), b, arenas)
	if c.Refused(r) {
		unchanged := b.Seq() == seq
		for a, want := range c.Before(r) {
			unchanged = unchanged && slices.Equal(memory[a], want)
		}
		return assert.ErrorIs(t, err, backend.ErrInvalidArgument) && assert.ErrorContains(t, err, "overlap in memory") && assert.True(t, unchanged)
	}
	if !assert.NoError(t, wait(w, err)) {
		return false
	}
	for a, want := range c.After(r) {
		if !slices.Equal(want, memory[a]) {
			return assert.Fail(t, "wrong elements", "arena %d", a)
		}
	}
	return true
}
