// Package choice chooses the algorithm of a collective from a table of
// measurements.
//
//	c := choice.Default().Choose(choice.Query{Op: plan.OpAllReduce, Bytes: 1 << 20, Ranks: 8, Hosts: 2})
//	p := c.Algorithm.Plan(plan.Call{Rank: rank, Size: 8, Bytes: 1 << 20, Elem: 4, Chunk: c.Chunk})
//	fmt.Println(c.Why)
//
// # Tables
//
// A table is a text of lines. The first one names the format and its version. The next two say
// which command made the table, and on which machines. Each further line is a measurement, in any
// order; # begins a comment.
//
//	c10d-table 1
//	command c10d bench -tune -world 4
//	machine 16 CPUs, Zen 3, Linux 6.1; sockets over loopback
//	# op         wire  ranks  hosts  bytes    algorithm           time_us
//	all_reduce   tcp   4      1      1024     recursive-doubling  31.5
//	all_reduce   tcp   4      1      1048576  ring                604.2
//	all_reduce   tcp   4      1      1048576  chain:65536         588
//
// The wire is that of the measurement; - is any. Bytes are [plan.Call]'s: of the buffer, or of
// one rank's block. An algorithm that cuts messages may have its chunk behind a colon. "c10d
// bench -tune" measures a table. The default table has rows of a modelled network, and measured ones for TCP within a host. Operations with one
// algorithm, all_to_all and barrier, need no rows.
//
// # Catalogs
//
// The algorithms are those of package plan, unless a [Catalog] has others. Package ways has one for
// CUDA tensors.
//
// # Interpolation
//
// Groups have one of three shapes: all ranks on one host, one rank on each host, or anything
// else. Only measurements of the group's shape and wire count. If there are none, those of any
// wire count, and then those of another shape.
//
// For each algorithm, the time is interpolated linearly between the measured numbers of ranks
// next below and above, and between the lengths next below and above. Below the shortest length
// the time is that of the shortest. Above the longest length it grows in proportion. Outside the
// measured numbers of ranks the nearest one counts. If a number of ranks was measured on several
// numbers of hosts, the nearest proportion counts. Only algorithms that were measured at all
// these points are compared. The fastest wins; of equals, the first by name.
//
// # Agreement
//
// All ranks of a group must choose the same algorithm. The arithmetic is in integers, so every
// processor gets the same result. [Table.Fingerprint] is a digest of the measurements, without
// their order and the comments. Ranks compare it when they meet.
package choice
