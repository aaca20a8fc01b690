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
//   - A reader that keeps a version delays the next update but one, and with it that receiver.
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
// # Frames
//
// Each side of a TCP connection sends frames. Numbers are little-endian. A frame has a header of 24 bytes:
//
//	 0  4 bytes "c10w"
//	 4  u32 kind
//	 8  u32 number of the bucket
//	12  u32 count: changed units of a delta, protocol version 2 in a hello, otherwise 0
//	16  u32 bytes of the payload that follows
//	20  u32 checksum of the payload that follows
//
// The checksum is a CRC-32 (IEEE, zlib's). A payload of 16 KiB and more is divided into blocks of 16 KiB. The blocks are
// added as 2048 u64 each, word by word, modulo 2^64. The CRC-32 is that of the 2048 sums and then of the bytes after the last
// block. So an error within 16 KiB has the effect that it has on a CRC-32. Errors 16 KiB apart can cancel each other.
//
// The kinds, in the order of an update:
//
//   - 1 hello, of the receiver: its name, UTF-8, at most 1024 bytes. The first frame
//   - 2 init, of the publisher: u32 bytes of a bucket, u32 number of parameters; for each of them u16 length and name,
//     u8 length and PyTorch's dtype, u8 dimensions, and u64 for each. Before the first update and whenever
//     something of this changes
//   - 3 start, of the publisher: u64 version, u64 version that deltas refer to; 0 if there are no deltas
//   - 4 full, of the publisher: all bytes of a bucket, row-major
//   - 5 delta, of the publisher: count indices (u32, increasing), then count values
//   - 6 finish, of the publisher: u64 version, u32 digest
//   - 7 ack, of the receiver: u64 version that is now in use
//   - 8 refuse, of the receiver: why it leaves, UTF-8, at most 1024 bytes
//
// A bucket is a range of one parameter: the first "bytes of a bucket", the next, and so on; the last may be shorter. Buckets
// are numbered over all parameters from 0 and sent in this order, each once. Bytes of a bucket are a multiple of 64 from 64
// KiB to 256 MiB. An index counts units within the bucket. A unit is an element, or half of a complex128. A delta is always
// shorter than the bucket. The digest begins with 0; each frame of kind 4 or 5 replaces it by the CRC-32 of the frame's CRC
// (4 bytes), begun with the digest before: zlib.crc32(pack("<I", crc), digest). A start or init in the middle of an update
// begins anew.
//
// # Limits
//
// Tensors are in host memory on both sides; package pg/pgweights of the core broadcasts device memory in a process group.
// Versions go over TCP to each receiver, not from receiver to receiver. Only the
// publisher for PyTorch makes values narrower.
package weights
