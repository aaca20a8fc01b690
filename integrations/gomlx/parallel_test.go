package gomlx_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"slices"
	"sync"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/dataset"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/fnn"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/integrations/gomlx"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

const (
	features = 8
	classes  = 3
	examples = 120
	batch    = 24
)

// points are examples of three classes, which a small network can tell apart.
func points(t *testing.T, rng *rand.Rand) *dataset.InMemoryDataset {
	t.Helper()
	source := rand.New(rand.NewSource(1))
	x, y := make([][]float32, examples), make([][]int32, examples)
	for i := range x {
		x[i], y[i] = make([]float32, features), []int32{int32(i % classes)}
		for j := range x[i] {
			x[i][j] = float32(source.NormFloat64())
		}
		x[i][i%classes] += 2
	}
	ds := must.Get(dataset.InMemoryFromData(gobackend.GetBackend(), "points", []any{x}, []any{y}))
	if rng == nil {
		return ds
	}
	return ds.WithRand(rng)
}

func network(scope *model.Scope, x *graph.Node) *graph.Node {
	return fnn.New(scope.In("model"), x, classes).NumHiddenLayers(2, 16).Activation(activation.TypeTanh).Done()
}

// setup is a training program.
type setup struct {
	model     func(*model.Scope, *graph.Node) *graph.Node
	optimizer func() optimizer.Interface
	options   gomlx.Options
	batch     int // of all ranks
	steps     int
	seed      int64 // of rank r: seed + r
	oneSeed   bool  // all ranks have the seed
	partial   bool  // the last batch of an epoch has the rows that are left
	loop      func(*testing.T, *gomlx.Parallel, *train.Loop, *model.Store)
	shard     bool
}

func (s setup) withDefaults() setup {
	if s.model == nil {
		s.model = network
	}
	if s.optimizer == nil {
		s.optimizer = func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Done() }
	}
	if s.batch == 0 {
		s.batch = batch
	}
	if s.steps == 0 {
		s.steps = 30
	}
	return s
}

// result is what a program has computed.
type result struct {
	losses []float64 // of each step
	moving float64   // the moving average of the loss
	random []uint64  // the state of the random generator
	eval   []float64
	model  map[string][]float32 // trained variables
	state  map[string][]float32 // others of float32
}

// train runs a program on one rank of a group, or alone.
func (s setup) train(t *testing.T, g *pg.ProcessGroup) (r result) {
	t.Helper()
	s = s.withDefaults()
	store := model.NewStore()
	rank := 0
	if g != nil && !s.oneSeed {
		rank = g.Rank()
	}
	require.NoError(t, store.SetRNGStateFromSeed(s.seed+int64(rank)))
	ds := points(t, rand.New(rand.NewSource(5))).BatchSize(s.batch, !s.partial).Shuffle().Infinite(true)
	var input train.Dataset = ds
	o := s.optimizer()
	var p *gomlx.Parallel
	if g != nil {
		p = must.Get(gomlx.New(t.Context(), g, s.options))
		o = p.Optimizer(o)
		if input = p.Split(ds); s.shard {
			input = p.Shard(ds.BatchSize(s.batch/g.Size(), true))
		}
	}
	trainer := train.NewTrainer(gobackend.GetBackend(), store, s.model, loss.SparseCategoricalCrossEntropyLogits, o,
		nil, []metric.Interface{metric.NewSparseCategoricalAccuracy("accuracy", "#acc")})
	loop := train.NewLoop(trainer)
	if p != nil {
		loop = p.NewLoop(trainer)
	}
	loop.OnStep("losses", 0, func(_ *train.Loop, m []*tensors.Tensor) error {
		r.losses = append(r.losses, float64(tensors.ToScalar[float32](m[0])))
		r.moving = float64(tensors.ToScalar[float32](m[1]))
		return nil
	})
	if s.loop != nil {
		s.loop(t, p, loop, store)
	}
	evaluate := func() {
		all := points(t, nil).BatchSize(7, false)
		metrics, err := trainer.Eval(all)
		if p != nil {
			metrics, err = p.Eval(trainer, all)
		}
		require.NoError(t, err)
		for _, m := range metrics {
			r.eval = append(r.eval, float64(tensors.ToScalar[float32](m)))
		}
	}
	must.Get(loop.RunSteps(input, 1))
	evaluate() // makes variables of which ranks have their own
	must.Get(loop.RunSteps(input, s.steps-1))
	evaluate()
	r.model, r.state = make(map[string][]float32), make(map[string][]float32)
	require.NoError(t, tensors.ConstFlatData(store.GetVariable("/"+model.RNGStateVariableName).MustValue(), func(x []uint64) { r.random = slices.Clone(x) }))
	for v := range store.IterVariables() {
		if flat, ok := v.MustValue().Value().([]float32); ok || v.Trainable {
			if v.Trainable {
				require.NoError(t, tensors.ConstFlatData(v.MustValue(), func(x []float32) { flat = slices.Clone(x) }))
				r.model[v.Path()] = flat
			} else {
				r.state[v.Path()] = flat
			}
		}
	}
	if p != nil {
		require.True(t, must.Get(p.Identical(store)))
	}
	return r
}

// ranks runs a program on n ranks, and returns what rank 0 has.
func (s setup) ranks(t *testing.T, n int) result {
	t.Helper()
	all := make([]result, n)
	pgtest.Run(t, n, func(t *testing.T, g *pg.ProcessGroup) { all[g.Rank()] = s.train(t, g) })
	for r := range all {
		require.Equal(t, all[0].losses, all[r].losses, "rank %d sees other losses", r)
		require.Equal(t, all[0].eval, all[r].eval, "rank %d sees other metrics", r)
	}
	return all[0]
}

// tolerance is the largest difference of two losses, relative to the loss. Sums are in another order.
const tolerance = 1e-4

func requireSame(t *testing.T, want, got result) {
	t.Helper()
	require.Len(t, got.losses, len(want.losses))
	for i := range want.losses {
		require.InDelta(t, want.losses[i], got.losses[i], tolerance*math.Abs(want.losses[i]), "step %d", i)
	}
	require.InDelta(t, want.moving, got.moving, 2e-5)
	require.Len(t, got.eval, len(want.eval))
	for i := range want.eval {
		require.InDelta(t, want.eval[i], got.eval[i], 1e-3, "metric %d", i)
	}
	require.Equal(t, len(want.model), len(got.model))
	for path, v := range want.model {
		for i := range v {
			require.InDelta(t, v[i], got.model[path][i], 1e-3, "%s[%d]", path, i)
		}
	}
}

// TestSameCurve compares 1, 2 and 4 ranks, with parts that are equal and with others, with one
// process.
func TestSameCurve(t *testing.T) {
	for name, s := range map[string]setup{
		"Adam":             {},
		"AdamW":            {optimizer: func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).WeightDecay(0.01).Done() }},
		"SGD":              {optimizer: func() optimizer.Interface { return optimizer.StochasticGradientDescent().Done() }},
		"unequal parts":    {batch: 21},
		"small buckets":    {options: gomlx.Options{BucketCap: 256}},
		"every nth batch":  {shard: true},
		"small last batch": {batch: 59, partial: true}, // of 2 rows
		"last batch of 1":  {batch: 119, partial: true},
	} {
		t.Run(name, func(t *testing.T) {
			one := s.train(t, nil)
			require.Less(t, one.losses[len(one.losses)-1], 0.8*one.losses[0], "it must learn")
			for _, n := range []int{1, 2, 4} {
				t.Run(fmt.Sprint(n), func(t *testing.T) { requireSame(t, one, s.ranks(t, n)) })
			}
		})
	}
}

// TestSynchronised starts ranks with other variables: rank 0's count.
func TestSynchronised(t *testing.T) {
	s := setup{seed: 40}
	one := s.train(t, nil)
	other := setup{seed: 41}.train(t, nil)
	require.NotEqual(t, one.losses[0], other.losses[0])
	requireSame(t, one, s.ranks(t, 3))
}

// TestCompressed averages in bfloat16, which is near.
func TestCompressed(t *testing.T) {
	s := setup{}
	one := s.train(t, nil)
	s.options.Hook = ddp.BF16CompressHook
	two := s.ranks(t, 2)
	require.NotEqual(t, one.losses, two.losses)
	require.InDelta(t, one.losses[len(one.losses)-1], two.losses[len(two.losses)-1], 0.05)
}

// TestHooksAfterUpdate has weights projected after each update: the small ones become zeros.
func TestHooksAfterUpdate(t *testing.T) {
	s := setup{model: func(scope *model.Scope, x *graph.Node) *graph.Node {
		return fnn.New(scope.In("model"), x, classes).Regularizer(regularizer.L1(0.02)).Done()
	}}
	one := s.train(t, nil)
	two := s.ranks(t, 2)
	requireSame(t, one, two)
	zeros := 0
	for _, v := range two.model {
		for _, x := range v {
			if x == 0 {
				zeros++
			}
		}
	}
	require.Positive(t, zeros, "no weight was projected after the last update")
}

// TestRandomGenerators: with one seed for all, ranks draw other numbers, and the same in each run.
func TestRandomGenerators(t *testing.T) {
	s := setup{oneSeed: true, seed: 7, steps: 5, model: func(scope *model.Scope, x *graph.Node) *graph.Node {
		x = layers.Dense(scope.In("hidden"), x, true, 16)
		return layers.Dense(scope.In("model"), layers.DropoutStatic(scope, x, 0.5), true, classes)
	}}
	var runs [2][3]result
	for i := range runs {
		pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) { runs[i][g.Rank()] = s.train(t, g) })
	}
	require.Equal(t, runs[0], runs[1])
	for r := range 3 {
		require.NotEqual(t, runs[0][r].random, runs[0][(r+1)%3].random)
	}
}

// TestOtherOrder has ranks that shuffle each in their own way: all get an error that says what to do.
func TestOtherOrder(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		shuffled := func() train.Dataset { return points(t, nil).BatchSize(batch, true).Shuffle() }
		for name, part := range map[string]func(*gomlx.Parallel, train.Dataset) train.Dataset{"Split": (*gomlx.Parallel).Split, "Shard": (*gomlx.Parallel).Shard} {
			p, err := gomlx.New(t.Context(), g)
			require.NoError(t, err)
			store := model.NewStore()
			trainer := train.NewTrainer(gobackend.GetBackend(), store, network, loss.SparseCategoricalCrossEntropyLogits,
				p.Optimizer(optimizer.Adam().Done()), nil, nil)
			_, err = p.NewLoop(trainer).RunSteps(part(p, shuffled()), 1)
			require.ErrorContains(t, err, "rank 1 has read other batches than rank 0", name)
			require.ErrorContains(t, err, "WithRand(p.Rand())", name)
			same, err := p.Identical(store)
			require.NoError(t, err)
			require.True(t, same, "no rank has updated its model")
			_, err = p.Eval(trainer, shuffled())
			require.ErrorContains(t, err, "Eval: rank 1 has read other batches than rank 0", name)
			ds, want := train.Dataset(points(t, nil).BatchSize(batch, true)), "Eval failed on rank 0"
			if g.Rank() == 0 {
				ds, want = part(p, ds), "Eval: the dataset is one of Split or Shard"
			}
			require.ErrorContains(t, must.Err(p.Eval(trainer, ds)), want, name)
		}
	})
}

// TestBatchNorm: the means of one process, also from parts that are not equal. Statistics of the whole dataset
// are those of one process; of a part of it they are refused.
func TestBatchNorm(t *testing.T) {
	const mean, variance = "/batch_normalization/mean", "/batch_normalization/variance"
	whole := func(trainer *train.Trainer) {
		require.True(t, must.Get(norm.UpdateBatchNormAverages(trainer, points(t, nil).BatchSize(50, false))))
	}
	run := func(t *testing.T, g *pg.ProcessGroup, update func(*gomlx.Parallel, *train.Trainer)) map[string][]float32 {
		var p *gomlx.Parallel
		if g != nil {
			p = must.Get(gomlx.New(t.Context(), g))
		}
		store := model.NewStore()
		var o optimizer.Interface = optimizer.StochasticGradientDescent().Done()
		ds := points(t, rand.New(rand.NewSource(5))).BatchSize(21, true).Shuffle().Infinite(true)
		var input train.Dataset = ds
		if p != nil {
			o, input = p.Optimizer(o), p.Split(ds)
		}
		trainer := train.NewTrainer(gobackend.GetBackend(), store, func(scope *model.Scope, x *graph.Node) *graph.Node {
			return layers.Dense(scope.In("model"), norm.BatchNorm(scope, x, -1).UseBackendInference(false).Done(), true, classes)
		}, loss.SparseCategoricalCrossEntropyLogits, o, nil, nil)
		loop := train.NewLoop(trainer)
		if p != nil {
			loop = p.NewLoop(trainer)
		}
		loop.OnStep("statistics amid steps", 0, func(loop *train.Loop, _ []*tensors.Tensor) error {
			if loop.LoopStep == 2 {
				whole(trainer)
			}
			return nil
		})
		must.Get(loop.RunSteps(input, 10))
		if update != nil {
			update(p, trainer)
		}
		state := make(map[string][]float32)
		for _, path := range []string{mean, variance} {
			require.NoError(t, tensors.ConstFlatData(store.GetVariable(path).MustValue(), func(x []float32) { state[path] = slices.Clone(x) }))
		}
		if p != nil {
			same := must.Get(p.Identical(store))
			require.True(t, same)
			if p.Rank() == 1 {
				v := store.GetVariable(mean)
				require.NoError(t, v.SetValue(tensors.FromFlatDataAndDimensions(make([]float32, features), features)))
			}
			same = must.Get(p.Identical(store))
			require.False(t, same, "other statistics on rank 1")
		}
		return state
	}
	atEnd := func(_ *gomlx.Parallel, trainer *train.Trainer) { whole(trainer) }
	trained, updated := run(t, nil, nil), run(t, nil, atEnd)
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		got := run(t, g, nil)
		for i, want := range trained[mean] {
			require.InDelta(t, want, got[mean][i], 1e-6)
		}
		require.NotEqual(t, trained[variance], got[variance], "each rank has those of its rows, as in PyTorch's DDP")
		got = run(t, g, atEnd)
		for path, want := range updated {
			for i := range want {
				require.InDelta(t, want[i], got[path][i], 1e-6, path)
			}
		}
		run(t, g, func(p *gomlx.Parallel, trainer *train.Trainer) {
			for _, ds := range []train.Dataset{
				p.Split(points(t, nil).BatchSize(50, false)), p.Split(points(t, nil).BatchSize(examples, true)), p.Shard(points(t, nil).BatchSize(20, true)),
			} {
				_, err := norm.UpdateBatchNormAverages(trainer, ds)
				require.ErrorContains(t, err, "gomlx: norm.UpdateBatchNormAverages got a dataset of Split or Shard")
			}
			whole(trainer)
		})
	})
}

// TestState averages what the model changes in a step besides its trained variables, as
// normalisation layers do: here the running mean of the inputs.
func TestState(t *testing.T) {
	s := setup{model: func(scope *model.Scope, x *graph.Node) *graph.Node {
		mean := scope.In("norm").WithInitializer(initializer.Zero).VariableWithShape("mean", shapes.Make(dtypes.Float32, features)).SetTrainable(false)
		now := graph.Add(graph.MulScalar(mean.NodeValue(x.Graph()), 0.9), graph.MulScalar(graph.ReduceMean(x, 0), 0.1))
		if scope.IsTraining(x.Graph()) {
			mean.SetNodeValue(now)
		}
		return layers.Dense(scope.In("model"), graph.Sub(x, graph.InsertAxes(graph.StopGradient(now), 0)), true, classes)
	}}
	all := make([]result, 2)
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) { all[g.Rank()] = s.train(t, g) })
	require.Contains(t, all[0].state, "/norm/mean")
	require.Equal(t, all[0].state["/norm/mean"], all[1].state["/norm/mean"])
	one := s.train(t, nil)
	for i, want := range one.state["/norm/mean"] {
		require.InDelta(t, want, all[0].state["/norm/mean"][i], 1e-5)
	}
}

// TestCheckpoint saves on rank 0 only, and goes on from there with one rank that has the file.
func TestCheckpoint(t *testing.T) {
	dir := t.TempDir()
	load := func(store *model.Store) *checkpoint.Handler {
		return must.Get(checkpoint.Build(store).Dir(dir).Keep(2).Done())
	}
	half := setup{steps: 15, loop: func(t *testing.T, p *gomlx.Parallel, loop *train.Loop, store *model.Store) {
		if p.Rank() != 0 {
			loop.OnEnd("save", 0, func(loop *train.Loop, m []*tensors.Tensor) error { return p.Save(nil)(loop, m) })
			return
		}
		h := load(store)
		loop.OnEnd("save", 0, func(loop *train.Loop, m []*tensors.Tensor) error { return p.Save(h)(loop, m) })
	}}
	before := half.ranks(t, 2)

	store := model.NewStore()
	h := load(store)
	loaded := h.LoadedVariables()
	require.NotEmpty(t, loaded)
	for path := range loaded {
		require.NotContains(t, path, "/"+gomlx.Scope+"/")
	}
	for path, want := range before.model {
		path = "var:" + path
		require.Contains(t, loaded, path)
		require.NoError(t, tensors.ConstFlatData(loaded[path], func(got []float32) { require.Equal(t, want, got) }))
	}

	// Rank 0 alone loads; the others have its variables and its step.
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		p, err := gomlx.New(t.Context(), g)
		require.NoError(t, err)
		store := model.NewStore()
		if g.Rank() == 0 {
			load(store)
		}
		trainer := train.NewTrainer(gobackend.GetBackend(), store, network, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(optimizer.Adam().LearningRate(0.01).Done()), nil, nil)
		loop := p.NewLoop(trainer)
		require.Equal(t, 15, loop.LoopStep)
		var first float64
		loop.OnStep("loss", 0, func(_ *train.Loop, m []*tensors.Tensor) error {
			if first == 0 {
				first = float64(tensors.ToScalar[float32](m[0]))
			}
			return nil
		})
		_, err = loop.RunToGlobalStep(p.Split(points(t, p.Rand()).BatchSize(examples, true).Shuffle().Infinite(true)), 20)
		require.NoError(t, err)
		require.Equal(t, int64(20), trainer.GlobalStep())
		saved := before.eval[len(before.eval)-2] // the loss of all examples, which are the first batch here
		require.InDelta(t, saved, first, tolerance*saved, "it must go on from the checkpoint")
		require.True(t, must.Get(p.Identical(store)))
	})
}

// TestOtherModels has ranks with other models: all get an error.
func TestOtherModels(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		p, err := gomlx.New(t.Context(), g)
		require.NoError(t, err)
		wide := func(scope *model.Scope, x *graph.Node) *graph.Node {
			return layers.Dense(scope.In("model"), graph.Concatenate([]*graph.Node{x, x}, -1), true, classes)
		}
		narrow := func(scope *model.Scope, x *graph.Node) *graph.Node {
			return layers.Dense(scope.In("model"), x, true, classes)
		}
		build := narrow
		if g.Rank() == 1 {
			build = wide
		}
		trainer := train.NewTrainer(gobackend.GetBackend(), model.NewStore(), build, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(optimizer.Adam().Done()), nil, nil)
		_, err = p.NewLoop(trainer).RunSteps(p.Split(points(t, nil).BatchSize(batch, true)), 1)
		require.ErrorIs(t, err, gomlx.ErrModelMismatch)
		require.ErrorContains(t, err, fmt.Sprintf("of rank 0 is /model/dense/weights (Float32)[%d, %d], and of rank 1 /model/dense/weights (Float32)[%d, %d]", features, classes, 2*features, classes))
	})
}

func TestWrongUse(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		require.ErrorContains(t, must.Err(gomlx.New(t.Context(), g, gomlx.Options{BucketCap: -1})), "BucketCap")
		p, err := gomlx.New(t.Context(), g)
		require.NoError(t, err)

		// The trainer's optimizer is not Optimizer's.
		trainer := train.NewTrainer(gobackend.GetBackend(), model.NewStore(), network, loss.SparseCategoricalCrossEntropyLogits,
			optimizer.Adam().Done(), nil, nil)
		_, err = p.NewLoop(trainer).RunSteps(p.Split(points(t, nil).BatchSize(batch, true)), 1)
		require.ErrorContains(t, err, "another optimizer")

		// An optimizer that takes no gradients.
		trainer = train.NewTrainer(gobackend.GetBackend(), model.NewStore(), network, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(struct{ optimizer.Interface }{optimizer.Adam().Done()}), nil, nil)
		_, err = p.NewLoop(trainer).RunSteps(p.Split(points(t, nil).BatchSize(batch, true)), 1)
		require.ErrorContains(t, err, "OptimizeWithGradients")

		// Gradients that the trainer accumulates.
		trainer = train.NewTrainer(gobackend.GetBackend(), model.NewStore(), network, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(optimizer.Adam().Done()), nil, nil)
		loop := p.NewLoop(trainer)
		require.NoError(t, trainer.AccumulateGradients(2))
		_, err = loop.RunSteps(p.Split(points(t, nil).BatchSize(batch, true)), 1)
		require.ErrorContains(t, err, "gomlx: Trainer.AccumulateGradients does not work with several ranks")
		require.PanicsWithError(t, "gomlx: Trainer.AccumulateGradients does not work with several ranks: use larger batches, of which each rank gets a part",
			func() { p.NewLoop(trainer) })

		// Fewer batches than ranks.
		trainer = train.NewTrainer(gobackend.GetBackend(), model.NewStore(), network, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(optimizer.Adam().Done()), nil, nil)
		_, err = p.NewLoop(trainer).RunEpochs(p.Shard(points(t, nil).BatchSize(examples, true)), 1)
		require.ErrorContains(t, err, "gomlx: Shard: the dataset has 1 batches for 2 ranks")
	})
}

// TestSplit holds that the parts of all ranks are the batch.
func TestSplit(t *testing.T) {
	var parts [3][]float32
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		p := must.Get(gomlx.New(t.Context(), g))
		for b, err := range p.Split(points(t, p.Rand()).BatchSize(10, true).Shuffle()).Iter() {
			require.NoError(t, err)
			require.Equal(t, b.Inputs[0].Shape().Dimensions[0], b.Labels[0].Shape().Dimensions[0])
			require.NoError(t, tensors.ConstFlatData(b.Inputs[0], func(x []float32) { parts[g.Rank()] = append(parts[g.Rank()], x...) }))
		}
	})
	all := slices.Concat(parts[:]...)
	require.Len(t, all, examples*features)
	slices.Sort(all)
	var want []float32
	for b, err := range points(t, nil).BatchSize(10, true).Iter() {
		require.NoError(t, err)
		require.NoError(t, tensors.ConstFlatData(b.Inputs[0], func(x []float32) { want = append(want, x...) }))
	}
	slices.Sort(want)
	require.Equal(t, want, all)
}

// TestShard gives every rank as many batches, and leaves out the rest.
func TestShard(t *testing.T) {
	var batches, rows [3]int
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		p := must.Get(gomlx.New(t.Context(), g))
		for b, err := range p.Shard(points(t, nil).BatchSize(16, false)).Iter() { // 7 of 16, one of 8
			require.NoError(t, err)
			batches[g.Rank()]++
			rows[g.Rank()] += b.Inputs[0].Shape().Dimensions[0]
		}
	})
	require.Equal(t, [3]int{2, 2, 2}, batches)
	require.Equal(t, [3]int{32, 32, 32}, rows)
}

// TestWithoutLoop calls Apply after each TrainStep, as a program with a loop of its own does.
func TestWithoutLoop(t *testing.T) {
	one := setup{steps: 10}.train(t, nil)
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		p := must.Get(gomlx.New(t.Context(), g))
		store := model.NewStore()
		require.NoError(t, store.SetRNGStateFromSeed(0))
		trainer := train.NewTrainer(gobackend.GetBackend(), store, network, loss.SparseCategoricalCrossEntropyLogits,
			p.Optimizer(optimizer.Adam().LearningRate(0.01).Done()), nil, nil)
		step := 0
		for b, err := range p.Split(points(t, rand.New(rand.NewSource(5))).BatchSize(batch, true).Shuffle().Infinite(true)).Iter() {
			require.NoError(t, err)
			metrics := must.Get(trainer.TrainStep(b))
			require.NoError(t, p.Apply(trainer, metrics))
			if step == 0 {
				require.InDelta(t, one.losses[0], float64(tensors.ToScalar[float32](metrics[0])), tolerance*one.losses[0])
			}
			if step++; step == 10 {
				break
			}
			if step == 5 { // a second Apply for one step
				require.ErrorContains(t, p.Apply(trainer, nil), "Apply must follow a step")
			}
		}
	})
}

// TestRankLeaves has rank 1 give up after three steps: rank 0's step fails and names it.
func TestRankLeaves(t *testing.T) {
	job := pgtest.NewJob(2)
	defer job.Close()
	var ranks sync.WaitGroup
	errs := make([]error, 2)
	for r := range errs {
		ranks.Go(func() {
			g, err := job.Join(t.Context(), r)
			if err != nil {
				errs[r] = err
				return
			}
			defer g.Close()
			p, err := gomlx.New(t.Context(), g)
			if err != nil {
				errs[r] = err
				return
			}
			trainer := train.NewTrainer(gobackend.GetBackend(), model.NewStore(), network, loss.SparseCategoricalCrossEntropyLogits,
				p.Optimizer(optimizer.Adam().Done()), nil, nil)
			loop := p.NewLoop(trainer)
			if r == 1 {
				loop.OnStep("leave", 0, func(loop *train.Loop, _ []*tensors.Tensor) error {
					if loop.LoopStep < 2 {
						return nil
					}
					err := errors.New("the disk is full")
					g.Abort(err)
					return err
				})
			}
			_, errs[r] = loop.RunSteps(p.Split(points(t, p.Rand()).BatchSize(batch, true).Infinite(true)), 30)
		})
	}
	ranks.Wait()
	require.ErrorContains(t, errs[1], "the disk is full")
	require.ErrorContains(t, errs[0], "rank 1")
}

func TestOnRank0(t *testing.T) {
	var calls [2]int
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		p := must.Get(gomlx.New(t.Context(), g))
		f := p.OnRank0(func(*train.Loop, []*tensors.Tensor) error { calls[g.Rank()]++; return nil })
		require.NoError(t, f(nil, nil))
	})
	require.Equal(t, [2]int{1, 0}, calls)
}
