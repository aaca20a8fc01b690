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
// In a Trial several faults happen to one job. Its ranks go on until they are told to end.
//
// PyTorch's ranks run torch.py, which does the same without comparing.
package faults
