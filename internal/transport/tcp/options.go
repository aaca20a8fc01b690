package tcp

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"
)

// Options are how a rank is reached and how it sends. The zero value works. All
// ranks of a group should have the same ones; of Eager and Window a pair uses the
// smaller.
type Options struct {
	// Host is the address, host name or network interface to be reached at.
	// Empty means all of the host's interfaces, loopback last.
	Host string

	// Lanes is how many connections besides the first a rank opens to a peer for
	// large messages, once there is one. 0 means 2 to other hosts and none within
	// the host, where they gain nothing; negative means none; at most 64.
	Lanes int

	// Eager is the size in bytes up to which a message goes out at once,
	// whether or not it is expected. 0 means 64 KiB; at most 1 MiB.
	Eager int

	// Window is how many bytes of such messages a peer may have sent here that
	// nobody has asked for yet: so much memory a slow rank spends on each
	// peer. 0 means 4 MiB; at least 256 KiB, four times Eager and at most 1 GiB.
	Window int

	// Congestion is the kernel's congestion control for all connections, and
	// LocalCongestion for those within the host, where it goes first. If both are empty
	// that is reno within a host whose ranks poll (see Poll), where nothing is congested and
	// others only hold messages back, and the system's choice elsewhere. Only Linux has a
	// choice.
	Congestion, LocalCongestion string

	// SendBuffer and ReceiveBuffer are the sockets' buffers in bytes. 0 leaves
	// them to the kernel, which adapts them, but for 1 MiB within the host, where
	// what is under way should stay in the processors' caches.
	SendBuffer, ReceiveBuffer int

	// Poll is for how long a goroutine that waits for messages, and says so with
	// Mesh.Help, polls the sockets before it sleeps. 0 means 100 us times the number of ranks
	// that share a CPU of this host, 1 if there are enough; a negative one not at all. There
	// is no polling with TLS, and only on Linux.
	Poll time.Duration

	// Silence is how long a host may say nothing, with messages for it on
	// their way, until it counts as dead; so does a process that was stopped for
	// as long with messages unread. 0 means one minute, negative for ever.
	Silence time.Duration

	// Handshake bounds how long a connection may take to prove that it
	// belongs to the group. 0 means 10 seconds.
	Handshake time.Duration

	// TLS makes all connections TLS 1.3 with both sides authenticated. It needs
	// certificates, for use on both sides of a connection, and RootCAs. ClientCAs
	// are RootCAs if nil. A peer's certificate has to be good for ServerName or, if
	// that is empty, for the address that it was reached at. Nil means plain TCP.
	TLS *tls.Config

	// For tests: what the constants of the same names say.
	bulkyBytes, pieceBytes int
	doubtLimit             time.Duration
}

const (
	defaultLanes  = 2
	defaultEager  = 64 << 10
	defaultWindow = 4 << 20

	// Of connections within the host. BenchmarkExchange, polling, of 1 MiB and 32 MiB: 246 us
	// and 19 ms with these; 511 us and 25 ms with bbr and 512 KiB, 275 us and 17 ms with reno and
	// 512 KiB, 450 us and 23 ms with bbr and 2 MiB.
	localBuffer     = 1 << 20
	localCongestion = "reno"

	maxLanes  = 64
	maxEager  = 1 << 20
	minWindow = 256 << 10
	maxWindow = 1 << 30
)

// filled returns o with the defaults in place of zeros.
func (o Options) filled() (Options, error) {
	if o.Eager == 0 {
		o.Eager = defaultEager
	}
	if o.Window == 0 {
		o.Window = max(defaultWindow, 4*o.Eager)
	}
	switch {
	case o.Silence == 0:
		o.Silence = time.Minute
	case o.Silence < 0:
		o.Silence = 0
	}
	if o.Handshake == 0 {
		o.Handshake = 10 * time.Second
	}
	for _, d := range []struct {
		field *int
		value int
	}{{&o.bulkyBytes, bulkyBytes}, {&o.pieceBytes, pieceBytes}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if o.doubtLimit == 0 {
		o.doubtLimit = doubtLimit
	}
	switch {
	case o.Lanes > maxLanes:
		return o, fmt.Errorf("tcp: %d lanes, want at most %d", o.Lanes, maxLanes)
	case o.Eager < 0 || o.Eager > maxEager:
		return o, fmt.Errorf("tcp: eager messages of %d bytes, want at most %d", o.Eager, maxEager)
	case o.Window < minWindow || o.Window < 4*o.Eager || o.Window > maxWindow:
		return o, fmt.Errorf("tcp: a window of %d bytes, want %d to %d", o.Window, max(minWindow, 4*o.Eager), maxWindow)
	case o.SendBuffer < 0 || o.ReceiveBuffer < 0:
		return o, fmt.Errorf("tcp: socket buffers of %d and %d bytes", o.SendBuffer, o.ReceiveBuffer)
	case o.Handshake < 0:
		return o, fmt.Errorf("tcp: a handshake within %v", o.Handshake)
	}
	if o.TLS == nil {
		return o, nil
	}
	if len(o.TLS.Certificates) == 0 && (o.TLS.GetCertificate == nil || o.TLS.GetClientCertificate == nil) {
		return o, errors.New("tcp: TLS without a certificate, which both sides need")
	}
	if o.TLS.RootCAs == nil {
		return o, errors.New("tcp: TLS without RootCAs: who may be a rank of the group")
	}
	c := o.TLS.Clone()
	c.MinVersion = tls.VersionTLS13
	c.ClientAuth = tls.RequireAndVerifyClientCert
	if c.ClientCAs == nil {
		c.ClientCAs = c.RootCAs
	}
	o.TLS = c
	return o, nil
}

// tune sets the options of a socket.
func (o *Options) tune(c *net.TCPConn) error {
	congestion := o.Congestion
	if isLocal(c) {
		congestion = cmp.Or(o.LocalCongestion, congestion)
		if congestion == "" && o.Poll > 0 {
			tuneSystem(c, localCongestion, 0) // better, but no matter
		}
	}
	err := tuneSystem(c, congestion, o.Silence)
	if err == nil && o.Silence > 0 {
		// Three unanswered questions are as long as Silence.
		err = c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: o.Silence / 2, Interval: o.Silence / 6, Count: 3})
	}
	send, receive := o.SendBuffer, o.ReceiveBuffer
	if isLocal(c) {
		send, receive = cmp.Or(send, localBuffer), cmp.Or(receive, localBuffer)
	}
	if err == nil && send > 0 {
		err = c.SetWriteBuffer(send)
	}
	if err == nil && receive > 0 {
		err = c.SetReadBuffer(receive)
	}
	if err != nil {
		return fmt.Errorf("tcp: options of the connection with %v: %w", c.RemoteAddr(), err)
	}
	return nil // Go has set TCP_NODELAY
}

// lanes returns how many more connections to open to the peer at the other end
// of c.
func (o *Options) lanes(c net.Conn) int {
	if o.Lanes == 0 && !isLocal(c) {
		return defaultLanes
	}
	return max(o.Lanes, 0)
}

// isLocal reports whether both ends of a connection are on this host.
func isLocal(c net.Conn) bool {
	remote := c.RemoteAddr().(*net.TCPAddr).IP
	return remote.IsLoopback() || remote.Equal(c.LocalAddr().(*net.TCPAddr).IP)
}
