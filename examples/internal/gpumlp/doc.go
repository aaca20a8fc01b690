// Package gpumlp is the perceptron of package mlp in device memory. It shows how a trainer
// with kernels of its own uses this library.
//
// A [Model] has the parameters, activations, derivatives and the optimizer's state on one
// device, and one stream for all kernels. Its calls enqueue and return. Only [Model.Result]
// waits: for the loss of the last pass, and not for kernels that were enqueued after it.
//
// # The kernels
//
// kernels.cu is CUDA C++. backend/cuda/ptx.sh compiles it to PTX, which is embedded:
// building and running need no compiler. The machine's driver translates the PTX for
// devices of compute capability 8.0 and later. The simulator does not run PTX. For it
// [Kernels] has Go functions of the same names, with package mlp's loops.
//
// Both add up in the order of package mlp and round as it does. A training differs from
// the CPU's where the ranks' sums are added in another order. On a GPU it also differs by
// the rounding of tanh and exp, which are computed with a relative error of 1e-13.
//
// # How a launch is written
//
// Three things must agree: the parameters in kernels.cu, those in the launch, and the memory that
// the kernel reads and writes. The simulator, and drivers since CUDA 12.4, refuse parameters of
// other sizes. The simulator also fails a kernel that uses memory outside its launch's
// declaration. It reports two launches on different streams without an order between them.
package gpumlp
