// Command figures writes the measured figures of README.md and of pages in docs.
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
// A table has a row for each case: an operation, a number of ranks and a size. Without op,
// ranks or sizes it has every case of the run. Several runs, with commas, stand side by side.
//
//	<!-- figures plot run=16cpus op=all_reduce ranks=8 on="16 CPUs" file=benchmarks/all_reduce.svg -->
//	<!-- figures end -->
//
// A plot shows the times of all systems over the size, and for a single operation the bus bandwidth too. Its
// first line is the text of on. The picture goes to the file, and a link to it into the document.
//
//	<!-- figures range run=4gpus sizes=64K,1M -->1.5 to 5.4x<!-- figures end -->
//
// A range is the smallest and the largest ratio of the first peer's time to this library's.
//
//	<!-- figures time run=2cpus op=all_reduce ranks=2 sizes=1K -->1.09 us<!-- figures end -->
//	<!-- figures rate run=2gpus op=all_reduce sizes=64M -->303 GB/s<!-- figures end -->
//
// Time is this library's median in one case, and rate is the size divided by it.
//
//	<!-- figures targets run=16cpus of=bars-16cpus.txt -->87 of 110<!-- figures end -->
//
// Targets counts the lines of a file in bench that the run meets.
//
//	<!-- figures faults of=faults.jsonl -->
//	<!-- figures end -->
//
// Faults is the table of package faults, of records that "tools faults -json" made.
//
//	<!-- figures steps of=step.jsonl -->
//	<!-- figures end -->
//
// Steps is the table of the records of bench/step.sh.
//
//	<!-- figures timeline of=timeline-1024x9.jsonl on="two H100" file=benchmarks/step.svg -->
//	<!-- figures end -->
//
// Timeline draws the records of bench/timeline.sh.
//
//	<!-- figures graphs of=direct-4gpus.txt op=all_reduce sizes=64K,1M -->0.26 to 0.45<!-- figures end -->
//
// Graphs is the smallest and the largest part of NCCL's time in CUDA graphs.
//
// The tests fail if a document or a picture is not what the records say.
package main
