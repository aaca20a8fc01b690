// Package ddp trains one model on many ranks: what DistributedDataParallel is
// to c10d, for trainers that hold their parameters and gradients in Go slices or
// in device memory.
//
// # The model
//
// Every rank has the whole model and computes gradients on its own part of the
// data. DDP averages the gradients over the ranks, so that equal optimizers on
// all ranks take equal steps and the models stay equal. Gradients are reduced
// in buckets, flat tensors of about 25 MiB, and a bucket is reduced while the backward
// pass is still computing the gradients of the next.
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
//	d, err := ddp.New(ctx, group, params, ddp.Options{})
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
// ReadyGrad is for trainers whose gradients are in new memory each time, and
// Options.GradientAsBucketView for those that can write them where DDP wants
// them, which saves a copy each way. The package example is a complete program.
//
// # What ranks must agree on
//
// Parameters (count, dtypes, shapes, strides, order), buffers and Options must
// be the same on all ranks. New compares them; a difference is a
// *MismatchError on every rank. After that every rank makes the same calls of
// Begin, Finish and Join. The order of Ready may differ from rank to rank:
// buckets are launched in index order whatever becomes ready first, so all
// ranks send the same sequence of collectives.
//
// # Buckets
//
// They are c10d's, so that a PyTorch rank sends the same sequence too. In the
// first iteration there is one bucket for each dtype. The order in which
// gradients became ready on rank 0 is then broadcast, and later buckets follow it: 1 MiB for the
// first, so that communication starts early, 25 MiB for the rest. With
// FindUnused buckets are in reverse order of definition from the start, and stay so.
//
// # Accumulating gradients
//
// Iterations inside NoSync reduce nothing. The trainer adds up gradients in
// its own tensors, and the first iteration outside reduces the sums.
//
// # Parameters without a gradient
//
// A trainer in which some parameters take no part in some iterations sets
// FindUnused. Finish then counts a missing gradient as zeros, and one small
// all-reduce finds the parameters that no rank used: their Grad is left alone.
// If the same parameters are unused in all iterations, StaticGraph finds them in the
// first and costs nothing later.
//
// # Unequal numbers of inputs
//
// Inside Join a rank may run out of inputs before the others. It then takes
// part in their collectives with zeros. When all have run out, every rank gets the
// model of the one that finished last.
//
// # Hooks
//
// Options.Hook replaces the all-reduce of a bucket: FP16CompressHook and
// BF16CompressHook halve what is sent, CompressWrapper does so around a hook of
// the user's own, and Bucket has what such a hook needs.
//
// # Parameters on a device
//
// Parameters may be in device memory, all or some, if Options.Device says how to
// use it: package ddp/gpu does for GPUs and for simulated ones. Their buckets are
// on the device too. Begin, Ready and Finish then enqueue on the trainer's stream and
// do not block: the all-reduce of a bucket comes after the kernels that computed
// its gradients, and the optimizer's kernels come after the averages. FindUnused,
// which has to know what the others used, blocks all the same.
//
// The group divides (backend.Avg()), and the hooks that cast gradients are for
// CPU memory. Wait tells, before anything leaves the program, how the collectives
// have ended.
//
// # Errors
//
// A call that was wrong (an index, a dtype, a gradient that was ready twice)
// is an error that changes nothing. What goes wrong between ranks comes out of
// Begin, Ready or Finish and names the bucket, its parameters and the rank whose fault
// it was. This rank then no longer knows what the others did: every
// later call returns ErrFailed with the cause, and a trainer starts again from a
// checkpoint with a new group. The caller closes the group; DDP owns no goroutine and needs no Close.
//
// # Cost
//
// A steady iteration allocates nothing but the Works of its collectives and, on
// a device, their contexts; sparse gradients are the exception.
//
// # What it does not do
//
// Mixed precision and sharding of parameters are not here.
// DDP does not see the model: it cannot find unused parameters before the
// backward pass as PyTorch can, nor reduce a gradient that nobody reports.
package ddp
