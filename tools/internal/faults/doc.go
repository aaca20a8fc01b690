// Package faults makes ranks, links, hosts and stores fail under running operations, and reports
// what the other ranks say. It makes the table of docs/faults.md and tries random schedules. It is
// the command "tools faults".
//
// Ranks are processes in network namespaces (package netns). Each runs the same script again and
// again, and compares its results with those of ranks in memory. At a random moment the fault
// happens. A rank whose operation fails reports the error. In cases of the table it then reconfigures
// the group, and completes one more operation. In the end it closes its group, and looks for goroutines
// and descriptors that were left.
//
// It has three more modes:
//
//   - Random cases run 30 random operations in groups of 2 to 5 ranks on one to five hosts, until a random fault at a
//     random moment. A case fails if a rank hangs, has a wrong result, blames anything but the culprit, or leaves
//     goroutines or descriptors behind. Case i has the seed of the run plus i.
//   - In a Trial 3 to 5 faults happen to one job of 3 to 5 processes, also while they reconfigure: SIGKILL, SIGSTOP
//     with SIGCONT up to 5 s later, panic, exit, a cancelled context, a newcomer. The ranks go on until they are told
//     to end. It also fails if two ranks have different members in one epoch, or if a Reconfigure takes longer than
//     -within although no fault comes.
//   - A soak runs a job of four processes on each wire at once. Every eighth step makes a sub-group, sums in it and
//     closes it. Every 1 to 5 s a fault happens to a rank, and a new process comes for each that has died. It also
//     fails if rank 0 uses more in the last third of the epochs than in the first.
//
// PyTorch's ranks run torch.py, which does the same without comparing.
package faults
