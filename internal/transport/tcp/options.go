package tcp

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

// Options set where a rank can be reached and how it sends. The zero value works. All ranks of
// a group should have the same. Of Eager and Window a pair uses the smaller.
type Options struct {
	// Host is the address, host name or network interface at which the other ranks reach this
	// one. Empty means all of the host's interfaces, loopback last.
	Host string

	// Lanes is how many connections a rank opens to a peer for large messages, besides the
	// first. 0 means 2 to other hosts (16 MiB over 1 Gbit/s: 2 % faster). Within the host it means 1
	// if there are 8 CPUs for each of the mesh's ranks there, and else none. On 2 CPUs for 2 ranks
	// it gains nothing. Negative means none. The most is 64.
	Lanes int

	// Eager is the size in bytes up to which a message is sent before the receiver asks for it.
	// 0 means 64 KiB; at most 1 MiB.
	Eager int

	// Window bounds the bytes of such messages from one peer that no receive has taken. A slow
	// rank needs up to that much memory for each peer. 0 means 4 MiB. The least is 256 KiB and
	// four times Eager, the most 1 GiB.
	Window int

	// Poll is how long a goroutine polls the sockets in Mesh.PollUntil before it sleeps. 0 means 100
	// us times the number of ranks that share a CPU of this host. Negative means not at all.
	// Polling needs Linux, and does not work with TLS.
	Poll time.Duration

	// Silence is how long a host may acknowledge nothing, with messages for it on their way,
	// until it counts as dead. The same holds for a process that is stopped while messages for
	// it are unread. 0 means 15 seconds, negative means forever.
	Silence time.Duration

	// Handshake bounds how long a connection may take to prove that it belongs to the group. 0
	// means 10 seconds.
	Handshake time.Duration

	// Checksum gives every message a CRC-32C. The receiver compares it before anything uses the
	// message, and the mesh fails with transport.FaultCorrupted if bytes were changed on the way.
	// Headers always have one. It is enough that one rank of a pair asks for it. TLS replaces it.
	// Messages take up to half of the time more with it over loopback, and no more over a link of 1 Gbit/s.
	Checksum bool

	// TLS makes all connections TLS 1.3 with both sides authenticated. It needs RootCAs and
	// certificates for both sides of a connection. ClientCAs are RootCAs if nil. A peer's
	// certificate must be valid for ServerName or, if that is empty, for the address it was
	// reached at. Nil means plain TCP.
	TLS *tls.Config

	// For tests: they replace the constants of the same names.
	bulkyBytes, aloneBytes, pieceBytes int
	reasonLimit, lastAnswer            time.Duration
}

const (
	defaultLanes  = 2
	localLanes    = 1 // if each rank of the host has cpusForLanes
	cpusForLanes  = 8 // the fewest with which a gain has been measured
	defaultEager  = 64 << 10
	defaultWindow = 4 << 20

	// Within the host, so that data in flight stay in the CPU caches, and none waits if the ranks poll. Elsewhere the
	// kernel chooses. Two ranks exchange 1 MiB and 32 MiB in 246 us and 19 ms with
	// these, 511 us and 25 ms with bbr and 512 KiB, 275 us and 17 ms with reno and 512 KiB.
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
	if o.Handshake == 0 {
		o.Handshake = 10 * time.Second
	}
	for _, d := range []struct {
		field *int
		value int
	}{{&o.bulkyBytes, bulkyBytes}, {&o.aloneBytes, cmp.Or(o.bulkyBytes, aloneBytes)}, {&o.pieceBytes, pieceBytes}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if o.reasonLimit == 0 {
		o.reasonLimit = reasonLimit
	}
	if o.lastAnswer == 0 {
		o.lastAnswer = lastAnswer
	}
	switch {
	case o.Lanes > maxLanes:
		return o, fmt.Errorf("tcp: %d lanes, want at most %d", o.Lanes, maxLanes)
	case o.Eager < 0 || o.Eager > maxEager:
		return o, fmt.Errorf("tcp: eager messages of %d bytes, want at most %d", o.Eager, maxEager)
	case o.Window < minWindow || o.Window < 4*o.Eager || o.Window > maxWindow:
		return o, fmt.Errorf("tcp: a window of %d bytes, want %d to %d", o.Window, max(minWindow, 4*o.Eager), maxWindow)
	case o.Handshake < 0:
		return o, fmt.Errorf("tcp: a handshake within %v", o.Handshake)
	}
	if o.TLS == nil {
		return o, nil
	}
	if len(o.TLS.Certificates) == 0 && (o.TLS.GetCertificate == nil || o.TLS.GetClientCertificate == nil) {
		return o, errors.New("tcp: TLS without a certificate: both sides of a connection need one")
	}
	if o.TLS.RootCAs == nil {
		return o, errors.New("tcp: TLS without RootCAs: they say which certificates belong to the group")
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
	err := mesh.LimitSilence(c, o.Silence)
	if tcpsock.IsLocal(c) {
		if o.Poll > 0 {
			tcpsock.SetCongestion(c, localCongestion) // better, but no matter
		}
		err = errors.Join(err, c.SetWriteBuffer(localBuffer), c.SetReadBuffer(localBuffer))
	}
	if err != nil {
		return fmt.Errorf("tcp: options of the connection with %v: %w", c.RemoteAddr(), err)
	}
	return nil // Go has set TCP_NODELAY
}
