package tcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/store"
)

// conn is a client's connection after its handshake. One call at a time uses it.
type conn struct {
	net.Conn
	r       *bufio.Reader
	dialect store.Dialect
	buf     []byte
}

// permanent is an error that another try cannot mend.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// disconnected reports whether err means that the other side ended the connection.
func disconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNABORTED)
}

// guard ends reads and writes on c when ctx ends. Call release afterwards; it removes c's
// deadline.
func guard(ctx context.Context, c net.Conn) (release func()) {
	ran := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		c.SetDeadline(time.Unix(1, 0))
		close(ran)
	})
	return func() {
		if !stop() {
			<-ran
			c.SetDeadline(time.Time{})
		}
	}
}

// send writes the requests in one piece.
func (c *conn) send(reqs ...*request) error {
	b := c.buf[:0]
	var err error
	for _, r := range reqs {
		if b, err = r.append(b, c.dialect); err != nil {
			return err
		}
	}
	if cap(b) <= keptBuffer {
		c.buf = b
	}
	_, err = c.Write(b)
	return err
}

// Connecting, with the handshake, is repeated as in PyTorch since 2.5. The pause begins with
// firstPause and grows by half each time, up to longestPause. Each pause varies at random by half
// of itself, up or down.
const (
	firstPause   = 500 * time.Millisecond
	longestPause = time.Minute
)

// attemptTimeout bounds one attempt, for hosts that have lost a connection's state. The kernel
// repeats a connect request after 1, 3, 7 and 15 s; this leaves time for the last one.
const attemptTimeout = 30 * time.Second

// dialer knows how to reach the server.
type dialer struct {
	addr    string
	dialect store.Dialect // DialectUnknown until found out
	plain   bool          // do not offer the native dialect
	tls     *tls.Config
	token   string

	progress   *progress     // hears of the tries; may be nil
	resolveFor time.Duration // how long to look up a name that does not exist; 0: the default

	connectTo func(ctx context.Context, network, addr string) (net.Conn, error) // nil: tcpsock.Dial

	job    string    // see Options.Job
	server *greeting // of the first native connection; nil before, and for other servers
}

// dialRetry connects, trying until ctx ends.
func (d *dialer) dialRetry(ctx context.Context) (*conn, error) {
	pause := firstPause
	var last error
	name := unresolved{limit: cmp.Or(d.resolveFor, resolveFor)}
	for tries := 1; ; tries++ {
		c, err := d.dial(ctx)
		if err == nil {
			return c, nil
		}
		left, final := name.see(err)
		if final != nil && ctx.Err() == nil {
			err = final
		}
		if ctx.Err() != nil && last != nil {
			// This try ended early; the error of the one before says more.
			err = last
			tries--
		}
		last = err
		d.progress.tried(err)
		var p permanent
		if ctx.Err() == nil && !errors.As(err, &p) {
			t := time.NewTimer(min(left, time.Duration(float64(pause)*(0.5+rand.Float64()))))
			pause = min(pause*3/2, longestPause)
			select {
			case <-t.C:
				continue
			case <-ctx.Done():
				t.Stop()
			}
		}
		if tries > 1 {
			err = fmt.Errorf("%w (attempt %d)", err, tries)
		}
		return nil, err
	}
}

// dial connects once. It detects an unknown dialect and keeps it.
func (d *dialer) dial(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	switch d.dialect {
	case store.DialectV1:
		return d.connect(ctx, store.DialectV1)
	case store.DialectV2:
		return d.validated(ctx)
	}

	c, err := d.validated(ctx)
	if err == nil {
		d.dialect = store.DialectV2
		return c, nil
	}
	if !disconnected(err) {
		return nil, err
	}
	// An old server closes a connection that begins with our handshake. So does a server that is
	// about to end. Only an answer shows that it is an old one.
	c, v1err := d.connect(ctx, store.DialectV1)
	if v1err != nil {
		return nil, err
	}
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	release := guard(short, c)
	v1err = c.send(&request{query: qNumKeys})
	if v1err == nil {
		var keys int64
		if keys, v1err = readInt64(c.r); v1err == nil && (keys < 0 || keys > math.MaxInt32) {
			release()
			c.Close()
			return nil, stranger(binary.LittleEndian.AppendUint64(nil, uint64(keys)))
		}
	}
	release()
	if v1err != nil {
		c.Close()
		return nil, fmt.Errorf("the server at this port is no TCPStore, or is ending; as a client of PyTorch 2.2 or later: %w; as one up to 2.0: %w", err, v1err)
	}
	// A server of this package serves both dialects, and may have closed the first connection to make
	// room for another client.
	if again, err := d.validated(ctx); err == nil {
		c.Close()
		d.dialect = store.DialectV2
		return again, nil
	} else if !disconnected(err) {
		c.Close()
		return nil, err
	}
	d.dialect = store.DialectV1
	return c, nil
}

// connect opens a connection, with TLS and token.
func (d *dialer) connect(ctx context.Context, dialect store.Dialect) (*conn, error) {
	connect := d.connectTo
	if connect == nil {
		connect = tcpsock.Dial
	}
	nc, err := connect(ctx, "tcp", d.addr)
	if openfiles.Exhausted(err) {
		return nil, permanent{openfiles.Explain(err)}
	}
	if err != nil {
		return nil, err
	}
	release := guard(ctx, nc)
	defer release()
	if d.tls != nil {
		host, _, _ := net.SplitHostPort(d.addr)
		t := tls.Client(nc, credentials.ForHost(d.tls, host))
		if err := t.HandshakeContext(ctx); err != nil {
			nc.Close()
			err = settled(fmt.Errorf("TLS handshake: %w", err))
			var refused *tls.CertificateVerificationError
			var alert tls.AlertError
			if errors.As(err, &refused) || errors.As(err, &alert) {
				err = permanent{err}
			}
			return nil, err
		}
		nc = t
	}
	if d.token != "" {
		if err := authenticate(nc, d.token); err != nil {
			nc.Close()
			return nil, settled(err)
		}
	}
	return &conn{Conn: nc, r: bufio.NewReaderSize(nc, 4<<10), dialect: dialect}, nil
}

// validated connects and does the handshake of the new dialect.
func (d *dialer) validated(ctx context.Context) (*conn, error) {
	c, err := d.connect(ctx, store.DialectV2)
	if err != nil {
		return nil, err
	}
	d.progress.connected()
	release := guard(ctx, c)
	if d.plain {
		err = c.ping(validate)
	} else {
		err = c.offerNative()
	}
	if err == nil && c.dialect == native {
		err = d.greet(c)
	}
	release()
	if err != nil {
		c.Close()
		if errors.Is(err, os.ErrDeadlineExceeded) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = mute(err)
		}
		return nil, fmt.Errorf("handshake: %w", settled(err))
	}
	return c, nil
}

// ping sends a request that has no reply, and PING. The reply to PING shows that the request was
// carried out. Both go out in one write: PyTorch's newer server forgets its handshake when the
// bytes of VALIDATE arrive in pieces.
//
// An old server takes the bytes of VALIDATE and PING, up to the nonce's third, for a SET and the
// length of its key. With the top bit of that byte set the length is impossible, and the server
// closes the connection. Without it, the server may try to allocate that much.
func (c *conn) ping(before *request) error {
	nonce := rand.Uint32() | 0x80<<16
	if err := c.send(before, &request{query: qPing, num: int64(nonce)}); err != nil {
		return err
	}
	echo, err := c.echo()
	if err == nil && echo != nonce {
		err = malformedf("the server answered %#x to a ping with %#x", echo, nonce)
	}
	return err
}

// echo reads the answer to a PING.
func (c *conn) echo() (uint32, error) {
	if b, err := c.r.Peek(4); err == nil && string(b) == alert[:4] {
		return 0, errNeedsTLS
	}
	return readUint32(c.r)
}
