package gomlx

import (
	"fmt"
	"strings"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/tensor"
)

const (
	scopePath     = model.ScopeSeparator + Scope
	gradientsPath = scopePath + model.ScopeSeparator + "gradients"
	pendingPath   = scopePath + model.ScopeSeparator + "pending"
)

// Optimizer returns an optimizer that updates the model with the average of all ranks' gradients. o
// must be a train.OptimizeWithGradients, as GoMLX's own are; otherwise the first step fails.
//
// GoMLX computes gradients and applies the optimizer in one graph. The returned optimizer cuts that graph
// in two. The trainer's graph leaves the gradients in variables. Apply, which NewLoop calls
// after each step, averages them and runs a second graph, with o and what the model does after each
// update (train.AddPerStepUpdateGraphFn).
func (p *Parallel) Optimizer(o optimizer.Interface) optimizer.Interface {
	if p.Size() == 1 {
		return o
	}
	return &cut{p, o}
}

// cut is the optimizer of the first graph.
type cut struct {
	p *Parallel
	optimizer.Interface
}

// UpdateGraphWithGradients would be called by a trainer that accumulates gradients. Without it the trainer would
// refuse to, and blame the program's optimizer. Now watch refuses it.
func (c *cut) UpdateGraphWithGradients(*model.Scope, []*graph.Node, dtypes.DType) {
	panic(errAccumulate)
}

// UpdateGraph is called by the trainer.
func (c *cut) UpdateGraph(scope *model.Scope, g *graph.Graph, loss *graph.Node) {
	if !loss.Shape().IsScalar() {
		panic(fmt.Errorf("gomlx: the loss has shape %s, want a scalar", loss.Shape()))
	}
	inner, ok := c.Interface.(train.OptimizeWithGradients)
	if !ok {
		panic(fmt.Errorf("gomlx: optimizer %T cannot be cut: it is no train.OptimizeWithGradients", c.Interface))
	}
	gradients := scope.BuildTrainableVariablesGradientsGraph(loss)
	if len(gradients) == 0 {
		panic(fmt.Errorf("gomlx: the model has no trainable variables"))
	}
	store := scope.Store()
	x := &plan{first: g, optimizer: inner, dtype: loss.DType(), afterUpdate: takeHooks(store, g)}
	for v := range scope.IterVariables() {
		if v.Trainable && v.InUseByGraph(g) {
			x.variables = append(x.variables, v)
		}
	}
	if len(x.variables) != len(gradients) {
		panic(fmt.Errorf("gomlx: %d gradients for %d trainable variables", len(gradients), len(x.variables)))
	}
	for i, v := range x.variables {
		if _, err := dtypeOf(v.DType()); err != nil {
			panic(fmt.Errorf("gomlx: variable %s: %w", v.Path(), err))
		}
		gradient := store.VariableWithShape(gradientsPath+v.Path(), v.Shape(), initializer.Zero).SetTrainable(false)
		gradient.SetNodeValue(gradients[i])
		x.gradients = append(x.gradients, gradient)
	}
	c.p.plans = append(c.p.plans, x)
	pending := store.VariableWithValue(pendingPath, int64(0)).SetTrainable(false)
	pending.SetNodeValue(graph.Const(g, int64(len(c.p.plans))))

	// The first step needs rank 0's variables.
	if err := c.p.sync(store, g); err != nil {
		panic(err)
	}
}

// Clear also deletes the gradients.
func (c *cut) Clear(scope *model.Scope) error {
	if err := scope.Store().DeleteVariablesInScope(scopePath); err != nil {
		return err
	}
	return c.Interface.Clear(scope)
}

// hook is a train.AddPerStepUpdateGraphFn of the model.
type hook struct {
	scope string
	f     train.ModelGraphFn
}

// takeHooks returns the model's hooks that run after an update, and has the first graph, which does not
// update, run none.
func takeHooks(store *model.Store, g *graph.Graph) (hooks []hook) {
	for param := range store.IterGraphParams(g) {
		if param.Key != train.TrainerPerStepUpdateGraphFnParamKey {
			continue
		}
		if f, ok := param.Value.(train.ModelGraphFn); ok {
			hooks = append(hooks, hook{param.Scope, f})
		}
	}
	for _, h := range hooks {
		train.AddPerStepUpdateGraphFn(store.Scope(h.scope), g, func(*model.Scope, *graph.Graph) {})
	}
	return hooks
}

// plan is what follows a first graph.
type plan struct {
	first       *graph.Graph
	optimizer   train.OptimizeWithGradients
	dtype       dtypes.DType // of the loss
	afterUpdate []hook

	variables, gradients []*model.Variable
	state                []*model.Variable
	haveState            bool
	second               *model.Exec
}

// pending returns the plan of the gradients that the last step has left.
func (p *Parallel) pending(store *model.Store) (*plan, error) {
	v := store.GetVariable(pendingPath)
	if v == nil {
		return nil, fmt.Errorf("gomlx: the trainer has another optimizer: give NewTrainer the one that Parallel.Optimizer returns")
	}
	value, err := v.Value()
	if err != nil {
		return nil, err
	}
	i := tensors.ToScalar[int64](value)
	if err := v.SetValue(tensors.FromScalar(int64(0))); err != nil {
		return nil, err
	}
	if i < 1 || int(i) > len(p.plans) {
		return nil, fmt.Errorf("gomlx: variable %s is %d, want 1 to %d: Apply must follow a step of a trainer with this Parallel's optimizer", pendingPath, i, len(p.plans))
	}
	return p.plans[i-1], nil
}

// stateOf returns the variables of floats that the first graph changes, besides gradients.
func (x *plan) stateOf(store *model.Store) []*model.Variable {
	if x.haveState {
		return x.state
	}
	for v := range store.IterVariables() {
		if !v.Trainable && isFloat(v.DType()) && !own(v) && v.ChangedInGraph(x.first) {
			x.state = append(x.state, v)
		}
	}
	x.haveState = true
	return x.state
}

// apply runs the second graph.
func (x *plan) apply(p *Parallel, trainer *train.Trainer) error {
	if x.second == nil {
		var err error
		x.second, err = model.NewExec(trainer.Backend(), trainer.Store(), func(scope *model.Scope, g *graph.Graph) {
			gradients := make([]*graph.Node, len(x.variables))
			for i, v := range x.variables {
				v.NodeValue(g) // the optimizer looks at the variables that the graph uses
				gradients[i] = x.gradients[i].NodeValue(g)
			}
			x.optimizer.UpdateGraphWithGradients(scope, gradients, x.dtype)
			for _, h := range x.afterUpdate {
				h.f(trainer.Store().Scope(h.scope), g)
			}
			// The optimizer's own variables, which rank 0 may have loaded.
			if err := p.sync(trainer.Store(), g); err != nil {
				panic(err)
			}
		})
		if err != nil {
			return fmt.Errorf("gomlx: the update: %w", err)
		}
	}
	if _, err := x.second.Call(); err != nil {
		return fmt.Errorf("gomlx: the update: %w", err)
	}
	return nil
}

// reducer averages the gradients of a list of variables.
type reducer struct{ d *ddp.DDP }

// reduce averages the gradients of a plan. Plans of the same variables share a reducer, because
// ranks may have made their graphs in another order.
func (p *Parallel) reduce(x *plan) error {
	var paths strings.Builder
	for _, v := range x.variables {
		fmt.Fprintln(&paths, v.Path(), v.Shape())
	}
	r := p.reducers[paths.String()]
	if r == nil {
		same, err := p.same(hash(paths.String()))
		if err != nil {
			return err
		}
		if !same {
			return fmt.Errorf("%w in this step: %w", ErrModelMismatch, p.difference(x.variables))
		}
		params := make([]ddp.Param, len(x.variables))
		for i, v := range x.variables {
			dtype, err := dtypeOf(v.DType())
			if err != nil {
				return err
			}
			value, err := tensor.New(dtype, v.Shape().Dimensions...)
			if err != nil {
				return fmt.Errorf("gomlx: variable %s: %w", v.Path(), err)
			}
			params[i] = ddp.Param{Name: v.Path(), Value: value}
		}
		d, err := ddp.New(p.ctx, p.group, params, ddp.Options{
			BucketCap: p.options.BucketCap, Hook: p.options.Hook,
			NoInitSync: true, GradientAsBucketView: true,
		})
		if err != nil {
			return fmt.Errorf("gomlx: %w", err)
		}
		r = &reducer{d}
		p.reducers[paths.String()] = r
	}
	if err := r.average(p, x); err != nil {
		return fmt.Errorf("gomlx: %w", err)
	}
	return nil
}

func (r *reducer) average(p *Parallel, x *plan) error {
	if err := r.d.Begin(p.ctx); err != nil {
		return err
	}
	// The last gradients are in the first bucket: it is sent while the next is filled.
	for i := len(x.gradients) - 1; i >= 0; i-- {
		err := r.each(x, i, func(gradient, bucket *tensor.Tensor) error {
			if p.weight == 0 {
				return bucket.Fill(0) // also if it is not a number
			}
			if err := bucket.CopyFrom(gradient); err != nil {
				return err
			}
			return scale(bucket, p.weight)
		})
		if err != nil {
			return err
		}
		if err := r.d.Ready(i); err != nil {
			return err
		}
	}
	if err := r.d.Finish(p.ctx); err != nil {
		return err
	}
	for i := range x.gradients {
		if err := r.each(x, i, func(gradient, bucket *tensor.Tensor) error { return gradient.CopyFrom(bucket) }); err != nil {
			return err
		}
	}
	return nil
}

// each calls f with a gradient and its place in a bucket.
func (r *reducer) each(x *plan, i int, f func(gradient, bucket *tensor.Tensor) error) error {
	value, err := x.gradients[i].Value()
	if err != nil {
		return err
	}
	bucket := r.d.GradView(i)
	return mutate(value, func(t *tensor.Tensor) error {
		t, err := t.Reshape(bucket.Shape()...)
		if err != nil {
			return err
		}
		return f(t, bucket)
	})
}

// scale multiplies the elements of a tensor.
func scale(t *tensor.Tensor, factor float64) error {
	if factor == 1 {
		return nil
	}
	if t.DType() == tensor.Float32 && t.IsContiguous() {
		elements, err := tensor.Data[float32](t)
		for i := range elements {
			elements[i] *= float32(factor)
		}
		return err
	}
	flat, err := t.Reshape(t.Len())
	if err != nil {
		return err
	}
	for i := range flat.Len() {
		v, err := flat.Float64At(i)
		if err != nil {
			return err
		}
		if err := flat.SetFloat64(v*factor, i); err != nil {
			return err
		}
	}
	return nil
}
