package run_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/overlaptest"
	"github.com/c10d-go/c10d/internal/testsize"
)

// TestOverlap: a call in place is refused, or right, on every wire.
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
	for i := range testsize.Of(2, 3, 20) * len(overlaptest.Names) {
		calls = append(calls, overlaptest.Draw(common, overlaptest.Names[i%len(overlaptest.Names)], len(bs)))
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
	memory, seq := c.Before(r), b.Seq()
	w, err := c.Run(context.Background(), b, of(t, memory, len(memory)))
	if c.Refused(r) {
		return assert.ErrorIs(t, err, backend.ErrInvalidArgument) && assert.ErrorContains(t, err, "overlap in memory") &&
			assert.Equal(t, seq, b.Seq()) && assert.Equal(t, c.Before(r), memory)
	}
	return assert.NoError(t, wait(w, err)) && assert.Equal(t, c.After(r), memory)
}
