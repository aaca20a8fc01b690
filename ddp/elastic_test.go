package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// errKilled ends a rank that the test has killed.
var errKilled = errors.New("killed")

// elasticRank is a rank of a training whose result is known. In step s the ranks share the numbers
// 12*s to 12*s+11, and parameter i decreases by i+1 times their sum.
type elasticRank struct {
	*ddp.Elastic
	t      *testing.T
	job    *pgtest.Job
	g      *pg.ProcessGroup
	params []ddp.Param
	mean   *tensor.Tensor // a buffer: how many forward passes there were
	sum    *tensor.Tensor // the optimizer's state: the sum of the first parameter's gradients
	calls  []int          // the steps that were tried
	views  []pg.View
	inStep func(r *elasticRank, step int) error // between the backward pass and Finish
}

// sumOf is the sum of the numbers of the steps before a step.
func sumOf(steps int) float64 { n := float64(12 * steps); return n * (n - 1) / 2 }

func newElasticRank(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, o ddp.ElasticOptions, wrap func(ddp.ElasticGroup) ddp.ElasticGroup) (*elasticRank, error) {
	r := &elasticRank{t: t, job: j, g: g, params: vectors(t, 2, 3, 1), mean: zeros(t, tensor.Float32, 2), sum: zeros(t, tensor.Float64, 1)}
	if o.GradientAsBucketView {
		for i := range r.params {
			r.params[i].Grad = nil
		}
	}
	o.BucketCap, o.FirstBucket = 8, 8
	o.Buffers = []ddp.Buffer{{Name: "mean", Value: r.mean}}
	o.State = []*tensor.Tensor{r.sum}
	o.Changed = func(v pg.View) { r.views = append(r.views, v) }
	var group ddp.ElasticGroup = g
	if wrap != nil {
		group = wrap(g)
	}
	var err error
	r.Elastic, err = ddp.NewElastic(soon(t), group, r.params, o)
	return r, err
}

// grad sets the gradient of a parameter.
func (r *elasticRank) grad(i int, v float64) {
	grad := r.params[i].Grad
	if grad == nil {
		grad = r.GradView(i)
	}
	fill(r.t, grad, v)
}

// step is a step of the training.
func (r *elasticRank) step(step int) (err error) {
	defer must.Catch(&err)
	r.calls = append(r.calls, step)
	must.Do(r.Begin(soon(r.t)))
	fill(r.t, r.mean, first(r.t, r.mean)+1)
	mine := 0.
	for n := 12*step + r.g.Rank(); n < 12*step+12; n += r.g.Size() {
		mine += float64(n * r.g.Size())
	}
	for i := len(r.params) - 1; i >= 0; i-- {
		r.grad(i, mine*float64(i+1))
		must.Do(r.Ready(i))
	}
	if r.inStep != nil {
		must.Do(r.inStep(r, step))
	}
	must.Do(r.Finish(soon(r.t)))
	for i, p := range r.params {
		grad := p.Grad
		if grad == nil {
			grad = r.GradView(i)
		}
		fill(r.t, p.Value, first(r.t, p.Value)-first(r.t, grad))
		if i == 0 {
			fill(r.t, r.sum, first(r.t, r.sum)+first(r.t, grad))
		}
	}
	return nil
}

// train does steps until there are so many.
func (r *elasticRank) train(steps int) error {
	for r.Steps() < steps {
		if err := r.Step(soon(r.t), r.step); err != nil {
			return err
		}
	}
	return nil
}

// check checks the result of so many steps.
func (r *elasticRank) check(steps int) error {
	for i, p := range r.params {
		if got, want := first(r.t, p.Value), -sumOf(steps)*float64(i+1); got != want {
			return fmt.Errorf("parameter %d is %v after %d steps, want %v", i, got, steps, want)
		}
	}
	if got := first(r.t, r.sum); got != sumOf(steps) {
		return fmt.Errorf("the optimizer's state is %v after %d steps, want %v", got, steps, sumOf(steps))
	}
	if got := first(r.t, r.mean); got != float64(steps) {
		return fmt.Errorf("the buffer is %v after %d steps", got, steps)
	}
	return nil
}

// die kills this rank.
func (r *elasticRank) die() error {
	name := "0"
	if n := len(r.views); n > 0 {
		name = fmt.Sprintf("0@%d", r.views[n-1].Epoch)
	}
	r.job.Fabric().Kill(name, r.g.Rank())
	return errKilled
}

// elastic runs f on size ranks, and on newcomers that wait from the beginning, with virtual time.
// Newcomers have the numbers from size on.
func elastic(t *testing.T, size, newcomers int, f func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(size)
		defer j.Close()
		o := j.Options()
		o.Elastic = true
		errs := make([]error, size+newcomers)
		var wg, trained sync.WaitGroup // ranks leave when all have what they need
		trained.Add(len(errs))
		for id := range errs {
			wg.Go(func() {
				var once sync.Once
				defer once.Do(trained.Done)
				var g *pg.ProcessGroup
				var err error
				if id < size {
					g, err = pg.New(t.Context(), j.Store, id, size, o)
				} else {
					time.Sleep(time.Duration(id) * time.Millisecond) // one after the other
					g, err = pg.Join(t.Context(), j.Store, o)
				}
				if errs[id] = err; err != nil {
					return
				}
				defer g.Close()
				errs[id] = errors.New("the rank's test has failed")
				defer must.Catch(&errs[id])
				if errs[id] = f(t, j, g, id); errs[id] == nil {
					once.Do(trained.Done)
					trained.Wait()
				}
			})
		}
		wg.Wait()
		for id, err := range errs {
			if !errors.Is(err, errKilled) {
				require.NoError(t, err, "member %d", id)
			}
		}
	})
}

// modes are options that change buckets and collectives.
var modes = map[string]ddp.Options{
	"default": {},
	"unused":  {FindUnused: true},
	"static":  {StaticGraph: true},
	"views":   {GradientAsBucketView: true},
	"hook":    {Hook: ddp.AllReduceHook},
}

// TestElasticRanksDie: in two steps a rank dies. The steps are done again, and count once.
func TestElasticRanksDie(t *testing.T) {
	for mode, o := range modes {
		t.Run(mode, func(t *testing.T) {
			elastic(t, 4, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
				r := must.Get(newElasticRank(t, j, g, ddp.ElasticOptions{Options: o}, nil))
				r.inStep = func(r *elasticRank, step int) error {
					if id == 0 && step == 3 || id == 2 && step == 5 {
						return r.die()
					}
					return nil
				}
				must.Do(r.train(8))
				require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7}, slices.Compact(r.calls))
				require.Len(t, r.views, 2)
				require.Equal(t, []int{1, 3}, r.views[1].IDs)
				return r.check(8)
			})
		})
	}
}

// TestElasticNewcomers: they get the state, and do the other steps with the rest.
func TestElasticNewcomers(t *testing.T) {
	for mode, o := range modes {
		t.Run(mode, func(t *testing.T) {
			elastic(t, 2, 2, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
				r := must.Get(newElasticRank(t, j, g, ddp.ElasticOptions{Options: o, Every: 2}, nil))
				r.inStep = func(r *elasticRank, step int) error {
					if step == 2 {
						time.Sleep(5 * time.Millisecond) // of virtual time: both newcomers wait
					}
					if id == 1 && step == 6 {
						return r.die()
					}
					return nil
				}
				must.Do(r.train(9))
				if id >= 2 {
					require.Less(t, r.calls[0], 5, "it came early")
				}
				require.Equal(t, 3, g.Size())
				return r.check(9)
			})
		})
	}
}

// TestElasticBehind: a rank has not completed a step that the others have completed. It takes over
// their state, and does not repeat the step.
func TestElasticBehind(t *testing.T) {
	elastic(t, 3, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		r, err := newElasticRank(t, j, g, ddp.ElasticOptions{}, nil)
		if err != nil {
			return err
		}
		for r.Steps() < 6 {
			err := r.Step(soon(t), func(step int) error {
				if id == 0 && step == 3 && len(r.views) == 0 {
					params := make([]float64, len(r.params))
					for i, p := range r.params {
						params[i] = first(t, p.Value)
					}
					sum := first(t, r.sum)
					if err := r.step(step); err != nil {
						return err
					}
					synctest.Wait() // the others are in the next step
					for i, p := range r.params {
						fill(t, p.Value, params[i])
					}
					fill(t, r.sum, sum)
					lost := &pg.EpochError{Err: errors.New("lost")}
					g.Abort(lost)
					return lost
				}
				return r.step(step)
			})
			if err != nil {
				return err
			}
		}
		require.Len(t, r.views, 1)
		require.Equal(t, []int{0, 1, 2, 3, 4, 5}, r.calls, "the others have done step 3, and step 4 had not begun")
		return r.check(6)
	})
}

// meddler changes what a rank does with the state that is sent.
type meddler struct {
	ddp.ElasticGroup
	broadcast func(g ddp.ElasticGroup, t *tensor.Tensor) error // before a large broadcast
}

func (m *meddler) Broadcast(ctx context.Context, t *tensor.Tensor, root int, o ...pg.CallOptions) (*work.Work, error) {
	w, err := m.ElasticGroup.Broadcast(ctx, t, root, o...)
	if err == nil && t.DType() == tensor.Float32 && t.Len() > 4 {
		if w.Wait(ctx) == nil {
			err = m.broadcast(m.ElasticGroup, t)
		}
	}
	return w, err
}

// TestElasticChecksum: state that arrives with other bits is not used, and every rank says so.
func TestElasticChecksum(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		params := vectors(t, 2, 3, 1)
		for _, p := range params {
			fill(t, p.Value, float64(g.Rank()))
		}
		_, err := ddp.NewElastic(soon(t), &meddler{g, func(g ddp.ElasticGroup, t *tensor.Tensor) error {
			if g.Rank() == 2 {
				t.Bytes()[5] ^= 4
			}
			return nil
		}}, params)
		require.ErrorIs(t, err, work.ErrCorrupted)
		require.ErrorContains(t, err, "on rank 2: ")
		require.ErrorContains(t, err, "ddp: state from rank 0 has checksum")
		for _, p := range params {
			require.EqualValues(t, g.Rank(), first(t, p.Value), "no rank has changed")
		}
	})
}

// TestElasticSourceDies while it sends its state to a newcomer. Another one sends it then.
func TestElasticSourceDies(t *testing.T) {
	elastic(t, 3, 1, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		var r *elasticRank
		r, err := newElasticRank(t, j, g, ddp.ElasticOptions{}, func(g ddp.ElasticGroup) ddp.ElasticGroup {
			return &meddler{g, func(g ddp.ElasticGroup, t *tensor.Tensor) error {
				if id == 0 && r != nil {
					j.Fabric().Kill("0@1", 0)
					return errKilled
				}
				return nil
			}}
		})
		if err != nil {
			return err
		}
		r.inStep = func(*elasticRank, int) error { time.Sleep(time.Millisecond); return nil }
		must.Do(r.train(20))
		require.Equal(t, 3, g.Size())
		return r.check(20)
	})
}

// TestElasticOtherModel: a newcomer with another model is refused, and the others go on.
func TestElasticOtherModel(t *testing.T) {
	elastic(t, 2, 1, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		if id == 2 {
			_, err := ddp.NewElastic(soon(t), g, vectors(t, 2, 4, 1))
			m := must.As[*ddp.MismatchError](t, err)
			require.Equal(t, 2, m.Other)
			return g.Close()
		}
		r := must.Get(newElasticRank(t, j, g, ddp.ElasticOptions{}, nil))
		r.inStep = func(*elasticRank, int) error { time.Sleep(time.Millisecond); return nil }
		must.Do(r.train(20))
		require.Len(t, r.views, 1)
		require.Equal(t, 2, r.views[0].Epoch)
		require.Equal(t, []int{0, 1}, r.views[0].IDs)
		return r.check(20)
	})
}

// TestElasticNoSync: a rank dies after iterations that reduce nothing. The step accumulates anew.
func TestElasticNoSync(t *testing.T) {
	elastic(t, 3, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		r, err := newElasticRank(t, j, g, ddp.ElasticOptions{}, nil)
		if err != nil {
			return err
		}
		for r.Steps() < 4 {
			err := r.Step(soon(t), func(step int) error {
				sum := 0.
				pass := func() (err error) {
					defer must.Catch(&err)
					must.Do(r.Begin(soon(t)))
					sum += float64(step + 1)
					for i := range r.params {
						fill(t, r.params[i].Grad, sum)
						must.Do(r.Ready(i))
					}
					if id == 1 && step == 2 {
						return r.die()
					}
					return r.Finish(soon(t))
				}
				err := r.NoSync(func() error { return errors.Join(pass(), pass()) })
				if err == nil {
					err = pass()
				}
				if err == nil {
					p := r.params[0]
					fill(t, p.Value, first(t, p.Value)+first(t, p.Grad))
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		require.Equal(t, 2, g.Size())
		require.InDelta(t, 3.*(1+2+3+4), first(t, r.params[0].Value), 1e-4, "the average of equal sums of three passes")
		return nil
	})
}

// TestElasticJoin: ranks have unequal numbers of steps. One dies while another one has none left.
func TestElasticJoin(t *testing.T) {
	for mode, o := range modes {
		t.Run(mode, func(t *testing.T) {
			inputs := []int{7, 2, 7, 5}
			elastic(t, 4, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
				r, err := newElasticRank(t, j, g, ddp.ElasticOptions{Options: o}, nil)
				if err != nil {
					return err
				}
				for round := range 2 {
					from := r.Steps()
					done := 0
					err = r.Join(soon(t), func() error {
						for r.Steps() < from+inputs[id] {
							err := r.Step(soon(t), func(step int) (err error) {
								defer must.Catch(&err)
								if id == 2 && round == 1 && step == from+3 {
									synctest.Wait() // the others need this rank for this step, and have done the last one
									return r.die()
								}
								must.Do(r.Begin(soon(t)))
								for i := range r.params {
									r.grad(i, 12)
									must.Do(r.Ready(i))
								}
								must.Do(r.Finish(soon(t)))
								done++
								grad := r.params[0].Grad
								if grad == nil {
									grad = r.GradView(0)
								}
								fill(t, r.params[0].Value, first(t, r.params[0].Value)+first(t, grad))
								fill(t, r.sum, first(t, r.sum)+1)
								return nil
							})
							if err != nil {
								return err
							}
						}
						return nil
					})
					if err != nil {
						return err
					}
					require.Equal(t, inputs[id], done)
					require.Equal(t, round+1, r.Joins())
				}
				require.Equal(t, 14, r.Steps())
				require.Equal(t, 14., first(t, r.sum), "the state of the ranks with most steps")
				// Round 0: 4 ranks have inputs for 2 steps, 3 for 3 more, 2 for 2 more. Round 1: the same
				// for 3 steps. Then 3 ranks are left, of which 2 have inputs for 2 steps, 1 for 2 more.
				want := 12 * ((2 + 3*3./4 + 2*2./4) + (2 + 3./4) + (2*2./3 + 2*1./3))
				require.InDelta(t, want, first(t, r.params[0].Value), 1e-3)
				return nil
			})
		})
	}
}

// TestElasticTooFew: Step fails, and may be called again.
func TestElasticTooFew(t *testing.T) {
	elastic(t, 3, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		r, err := newElasticRank(t, j, g, ddp.ElasticOptions{
			Reconfigure: pg.ReconfigureOptions{Min: 3, Timeout: time.Second},
		}, nil)
		if err != nil {
			return err
		}
		r.inStep = func(r *elasticRank, step int) error {
			if id == 2 && step == 1 {
				return r.die()
			}
			return nil
		}
		if id == 2 {
			return r.train(3)
		}
		for range 2 {
			require.ErrorIs(t, r.train(3), pg.ErrTooFew)
			require.Equal(t, 1, r.Steps())
		}
		return nil
	})
}

// TestElasticRefuses wrong options.
func TestElasticRefuses(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		_, err := ddp.NewElastic(soon(t), g, vectors(t, 1), ddp.ElasticOptions{Options: ddp.Options{PyTorch: true}})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		_, err = ddp.NewElastic(soon(t), g, vectors(t, 1), ddp.ElasticOptions{State: []*tensor.Tensor{nil}})
		require.EqualError(t, err, "ddp: State[0]: nil tensor")
		e := must.Get(ddp.NewElastic(soon(t), g, vectors(t, 1)))
		wrong := errors.New("wrong")
		require.ErrorIs(t, e.Step(soon(t), func(int) error { return wrong }), wrong)
		require.Zero(t, e.Steps())
	})
}

// TestElasticPowerSGD: PowerSGD begins anew in each epoch, with all ranks. Gradients of rank 1 are averaged
// exactly, also when buckets of the same length have other parameters first.
func TestElasticPowerSGD(t *testing.T) {
	elastic(t, 3, 1, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		s := must.Get(ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 3}))
		var ps []ddp.Param
		for _, n := range []int{20, 16} {
			ps = append(ps, ddp.Param{Value: zeros(t, tensor.Float32, n, 30), Grad: zeros(t, tensor.Float32, n, 30)})
		}
		e, err := ddp.NewElastic(soon(t), g, ps, ddp.ElasticOptions{Options: ddp.Options{Hook: s.Hook}})
		if err != nil {
			return err
		}
		r, tries := &elasticRank{t: t, job: j, g: g}, 0
		for e.Steps() < 16 {
			err := e.Step(soon(t), func(step int) (err error) {
				defer must.Catch(&err)
				if tries++; tries > 18 {
					return fmt.Errorf("step %d has been tried again and again", step)
				}
				if step == 10 {
					time.Sleep(5 * time.Millisecond) // of virtual time: the newcomer waits
				}
				must.Do(e.Begin(soon(t)))
				for i := len(ps) - 1; i >= 0; i-- {
					grad := must.Get(tensor.Data[float32](ps[i].Grad))
					for k := range grad {
						grad[k] = float32((k/30 + 1) * (k%30 + 1))
					}
					must.Do(e.Ready(i))
				}
				if id == 2 && step == 5 {
					return r.die()
				}
				must.Do(e.Finish(soon(t)))
				for i := range ps {
					grad := must.Get(tensor.Data[float32](ps[i].Grad))
					for k, v := range grad {
						if want := float64((k/30 + 1) * (k%30 + 1)); math.Abs(float64(v)/want-1) > 1e-3 {
							return fmt.Errorf("step %d: element %d of gradient %d is %v, want %v", step, k, i, v, want)
						}
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		require.Equal(t, 3, g.Size())
		return nil
	})
}

// unasked is a group whose store does not answer.
type unasked struct {
	ddp.ElasticGroup
	asked int
}

func (u *unasked) Pending(context.Context) (int, error) {
	u.asked++
	return 0, errors.New("the store does not answer")
}

// TestElasticStoreStops: a step does not ask a store that has not answered the steps before.
func TestElasticStoreStops(t *testing.T) {
	elastic(t, 2, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		u := &unasked{ElasticGroup: g}
		r, err := newElasticRank(t, j, g, ddp.ElasticOptions{}, func(ddp.ElasticGroup) ddp.ElasticGroup { return u })
		if err != nil {
			return err
		}
		if err := r.train(30); err != nil {
			return err
		}
		if g.Rank() == 0 && (u.asked == 0 || u.asked > 5) {
			return fmt.Errorf("it has asked %d times in 30 steps", u.asked)
		}
		return r.check(30)
	})
}

// TestElasticOldGroup: a hook's group ends with its epoch. Step says so, and tries no more epochs.
func TestElasticOldGroup(t *testing.T) {
	elastic(t, 4, 0, func(t *testing.T, j *pgtest.Job, g *pg.ProcessGroup, id int) error {
		pair := must.Get(g.NewSubgroups(t.Context(), 2))
		e, err := ddp.NewElastic(soon(t), g, vectors(t, 3), ddp.ElasticOptions{Options: ddp.Options{Hook: ddp.PostLocalSGDHook(pair, 0)}})
		if err != nil {
			return err
		}
		tries := 0
		for e.Steps() < 4 && err == nil {
			err = e.Step(soon(t), func(step int) (err error) {
				defer must.Catch(&err)
				if tries++; tries > 8 {
					return errors.New("again and again")
				}
				must.Do(e.Begin(soon(t)))
				if id == 1 && step == 2 {
					return (&elasticRank{job: j, g: g}).die()
				}
				must.Do(e.Ready(0))
				return e.Finish(soon(t))
			})
		}
		if id == 1 {
			return err
		}
		require.ErrorContains(t, err, "it was made in epoch 0 of the default group, which is in epoch 1 now")
		return nil
	})
}
