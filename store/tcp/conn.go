package tcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/tcpsock"
)

// conn is a client's connection after its handshake. One call at a time uses it.
type conn struct {
	net.Conn
	r       *bufio.Reader
	dialect *dialect
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
	dialect *dialect // PyTorch's that the server serves; nil until found out
	plain   bool     // do not offer the native dialect
	tls     *tls.Config

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

// dial connects once. It finds out which dialect the server serves and keeps it.
func (d *dialer) dial(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	if d.dialect != nil && d.dialect != pytorch {
		return d.connect(ctx, d.dialect)
	}
	c, err := d.validated(ctx)
	switch {
	case d.dialect != nil: // other calls may be reading it
	case err == nil:
		d.dialect = pytorch
	case disconnected(err):
		return d.dialBare(ctx, err)
	}
	return c, err
}

// connect opens a connection, with TLS.
func (d *dialer) connect(ctx context.Context, dialect *dialect) (*conn, error) {
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
	return &conn{Conn: nc, r: bufio.NewReaderSize(nc, 4<<10), dialect: dialect}, nil
}

// validated connects and does the handshake.
func (d *dialer) validated(ctx context.Context) (*conn, error) {
	c, err := d.connect(ctx, pytorch)
	if err != nil {
		return nil, err
	}
	d.progress.connected()
	release := guard(ctx, c)
	if err = c.validate(!d.plain); err == nil && c.dialect == native {
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

// confirm sends a request that every server knows, after those that have no reply: its reply shows that they were
// carried out.
func (c *conn) confirm(before ...*request) (keys int64, err error) {
	if err := c.send(append(before, &request{query: qNumKeys})...); err != nil {
		return 0, err
	}
	return readInt64(c.r)
}
