// Command figures writes the measured figures of README.md, docs/benchmarks.md and docs/faults.md.
//
//	make figures   # writes them again
//
// The figures come from the records in docs/benchmarks, which "make bench-peers" makes
// (bench/README.md has their format). A run is a set of files there: 16cpus is
// c10d-go-16cpus.jsonl, openmpi-16cpus.jsonl and torch-gloo-16cpus.jsonl.
//
// Comments in the documents say what to write. The text between the two comments is
// replaced:
//
//	<!-- figures table run=16cpus op=all_reduce ranks=8 -->
//	<!-- figures end -->
//
// A table has a row for each case: an operation, a number of ranks and a size. Without op
// or ranks it has every case of the run. Several runs, with commas, stand side by side.
//
//	<!-- figures plot run=16cpus op=all_reduce ranks=2,8 file=benchmarks/ratios.svg -->
//	<!-- figures end -->
//
// A plot shows the ratio of each peer's time to this library's. The picture goes to the
// file, and a link to it into the document.
//
//	<!-- figures targets run=16cpus of=bars-16cpus.txt -->87 of 110<!-- figures end -->
//
// Targets counts the lines of a file in bench that the run meets.
//
//	<!-- figures faults of=faults.jsonl -->
//	<!-- figures end -->
//
// Faults is the table of package faults, of records that "tools faults -json" made. Says is its table
// of errors.
//
// The tests fail if a document or a picture is not what the records say.
package main
