// Package gpu lets package ddp train models whose parameters are in device memory.
//
//	dev, err := gpu.New(device, stream) // the stream of the trainer's kernels
//	...
//	defer dev.Close()
//	d, err := ddp.New(ctx, group, params, ddp.Options{Device: dev, GradientAsBucketView: true})
//	...
//	for batch := range batches {
//		err := d.Begin(ctx)
//		...
//		for i := range slices.Backward(params) {
//			grad, err := gpu.Ptr(d.GradView(i)) // where the kernel writes the gradient
//			...
//			err = stream.Launch(backward(i, grad))
//			...
//			err = d.Ready(i)
//		}
//		err = d.Finish(ctx)
//		...
//		err = stream.Launch(step) // the optimizer
//	}
//	err = d.Wait(ctx) // what went wrong on the way, before the model is saved
//
// The loop enqueues and does not wait for the device: Ready starts the
// all-reduce of a bucket after the kernels that the stream has been given, which
// go on with the next gradients; Finish makes the stream wait for the averages.
// A trainer that reads the loss of a step waits for that alone, with an event of
// its own.
//
// Buckets are device memory, copies to and from them are the stream's, and the
// group divides: an average is one all-reduce with backend.Avg() and nothing else.
// What ranks tell each other about the model goes through CPU memory, so the
// group needs a backend for it too: "cpu:gloo,cuda:cuda".
//
// # What it is not
//
// It computes nothing. Hooks that cast or divide gradients have to bring their
// own kernels.
package gpu
