// Package gpumlp is the perceptron of package mlp in device memory. It shows how a trainer
// with kernels of its own uses this library.
//
// A [Model] has the parameters, the activations, the gradients' way back and the
// optimizer's state on one device, and one stream on which everything happens in
// order. Its calls enqueue and return; [Model.Result] alone waits, for the loss of
// the last pass and not for what was enqueued behind it.
//
// # The kernels
//
// kernels.cu is CUDA C++, compiled ahead to PTX by examples/internal/ptx.sh and
// embedded, so that neither building nor running needs a compiler. The machine's
// driver translates the PTX for whatever device there is, from compute capability
// 8.0 on. On the simulator, which does not run PTX, [Kernels] has Go functions of
// the same names, made of package mlp's loops.
//
// Both add up in the order of package mlp and round as it does. A training differs from
// the CPU's where the ranks' sums are added in another order. On a GPU it also differs by
// the rounding of tanh and exp, which are computed with a relative error of 1e-13.
//
// # How a launch is written
//
// Three things must agree: the parameters in kernels.cu, those in the launch, and the
// memory that the kernel reads and writes. The simulator, and drivers since CUDA 12.4,
// refuse parameters of other sizes. The simulator also fails a kernel that uses memory
// which its launch does not declare, and reports two launches on different streams
// without an order between them.
package gpumlp
