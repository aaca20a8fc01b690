// Package kernels has the kernels of the works on device memory: what kernels.cu
// says, as a PTX text that the driver compiles for the device it runs on.
//
// The script recipe makes the text from the source. It needs clang and nothing of
// CUDA; who only builds the module needs neither, for the text is in the tree. A
// test holds that text and source belong together.
//
// One kernel waits, Exchange, and that for the host. The order of all others comes from the streams: events, and
// words that streams write and wait for.
//
// Package driver/sim runs no PTX; package driver/sim/simkernels has the same
// kernels as Go functions.
package kernels
