// Command judge runs PyTorch's own tests of process groups against this library.
//
// A group of this library takes the place of PyTorch's ProcessGroupGloo: a C library over package pg (folder lib), and a
// Python class over that (c10d_go.py). The tests are those of the PyTorch that is there. Every PyTorch has
// distributed_test.py. The other files are in its sources (test/distributed); flag -tests names the folder. On Debian
// "apt-get source --download-only pytorch" fetches the sources.
//
//	go run -C interop/judge .                                PyTorch of /usr/bin/python3
//	go run -C interop/judge . -python "../debian13 python3"  PyTorch 2.6 of Debian 13
//	go run -C interop/judge . -run broadcast -wire tcp       some cases on one wire
//	go run -C interop/judge . -speed                         times of all_reduce from Python, beside gloo
//	go run -C interop/judge . -table a.json b.json           a Markdown table of saved runs
//
// It needs Linux and a C compiler.
//
// # A run
//
// Each case runs with gloo first, and then with this library on each wire: shared memory, TCP with a host for each rank,
// Gloo's wire, and shared memory under TORCH_DISTRIBUTED_DEBUG=DETAIL. Cases that gloo skips are left out, but for those of
// all_to_all, which PyTorch tests for MPI alone. A case fails if
//
//   - it fails here and not with gloo, or
//   - an error has another text than the test wants,
//
// unless expected.go lists it, with a reason. A case that fails is run a second time, alone, because PyTorch's tests
// have limits of 10 s and less. Cases that are listed and pass are printed.
//
// A worker is one Python process that runs cases one after the other. At most -parallel of them run at a time. A
// worker whose case takes more than three times -timeout is killed with its children, and the next one goes on.
//
// # A machine without Go
//
//	CGO_ENABLED=1 go build -C interop/judge -buildmode c-shared -o ../../bin/libc10dgo.so ./lib
//	CGO_ENABLED=0 go build -C interop/judge -o ../../bin/ . && CGO_ENABLED=0 go build -o bin/ ./cmd/c10d
//	bin/judge -library bin/libc10dgo.so -c10d bin/c10d -python python3 -tests PYTORCH/test/distributed -json out.json
package main
