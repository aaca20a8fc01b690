// Package choice chooses the algorithm of a collective from a table of
// measurements.
//
//	c := choice.Default().Choose(choice.Query{Op: plan.OpAllReduce, Bytes: 1 << 20, Ranks: 8, Hosts: 2})
//	p := c.Algorithm.Plan(plan.Call{Rank: rank, Size: 8, Bytes: 1 << 20, Elem: 4, Chunk: c.Chunk, Layout: layout})
//	fmt.Println(c.Why)
//
// # Tables
//
// A table is a text of lines. The first one names the format and its version;
// two more say what made the table: the command, and on which machines. The
// others are one measurement each, in any order; # begins a comment.
//
//	c10d-table 1
//	command c10d bench -tune -world 4
//	machine 16 CPUs, Zen 3, Linux 6.1; sockets over loopback
//	# op         wire  ranks  hosts  bytes    algorithm           time_us
//	all_reduce   tcp   4      1      1024     recursive-doubling  31.5
//	all_reduce   tcp   4      1      1048576  ring                604.2
//	all_reduce   tcp   4      1      1048576  chain:65536         588
//
// Wire names what carried the messages, - anything. Bytes are [plan.Call]'s: of
// the buffer, or of one rank's block. An algorithm that cuts messages may have
// its chunk behind a colon. "c10d bench -tune" measures a table; "c10d
// simulate -table" makes one of a modelled network. The default table has such rows,
// and measured ones for TCP within a host. Operations with one algorithm, all_to_all
// and barrier, need no rows.
//
// # Interpolation
//
// Groups have one of three shapes: all ranks on one host, every rank on a host
// of its own, or anything else. Only measurements of the group's shape count,
// and of its wire; where there are none, those of any wire, then those of
// another shape. Hierarchical algorithms serve only where several ranks are on
// each of several hosts.
//
// For each algorithm, the time is taken from the measured numbers of ranks next
// below and above, and there from the lengths next below and above, by straight
// lines. Below the shortest length the time is that of the shortest; above the
// longest it grows in proportion; outside the numbers of ranks it is that of the
// nearest. Of several numbers of hosts for as many ranks the one in the nearest
// proportion counts. Only algorithms measured at all of these numbers of ranks
// are compared. The fastest wins; of equals, the first by name.
//
// # Agreement
//
// All ranks of a group must choose alike, or they send what nobody expects. The
// arithmetic is done in integers, so that it is the same on every processor, and
// [Table.Fingerprint] is a digest of the measurements, whatever their order and
// the comments: ranks compare it when they meet.
package choice
