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
//	err = d.Wait(ctx) // errors of the collectives, before the model is saved
//
// The loop enqueues and does not wait for the device. Ready orders the all-reduce of a bucket
// after the stream's kernels, which go on with the next gradients. Finish makes the stream wait
// for the averages. To read the loss of a step, the trainer waits for an event after it.
//
// All-reduces take 16 multiprocessors from the kernels beside them ([cuda.Beside]). That of the last
// bucket has none beside it. It runs on the stream itself, which saves the events between two streams.
// With Options.Hook it does not.
//
// Buckets are in device memory, and copies to and from them are on the stream. The group divides:
// an average is one all-reduce with pg.Avg(). Ranks also exchange data about the model in CPU
// memory, so the group needs a backend for the CPU too: "cpu:gloo,cuda:cuda".
//
// # Limits
//
// Hooks that compress gradients to float16 or bfloat16 work. Other hooks that compute with gradients need
// kernels of their own.
package gpu
