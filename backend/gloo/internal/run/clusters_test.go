package run_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// clustered connects ranks of which so many are in each cluster, all on one host.
func clustered(t testing.TB, sizes ...int) []*gloo.Backend {
	t.Helper()
	onLinuxOf(t)
	var options []gloo.Options
	for c, n := range sizes {
		options = append(options, slices.Repeat([]gloo.Options{{Wire: gloo.WireNative, Cluster: fmt.Sprint(c)}}, n)...)
	}
	bs := grouped(t, options...)
	return bs
}

func onLinuxOf(t testing.TB) {
	if runtime.GOOS != "linux" {
		t.Skip("memory is shared on Linux only")
	}
}

// TestF22OneHostPlaysSeveral: names split a host into clusters, by option or environment. Explain has
// each rank's part.
func TestF22OneHostPlaysSeveral(t *testing.T) {
	bs := clustered(t, 2, 3)
	e := bs[0].Explain()
	require.Equal(t, 1, e.Hosts)
	require.Equal(t, []backend.Cluster{
		{Ranks: []int{0, 1}, Shares: []float64{0.5, 0.5}}, {Ranks: []int{2, 3, 4}, Shares: []float64{1. / 3, 1. / 3, 1. / 3}},
	}, e.Clusters)
	require.Contains(t, e.String(), "rank 2 carries 0.333, rank 3 carries 0.333, rank 4 carries 0.333 of its traffic")

	t.Setenv("C10D_CLUSTER", "all")
	t.Setenv("C10D_LINK_SPEED", "1000")
	other := gloo.Options{Wire: gloo.WireNative, Cluster: "other", Tuning: gloo.Tuning{LinkSpeed: 3000}}
	bs = grouped(t, gloo.Options{Wire: gloo.WireNative}, other, gloo.Options{Wire: gloo.WireNative, Cluster: "other"})
	require.Equal(t, []backend.Cluster{{Ranks: []int{0}, Shares: []float64{1}}, {Ranks: []int{1, 2}, Shares: []float64{0.75, 0.25}}}, bs[2].Explain().Clusters)

	t.Setenv("C10D_LINK_SPEED", "fast")
	_, errs := connectWith(t, run.GroupTimeout, gloo.Options{Wire: gloo.WireNative})
	require.ErrorContains(t, errs[0], `environment variable C10D_LINK_SPEED is "fast"`)
}

// TestF26StagesOverlap: while a rank is in a step inside its cluster, the messages of an earlier chunk
// between the clusters come and go. The step does not end before they have.
func TestF26StagesOverlap(t *testing.T) {
	const chunk, chunks = 256 << 10, 8
	defer run.SetClusterSizes(0, chunk)()
	for _, sizes := range [][]int{{2, 2}, {2, 3}} {
		bs := clustered(t, sizes...)
		moved := make([]int, len(bs)) // steps inside during which messages between clusters ended
		var late sync.Map
		for r, b := range bs {
			b.TraceSteps(func(s run.Step) {
				if s.Stage != cluster.Before || !s.Begins || len(s.Ranks) == 1 {
					return
				}
				limit := time.Now().Add(20 * time.Second)
				going := s.Going()
				for s.Going() > 0 && time.Now().Before(limit) {
					runtime.Gosched()
				}
				if s.Going() > 0 {
					late.Store(r, s.Chunk)
				} else if going > 0 {
					moved[r]++
				}
			})
		}
		onAll(t, bs, func(r int, b *gloo.Backend) {
			x := numbers(t, r, 1, chunk*chunks/4)
			want := sum(t, len(bs), x.Len(), func(q int) *tensor.Tensor { return numbers(t, q, 1, x.Len()) })
			assert.NoError(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})))
			assert.True(t, bytes.Equal(want.Bytes(), x.Bytes()))
		})
		late.Range(func(r, chunk any) bool {
			t.Errorf("rank %v, chunk %v: the messages of an earlier chunk wait for this step", r, chunk)
			return true
		})
		t.Logf("%v: overlaps %v", sizes, moved)
		require.Positive(t, slices.Max(moved))
	}
}

// TestClusterLengths: two ranks of an all_to_all disagree on a block's length, on any sides of the length up to which blocks
// of two clusters go together. So do a rank and the root of a gather_v. All ranks learn of it before their timeout, and
// within a cluster who disagrees.
func TestClusterLengths(t *testing.T) {
	const (
		size        = 5
		short, long = 4 * 100, 4 * run.Aggregate * 4 // bytes: of four blocks, long alone is above the limit
	)
	for _, tc := range []struct {
		name           string
		from, to       int
		sent, expected int // bytes
	}{
		{"both short", 1, 2, short, short + 4},
		{"both long", 1, 2, long, long + 4},
		{"sent long", 1, 2, long, short},
		{"sent short", 1, 2, short, long},
		{"sent none", 1, 2, 0, long},
		{"expected none", 1, 2, long, 0},
		{"sent long by another rank", 0, 3, long, short},
		{"sent short by another rank", 0, 3, short, long},
		{"sent none by another rank", 0, 3, 0, long},
		{"a cluster of one sends", 4, 0, short, long},
		{"a cluster of one receives", 3, 4, short, long},
		{"within a cluster, sent long", 0, 1, long, short},
		{"within a cluster, sent short", 1, 0, short, long},
	} {
		check := func(t *testing.T, exact bool, call func(r int, b *gloo.Backend) error) {
			bs := clustered(t, 2, 2, 1)
			onAll(t, bs, func(r int, b *gloo.Backend) {
				err := call(r, b)
				if err == nil { // its part was done
					err = barrier(b)
				}
				if assert.ErrorIs(t, err, work.ErrMismatch, "rank %d", r) && exact {
					assert.ErrorContains(t, err, fmt.Sprintf("rank %d sends %d bytes to rank %d, which expects %d", tc.from, tc.sent, tc.to, tc.expected))
				}
			})
		}
		for _, others := range []int{short, 0}[:testsize.Of(1, 1, 2)] { // of the other blocks
			t.Run(fmt.Sprintf("%s, others %d", tc.name, others), func(t *testing.T) {
				check(t, strings.HasPrefix(tc.name, "within"), func(r int, b *gloo.Backend) error {
					send, recv := slices.Repeat([]int{others / 4}, size), slices.Repeat([]int{others / 4}, size)
					switch r {
					case tc.from:
						send[tc.to] = tc.sent / 4
					case tc.to:
						recv[tc.from] = tc.expected / 4
					}
					blocks := func(lengths []int) []*tensor.Tensor {
						return each(size, func(i int) *tensor.Tensor { return empty(t, lengths[i]) })
					}
					return wait(b.AllToAll(context.Background(), blocks(recv), blocks(send), backend.AllToAllOptions{}))
				})
			})
		}
		if tc.from == 4 {
			continue // a cluster of one always sends by itself
		}
		t.Run("gather_v, "+tc.name, func(t *testing.T) {
			check(t, false, func(r int, b *gloo.Backend) error {
				var out []*tensor.Tensor
				if r == tc.to {
					out = each(size, func(i int) *tensor.Tensor {
						if i == tc.from {
							return empty(t, tc.expected/4)
						}
						return empty(t, short/4)
					})
				}
				n := short
				if r == tc.from {
					n = tc.sent
				}
				return wait(b.GatherV(context.Background(), out, empty(t, n/4), backend.GatherOptions{Root: tc.to}))
			})
		})
	}
}

// TestNetworkBytes: in an all-reduce of two clusters of eight ranks, a network card carries each way
// what two single ranks would: 2(C-1)/C of the data once. The connections count.
func TestNetworkBytes(t *testing.T) {
	bs := clustered(t, 8, 8)
	const n = 4 << 20
	sent := func() (between uint64) {
		for _, b := range bs[:8] {
			for _, bytes := range b.Sent()[8:] {
				between += bytes
			}
		}
		return between
	}
	run := func() {
		onAll(t, bs, func(r int, b *gloo.Backend) {
			assert.NoError(t, wait(b.AllReduce(context.Background(), list(numbers(t, r, 1, n/4)), backend.AllReduceOptions{})))
		})
	}
	run()
	before := sent()
	run()
	require.InDelta(t, n, sent()-before, 0.05*n)
}

// TestF29ErrorsNameTheStep: a rank is aborted at each of its steps. Every rank gets an error, on some
// with stage and step, and nothing is left over. (The package's tests look for goroutines that are
// left.)
func TestF29ErrorsNameTheStep(t *testing.T) {
	defer run.SetClusterSizes(512, 20_000)()
	steps := 1
	for at := 0; at < steps; at++ {
		bs := clustered(t, 2, 2)
		var mine int
		bs[1].TraceSteps(func(s run.Step) {
			if s.Begins {
				if mine == at {
					bs[1].Abort(errors.New("for a test"))
				}
				mine++
			}
		})
		errs := make([]error, len(bs))
		onAll(t, bs, func(r int, b *gloo.Backend) {
			errs[r] = wait(b.AllReduce(context.Background(), list(numbers(t, r, 1, 20_000)), backend.AllReduceOptions{}))
		})
		named := 0
		for r, err := range errs {
			if at == 0 || err != nil {
				require.ErrorIs(t, err, work.ErrAborted, "rank %d, aborted at step %d", r, at)
			}
			if err != nil && strings.Contains(err.Error(), "step ") && strings.Contains(err.Error(), fmt.Sprintf("on rank %d", r)) {
				named++
			}
		}
		if at < steps/2 {
			require.Error(t, errs[1], "aborted at step %d", at)
		}
		if at == 0 {
			require.Positive(t, named, "%v", errs)
			p := must.Get(cluster.New([]int{0, 0, 1, 1}, nil).Plan(cluster.Call{Rank: 1, Bytes: 80_000, Elem: 4, Chunk: 20_000}))
			steps = len(p.Steps) // in the last ones an abort may come too late for this operation
		}
	}
}

// TestF29BetweenNamesTheStep: a rank is aborted while another one waits for it between clusters. The
// other one's error names its rank, the step and the stage.
func TestF29BetweenNamesTheStep(t *testing.T) {
	bs := clustered(t, 2, 2)
	waits := make(chan struct{})
	bs[2].TraceSteps(func(s run.Step) {
		if s.Finish && s.Begins {
			close(waits)
		}
	})
	bs[0].TraceSteps(func(s run.Step) {
		if s.Stage == cluster.Between && !s.Finish && s.Begins {
			<-waits
			bs[0].Abort(errors.New("for a test"))
		}
	})
	errs := make([]error, len(bs))
	onAll(t, bs, func(r int, b *gloo.Backend) {
		errs[r] = wait(b.AllReduce(context.Background(), list(numbers(t, r, 1, 100)), backend.AllReduceOptions{}))
	})
	require.ErrorIs(t, errs[2], work.ErrAborted)
	e := must.As[*work.Error](t, errs[2])
	require.Equal(t, []int{2, 0}, []int{e.Rank, e.Peer})
	require.Regexp(t, `on rank 2.*: step \d+ of \d+ \(between clusters, chunk 0\): .*for a test`, errs[2].Error())
}

// TestClusterAllocations: an all-reduce of clusters allocates its Work and nothing else, in one chunk
// or in several.
func TestClusterAllocations(t *testing.T) {
	defer run.SetClusterSizes(512, 64<<10)()
	ctx := context.Background()
	bs := clustered(t, 2, 2)
	for _, n := range []int{256, 128 << 10} { // one chunk, and eight
		const runs = 10
		xs := each(len(bs), func(r int) *tensor.Tensor { return numbers(t, r, 1, n) })
		once := func(r int) {
			if err := wait(bs[r].AllReduce(ctx, list(xs[r]), backend.AllReduceOptions{})); err != nil {
				panic(err)
			}
		}
		onAll(t, bs, func(r int, _ *gloo.Backend) {
			for range 3 {
				once(r)
			}
		})
		var wg sync.WaitGroup
		for r := 1; r < len(bs); r++ {
			wg.Go(func() {
				for range runs + 1 {
					once(r)
				}
			})
		}
		// Two for each rank: the Work and the list of tensors. There are some more under the race detector, whose
		// pools drop things, and when the machine is busy and a watcher starts.
		got := testing.AllocsPerRun(runs, func() { once(0) })
		run.Finish(t, "all ranks", &wg)
		t.Logf("%d floats: %.1f allocations of four ranks", n, got)
		require.LessOrEqual(t, got, 4*(2+3.0))
	}
}
