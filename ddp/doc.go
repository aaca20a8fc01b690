// Package ddp is PyTorch's DistributedDataParallel: it trains one model on many ranks. The
// trainer has its parameters and gradients in Go slices or in device memory.
//
// # The model
//
// Every rank has the whole model and computes gradients on its own part of the data. DDP averages
// the gradients over the ranks. All optimizers then take the same step, and the models stay
// equal. Gradients are reduced in buckets, flat tensors of about 25 MiB. A bucket is reduced
// while the backward pass computes the gradients of the next.
//
// # A training loop
//
// The trainer lists its parameters in the order in which the model defines
// them, and says in the backward pass when each gradient is final:
//
//	var params []ddp.Param
//	for _, l := range layers {
//		w, err := tensor.Of(l.W, l.Out, l.In)
//		...
//		dw, err := tensor.Of(l.DW, l.Out, l.In)
//		...
//		params = append(params, ddp.Param{Name: l.Name + ".weight", Value: w, Grad: dw})
//	}
//	d, err := ddp.New(ctx, group, params)
//	if err != nil {
//		return err // the ranks' models differ, or a rank is gone
//	}
//	for batch := range batches {
//		if err := d.Begin(ctx); err != nil {
//			return err
//		}
//		loss := forward(layers, batch)
//		for i := len(layers) - 1; i >= 0; i-- {
//			layers[i].backward()               // fills DW
//			if err := d.Ready(i); err != nil { // the earlier, the more overlap
//				return err
//			}
//		}
//		if err := d.Finish(ctx); err != nil { // DW now has the average
//			return err
//		}
//		step(layers, learningRate)
//	}
//
// For slices without shapes, Params makes the list: ddp.Params(values, grads).
//
// Call ReadyGrad if the gradients are in new memory each time. With Options.GradientAsBucketView
// the trainer writes gradients straight into buckets, which saves a copy each way. The package
// example is a complete program.
//
// # What ranks must agree on
//
// Parameters (count, dtypes, shapes, strides, order), buffers and Options must be the same on all
// ranks. New compares them; a difference is a *MismatchError on every rank. After that every rank
// makes the same calls of Begin, Finish and Join. The order of Ready may differ between ranks.
// Buckets are launched in index order, so all ranks send the same sequence of collectives.
//
// # Buckets
//
// Buckets are c10d's, so a PyTorch rank sends the same sequence. In the first iteration there is
// one bucket for each dtype. Then rank 0 broadcasts the order in which its gradients became
// ready, and later buckets follow it. The first has 1 MiB, so that communication starts early,
// and the rest 25 MiB. With FindUnused, buckets are always in reverse order of definition.
//
// Where ranks share a host, buckets in CPU memory are tensors of [pg.ProcessGroup.Alloc], which
// all-reduces read in place. They take as many bytes as in ordinary memory, but not from Go's heap.
// The memory is from memfd_create(2): the size of /dev/shm does not matter, and the limit of a
// container does. DDP frees it when it rebuilds the buckets, and when the program has dropped the DDP
// and the collector has run. Operations of the same group on large ordinary tensors then wait once
// more. Buckets lie in ordinary memory if a rank has no room, or if a limit of addresses or file
// sizes is set (ulimit -v, -f). They are in ordinary memory, too, if Options sets GradientAsBucketView,
// Hook or PyTorch, and in an Elastic.
//
// # Accumulating gradients
//
// Iterations inside NoSync reduce nothing. The trainer adds up gradients in
// its own tensors, and the first iteration outside reduces the sums.
//
// # Parameters without a gradient
//
// Set FindUnused if some parameters get no gradient in some iterations. Finish then counts a
// missing gradient as zeros. A small all-reduce finds the parameters that no rank used; their
// Grad does not change. If the same parameters are unused in all iterations, use StaticGraph: it
// finds them in the first iteration and costs nothing later.
//
// # Unequal numbers of inputs
//
// Inside Join a rank may run out of inputs before the others. It then takes
// part in their collectives with zeros. When all have run out, every rank gets the
// model of the one that finished last.
//
// # Hooks
//
// Options.Hook replaces the all-reduce of a bucket. FP16CompressHook and BF16CompressHook halve
// the bytes sent, and CompressWrapper does so around another hook. A hook of your own uses the
// methods of Bucket.
//
// PowerSGD sends matrices as products of two thin ones: many times fewer bytes, and an
// approximation. PostLocalSGDHook averages gradients among the ranks of a host only, and a
// PeriodicAverager the models of all ranks from time to time.
//
// # Optimizer state divided over the ranks
//
// A ShardedOptimizer keeps 1/n of the optimizer's state on each of n ranks (ZeRO stage 1) and takes
// the place of a DDP. It sends as many bytes, but only after the backward pass. Parameters are in
// CPU memory. A checkpoint must save the state of every rank, and fits only the same number of ranks.
//
// # Parameters on a device
//
// All or some parameters may be in device memory. Options.Device says how to use it; package
// ddp/gpu makes one for GPUs and for simulated ones. Their buckets are on the device too. Begin,
// Ready and Finish then enqueue on the trainer's stream and do not block. The all-reduce of a
// bucket follows the kernels that computed its gradients, and the optimizer's kernels follow the
// averages. FindUnused still blocks, because it needs the other ranks' data on the host.
//
// On a device the group divides (pg.Avg()). Hooks that cast gradients need a Device
// with a method Cast, as that of ddp/gpu has. Call Wait to learn whether the collectives succeeded,
// for example before a checkpoint.
//
// # Errors
//
// A wrong call (an index, a dtype, a gradient that was ready twice) returns an error and changes
// nothing. If a collective fails, Begin, Ready or Finish returns an error that names the bucket,
// its parameters and the rank at fault. The state of other ranks is then unknown. Every later
// call returns ErrFailed with the cause. A trainer uses Elastic, or starts again from a checkpoint
// with a new group. The caller closes the group. DDP has no goroutines and needs no Close.
//
// # Ranks that die and come
//
// An Elastic is a DDP that survives its ranks. It counts the steps of the training. A step that a
// death interrupts is done again by the ranks that are left, and gradients are divided by their
// number. A newcomer gets parameters, buffers and the optimizer's state of a rank that has them.
// docs/elastic.md has the rules, and examples/ddp a program.
//
// # Cost
//
// Without sparse gradients, an iteration allocates only the Works of its collectives and, on a
// device, their contexts.
//
// # Limits
//
// There is no mixed precision and no sharding of parameters or gradients. DDP does not see the model. It
// cannot find unused parameters before the backward pass, as PyTorch can, and it reduces only
// gradients for which Ready is called.
package ddp
