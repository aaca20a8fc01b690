// Package faults makes ranks, links, hosts and stores fail under running operations, and reports
// what the other ranks say. It makes the tables of docs/faults.md. It is the command "tools faults".
//
// Ranks are processes in network namespaces (package netns). Each runs the same script again and
// again, and compares its results with those of ranks in memory. At a random moment the fault
// happens. A rank whose operation fails reports the error. In cases of the table it then reconfigures
// the group, and completes one more operation. In the end it closes its group, and looks for goroutines
// and descriptors that were left.
//
// A soak runs a job of four processes on each wire at once. Every eighth step makes a sub-group, sums in it and
// closes it. Every 1 to 5 s a fault happens to a rank: SIGKILL, SIGSTOP with SIGCONT up to 3 s later, panic, exit, a
// cancelled context. A new process comes for each that has died. A soak fails if a rank hangs, has a wrong result, or
// leaves goroutines or descriptors behind, if two ranks have different members in one epoch, or if rank 0 uses more in
// the last third of the epochs than in the first.
//
// PyTorch's ranks run torch.py, which does the same without comparing.
package faults
