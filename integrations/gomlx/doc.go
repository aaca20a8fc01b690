// Package gomlx trains a GoMLX model on the ranks of a process group.
//
// A program of one process becomes one of several ranks by these lines (testdata/single and
// testdata/parallel are the whole programs):
//
//	diff single/main.go parallel/main.go
//	+	"context"
//	..
//	+	"github.com/c10d-go/c10d/integrations/gomlx"
//	..
//	+	p, err := gomlx.Init(context.Background())
//	+	if err != nil {
//	+		log.Fatal(err)
//	+	}
//	+	defer p.Close()
//	..
//	-		optimizer.Adam().LearningRate(0.01).Done(),
//	+		p.Optimizer(optimizer.Adam().LearningRate(0.01).Done()),
//	..
//	-	loop := train.NewLoop(trainer)
//	-	metrics, err := loop.RunSteps(ds, 100)
//	+	loop := p.NewLoop(trainer)
//	+	metrics, err := loop.RunSteps(p.Split(ds), 100)
//
// Start the ranks with a launcher, for example "c10d run -n 4 -- ./program". A program that no
// launcher has started trains alone.
//
// Every rank has the whole model and trains on its part of each batch. The model gets the updates that
// one process would compute with the whole batch, but for rounding. The tests hold 1, 2 and 4 ranks to
// the loss of one process within 1e-4 of it, for each of 30 steps. Adam divides a gradient by its size, so
// the rounding of small gradients grows: weights of float32 can differ by 1e-3 after 50 steps, where those of
// float64 agree in 12 digits.
//
// # What it does
//
//   - Variables: all ranks begin with rank 0's, which may come from a checkpoint. Ranks with other
//     models get ErrModelMismatch.
//   - Gradients: averages over the ranks, in the buckets of package ddp, with its hooks (Options.Hook).
//   - Data: Split divides each batch, Shard deals whole batches. Parts of unequal size have
//     weights. Ranks that read other batches, for example because each shuffles in its own way, get an error.
//   - Metrics: what a step returns, and what hooks of the loop see, are averages over the ranks. Eval
//     divides an evaluation over the ranks.
//   - Other variables that a step changes (statistics of normalisation layers, moving averages): averages
//     over the ranks, by rows. The state of the random generator is each rank's own, also with one seed for
//     all, so that ranks drop other neurons.
//   - Checkpoints: Save is a hook that saves on rank 0. OnRank0 restricts any other hook.
//
// # How it works
//
// GoMLX computes gradients and applies the optimizer in one graph, and its Go backend has no
// AllReduce. Optimizer therefore cuts the graph. The trainer's graph leaves the gradients in
// variables (scope "c10d"). The hook of NewLoop averages them and runs a second graph with the
// program's optimizer. This works on every backend of GoMLX. A step copies each gradient into
// a bucket and back, and sends one small message more for the metrics. The ranks' DDP keeps
// as much memory as the trained variables have, besides its buckets.
//
// # Limits
//
// Batch normalisation uses the mean and variance of a rank's own rows, as in PyTorch's DDP without SyncBatchNorm. So
// a model with it differs from that of one process. Give norm.UpdateBatchNormAverages the whole dataset on all
// ranks: the statistics are then those that one process has for the same weights.
//
// The optimizer must take gradients (train.OptimizeWithGradients), as all of GoMLX's do.
// Trainer.AccumulateGradients is refused by NewLoop and Apply. All ranks must run the same Spec in the same step.
// DistributedDataset, GoMLX's own distribution over the devices of one process, cannot be combined with
// it. After an error the group has to be made again; a program goes on from a checkpoint.
//
// There is no backend whose graphs contain the all-reduce (compute.CollectiveOps). A graph of GoMLX reduces over a
// mesh of devices that are all of one process. Its trainer then wants batches for each of them.
// Ranks of other processes have no place in the mesh. The Go backend also runs a graph as a whole.
package gomlx
