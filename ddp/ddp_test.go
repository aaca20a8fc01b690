package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// step runs an iteration in which every gradient is v.
func step(t *testing.T, d *ddp.DDP, ps []ddp.Param, v float64) {
	t.Helper()
	require.NoError(t, d.Begin(soon(t)))
	for i := len(ps) - 1; i >= 0; i-- {
		fill(t, ps[i].Grad, v)
		require.NoError(t, d.Ready(i))
	}
	require.NoError(t, d.Finish(soon(t)))
}

func TestMismatch(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(ps *[]ddp.Param, o *ddp.Options)
		want    string // on every rank
		pytorch string // on rank 2 of a group with PyTorch ranks; empty: PyTorch does not look
	}{
		"count": {
			func(ps *[]ddp.Param, _ *ddp.Options) { *ps = (*ps)[:2] },
			"ddp: ranks disagree on the model: rank 0 has 3 trained parameters, rank 2 has 2",
			"ddp: ranks disagree on the model: rank 0 has 3 trained parameters, rank 2 has 2",
		},
		"shape": {
			func(ps *[]ddp.Param, _ *ddp.Options) {
				(*ps)[1].Value, (*ps)[1].Grad = zeros(t, tensor.Float32, 6), nil
			},
			"ddp: ranks disagree on parameter 1: rank 0 has p1 float32[5], rank 2 has p1 float32[6]",
			"ddp: ranks disagree on parameter 1: rank 0 has sizes [5] and strides [1], rank 2 has p1 with sizes [6] and strides [1]",
		},
		"dtype": {
			func(ps *[]ddp.Param, _ *ddp.Options) {
				(*ps)[2].Name = "other"
				(*ps)[2].Value, (*ps)[2].Grad = zeros(t, tensor.Float64, 6), nil
			},
			"ddp: ranks disagree on parameter 2: rank 0 has p2 float32[6], rank 2 has other float64[6]", "",
		},
		"sparse": {
			func(ps *[]ddp.Param, _ *ddp.Options) {
				g := must.Get(tensor.FromDense((*ps)[0].Value, 1))
				(*ps)[0].Grad = g
			},
			"ddp: ranks disagree on parameter 0: rank 0 has p0 float32[4], rank 2 has p0 float32[4] with a sparse gradient (1 sparse dimensions)", "",
		},
		"buffer": {
			func(_ *[]ddp.Param, o *ddp.Options) {
				o.Buffers = []ddp.Buffer{{Name: "mean", Value: zeros(t, tensor.Float32, 2)}}
			},
			"ddp: ranks disagree on the model: rank 0 has 0 untrained tensors [], rank 2 has 1 untrained tensors [buffer mean float32[2]]", "",
		},
		"options": {
			func(_ *[]ddp.Param, o *ddp.Options) { o.BucketCap = 100 },
			"ddp: ranks disagree on the model: rank 0 has options BucketCap 26214400, FirstBucket 1048576, NoInitSync true, NoBroadcastBuffers false, FindUnused false, StaticGraph false, Hook false, " +
				"rank 2 has options BucketCap 100, FirstBucket 1048576, NoInitSync true, NoBroadcastBuffers false, FindUnused false, StaticGraph false, Hook false", "",
		},
	} {
		for _, pytorch := range []bool{false, true} {
			if pytorch && tc.pytorch == "" {
				continue
			}
			t.Run(fmt.Sprintf("%s/pytorch %v", name, pytorch), func(t *testing.T) {
				pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
					ps := vectors(t, 4, 5, 6)
					o := ddp.Options{NoInitSync: true, PyTorch: pytorch}
					if g.Rank() == 2 {
						tc.change(&ps, &o)
					}
					d, err := ddp.New(soon(t), g, ps, o)
					want := tc.want
					if pytorch {
						want = tc.pytorch
						if name != "count" && g.Rank() != 2 {
							if err == nil {
								err = tryIteration(t, d, len(ps))
							}
							require.ErrorIs(t, err, work.ErrAborted)
							require.ErrorContains(t, err, "rank 2 aborted the group")
							return
						}
					}
					require.ErrorIs(t, err, ddp.ErrModelMismatch)
					require.EqualError(t, err, want)
					e := must.As[*ddp.MismatchError](t, err)
					require.Equal(t, 0, e.Rank)
					require.Equal(t, 2, e.Other)
				})
			})
		}
	}
}

func TestParamsRefuses(t *testing.T) {
	_, err := ddp.Params([][]float32{{1}, {2}}, [][]float32{{1}})
	require.EqualError(t, err, "ddp: Params: 2 values and 1 gradients")
	_, err = ddp.Params([][]float32{{1}, {2}}, [][]float32{{1}, {2, 3}})
	require.EqualError(t, err, "ddp: Params: parameter 1 has 1 elements, its gradient 2")
}

func TestNewRefuses(t *testing.T) {
	ok := func() ddp.Param { return ddp.Param{Name: "w", Value: zeros(t, tensor.Float32, 2, 2)} }
	shared := ok()
	wide := must.Get(zeros(t, tensor.Float32, 2).AsStrided([]int{2, 2}, []int{0, 1}, 0))
	for name, tc := range map[string]struct {
		params []ddp.Param
		o      ddp.Options
		want   string
	}{
		"nothing":        {nil, ddp.Options{}, "no parameter requires a gradient"},
		"all frozen":     {[]ddp.Param{{Value: zeros(t, tensor.Float32, 1), NoGrad: true}}, ddp.Options{}, "no parameter requires a gradient"},
		"no value":       {[]ddp.Param{{Name: "w"}}, ddp.Options{}, "ddp: parameter 0 (w): nil tensor"},
		"integers":       {[]ddp.Param{{Value: zeros(t, tensor.Int32, 1)}}, ddp.Options{}, "ddp: parameter 0: int32 has no gradients; set NoGrad"},
		"overlap":        {[]ddp.Param{{Value: wide}}, ddp.Options{}, "elements of float32[2 2] overlap"},
		"twice":          {[]ddp.Param{shared, ok(), shared}, ddp.Options{}, "ddp: parameter 2 (w): is the same tensor as parameter 0"},
		"grad dtype":     {[]ddp.Param{{Value: ok().Value, Grad: zeros(t, tensor.Float64, 2, 2)}}, ddp.Options{}, "expected a gradient like float32[2 2], got float64[2 2]"},
		"grad shape":     {[]ddp.Param{{Value: ok().Value, Grad: zeros(t, tensor.Float32, 4)}}, ddp.Options{}, "expected a gradient like float32[2 2], got float32[4]"},
		"grad and none":  {[]ddp.Param{{Value: ok().Value, Grad: zeros(t, tensor.Float32, 2, 2), NoGrad: true}}, ddp.Options{}, "has a gradient and NoGrad"},
		"grad and views": {[]ddp.Param{{Value: ok().Value, Grad: zeros(t, tensor.Float32, 2, 2)}}, ddp.Options{GradientAsBucketView: true}, "Grad must be nil"},
		"buffer":         {[]ddp.Param{ok()}, ddp.Options{Buffers: []ddp.Buffer{{Name: "mean"}}}, "ddp: buffer 0 (mean): nil tensor"},
		"bucket":         {[]ddp.Param{ok()}, ddp.Options{BucketCap: -1}, "negative bucket size"},
	} {
		t.Run(name, func(t *testing.T) {
			rec := &recorder{Group: newInstant()}
			require.ErrorContains(t, must.Err(ddp.New(soon(t), rec, tc.params, tc.o)), tc.want)
			require.Empty(t, rec.take(), "nothing was sent")
		})
	}
}

func TestNewNeedsAMember(t *testing.T) {
	_, err := ddp.New(soon(t), nil, vectors(t, 1))
	require.EqualError(t, err, "ddp: New needs a group")
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		sub, err := g.NewGroup(soon(t), []int{0})
		require.NoError(t, err)
		_, err = ddp.New(soon(t), sub, vectors(t, 1))
		if sub.IsMember() {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, "ddp: this rank is not a member of the group")
		}
	})
}

func TestMisuseChangesNothing(t *testing.T) {
	ps := vectors(t, 2, 3)
	ps = append(ps, ddp.Param{Name: "frozen", Value: zeros(t, tensor.Float32, 1), NoGrad: true},
		ddp.Param{Name: "loose", Value: zeros(t, tensor.Float32, 1)})
	d := must.Get(ddp.New(soon(t), newInstant(), ps))
	require.ErrorIs(t, d.Ready(0), ddp.ErrNotBegun)
	require.ErrorIs(t, d.Finish(soon(t)), ddp.ErrNotBegun)
	require.NoError(t, d.Begin(soon(t)))
	require.EqualError(t, d.Ready(4), "ddp: out of range parameter index 4 of 4")
	require.EqualError(t, d.Ready(-1), "ddp: out of range parameter index -1 of 4")
	require.EqualError(t, d.Ready(2), "ddp: parameter 2 (frozen): has NoGrad")
	require.EqualError(t, d.Ready(3), "ddp: parameter 3 (loose): has no Grad; use ReadyGrad")
	require.EqualError(t, d.ReadyGrad(3, nil), "ddp: parameter 3: nil gradient; see Unused")
	require.EqualError(t, d.ReadyGrad(3, zeros(t, tensor.Float16, 1)), "ddp: parameter 3 (loose): expected a gradient like float32[1], got float16[1]")
	require.ErrorContains(t, d.Unused(3), "FindUnused is not set")
	require.Nil(t, d.GradView(0))
	fill(t, ps[0].Grad, 3)
	require.NoError(t, d.Ready(0))
	err := d.Ready(0)
	require.ErrorIs(t, err, ddp.ErrMarkedTwice)
	require.ErrorContains(t, err, "ddp: parameter 0 (p0): expected to mark a variable ready only once")
	pe := must.As[*ddp.ParamError](t, err)
	require.Equal(t, 0, pe.Index)
	require.NoError(t, d.Ready(1))
	loose := zeros(t, tensor.Float32, 1)
	fill(t, loose, 5)
	require.NoError(t, d.ReadyGrad(3, loose))
	require.NoError(t, d.Finish(soon(t)))
	require.Equal(t, 3.0, first(t, ps[0].Grad))
	require.Equal(t, 5.0, first(t, loose))
}

func TestUnfinished(t *testing.T) {
	for name, end := range map[string]func(d *ddp.DDP) error{
		"Finish": func(d *ddp.DDP) error { return d.Finish(soon(t)) },
		"Begin":  func(d *ddp.DDP) error { return d.Begin(soon(t)) },
		"Join":   func(d *ddp.DDP) error { return d.Join(soon(t), func() error { return nil }) },
	} {
		t.Run(name, func(t *testing.T) {
			d := must.Get(ddp.New(soon(t), newInstant(), vectors(t, 2, 3, 4)))
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Begin(soon(t)), "a forward pass alone needs no Finish")
			require.NoError(t, d.Ready(1))
			err := end(d)
			require.ErrorIs(t, err, ddp.ErrUnfinished)
			require.EqualError(t, err, "ddp: expected to have finished reduction in the prior iteration before starting a new one; "+
				"parameters which did not receive grad for rank 0: 0 (p0), 2 (p2); if they took no part in the loss, set FindUnused")
			for _, after := range []error{d.Begin(soon(t)), d.Ready(0), d.Finish(soon(t)), d.Join(soon(t), nil)} {
				require.ErrorIs(t, after, ddp.ErrFailed)
				require.ErrorIs(t, after, ddp.ErrUnfinished)
			}
		})
	}
	t.Run("no Finish", func(t *testing.T) {
		d := must.Get(ddp.New(soon(t), newInstant(), vectors(t, 2)))
		require.NoError(t, d.Begin(soon(t)))
		require.NoError(t, d.Ready(0))
		require.EqualError(t, d.Begin(soon(t)), "ddp: expected to have finished reduction in the prior iteration before starting a new one; call Finish after the backward pass")
	})
}

func TestNoSyncAccumulates(t *testing.T) {
	for _, views := range []bool{false, true} {
		t.Run(fmt.Sprintf("views %v", views), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				ps := vectors(t, 2, 3)
				if views {
					ps[0].Grad, ps[1].Grad = nil, nil
				}
				d, err := ddp.New(soon(t), g, ps, ddp.Options{GradientAsBucketView: views, FirstBucket: 4, BucketCap: 4})
				require.NoError(t, err)
				grad := func(i int) *tensor.Tensor {
					if views {
						return d.GradView(i)
					}
					return ps[i].Grad
				}
				add := func(v float64) {
					require.NoError(t, d.Begin(soon(t)))
					for i := 1; i >= 0; i-- {
						fill(t, grad(i), first(t, grad(i))+v)
						require.NoError(t, d.Ready(i))
					}
					require.NoError(t, d.Finish(soon(t)))
				}
				for range 3 { // over the rebuilding of buckets too
					fill(t, grad(0), 0)
					fill(t, grad(1), 0)
					require.NoError(t, d.NoSync(func() error {
						add(float64(1 + g.Rank()))
						require.Equal(t, float64(1+g.Rank()), first(t, grad(0)), "nothing was reduced")
						add(10)
						return nil
					}))
					add(100)
					// The mean of 1+10+100, 2+10+100, 3+10+100.
					require.InDelta(t, 112, first(t, grad(0)), 1e-4)
					require.InDelta(t, 112, first(t, grad(1)), 1e-4)
				}
			})
		})
	}
	sentinel := errors.New("stop")
	d := must.Get(ddp.New(soon(t), newInstant(), vectors(t, 1)))
	require.ErrorIs(t, d.NoSync(func() error { return sentinel }), sentinel)
}

func TestUnusedParameters(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2, 3, 4, 5, 6)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{FindUnused: true, FirstBucket: 1, BucketCap: 1}))
		for i := range ps {
			fill(t, ps[i].Grad, 50)
		}
		// Parameters 3 and 4 are accumulated on rank 1 first, then unused: their gradients count.
		require.NoError(t, d.NoSync(func() error {
			require.NoError(t, d.Begin(soon(t)))
			if g.Rank() == 1 {
				require.NoError(t, d.Ready(3))
				require.NoError(t, d.Ready(4))
			}
			return d.Finish(soon(t))
		}))
		require.NoError(t, d.Begin(soon(t)))
		require.NoError(t, d.Ready(0)) // on both
		require.NoError(t, d.Unused(4))
		if g.Rank() == 1 {
			require.NoError(t, d.Ready(1)) // on one
		} else {
			require.NoError(t, d.Unused(1))
			require.ErrorIs(t, d.Ready(1), ddp.ErrMarkedTwice)
		}
		require.NoError(t, d.Finish(soon(t)))
		for i, want := range []float64{50, 25, 50, 25, 25} { // 2: on none
			require.Equal(t, want, first(t, ps[i].Grad), "parameter %d", i)
		}
	})
	t.Run("nowhere to put it", func(t *testing.T) {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			d, err := ddp.New(soon(t), g, []ddp.Param{{Name: "w", Value: zeros(t, tensor.Float32, 2)}}, ddp.Options{FindUnused: true})
			require.NoError(t, err)
			require.NoError(t, d.Begin(soon(t)))
			if g.Rank() == 1 {
				require.NoError(t, d.ReadyGrad(0, zeros(t, tensor.Float32, 2)))
				require.NoError(t, d.Finish(soon(t)))
				return
			}
			require.EqualError(t, d.Finish(soon(t)), "ddp: parameter 0 (w): was used on another rank only, and there is no Grad for the result")
		})
	})
}

func TestStaticGraph(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2, 3, 4)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{StaticGraph: true, FirstBucket: 1, BucketCap: 1}))
		for it := range 4 {
			fill(t, ps[1].Grad, -1)
			require.NoError(t, d.Begin(soon(t)))
			fill(t, ps[2].Grad, float64(it+g.Rank()))
			require.NoError(t, d.Ready(2))
			fill(t, ps[2].Grad, float64(it+2*g.Rank())) // a parameter used twice is final at the second
			require.NoError(t, d.Ready(2))
			fill(t, ps[0].Grad, 8)
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			require.Equal(t, float64(it)+1, first(t, ps[2].Grad))
			require.Equal(t, 8.0, first(t, ps[0].Grad))
			require.Equal(t, -1.0, first(t, ps[1].Grad), "unused on every rank")
		}
		require.Equal(t, [][]int{{2}, {0}, {1}}, d.Buckets())
		require.NoError(t, d.Begin(soon(t)))
		require.ErrorIs(t, d.Ready(1), ddp.ErrGraphChanged, "unused in the first iteration")
		require.NoError(t, d.Ready(2))
		require.NoError(t, d.Ready(2))
		require.ErrorIs(t, d.Ready(2), ddp.ErrGraphChanged, "a third time")
		err := d.Finish(soon(t))
		require.ErrorIs(t, err, ddp.ErrUnfinished)
		require.ErrorIs(t, err, ddp.ErrGraphChanged)
		require.ErrorContains(t, err, "0 (p0)")
	})
}

func TestSparseGradients(t *testing.T) {
	for _, unused := range []bool{false, true} {
		t.Run(fmt.Sprintf("find unused %v", unused), func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				ps := vectors(t, 2, 12, 2)
				ps[1].Value = zeros(t, tensor.Float32, 6, 2)
				grad := must.Get(tensor.FromDense(ps[1].Value, 1))
				ps[1].Grad = grad
				d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{FindUnused: unused}))
				require.Contains(t, d.Buckets(), []int{1})
				for range 3 {
					// Each rank has row rank twice and row 5; rank 2 has none if it may.
					rows := must.Get(tensor.Of([]int64{int64(g.Rank()), 5, int64(g.Rank())}, 1, 3))
					mine := []float32{1, 2, 3, 4, 5, 6}
					values := must.Get(tensor.Of(mine, 3, 2))
					require.NoError(t, grad.SetSparse(rows, values, false))
					require.NoError(t, d.Begin(soon(t)))
					require.NoError(t, d.Ready(0))
					absent := unused && g.Rank() == 2
					if !absent {
						require.NoError(t, d.Ready(1))
					}
					require.NoError(t, d.Ready(2))
					require.NoError(t, d.Finish(soon(t)))
					require.Equal(t, []float32{1, 2, 3, 4, 5, 6}, mine, "the trainer's values stay")
					dense := must.Get(grad.Dense())
					got := must.Get(tensor.Data[float32](dense))
					ranks := float32(3)
					if unused {
						ranks = 2
					}
					want := []float32{2, 8. / 3, 2, 8. / 3, 2, 8. / 3, 0, 0, 0, 0, ranks, ranks * 4 / 3}
					if unused {
						want[4], want[5] = 0, 0
					}
					require.InDeltaSlice(t, want, got, 1e-5)
				}
			})
		})
	}
}

func TestBuffersComeFromRankZero(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		mean, steps := zeros(t, tensor.Float32, 4), zeros(t, tensor.Int64)
		strided := must.Get(zeros(t, tensor.Float32, 3, 2).Transpose(0, 1))
		o := ddp.Options{Buffers: []ddp.Buffer{{Name: "mean", Value: mean}, {Name: "steps", Value: steps}, {Name: "strided", Value: strided}}}
		for _, b := range o.Buffers {
			fill(t, b.Value, float64(10+g.Rank()))
		}
		ps := vectors(t, 2)
		d := must.Get(ddp.New(soon(t), g, ps, o))
		for i := range 3 {
			if i > 0 {
				require.NoError(t, d.Begin(soon(t)))
				backward(t, d, 1)
				require.NoError(t, d.Finish(soon(t)))
			}
			for _, b := range o.Buffers {
				require.Equal(t, float64(10+i), first(t, b.Value))
				fill(t, b.Value, float64(11+i+g.Rank()))
			}
		}
		o.NoBroadcastBuffers = true
		d = must.Get(ddp.New(soon(t), g, ps, o))
		fill(t, mean, float64(g.Rank()))
		step(t, d, ps, 1)
		require.Equal(t, float64(g.Rank()), first(t, mean))
	})
}

// A rank that dies while others reduce: they are told which bucket it was.
func TestFailureNamesBucketAndParameters(t *testing.T) {
	job := pgtest.NewJob(3)
	defer job.Close()
	groups := make([]*pg.ProcessGroup, job.Size)
	for r := range groups {
		groups[r] = must.Get(job.Join(soon(t), r))
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			ps := vectors(t, 2, 3)
			d, err := ddp.New(soon(t), g, ps, ddp.Options{FirstBucket: 1, BucketCap: 1})
			if err != nil {
				t.Error(err)
				return
			}
			step(t, d, ps, 1)
			step(t, d, ps, 1)
			if g.Rank() == 2 {
				job.Kill(2)
				return
			}
			err = d.Begin(soon(t))
			for i := 1; i >= 0 && err == nil; i-- {
				err = d.Ready(i)
			}
			if err == nil {
				err = d.Finish(soon(t))
			}
			var be *ddp.BucketError
			if !errors.As(err, &be) {
				t.Errorf("rank %d: %v", g.Rank(), err)
				return
			}
			// The death may be known when bucket 0 is waited for, or before bucket 1 is launched.
			i := 1 - be.Bucket
			if be.Indices[0] != i || be.Names[0] != ps[i].Name || !errors.Is(err, work.ErrPeerDied) {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
			if err := d.Begin(soon(t)); !errors.Is(err, ddp.ErrFailed) || !errors.Is(err, be) {
				t.Errorf("rank %d goes on: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
}

// held is a group whose collectives of float32 never end by themselves.
type held struct{ instant }

func (g held) AllReduce(context.Context, *tensor.Tensor, pg.ReduceOp, ...pg.CallOptions) (*work.Work, error) {
	return work.NewPromise(work.Info{Op: work.AllReduce, Seq: 4}).Work(), nil
}

func TestFinishObeysItsContext(t *testing.T) {
	d := must.Get(ddp.New(soon(t), held{newInstant()}, vectors(t, 2)))
	require.NoError(t, d.Begin(soon(t)))
	require.NoError(t, d.Ready(0))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := d.Finish(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "ddp: bucket 0 with parameters 0 (p0): work: all_reduce seq 4")
}

// The buckets are rebuilt in the second Begin; what was accumulated stays.
func TestViewsKeepTheirElementsOverARebuild(t *testing.T) {
	ps := vectors(t, 4, 5)
	ps[0].Grad, ps[1].Grad = nil, nil
	d, err := ddp.New(soon(t), newInstant(), ps, ddp.Options{GradientAsBucketView: true, FirstBucket: 1, BucketCap: 1})
	require.NoError(t, err)
	require.NoError(t, d.Begin(soon(t)))
	before := d.GradView(0)
	fill(t, before, 7)
	fill(t, d.GradView(1), 8)
	backward(t, d, 2)
	require.NoError(t, d.Finish(soon(t)))
	require.NoError(t, d.Begin(soon(t)))
	require.NotSame(t, before, d.GradView(0))
	require.Equal(t, 7.0, first(t, d.GradView(0)))
	require.Equal(t, 8.0, first(t, d.GradView(1)))
}

func TestReadyFromManyGoroutines(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 1, 2, 3, 4, 5, 6, 7, 8)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{FirstBucket: 1, BucketCap: 1}))
		for range 5 {
			require.NoError(t, d.Begin(soon(t)))
			var wg sync.WaitGroup
			errs := make([]error, len(ps))
			for i := range ps {
				wg.Go(func() {
					errs[i] = errors.Join(ps[i].Grad.Fill(float64(i+2*g.Rank())), d.Ready(i))
				})
			}
			wg.Wait()
			require.NoError(t, errors.Join(errs...))
			require.NoError(t, d.Finish(soon(t)))
			for i := range ps {
				require.Equal(t, float64(i)+1, first(t, ps[i].Grad))
			}
		}
	})
}

// A steady iteration allocates nothing; the group here makes no Works.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	buffers := []ddp.Buffer{{Value: zeros(t, tensor.Float32, 3)}, {Value: zeros(t, tensor.Float32, 2)}}
	for name, o := range map[string]ddp.Options{
		"default":       {Buffers: buffers},
		"small buckets": {FirstBucket: 1, BucketCap: 1},
		"find unused":   {FindUnused: true},
		"static":        {StaticGraph: true},
		"views":         {GradientAsBucketView: true},
		"all-reduce":    {Hook: ddp.AllReduceHook},
		"float16":       {Hook: ddp.FP16CompressHook},
		"bfloat16":      {Hook: ddp.BF16CompressHook},
		"wrapped twice": {Hook: ddp.CompressWrapper(tensor.BFloat16, ddp.CompressWrapper(tensor.Float8E5M2, ddp.AllReduceHook))},
	} {
		t.Run(name, func(t *testing.T) {
			ps := vectors(t, 1000, 20, 3000)
			if o.GradientAsBucketView {
				for i := range ps {
					ps[i].Grad = nil
				}
			}
			d, err := ddp.New(soon(t), newInstant(), ps, o)
			require.NoError(t, err)
			ctx := soon(t)
			iteration := func() {
				err := d.Begin(ctx)
				for i := len(ps) - 1; i >= 0 && err == nil; i-- {
					err = d.Ready(i)
				}
				if err == nil {
					err = d.Finish(ctx)
				}
				if err != nil {
					panic(err)
				}
			}
			for range 3 {
				iteration()
			}
			require.Zero(t, testing.AllocsPerRun(100, iteration))
		})
	}
}

// A sparse gradient that no rank has stays as it is, beside bucket views too.
func TestUnusedSparseGradient(t *testing.T) {
	for _, views := range []bool{false, true} {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			indices := must.Get(tensor.Of([]int64{1}, 1, 1))
			values := must.Get(tensor.Of([]float32{5}, 1))
			sparse := must.Get(tensor.Sparse(indices, values, 4))
			ps := append(vectors(t, 2), ddp.Param{Value: zeros(t, tensor.Float32, 4), Grad: sparse})
			if views {
				ps[0].Grad = nil
			}
			d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{FindUnused: true, GradientAsBucketView: views}))
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			require.Equal(t, 1, sparse.NNZ())
			require.Equal(t, 5.0, first(t, sparse.Values()))
		})
	}
}
