// Package agent is a launcher: it starts the ranks of a job on this host as
// torchrun does, with torchrun's environment variables, shows what they print,
// and ends all of them when one fails. The command "c10d run" is its front.
//
// # What a rank gets
//
// The agent of node 0 hosts the store, a fresh one for each attempt, and tells
// the ranks so (TORCHELASTIC_USE_AGENT_STORE=True): any of them may die without
// taking the store along. Each rank has a process group of its own, no standard
// input, and a file in which it may leave the reason of its failure
// (TORCHELASTIC_ERROR_FILE, torchrun's JSON form).
//
// # How a job ends
//
// The first rank that ends with an exit code other than 0, or by a signal, is
// the cause. The other ranks get SIGTERM at once, and SIGKILL after
// Job.Grace. Whatever a rank leaves behind in its process group dies with
// it. Then there is another attempt, or the Summary says who was first, when,
// why, and what it last wrote to its standard error.
//
// A signal from Job.Signals is passed on to every rank's process group. Ranks
// that are still there Job.Grace later get SIGKILL; a second signal has that
// effect at once. There is no further attempt.
//
// If the agent itself is killed, the kernel kills the ranks (on Linux), and
// the guard, a process that does nothing but wait for the agent's end, kills
// what they left in their process groups (on every Unix). Only a process that
// has made a session or group of its own escapes.
//
// # Several nodes
//
// With Job.Nodes above 1, an agent runs on each. They meet in a store that node
// 0 hosts at Job.MasterAddr and Job.MasterPort; nodes may have different numbers
// of ranks. A failure on one node ends the attempt on all, and every agent
// reports the same first failure. The ranks' store is beside it on a port that
// node 0 picks.
package agent
