// Package tcp is PyTorch's TCPStore, client and server. One process of a job hosts the
// server, and all ranks connect to it over TCP. Go and Python processes can share a store,
// whichever hosts it.
//
// # A program
//
// Every rank calls New, and rank 0 hosts, as in the example. New returns on rank 0 when all ranks have
// joined, and elsewhere when the server has answered.
//
// For a server that outlives the ranks, call Listen in a separate process. With Python
// ranks, let them be clients only: under torchrun they are, and otherwise
// TORCHELASTIC_USE_AGENT_STORE=True in their environment makes them clients.
//
// # Two dialects
//
// PyTorch up to 2.0 has no handshake. PyTorch from 2.2 on numbers its requests differently
// and begins with VALIDATE. The server tells the dialects apart by the first bytes and serves
// both at once. The client begins in the new dialect. An old server takes these bytes for
// an impossible length and closes that one connection; the client then finds out by a second one.
//
//	                        PyTorch's clients         PyTorch's servers
//	1.13 (old)              all it has                all but queues and ListKeys
//	2.2 and later (new)     all, queues and barrier   all but, where the server is
//	                        of later ones included    older, queues and ListKeys
//
// A missing operation returns errors.ErrUnsupported. A server closes the connection when it
// does not know a request, so the client tries once, on a separate connection. For an old
// server, Append, MultiGet and MultiSet are made of other calls. PyTorch 2.1 is not supported,
// nor are servers of the first releases after it that have VALIDATE but no PING.
//
// # Among Go processes
//
// The client's first PING carries a magic number. A server of this package answers with
// another number; PyTorch's echoes it. If both sides are of this package, they then speak the
// native dialect. Requests are numbered, and replies come in any order. All calls of a Store
// share one connection. Calls of one moment go out in one write, and so do their replies. Get,
// MultiGet and Wait take one round trip. A call that the server refuses returns an error with
// the reason; other calls go on. BenchmarkPipelined and BenchmarkCalls measure it.
//
// A client can leave a will (Store.SetWill): a CompareSet that the server carries out when the
// connection ends. So the others learn at once that a process died.
//
// Client and server also exchange names. A server refuses a client of another job
// (Options.Job). A client that reconnects and finds another server at the address gets
// ErrRestarted, and not an empty store.
//
// # Guarantees
//
// When New waits longer than 10 s it writes to Options.Logger: the error of the last try to
// connect, or the ranks that have not joined.
//
// Every call ends with its context, with the store's timeout if the context has no deadline,
// or with Close. A call that waits does not delay other calls: it shares a connection with
// them, or has its own with a server of PyTorch's. Some waits that end early must first be
// cancelled on the server, which takes one round trip, or one second if the server does not
// answer:
//
//   - a blocked QueuePop, whose element could be lost;
//   - a wait for several keys that ran out of time, to name the missing ones;
//   - with a server of PyTorch's, any wait and any QueuePop.
//
// When the server ends, pending calls fail at once with ErrDisconnected. The error names the
// operation, its keys and the address.
//
// When a call that writes returns nil, every client sees the new value. PyTorch's protocol
// has no reply to SET, APPEND, MULTI_SET and QUEUE_PUSH. With PyTorch's servers the client
// therefore sends a second request, for the number of keys. Its reply
// shows that the server has processed the first. PyTorch's clients do not, so another rank's
// read may overtake their write.
//
// The server protects clients from each other. A client that sends half a message, does not
// read its replies, or sends an invalid or too large request affects its own connection only.
// The server allocates memory as bytes arrive, not as a client announces them. A listing of the
// keys goes out in pieces, and other requests go on meanwhile. TCP keep-alive ends connections
// whose host is gone.
//
// # Who stays
//
// The fields of ServerOptions limit connections, times and memory. All have defaults, which
// ServerOptions.World sizes. With TLS, connections whose handshake has not ended are apart:
// a process takes 256, and two for each rank, and one more closes the oldest. One that has sent 16 KiB of
// a TLS handshake is closed.
//
// Otherwise a client is, in the order in which they stay:
//
//   - silent: has sent no message yet;
//   - a guest: has sent one;
//   - a rank that says so: has counted itself (Options.WorldSize; PyTorch's ranks do the same), or named the
//     server's job (Options.Job). At most eight connections for each rank of World are believed, and at most
//     half of MaxClients;
//   - proved: has a certificate that the server verifies, or hosts the server in its process.
//
// When there are too many connections, a new client takes the place of a silent one, else of a guest. It is
// one of the address with the most of them, and of these the one that has sent nothing for longest. Ranks
// stay. There may be 256 silent ones besides as many as ranks may have.
//
// What the server holds for a client is one number: requests, waits, wills, and unread replies without the values
// that are stored. The sum for all that have proved nothing is at most MaxHeld. A client that does not read costs
// 2 KiB. If ranks all write long values or get many at once, some wait for others, for 5 s at most. Then the server
// closes connections. First it closes those with 256 KiB or more, in the order in which these began. Then it closes
// those with most. It closes only guests while guests have more than half.
//
// A client that has sent a message may then be silent for ever, because PyTorch's clients are
// silent for hours and cannot reconnect. A PyTorch client up to 2.0 has a second connection that
// never speaks. The oldest silent connection of its address is taken for that, and stays as the first does.
//
// # Differences from PyTorch's servers
//
// The server binds the host it is given; PyTorch's binds all interfaces. Write
// ":29500" for that. A CompareSet wakes waiters exactly when it changes
// something. When a client of the old dialect gives up a wait, its next request cancels it;
// PyTorch's own server then gives wrong answers. A reader of a missing key gets an empty
// value, as from PyTorch's newer server; the older one closes the connection. WATCHKEY
// of PyTorch 1.x is confirmed and never notified.
//
// # Access control
//
// PyTorch's protocol has no authentication: every process that reaches the port can read and
// write everything. Among Go processes Options.TLS authenticates and encrypts; PyTorch's clients
// cannot use it. A server with TLS refuses a client without it.
//
// # Limits
//
// Data live in the server's memory and end with it. There is no replication, and
// a client does not look for another server.
package tcp
