package ddp_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// Rank r has inputs[r] inputs; its gradient is 10^r. The model sums averages,
// so that every rank's value tells which gradients it has seen.
func TestJoinWithUnevenInputs(t *testing.T) {
	for name, inputs := range map[string][]int{
		"one more":   {2, 3},
		"rank 0 out": {0, 3},
		"rank 1 out": {4, 0},
		"stairs":     {1, 2, 3},
		"even":       {2, 2, 2},
		"nobody":     {0, 0},
		"alone":      {3},
		"far":        {1, 7, 4, 0},
	} {
		for mode, o := range map[string]ddp.Options{
			"default": {FirstBucket: 4, BucketCap: 4},
			"unused":  {FindUnused: true, FirstBucket: 4, BucketCap: 4},
			"static":  {StaticGraph: true, FirstBucket: 4, BucketCap: 4},
			"hook":    {Hook: ddp.AllReduceHook},
		} {
			for _, byActive := range []bool{false, true} {
				if byActive && o.Hook != nil {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/by active %v", name, mode, byActive), func(t *testing.T) {
					size := len(inputs)
					most, want, last := 0, 0.0, 0
					for _, n := range inputs {
						most = max(most, n)
					}
					for it := range most {
						sum, active, power := 0.0, 0, 1.0
						for _, n := range inputs {
							if n > it {
								sum += power
								active++
							}
							power *= 10
						}
						if byActive {
							want += sum / float64(active)
						} else {
							want += sum / float64(size)
						}
					}
					for r, n := range inputs {
						if n == most {
							last = r
						}
					}
					pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
						o := o
						mean := zeros(t, tensor.Float32, 3)
						o.Buffers = []ddp.Buffer{{Name: "mean", Value: mean}}
						ps := vectors(t, 2, 3)
						d := must.Get(ddp.New(soon(t), g, ps, o))
						power := 1.0
						for range g.Rank() {
							power *= 10
						}
						for epoch := range 2 { // the second begins where the first ended
							require.NoError(t, d.Join(soon(t), func() error {
								for it := range inputs[g.Rank()] {
									require.NoError(t, d.Begin(soon(t)))
									source := 0
									for r, n := range inputs {
										if n > it {
											source = r
										}
									}
									if it > 0 {
										require.Equal(t, float64(100*source+it-1), first(t, mean), "buffers of the highest active rank")
									}
									fill(t, mean, float64(100*g.Rank()+it))
									for i := range ps {
										fill(t, ps[i].Grad, power)
										require.NoError(t, d.Ready(i))
									}
									require.NoError(t, d.Finish(soon(t)))
									for i := range ps {
										fill(t, ps[i].Value, first(t, ps[i].Value)+first(t, ps[i].Grad))
									}
								}
								return nil
							}, ddp.JoinOptions{DivideByActive: byActive}))
							for i := range ps {
								require.InEpsilon(t, float64(epoch+1)*want+1, first(t, ps[i].Value)+1, 1e-5, "parameter %d", i)
							}
							if most > 0 {
								require.Equal(t, float64(100*last+most-1), first(t, mean), "the last joiner's buffers")
							}
						}
					})
				})
			}
		}
	}
}

// The first call after the buckets' order is known is one of Evaluate.
func TestEvaluateInJoin(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2, 3)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{FirstBucket: 4, BucketCap: 4}))
		require.NoError(t, d.Join(soon(t), func() error {
			for it := range 1 + g.Rank() {
				if it == 1 {
					require.NoError(t, d.Evaluate(soon(t)))
				}
				for i := range ps {
					fill(t, ps[i].Grad, 2)
				}
				require.NoError(t, tryIteration(t, d, 2))
				require.Equal(t, float64(2-it), first(t, ps[1].Grad))
			}
			return nil
		}))
	})
}

// A rank that had joined before the first iteration of a static graph learns
// its graph later, in step with the others.
func TestStaticGraphLearntLate(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2, 3, 4)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{StaticGraph: true, FirstBucket: 4, BucketCap: 4}))
		for _, inputs := range [][]int{{0, 1}, {3, 3}} {
			require.NoError(t, d.Join(soon(t), func() error {
				for range inputs[g.Rank()] {
					require.NoError(t, d.Begin(soon(t)))
					for _, i := range []int{2, 0, 0} {
						fill(t, ps[i].Grad, float64(1+g.Rank()))
						require.NoError(t, d.Ready(i))
					}
					require.NoError(t, d.Finish(soon(t)))
					want := 1.5
					if inputs[0] == 0 {
						want = 1
					}
					require.Equal(t, want, first(t, ps[0].Grad))
					require.Equal(t, want, first(t, ps[2].Grad))
					require.Zero(t, first(t, ps[1].Grad))
				}
				return nil
			}))
		}
		require.Equal(t, [][]int{{0}, {1}, {2}}, d.Buckets(), "rank 0 had no order of readiness to tell")
	})
}

func TestJoinWithAccumulation(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{Buffers: []ddp.Buffer{{Value: zeros(t, tensor.Float32, 1)}}}))
		require.NoError(t, d.Join(soon(t), func() error {
			if g.Rank() == 0 {
				return nil
			}
			for range 3 {
				fill(t, ps[0].Grad, 1)
				require.NoError(t, d.NoSync(func() error {
					require.NoError(t, d.Begin(soon(t)))
					require.NoError(t, d.Ready(0))
					return d.Finish(soon(t))
				}))
				fill(t, ps[0].Grad, 2)
				require.NoError(t, d.Begin(soon(t)))
				require.NoError(t, d.Ready(0))
				require.NoError(t, d.Finish(soon(t)))
				require.Equal(t, 1.0, first(t, ps[0].Grad), "divided by the size of the group")
			}
			return nil
		}))
	})
}

func TestJoinEndsEarly(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		ps := vectors(t, 2, 3)
		d := must.Get(ddp.New(soon(t), g, ps))
		done := 0
		err := d.Join(soon(t), func() error {
			for range 2 + g.Rank() {
				if err := d.Begin(soon(t)); err != nil {
					return err
				}
				backward(t, d, 2)
				require.NoError(t, d.Finish(soon(t)))
				done++
			}
			return nil
		}, ddp.JoinOptions{ErrorOnEarlyEnd: true})
		require.ErrorIs(t, err, ddp.ErrEarlyEnd)
		require.Equal(t, 2, done)
		if g.Rank() == 0 {
			require.EqualError(t, err, "ddp: a rank exhausted its inputs: rank 0")
		}
		step(t, d, ps, 1) // all ranks are in step: training can go on
	})
}

func TestJoinPassesTheTrainersError(t *testing.T) {
	sentinel := errors.New("bad batch")
	rec := &recorder{Group: newInstant()}
	d := must.Get(ddp.New(soon(t), rec, vectors(t, 2)))
	rec.take()
	require.ErrorIs(t, d.Join(soon(t), func() error { return sentinel }), sentinel)
	require.Empty(t, rec.take())
	require.EqualError(t, d.Join(soon(t), func() error {
		return d.Join(soon(t), nil)
	}), "ddp: Join inside Join")
}
