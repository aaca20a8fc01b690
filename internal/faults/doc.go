// Package faults makes ranks, links, hosts and stores fail under running operations, and reports
// what the other ranks say. It makes the table of docs/faults.md and tries random schedules. It is
// the command "c10d faults".
//
// Ranks are processes in network namespaces (package netns). Each runs the same script again and
// again, and compares its results with those of ranks in memory. At a random moment the fault
// happens. A rank whose operation fails reports the error, closes its group, and looks for
// goroutines and descriptors that were left.
//
// PyTorch's ranks run torch.py, which does the same without comparing.
package faults
