// Command interop proves that Go ranks and PyTorch ranks make one group.
//
// It starts jobs whose ranks are partly "c10d rank" and partly rank.py, which
// run the same script of operations (package internal/script), and compares the
// digests of every result on every rank with those of a job of PyTorch ranks
// alone. It ends with a table: what was equal, and what PyTorch itself does not
// do and why. Anything else is a difference, and the exit status is 1.
//
//	go run ./interop                                    PyTorch of /usr/bin/python3
//	go run ./interop -python "interop/debian13 python3" PyTorch 2.6 of Debian 13
//	go run ./interop -table a.json b.json               one Markdown table of saved runs
//
// # What a run consists of
//
// First a job of two PyTorch ranks is asked what it takes: every operation with
// every dtype and operator. What it refuses must be what function refusal says
// of that version, no more and no less; only what it takes goes into scripts.
//
// The matrix: worlds of 2 to 5 ranks, one Go rank in every place, one PyTorch
// rank in every place, and Go ranks alone. Each runs every operation with every
// dtype and operator, with tensors of no, one and an odd number of elements,
// with whole numbers and with fractions, some of several segments of Gloo's
// ring (more than 2 MiB a rank), and in sub-groups.
//
// Then a shorter script in other surroundings: stores hosted by "c10d store",
// by torchrun's agent and in a shared file, a store barrier, two devices, no
// interface named, IPv6; groups in groups that overlap and are used in turns;
// ranks that compare their collectives first (TORCH_DISTRIBUTED_DEBUG=DETAIL);
// and 500 lines drawn from a seed that is printed.
//
// Last, a rank calls something else under DETAIL, and all must say so and go
// on; and a rank is killed: a Go rank must name the PyTorch rank that died
// within two seconds, a PyTorch rank must say that its connection was closed.
//
// # A machine without Go
//
// rank.py is inside the program, so two static binaries are all it takes. (The
// IPv6 job is left out where no network of its own can be made for it.)
//
//	CGO_ENABLED=0 go build -o bin/ ./interop ./cmd/c10d
//	bin/interop -c10d bin/c10d -python python3 -json out.json
package main
