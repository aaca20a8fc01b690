// Package gorgonia is the driver on gorgonia.org/cu, for programs that have
// contexts, streams and memory of that package already, as Gorgonia's trainers
// do. It is a module of its own, because it needs cgo, CUDA's header and a driver
// library to link with. All other programs use
// [github.com/c10d-go/c10d/backend/cuda/driver/nvidia], which needs none of them.
//
//	ctx, err := cu.Device(0).MakeContext(cu.SchedAuto) // the program's own
//	...
//	d, err := gorgonia.Open(gorgonia.Options{Contexts: map[int]cu.CUContext{0: ctx}})
//	v, err := d.Device(0)
//	s, err := gorgonia.Stream(v, stream)                                // a cu.Stream
//	grad, err := gorgonia.Tensor(v, ptr, tensor.Float32, rows, columns) // a cu.DevicePtr
//
// The stream and the tensor then go where any others do. Nothing is copied: an
// operation on grad works on the memory at ptr.
//
// # Building
//
// Files that need the header have the build tag cuda. So go vet and go test also work without the
// header, and leave these files out. Folder stub has a header with the declarations that are
// needed, and makes a library to link with. A C compiler is enough:
//
//	stub/stub.sh DIR   # makes DIR/libcuda.so, and a driver in software: DIR/fake/libcuda.so.1
//	CGO_CFLAGS=-I$PWD/stub CGO_LDFLAGS=-LDIR go build -tags cuda ./...
//
// The program then loads the driver's own library, of CUDA 11.8 or later.
//
// A toolkit of CUDA 11.8 or 12 in /usr/local/cuda is found without these flags. CUDA 13
// changed five functions that cu uses, but drivers still have the old ones. Put this module's
// folder include before the toolkit's. Its cuda.h includes the toolkit's, and gives the five
// names their old meaning:
//
//	CGO_CFLAGS="-I$PWD/include -I/usr/local/cuda/include"
//
// One module cannot set another's flags, so whoever builds a program with this
// package sets them, too.
//
// # Testing
//
// "make gorgonia", in the root of the repository, compiles all this with the header here, also in
// CI. It leaves three programs in bin, for a machine with GPUs:
//
//   - gorgonia.test is the suite of drivers, and tests of operations with cu's streams and memory.
//
//   - gorgonia-allreduce is the example in folder allreduce. CI runs it on the driver in software.
//
//   - cuda-gorgonia.test has every test of package cuda on GPUs, with this driver under it. It runs
//     in that package's folder:
//
//     ../../bin/cuda-gorgonia.test -test.run '^TestGPU'
//
// # What comes from cu, and what does not
//
// Functions are cu's own where it has them. A small part in C adds the others:
//
//   - page-locked memory, and handles of other processes
//   - cooperative launches, and launches with structures by value
//   - attributes of pointers (cu's function asks for none)
//   - waits and writes of the second kind. The header of 11.8 gives their names to the first
//     kind, which drivers may refuse.
//   - three queries that would allocate
//
// Neither cu.Ctx.Do nor cu.BatchedContext are used.
//
// A program with this package gets CUDA_DEVICE_MAX_CONNECTIONS=32 when it is loaded, before cu
// initialises CUDA, unless its environment has a value. With CUDA's own value, streams that wait
// for other ranks hold up others. Package driver says why. A plugin or a C library in Go is
// loaded later: set the variable for a program that uses CUDA before that.
//
// A program with cu ends at its start where there is no driver or no device. It is
// linked to the driver's library, and cu's init exits if the library finds no device.
// So Open cannot return an error then.
package gorgonia
