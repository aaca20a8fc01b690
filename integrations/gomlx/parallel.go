package gomlx

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// Scope is the scope of the variables that this package adds to a model: gradients on their way from
// one graph to the other.
const Scope = "c10d"

// ErrModelMismatch is matched when the ranks have different variables.
var ErrModelMismatch = errors.New("gomlx: ranks hold different models")

// Options are the options of New. The zero value works. All ranks must choose the same.
type Options struct {
	// BucketCap is the number of bytes of gradients that one all-reduce sends; 0 means package
	// ddp's 25 MiB.
	BucketCap int

	// Hook replaces the all-reduce of a bucket, for example by one in bfloat16
	// (ddp.BF16CompressHook); nil means a plain average.
	Hook ddp.Hook
}

// Parallel trains one model on all ranks of a group. Make one with New or Init. It serves one
// train.Trainer. Its methods that communicate must be called by all ranks, in the same order, from
// one goroutine.
type Parallel struct {
	ctx     context.Context
	group   *pg.ProcessGroup
	owned   bool
	options Options
	seed    int64

	plans    []*plan
	reducers map[string]*reducer
	synced   map[string]bool // paths of the variables that are equal on all ranks
	weight   float64         // of this rank's batch among the ranks': 1 for equal parts
	batch    uint32          // checksum of what the ranks have read for their batches; 0 without Split and Shard
	watched  *train.Trainer
	norms    bool // the watched trainer has computed statistics of batch normalisation
}

// New returns a Parallel for a group. Every rank must call it. ctx bounds the communication of all
// later calls, because GoMLX's hooks have no context of their own. The group stays the caller's.
func New(ctx context.Context, g *pg.ProcessGroup, opts ...Options) (*Parallel, error) {
	var o Options
	if len(opts) > 0 {
		o = opts[len(opts)-1]
	}
	if o.BucketCap < 0 {
		return nil, fmt.Errorf("gomlx: Options.BucketCap is %d bytes, want 0 or more", o.BucketCap)
	}
	seed := []int64{rand.Int63()}
	if err := pg.Wait(g.Broadcast(ctx, pg.Slice(seed), 0)); err != nil {
		return nil, fmt.Errorf("gomlx: %w", err)
	}
	return &Parallel{
		ctx: ctx, group: g, options: o, seed: seed[0],
		reducers: make(map[string]*reducer), synced: make(map[string]bool), weight: 1,
	}, nil
}

// Init makes the default group of the job from the launcher's environment (pg.Init with "env://"), and
// a Parallel for it, whose Close closes the group. A program that no launcher has started trains
// alone: a group of one rank.
func Init(ctx context.Context, o ...Options) (*Parallel, error) {
	g, err := initGroup(ctx)
	if err != nil {
		return nil, err
	}
	p, err := New(ctx, g, o...)
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	p.owned = true
	return p, nil
}

// Close waits until the group's operations have ended, and closes the group if Init has made it.
func (p *Parallel) Close() error {
	if !p.owned {
		return nil
	}
	return p.group.Shutdown(p.ctx)
}

// Rank returns the number of this rank in the group.
func (p *Parallel) Rank() int { return p.group.Rank() }

// Size returns the number of ranks.
func (p *Parallel) Size() int { return p.group.Size() }

// Rand returns a source of random numbers that is the same on all ranks, for example to shuffle a
// dataset before Split or Shard.
func (p *Parallel) Rand() *rand.Rand { return rand.New(rand.NewSource(p.seed)) }

// NewLoop is train.NewLoop with the steps of all ranks made one: after each step of the trainer,
// before all other hooks, it calls Apply. The trainer's optimizer must be one of Optimizer. Like
// train.NewLoop it panics on errors. The ranks start at the global step of rank 0, which may
// have loaded a checkpoint.
func (p *Parallel) NewLoop(trainer *train.Trainer) *train.Loop {
	if p.Size() > 1 {
		if err := p.watch(trainer); err != nil {
			panic(err)
		}
		v := optimizer.GetGlobalStepVar(trainer.Store())
		step := []int64{optimizer.GetGlobalStep(trainer.Store())}
		err := pg.Wait(p.group.Broadcast(p.ctx, pg.Slice(step), 0))
		if err == nil {
			err = v.SetValue(tensors.FromScalar(step[0]))
		}
		if err != nil {
			panic(fmt.Errorf("gomlx: the global step of rank 0: %w", err))
		}
	}
	loop := train.NewLoop(trainer)
	loop.OnStep("c10d: gradients of all ranks", train.Priority(math.MinInt), func(loop *train.Loop, metrics []*tensors.Tensor) error {
		return p.Apply(loop.Trainer, metrics)
	})
	return loop
}

// Apply ends a step: it averages the gradients and the metrics over the ranks, and updates the
// model with the trainer's optimizer. A program without a loop calls it after each
// Trainer.TrainStep, with that step's metrics.
func (p *Parallel) Apply(trainer *train.Trainer, metrics []*tensors.Tensor) error {
	if p.Size() == 1 {
		return nil
	}
	defer func() { p.weight, p.batch = 1, 0 }()
	if err := p.watch(trainer); err != nil {
		return err
	}
	pending, err := p.pending(trainer.Store())
	if err != nil {
		return err
	}
	if err := p.averageFloats(trainer.Store(), metrics, pending); err != nil {
		return err
	}
	if err := p.reduce(pending); err != nil {
		return err
	}
	return pending.apply(p, trainer)
}

// errAccumulate refuses Trainer.AccumulateGradients: it would begin before the ranks have the same variables.
var errAccumulate = errors.New("gomlx: Trainer.AccumulateGradients does not work with several ranks: use larger batches, of which each rank gets a part")

// watch prepares a trainer, and notes when it computes statistics of batch normalisation.
func (p *Parallel) watch(trainer *train.Trainer) error {
	if trainer.NumAccumulatingSteps() > 0 {
		return errAccumulate
	}
	if p.watched != trainer {
		p.watched = trainer
		trainer.OnExecCreation(func(_ *model.Exec, of train.GraphType) {
			if of == train.BatchNormAveragesType {
				p.norms = true
			}
		})
	}
	return nil
}

// Eval is trainer.Eval with the batches of ds divided over the ranks. It returns the averages of
// the metrics over the ranks, weighted by the number of rows that each has seen. All ranks
// must have the same batches, of the whole dataset. With fewer batches than ranks every rank evaluates all of them.
func (p *Parallel) Eval(trainer *train.Trainer, ds train.Dataset) ([]*tensors.Tensor, error) {
	if p.Size() == 1 {
		return trainer.Eval(ds)
	}
	mine := &evalShard{Dataset: ds, rank: p.Rank(), size: p.Size()}
	var metrics []*tensors.Tensor
	var err error
	_, part := ds.(*dataset)
	if part {
		err = errors.New("gomlx: Eval: the dataset is one of Split or Shard: give Eval the whole one, which it divides itself")
	} else {
		metrics, err = trainer.Eval(mine)
	}
	rows := float64(mine.rows)
	if err != nil && (part || mine.rows > 0) {
		rows = -1
	}
	said := make([]float64, 2*p.group.Size())
	gathered := pg.Wait(p.group.AllGatherIntoTensor(p.ctx, pg.Slice(said), pg.Slice([]float64{rows, float64(mine.sum)})))
	var all, sums []float64
	for i := 0; i < len(said); i += 2 {
		all, sums = append(all, said[i]), append(sums, said[i+1])
	}
	switch {
	case rows < 0:
		return nil, err
	case gathered != nil:
		return nil, fmt.Errorf("gomlx: Eval: %w", gathered)
	case slices.Min(all) < 0:
		return nil, fmt.Errorf("gomlx: Eval failed on rank %d", slices.Index(all, slices.Min(all)))
	case sameBatches(sums) != nil:
		return nil, fmt.Errorf("gomlx: Eval: %w", sameBatches(sums))
	case slices.Min(all) == 0:
		return trainer.Eval(ds)
	}
	total := 0.
	for _, n := range all {
		total += n
	}
	if _, err := p.average(weighted(metrics, rows/total), 0); err != nil {
		return nil, fmt.Errorf("gomlx: Eval: %w", err)
	}
	return metrics, nil
}

// OnRank0 returns a hook that calls f on rank 0, and does nothing on the others.
func (p *Parallel) OnRank0(f train.OnStepFn) train.OnStepFn {
	if p.Rank() == 0 {
		return f
	}
	return func(*train.Loop, []*tensors.Tensor) error { return nil }
}

// Save returns a hook that saves a checkpoint on rank 0, without the variables of this package. Use
// it in place of the handler's OnStepFn. Only rank 0 has to load a checkpoint: all get its
// variables before their first step.
func (p *Parallel) Save(h *checkpoint.Handler) train.OnStepFn {
	return p.OnRank0(func(loop *train.Loop, metrics []*tensors.Tensor) error {
		for v := range loop.Trainer.Store().Scope("/" + Scope).IterVariables() {
			h.ExcludeVarsFromSaving(v)
		}
		return h.Save()
	})
}

// Identical reports whether the variables have the same bits on all ranks: what is trained, the
// optimizer's, and statistics of normalisation layers. The state of the random generator and of metrics is each
// rank's own.
func (p *Parallel) Identical(store *model.Store) (bool, error) {
	sum := uint64(0) // the ranks may have made their variables in another order
	for v := range store.IterVariables() {
		if !v.HasValue() || own(v) || v.Name() == model.RNGStateVariableName || ofMetrics(v) {
			continue
		}
		value, err := v.Value()
		if err != nil {
			return false, err
		}
		h := fnv.New64a()
		h.Write([]byte(v.Path()))
		if err := value.ConstBytes(func(b []byte) { h.Write(b) }); err != nil {
			return false, err
		}
		sum += h.Sum64()
	}
	return p.same(sum)
}

// same reports whether all ranks have the same number.
func (p *Parallel) same(mine uint64) (bool, error) {
	all := make([]uint64, p.group.Size())
	if err := pg.Wait(p.group.AllGatherIntoTensor(p.ctx, pg.Slice(all), pg.Slice([]uint64{mine}))); err != nil {
		return false, fmt.Errorf("gomlx: %w", err)
	}
	return !slices.ContainsFunc(all, func(n uint64) bool { return n != all[0] }), nil
}

// sync gives all ranks rank 0's value of every variable that graph g uses, and that they do not share yet.
// The state of the random generator becomes each rank's own, also with one seed for all: ranks drop other neurons.
func (p *Parallel) sync(store *model.Store, g *graph.Graph) error {
	if err := store.InitializeVariables(g.Backend(), nil); err != nil {
		return err
	}
	var fresh []*model.Variable
	h := fnv.New64a()
	for v := range store.IterVariables() {
		if p.synced[v.Path()] || !v.InUseByGraph(g) || own(v) {
			continue
		}
		if v.Name() == model.RNGStateVariableName {
			if err := p.divert(v); err != nil {
				return fmt.Errorf("gomlx: variable %s: %w", v.Path(), err)
			}
			p.synced[v.Path()] = true
			continue
		}
		fresh = append(fresh, v)
		fmt.Fprintln(h, v.Path(), v.Shape())
	}
	if len(fresh) == 0 {
		return nil
	}
	same, err := p.same(h.Sum64())
	if err != nil {
		return err
	}
	if !same {
		return fmt.Errorf("%w: %w", ErrModelMismatch, p.difference(fresh))
	}
	for _, v := range fresh {
		value, err := v.Value()
		if err != nil {
			return err
		}
		err = mutate(value, func(t *tensor.Tensor) error {
			w, err := p.group.Broadcast(p.ctx, t, 0)
			if err != nil {
				return err
			}
			return w.Wait(p.ctx)
		})
		if err != nil {
			return fmt.Errorf("gomlx: variable %s: %w", v.Path(), err)
		}
		p.synced[v.Path()] = true
	}
	return nil
}

// divert makes the state of a random generator differ from that of other ranks. Rank 0 keeps its state, which
// is that of one process.
func (p *Parallel) divert(v *model.Variable) error {
	if p.Rank() == 0 {
		return nil
	}
	value, err := v.Value()
	if err != nil {
		return err
	}
	other := rand.New(rand.NewSource(int64(p.Rank())))
	return mutate(value, func(t *tensor.Tensor) error {
		state, err := tensor.Data[uint64](t)
		for i := range state {
			state[i] ^= other.Uint64()
		}
		return err
	})
}

// ofMetrics reports whether a variable is the state of a metric.
func ofMetrics(v *model.Variable) bool { return strings.HasPrefix(v.Path(), "/"+metric.Scope+"/") }

// own reports whether a variable is one of this package.
func own(v *model.Variable) bool { return strings.HasPrefix(v.Path(), "/"+Scope+"/") }

// difference says where the ranks' lists of variables differ first. All ranks call it.
func (p *Parallel) difference(vs []*model.Variable) error {
	mine := make([]string, len(vs))
	for i, v := range vs {
		mine[i] = fmt.Sprint(v.Path(), " ", v.Shape())
	}
	all, err := pg.AllGatherObject(p.ctx, p.group, mine)
	if err != nil {
		return err
	}
	at := func(list []string, i int) string {
		if i < len(list) {
			return list[i]
		}
		return "none"
	}
	for r, theirs := range all {
		for i := range max(len(theirs), len(all[0])) {
			if a, b := at(all[0], i), at(theirs, i); a != b {
				return fmt.Errorf("variable %d of rank 0 is %s, and of rank %d %s", i, a, r, b)
			}
		}
	}
	return errors.New("the variables are the same now")
}

// part is a tensor whose elements are averaged, with this rank's weight.
type part struct {
	t      *tensors.Tensor
	weight float64
}

// weighted returns the tensors of floats.
func weighted(ts []*tensors.Tensor, weight float64) (parts []part) {
	for _, t := range ts {
		if isFloat(t.DType()) {
			parts = append(parts, part{t, weight})
		}
	}
	return parts
}

// averageFloats averages the metrics of a step, and what the step has changed besides gradients: the
// state of metrics and of normalisation layers. It refuses batches that the ranks have read otherwise.
func (p *Parallel) averageFloats(store *model.Store, metrics []*tensors.Tensor, pending *plan) error {
	n := float64(p.Size())
	parts := weighted(metrics, p.weight/n)
	for _, v := range pending.stateOf(store) {
		value, err := v.Value()
		if err != nil {
			return err
		}
		weight := p.weight / n
		if ofMetrics(v) && (v.Name() == "total" || v.Name() == "weight") {
			weight = 1 / n // sums over rows, whose quotient counts: metric.MeanMetric
		}
		parts = append(parts, part{value, weight})
	}
	sums, err := p.average(parts, float64(p.batch))
	if err == nil {
		err = sameBatches(sums)
	}
	if err != nil {
		return fmt.Errorf("gomlx: %w", err)
	}
	return nil
}

// sameBatches compares checksums of what the ranks have read.
func sameBatches(sums []float64) error {
	for r, s := range sums {
		if s != sums[0] {
			return fmt.Errorf("rank %d has read other batches than rank 0: all ranks must read the same, so shuffle with one source of random numbers, for example WithRand(p.Rand())", r)
		}
	}
	return nil
}

// average replaces tensors by their weighted sums over the ranks, in one all-reduce. It also returns each
// rank's number.
func (p *Parallel) average(parts []part, number float64) ([]float64, error) {
	flat := make([]float64, p.Size())
	flat[p.Rank()] = number
	for _, x := range parts {
		err := mutate(x.t, func(t *tensor.Tensor) error {
			for i := range t.Len() {
				v, err := t.Float64At(i)
				if err != nil {
					return err
				}
				if x.weight == 0 {
					v = 0 // also of NaN
				}
				flat = append(flat, v*x.weight)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if err := pg.Wait(p.group.AllReduce(p.ctx, pg.Slice(flat), pg.Sum())); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	numbers := flat[:p.Size()]
	flat = flat[p.Size():]
	for _, x := range parts {
		err := mutate(x.t, func(t *tensor.Tensor) error {
			for i := range t.Len() {
				if err := t.SetFloat64(flat[i], i); err != nil {
					return err
				}
			}
			flat = flat[t.Len():]
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return numbers, nil
}

// hash returns a number that is equal for equal texts.
func hash(text string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(text))
	return h.Sum64()
}
