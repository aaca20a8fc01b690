// Package trace records what a rank does, for people who look for the slow or the missing one.
//
// Every rank has a Recorder: a ring of its last operations, in all its groups and epochs. It is on by
// default. pg.Options.Recorder replaces it, for example by one with observers:
//
//	r := trace.New(trace.Options{Prefix: "/tmp/job/rank_", Observers: []trace.Observer{metrics}})
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Recorder: r}})
//
// # Dumps
//
// A Recorder with a prefix writes its ring to a file when an operation fails, and when a call finds that its group has
// failed. Dump writes it, too. pg.Init takes the prefix from the variable C10D_TRACE. On Unix, a process then also
// writes its file on SIGUSR1:
//
//	C10D_TRACE=/tmp/job/rank_ c10d run -n 4 -- ./train
//	kill -USR1 PID                # of a rank
//	c10d trace /tmp/job/rank*     # who was late, and a file for ui.perfetto.dev
//
// Wait of a failed operation returns when the file is written, and so does Close. Both wait for at most two seconds.
// If the file cannot be written, a line in the log says why. Only this user can read it, and a directory that Dump makes.
//
// A dump names its run, the launcher's name for the job, and how often the launcher has restarted it. The newest file of
// a rank has the plain name. When a run finds one of an earlier run, it renames that: rank_3 of run 5e1c09aa, attempt 0,
// becomes rank.5e1c09aa.0.3. So PyTorch's analyzer, which takes all files with "rank_" in their names, does not read it.
// It reads the earlier run with -p rank.5e1c09aa.0. instead. c10d trace and Runs separate the dumps of different runs.
//
// After an elastic change a process can have another rank. Its dump names all ranks by the numbers that they keep
// in all epochs (pg.View), which are their ranks in the first one.
//
// The file is in the format of PyTorch's flight recorder, version 2.10. The analyzer of PyTorch 2.11
// reads it: torchfrtrace /tmp/job -p rank_. It mixes the runs of files that a larger job has left. Give it what
// c10d trace -torch writes of the last run then.
//
// # Differences from PyTorch's flight recorder
//
// Entries have stack frames only with Options.Stacks, or C10D_TRACE_STACKS=1. A failed operation is retired and not
// completed, as there, and has its error in the additional key "error". A dump has the additional keys "rank",
// "host_name", "run", "job" and "attempt". Each group's status has the group's name in the
// additional key "name". The sizes of several tensors of one shape are one size, with the number of tensors as first
// dimension.
//
// Names of operations begin with "nccl:", for all backends. The analyzer of PyTorch 2.11 refuses
// names that begin with "gloo:". c10d trace takes any.
//
// The analyzer cannot read dumps of ranks with PyTorch's Gloo. Their operations have such names and stay
// scheduled, and their groups have no names. c10d trace reads them. It also writes all dumps again so
// that the analyzer takes them:
//
//	c10d trace -torch /tmp/fixed /tmp/job/rank*
//	torchfrtrace /tmp/fixed -p rank_
//
// # Cost
//
// By itself, recording an operation takes about 0.1 us and no allocation. An observer that does nothing takes 20 ns
// more, because an Event is a place in the ring and copies nothing. BenchmarkCall has these figures: the
// least of six runs on a Xeon, 105 ns. Within a call most of that goes on while the rank waits for others. With
// pg.Options.Recorder: trace.Off nothing is recorded.
//
// BenchmarkRecorder in package pg compares rounds of one group with and without a recorder in turn:
//
//	go test -run '^$' -bench Recorder/2/1024 -benchtime 4000x ./pg
//
// An all_reduce of 1 KiB takes two ranks 1.2 to 1.4 us without a recorder, on two CPUs of an EPYC. With a recorder it takes
// 5 % longer, and with an observer 10 %. The control, with no recorder either, was within 0.3 %.
//
// # For authors of groups
//
// Packages pg and trace/debug call these, and a program needs none of them: [Member], [Recorder.Join], [Recorder.Adopt],
// [Recorder.Joined], [Recorder.Ended], [Recorder.Settle], [Group.Calls], [Group.Leave] and
// [Call].
package trace
