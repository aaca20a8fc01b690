package ddp_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

var update = flag.Bool("update", false, "write testdata/sequence.json from what PyTorch sends")

const golden = "testdata/sequence.json"

// goldenSequences has, by scenario, what PyTorch sends in each step.
func goldenSequences(t *testing.T) map[string][][]string {
	t.Helper()
	b := must.Get(os.ReadFile(golden))
	var want map[string][][]string
	require.NoError(t, json.Unmarshal(b, &want))
	return want
}

// iterate runs one iteration and returns what it sent.
func iterate(t *testing.T, d *ddp.DDP, rec *recorder, n int) []string {
	t.Helper()
	require.NoError(t, d.Begin(soon(t)))
	backward(t, d, n)
	require.NoError(t, d.Finish(soon(t)))
	return rec.take()
}

// scenarios does what testdata/sequence.py does.
var scenarios = map[string]func(t *testing.T, rec *recorder, o ddp.Options) [][]string{
	"default": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		o.Buffers = []ddp.Buffer{{Name: "mean", Value: zeros(t, tensor.Float32, 3)}, {Name: "steps", Value: zeros(t, tensor.Int64)}}
		ps := vectors(t, 10, 5, 20, 4)
		ps[1].Value, ps[1].Grad = zeros(t, tensor.Float64, 5), zeros(t, tensor.Float64, 5)
		ps = append(ps, ddp.Param{Name: "frozen", Value: zeros(t, tensor.Float32, 7), NoGrad: true})
		d := must.Get(ddp.New(soon(t), rec, ps, o))
		steps := [][]string{rec.take()}
		for _, sync := range []bool{true, true, true, false, false, true, true} {
			if sync {
				steps = append(steps, iterate(t, d, rec, 4))
				continue
			}
			require.NoError(t, d.NoSync(func() error {
				steps = append(steps, iterate(t, d, rec, 4))
				return nil
			}))
		}
		require.Equal(t, [][]int{{3, 2}, {1}, {0}}, d.Buckets())
		return steps
	},
	"find unused": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		o.FindUnused = true
		return fourSteps(t, rec, o)
	},
	"static graph": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		o.StaticGraph = true
		return fourSteps(t, rec, o)
	},
	"evaluation": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		o.Buffers = []ddp.Buffer{{Name: "mean", Value: zeros(t, tensor.Float32, 3)}}
		d := must.Get(ddp.New(soon(t), rec, vectors(t, 10, 10, 20, 4), o))
		steps := [][]string{rec.take()}
		for _, evaluate := range []bool{true, false, true, false, false, true, true, false} {
			if evaluate {
				require.NoError(t, d.Evaluate(soon(t)))
				require.ErrorIs(t, d.Ready(0), ddp.ErrNotBegun)
				steps = append(steps, rec.take())
				continue
			}
			steps = append(steps, iterate(t, d, rec, 4))
		}
		return steps
	},
	"join": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		o.Buffers = []ddp.Buffer{{Name: "mean", Value: zeros(t, tensor.Float32, 3)}}
		return joinSteps(t, rec, o, ddp.JoinOptions{}, nil)
	},
	"early end": func(t *testing.T, rec *recorder, o ddp.Options) [][]string {
		return joinSteps(t, rec, o, ddp.JoinOptions{ErrorOnEarlyEnd: true}, ddp.ErrEarlyEnd)
	},
}

func fourSteps(t *testing.T, rec *recorder, o ddp.Options) [][]string {
	d := must.Get(ddp.New(soon(t), rec, vectors(t, 10, 10, 20, 4), o))
	steps := [][]string{rec.take()}
	for range 3 {
		steps = append(steps, iterate(t, d, rec, 4))
	}
	return steps
}

// joinSteps joins with one input on rank 0 and two on rank 1.
func joinSteps(t *testing.T, rec *recorder, o ddp.Options, j ddp.JoinOptions, want error) [][]string {
	d := must.Get(ddp.New(soon(t), rec, vectors(t, 10, 20), o))
	steps := [][]string{rec.take()}
	require.ErrorIs(t, d.Join(soon(t), func() error {
		for range 1 + rec.Rank() {
			if err := d.Begin(soon(t)); err != nil {
				return err
			}
			backward(t, d, 2)
			require.NoError(t, d.Finish(soon(t)))
		}
		return nil
	}, j), want)
	return append(steps, rec.take())
}

// What goes over the wire is what PyTorch's DistributedDataParallel sends.
func TestSequenceOfCollectives(t *testing.T) {
	for name, want := range goldenSequences(t) {
		t.Run(name, func(t *testing.T) {
			pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
				rec := &recorder{Group: g}
				got := scenarios[name](t, rec, ddp.Options{PyTorch: true, FirstBucket: 40, BucketCap: 100})
				require.Equal(t, want, got, "rank %d", g.Rank())
			})
		})
	}
	require.Len(t, goldenSequences(t), len(scenarios))
}

// The golden file is what PyTorch does: two ranks of it run and tell.
func TestGoldenSequenceIsPyTorchs(t *testing.T) {
	torchtest.Need(t)
	path := filepath.Join(t.TempDir(), "store")
	var out [2][]byte
	var errs [2]error
	var wg sync.WaitGroup
	for r := range out {
		wg.Go(func() {
			cmd := torchtest.Command(soon(t), t, "testdata/sequence.py", fmt.Sprint(r), path)
			out[r], errs[r] = cmd.Output()
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	require.JSONEq(t, string(out[0]), string(out[1]))
	if *update {
		require.NoError(t, os.WriteFile(golden, out[0], 0o644))
	}
	var got map[string][][]string
	require.NoError(t, json.Unmarshal(out[0], &got))
	require.Equal(t, goldenSequences(t), got)
}

// Buckets are launched in index order, and early: communication overlaps with
// the backward pass.
func TestLaunchOrderAndOverlap(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		rec := &recorder{Group: g}
		d := must.Get(ddp.New(soon(t), rec, vectors(t, 10, 20, 30, 40), ddp.Options{FirstBucket: 1, BucketCap: 1}))
		iterate(t, d, rec, 4)
		iterate(t, d, rec, 4)
		require.Equal(t, [][]int{{3}, {2}, {1}, {0}}, d.Buckets())

		require.NoError(t, d.Begin(soon(t)))
		require.Empty(t, rec.take())
		require.NoError(t, d.Ready(3))
		require.Equal(t, []string{"all_reduce float32[40] sum"}, rec.take(), "bucket 0 goes while three gradients are still computed")
		require.NoError(t, d.Ready(1))
		require.NoError(t, d.Ready(0))
		require.Empty(t, rec.take(), "buckets 2 and 3 wait for 1")
		require.NoError(t, d.Ready(2))
		require.Equal(t, []string{"all_reduce float32[30] sum", "all_reduce float32[20] sum", "all_reduce float32[10] sum"}, rec.take())
		require.NoError(t, d.Finish(soon(t)))
	})
}

// Rank 0's order wins.
func TestRebuildFollowsRankZero(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		d := must.Get(ddp.New(soon(t), g, vectors(t, 10, 10, 10, 10), ddp.Options{FirstBucket: 40, BucketCap: 80}))
		orders := [][]int{{2, 0, 3, 1}, {0, 1, 2, 3}, {3, 2, 1, 0}}
		for range 3 {
			require.NoError(t, d.Begin(soon(t)))
			for _, i := range orders[g.Rank()] {
				require.NoError(t, d.Ready(i))
			}
			require.NoError(t, d.Finish(soon(t)))
		}
		require.Equal(t, [][]int{{2}, {0, 3}, {1}}, d.Buckets())
	})
}

func TestBroadcastInPieces(t *testing.T) {
	// 4 x 100 MiB: the third tensor fills the first piece of 250 MiB.
	if testing.Short() {
		t.Skip("-short: needs 400 MiB")
	}
	g := &recorder{Group: newInstant()}
	const n = 25 << 20
	big := zeros(t, tensor.Float32, n)
	ps := vectors(t, 1)
	for range 4 {
		v, err := big.Reshape(n) // the same memory, which nobody here changes
		require.NoError(t, err)
		ps = append(ps, ddp.Param{Value: v, NoGrad: true})
	}
	must.Get(ddp.New(soon(t), g, ps, ddp.Options{PyTorch: true}))
	require.Equal(t, []string{"broadcast float32[78643201] from 0", "broadcast float32[26214400] from 0"}, g.take()[2:])
}
