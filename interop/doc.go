// Command interop tests that Go ranks and PyTorch ranks can be in one group.
//
// It starts jobs whose ranks are "c10d rank" or rank.py. Both run the same script of operations
// (package internal/script). It compares the digest of every result on every rank with those of a
// job of PyTorch ranks alone. It prints a table of equal operations, and of those that PyTorch
// refuses, with reasons. Anything else is a difference, and the exit status is 1.
//
//	go run -C interop .                               PyTorch of /usr/bin/python3
//	go run -C interop . -python "./debian13 python3"  PyTorch 2.6 of Debian 13
//	go run -C interop . -table a.json b.json          one Markdown table of saved runs
//
// # A run
//
// First a job of two PyTorch ranks tries every operation with every dtype and operator. It must
// refuse exactly the combinations that function refusal lists for that version. The others go
// into scripts.
//
// The matrix: worlds of 2 to 5 ranks, one Go rank in every place, one PyTorch rank in every
// place, and Go ranks alone. Each runs every operation with every dtype and operator, also in
// sub-groups. Tensors have no, one or an odd number of elements, whole numbers and fractions.
// Some have several segments of Gloo's ring (more than 2 MiB a rank).
//
// With -quick a group of each size has one Go or PyTorch rank in one place only. Worlds of 4 and 5
// run a fifth of the operations. Later jobs that repeat others in other places are left out.
//
// Then a shorter script in other environments:
//
//   - stores hosted by "c10d store", by torchrun's agent and in a shared file;
//   - a store barrier, two devices, no interface named, IPv6;
//   - overlapping groups in groups;
//   - ranks that compare their collectives first (TORCH_DISTRIBUTED_DEBUG=DETAIL);
//   - 500 random lines from a seed that is printed.
//
// Last, one rank makes another call under DETAIL; all ranks must report it and go on. Then a rank
// is killed. A Go rank must name the dead PyTorch rank within two seconds. A PyTorch rank must
// say that its connection was closed.
//
// # A machine without Go
//
// The program contains rank.py, so two static binaries are enough. It skips the IPv6 job if it
// cannot make a network namespace.
//
//	CGO_ENABLED=0 go build -o bin/ ./cmd/c10d
//	CGO_ENABLED=0 go build -C interop -o ../bin/ .
//	bin/interop -c10d bin/c10d -python python3 -json out.json
package main
