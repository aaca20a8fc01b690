// Package gpumlp is the perceptron of package mlp in device memory: what a
// trainer with kernels of its own looks like on this library.
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
// Both add up in the order of package mlp and round as it does, so a training
// differs from the CPU's only where the ranks' sums are added in another order,
// and on a GPU by the rounding of tanh and exp, which are computed to 1e-13.
//
// # How a launch is written
//
// Three things have to agree: the parameters in kernels.cu, those in the launch,
// and what the kernel reads and writes. The simulator, and drivers since CUDA 12.4,
// refuse parameters of other sizes; the simulator also fails a kernel that touches
// what its launch has not declared, and reports two launches on different streams
// that nothing orders.
package gpumlp
