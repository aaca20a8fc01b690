package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/c10d-go/c10d/internal/tcpsock"
)

// refusal returns the error of a transaction. If a server refuses a command, for example because
// it is a replica or out of memory, it also refuses EXEC. The cause is the command's error.
func refusal(cmds []redis.Cmder, err error) error {
	if !redis.HasErrorPrefix(err, "EXECABORT") {
		return err
	}
	for _, c := range cmds {
		if cause := c.Err(); cause != nil && !redis.HasErrorPrefix(cause, "EXECABORT") {
			return cause
		}
	}
	return err
}

// plainDialer connects.
func plainDialer(o *redis.Options) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, cmp.Or(o.DialTimeout, dialTimeout))
		defer cancel()
		return tcpsock.DialWith(ctx, &net.Dialer{KeepAlive: keepAlive}, network, addr)
	}
}

// tlsDialer connects and does the TLS handshake. Its errors name the handshake. A server without
// TLS takes the handshake for the start of a command, and waits for the rest.
func tlsDialer(o *redis.Options) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, cmp.Or(o.DialTimeout, dialTimeout))
		defer cancel()
		conn, err := plainDialer(o)(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		t := tls.Client(conn, o.TLSConfig)
		if err = t.HandshakeContext(ctx); err == nil {
			return t, nil
		}
		conn.Close()
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) || errors.Is(err, context.DeadlineExceeded) {
			return nil, fmt.Errorf("TLS handshake: %w; is it a server without TLS? Then use redis://", err)
		}
		return nil, fmt.Errorf("TLS handshake: %w", err)
	}
}

// keepAlive is go-redis's own value.
const keepAlive = 5 * time.Minute
