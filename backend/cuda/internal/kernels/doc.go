// Package kernels has the kernels of the works on device memory: what kernels.cu
// says, as a PTX text that the driver compiles for the device it runs on.
//
// The script recipe makes the text from the source. It needs clang and nothing of
// CUDA; who only builds the module needs neither, for the text is in the tree. A
// test holds that text and source belong together.
//
// A kernel of [Step] does a step of a ring. It combines data of a neighbour with
// those of its own device, and writes the result to one or two places. One of them may
// be in another device's memory. Nothing in a kernel waits for anything. Order comes from the streams: events, and words that streams write
// and wait for.
//
// Package driver/sim runs no PTX; package driver/sim/simkernels has the same
// kernels as Go functions.
package kernels
