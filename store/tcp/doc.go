// Package tcp is PyTorch's TCPStore: a key-value server that one process of a
// job hosts and all ranks reach over TCP. Client and server speak PyTorch's wire
// protocol, so Go and Python processes share one store, whichever hosts it.
//
// # A program
//
// Every rank runs this; rank 0 hosts. New returns on rank 0 when all ranks have
// joined, and elsewhere when the server has answered.
//
//	package main
//
//	import (
//		"context"
//		"fmt"
//		"log"
//		"os"
//		"strconv"
//
//		"github.com/c10d-go/c10d/store/tcp"
//	)
//
//	func main() {
//		rank, _ := strconv.Atoi(os.Getenv("RANK"))
//		size, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
//		ctx := context.Background()
//		s, err := tcp.New(ctx, "10.0.0.1:29500", tcp.Options{Server: rank == 0, WorldSize: size, Rank: rank})
//		if err != nil {
//			log.Fatal(err)
//		}
//		defer s.Close()
//		if rank == 0 {
//			err = s.Set(ctx, "greeting", []byte("hello"))
//		}
//		if err != nil {
//			log.Fatal(err)
//		}
//		v, err := s.Get(ctx, "greeting") // waits for it
//		if err != nil {
//			log.Fatal(err)
//		}
//		fmt.Printf("rank %d: %s\n", rank, v)
//	}
//
// A server that outlives the ranks is Listen in a process of its own. With
// Python ranks, let them be clients only: under torchrun they are, and
// otherwise TORCHELASTIC_USE_AGENT_STORE=True in their environment makes them.
//
// # Two dialects
//
// PyTorch up to 2.0 numbers its requests in one way and has no handshake;
// PyTorch from 2.2 on numbers them in another and begins with VALIDATE. The
// server tells them apart by the first bytes and serves both at once. The client
// finds out what the server is, see Options.Dialect: it begins in the new
// dialect, with bytes that an old server can only take for an impossible length
// and that make it close that one connection.
//
//	                        PyTorch's clients         PyTorch's servers
//	1.13 (old)              all it has                all but queues and ListKeys
//	2.2 and later (new)     all, queues and barrier   all but, where the server is
//	                        of later ones included    older, queues and ListKeys
//
// What a server lacks gives errors.ErrUnsupported. It cannot be asked: a server
// that does not know a request closes the connection. The client tries on one of
// its own, once. Append, MultiGet and MultiSet of an old server are made of other
// calls. PyTorch 2.1 shipped in between and is not supported; nor are servers of
// the first releases after it that have VALIDATE but no PING.
//
// # Among Go processes
//
// A client and a server of this package use PyTorch's protocol only to find each
// other out: the number in the client's first PING offers more, and the server's
// answer takes it up, where PyTorch's echoes it. Then every request has a number
// and a reply, in whatever order. All calls of a Store share one connection and
// are under way together; what is asked at the same moment goes out in one write,
// and so do the answers. Get, MultiGet and Wait are one round trip, and the server
// holds one place in a line for each of them that waits, however many its keys.
// What the server refuses is the error of that call alone and tells why.
//
// BenchmarkPipelined and BenchmarkCalls measure it.
//
// They also tell each other who they are. A client of another job than the
// server's is refused (Options.Job). A client that has lost its connection and
// finds another server at the address gets ErrRestarted instead of an empty store.
//
// # Guarantees
//
// When New waits longer than 10 s it writes to Options.Logger what it waits for: the
// server, with the error of the last try, or the ranks that have not joined.
//
// Every call ends with its context, or if that has no deadline, with the store's
// timeout, or with Close. A call that waits holds up no other: calls share a
// connection without waiting for each other, or, with a server of PyTorch's, it
// has one of its own while it waits. (Some waits that are given up are first taken
// back from the server, which holds up the call by a round trip, or by a second if
// the server hangs: a blocked QueuePop, whose element would be lost; a wait for
// several keys that has run out of time, to name those that are missing; and, with
// a server of PyTorch's, any.) When the server ends, pending calls fail
// at once with ErrDisconnected, and the error names the operation, its keys and
// the address.
//
// When a call that writes returns nil, every client sees what it wrote. PyTorch's
// protocol has no reply to SET, APPEND, MULTI_SET and QUEUE_PUSH, so with its
// servers the client sends a second request with them whose reply says that the
// server has come so far: PING, or for an old server a WAIT for no keys. PyTorch's
// clients do not, and may be overtaken by another rank's read.
//
// The server keeps good clients apart from bad ones. A client that sends half a
// message, does not read its replies, or sends what is no request, affects no
// other; a malformed or too large request ends its own connection only, which is
// all the protocol offers as an error. Memory is allocated as bytes come, not as
// they are announced. What one client can make the server hold outside of keys
// and values is bounded by Limits.Message and what all can by
// ServerOptions.MaxClients; MaxMemory bounds the keys and values. An idle
// connection is never closed, because PyTorch's clients are idle for hours and
// cannot reconnect, but TCP keep-alive finds those whose host is gone.
//
// # Differences from PyTorch's servers
//
// The server binds the host it is given; PyTorch's binds all interfaces. Write
// ":29500" for that. A CompareSet wakes waiters exactly when it changes
// something. The wait that a client of the old dialect has given up is dropped
// when its next request comes, which repairs the wrong answers such a client
// gets from PyTorch's own server. A reader of a missing key gets an empty value,
// as from PyTorch's newer server; the older one closes the connection. A watch of
// the old dialect's second connection is confirmed and never notified.
//
// # Strangers
//
// The protocol has no authentication: whoever reaches the port can read and
// write everything. Among Go processes Options.Token keeps others out, and
// Options.TLS encrypts; PyTorch's clients can use neither. A token without TLS is
// not sent in the clear, but what follows is, and can be tampered with.
//
// # What it does not do
//
// Data live in the server's memory and end with it. There is no replication, and
// a client does not look for another server.
package tcp
