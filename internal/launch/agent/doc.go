// Package agent is a launcher: it starts the ranks of a job on this host as
// torchrun does, with torchrun's environment variables, shows what they print,
// and ends all of them when one fails. The command "c10d run" is its front.
//
// # What a rank gets
//
// The agent of node 0 hosts the store, a fresh one for each attempt, and tells
// the ranks so (TORCHELASTIC_USE_AGENT_STORE=True): any of them may die without
// taking the store along. Each rank has a process group of its own, no standard
// input, and two files: one in which it may leave the reason of its failure
// (TORCHELASTIC_ERROR_FILE, torchrun's JSON form), and one in which package pg notes
// which rank ended its group (C10D_FAILURE_FILE). They are in a directory of the agent,
// in Job.LogDir if there is one, else in the system's temporary directory. The agent
// removes it, or, if it is killed, its guard. In Job.LogDir the error files of failed
// ranks stay.
//
// # How a job ends
//
// A rank fails by ending with an exit code other than 0, or by a signal. The rank that
// ends first is often not the one at fault: a rank that panics leaves its group, the
// others fail and end, and only then it prints the panic. After the first failure the
// agent therefore waits 200 ms for others. It waits up to a second while a rank writes
// to its standard error, and up to three for a rank that others name or that is printing
// a panic. Then the other ranks get SIGTERM, and SIGKILL after Job.Grace. A stopped rank
// goes on, so that it can take the SIGTERM. Whatever a rank leaves behind in its process
// group dies with it.
//
// The rank at fault is found by what is known of the ranks that failed. What a rank's
// group noted comes first, then panics, tracebacks and signals, then what ranks wrote of
// each other, and last the time. It may be a rank that has not failed: one that was
// stopped, or that ended with exit code 0 while others needed it.
//
// Then there is another attempt, or the Summary says which rank was at fault, when and how
// it ended, its panic or last error line, who named it, and the other ranks that failed.
//
// A signal from Job.Signals is passed on to every rank's process group. Ranks
// that are still there Job.Grace later get SIGKILL; a second signal has that
// effect at once. There is no further attempt.
//
// If the agent itself is killed, the kernel kills the ranks (on Linux), and
// the guard, a process that does nothing but wait for the agent's end, kills
// what they left in their process groups (on every Unix), and removes the agent's
// directory. Only a process that
// has made a session or group of its own escapes.
//
// # Several nodes
//
// With Job.Nodes above 1, an agent runs on each. They meet in a store that node
// 0 hosts at Job.MasterAddr and Job.MasterPort; nodes may have different numbers
// of ranks. A failure on one node ends the attempt on all: every agent tells node 0 what
// it knows of its ranks, node 0 finds the one at fault, and every agent reports it. The ranks' store is beside it on a port that
// node 0 picks.
package agent
