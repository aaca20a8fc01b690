package run_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestNoResultWithoutARank has a rank leave a collective out and abort the group, while the others
// are in it. Each of them returns an error, unless it did not need that rank: then it has the
// right result.
func TestNoResultWithoutARank(t *testing.T) {
	onLinux(t)
	seed := must.Seed(t)
	groups := map[string][]gloo.Options{
		"gloo":         slices.Repeat([]gloo.Options{{Wire: gloo.WireGloo}}, 3),
		"tcp":          slices.Repeat([]gloo.Options{{Wire: gloo.WireTCP}}, 3),
		"memory":       slices.Repeat([]gloo.Options{{}}, 3),
		"hosts 0011":   {{Host: "0"}, {Host: "0"}, {Host: "1"}, {Host: "1"}},
		"hosts 00112":  {{Host: "0"}, {Host: "0"}, {Host: "1"}, {Host: "1"}, {Host: "2"}},
		"in order 001": {{Host: "0", Sums: gloo.SumsInRankOrder}, {Host: "0", Sums: gloo.SumsInRankOrder}, {Host: "1", Sums: gloo.SumsInRankOrder}},
	}
	gone := errors.New("not this one")
	for name, options := range groups {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for kind := range levelledKinds {
				for round := range testsize.Of(1, 1, 4) {
					draw := rand.New(rand.NewPCG(seed, uint64(4*kind+round)))
					missing, salt := draw.IntN(len(options)), draw.IntN(1000)
					bs := grouped(t, options...)
					onAll(t, bs, func(r int, b *gloo.Backend) {
						if r == missing {
							for _, other := range bs {
								for until := time.Now().Add(run.Patience); other != b && other.Seq() == 0 && time.Now().Before(until); {
									time.Sleep(time.Millisecond)
								}
							}
							b.Abort(gone)
							return
						}
						x := drawLevelledOf(t, rand.New(rand.NewPCG(seed, uint64(salt))), b, salt, kind, func(x *tensor.Tensor) *tensor.Tensor { return x })
						if err := wait(x.call()); err != nil {
							return
						}
						for j := range x.want {
							if !assert.True(t, bytes.Equal(x.want[j].Bytes(), bytesOf(x.got[j])),
								"rank %d without rank %d: %s, tensor %d of %v", r, missing, x.name, j, x.got[j]) {
								return
							}
						}
						assert.Error(t, barrier(b), fmt.Sprintf("rank %d without rank %d", r, missing))
					})
				}
			}
		})
	}
}

// TestNoSparseResultWithoutARank is the same for sparse all-reduces, which always need all ranks.
func TestNoSparseResultWithoutARank(t *testing.T) {
	onLinux(t)
	const size = 4
	seed := must.Seed(t)
	for name, options := range sparseGroups(size) {
		for _, window := range []int64{0, 64} { // 0: in one go
			t.Run(fmt.Sprintf("%s, window %d", name, window), func(t *testing.T) {
				if window > 0 {
					defer run.SetWindow(window)()
				}
				draw := rand.New(rand.NewPCG(seed, 0))
				missing := draw.IntN(size)
				bs := grouped(t, options...)
				onAll(t, bs, func(r int, b *gloo.Backend) {
					x := entries(t, rand.New(rand.NewPCG(seed, uint64(r))), tensor.Float32, sparseShape{1, []int{500, 3}}, 100)
					if r != missing {
						assert.Error(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})), "rank %d", r)
						return
					}
					for _, other := range bs {
						for until := time.Now().Add(run.Patience); other != b && other.Seq() == 0 && time.Now().Before(until); {
							time.Sleep(time.Millisecond)
						}
					}
					b.Abort(errors.New("not this one"))
				})
			})
		}
	}
}

// TestErr: a group has an error once it has ended, and none before.
func TestErr(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		require.NoError(t, b.Err())
		require.NoError(t, barrier(b))
		if b.Rank() == 1 {
			b.Abort(errors.New("enough"))
		} else {
			require.Error(t, barrier(b))
		}
		e := must.As[*work.Error](t, b.Err())
		require.ErrorIs(t, e, work.ErrAborted)
		require.Equal(t, 1, e.Peer)
		require.Equal(t, b.Rank(), e.Rank)
	})
}
