// Package weights gives servers the newest parameters of a model while a trainer changes them.
//
// A Publisher is the trainer's side: it listens. A Receiver is the server's side: it connects, and connects again whenever
// the connection ends. The trainer publishes versions, each with a number that is greater than the one before. The first is
// at least 1:
//
//	p, err := weights.Listen(ctx, "10.0.0.1:29600")
//	...
//	report, err := p.Publish(ctx, step+1, []weights.Named{{Name: "embedding", Tensor: t}})
//
// A server uses the newest version for each request:
//
//	r, err := weights.Dial("10.0.0.1:29600", weights.ReceiverOptions{Name: "server 3"})
//	...
//	v, ok := r.Acquire() // false before the first version
//	defer v.Release()
//	t := v.Tensor("embedding")
//
// The package is a module of its own, github.com/c10d-go/c10d/weights, because it needs no process group.
//
// A trainer in Python uses torch/weights_publisher.py: one file that needs PyTorch 1.13 or later and nothing else. Its option
// fp8 sends bfloat16 parameters as float8_e4m3fn with a scale for each row, in half the bytes.
//
// # Guarantees
//
//   - A request sees one whole version. An update is written to a second copy. The receiver swaps the copies when all buckets
//     and the digest are right.
//   - Deltas are exact: bits are compared. A bucket of which few elements changed is sent as their indices and values, any
//     other as a whole.
//   - A trainer that dies in an update, or sends wrong bytes, leaves the receiver's version as it was. The first update of a
//     connection has all elements.
//   - A receiver that comes late is sent the current version alone. Updates wait for it, and Report counts it, once it has
//     acknowledged a version or taken 64 MiB. So whoever says hello and never reads delays no update.
//   - A receiver that takes no bucket for PublisherOptions.Timeout is dropped. Report.Dropped says why. An update waits once
//     for this time, however many receivers stall. A slow one that goes on slows the update down: the context of Publish
//     bounds that.
//   - A reader that keeps a version blocks its receiver at the second update after it, so call Release soon.
//   - Versions increase on a connection. A trainer that begins again from a checkpoint may publish smaller ones than before.
//     Receivers take them, and Status and Await then tell of these.
//   - Parameters for whose versions the host has no memory are refused. A parameter's memory is reserved while it comes.
//   - Errors and names show only printable characters of what came from the network.
//
// # Memory
//
// A publisher keeps one copy of the parameters beside the trainer's own, and the last delta of each bucket. Receivers that
// come late share copies of 4 MiB, or of one bucket. A receiver has one copy, and two from the second version on. It also
// remembers the last delta of each bucket, with at most an eighth of a copy. Once it has acknowledged an update, it brings
// the older copy up to date with these deltas. A receiver lets other goroutines run after every 256 KiB.
//
// # Security
//
// Whoever can pose as the publisher controls the model. Options take TLS configurations: pg's Security.Configs returns one
// for each side, from the files of "c10d certs". Without TLS use a network that only the job reaches.
//
// # Limits
//
// Tensors are in host memory on both sides; package pg/pgweights of the core broadcasts device memory in a process group.
// Versions go over TCP to each receiver, not from receiver to receiver. Only the publisher for PyTorch makes values narrower.
package weights
