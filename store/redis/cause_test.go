package redis

import (
	"crypto/tls"
	"errors"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// TestRefusedWrites: a server that takes no writes says why, not that a transaction was
// discarded.
func TestRefusedWrites(t *testing.T) {
	for name, test := range map[string]struct {
		args []any
		want string
	}{
		"replica":       {[]any{"REPLICAOF", "127.0.0.1", "1"}, "READONLY"},
		"out of memory": {[]any{"CONFIG", "SET", "maxmemory", "1"}, "OOM"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := startServer(t, "--port", "PORT")
			s := connect(t, "redis://"+srv.addr, Options{})
			require.NoError(t, s.client.Do(t.Context(), test.args...).Err())
			_, err := New(t.Context(), "redis://"+srv.addr, Options{Prefix: "another"})
			require.ErrorContains(t, err, test.want)
			_, addErr := s.Add(t.Context(), "k", 1)
			for op, err := range map[string]error{"set": s.Set(t.Context(), "k", nil), "add": addErr, "append": s.Append(t.Context(), "k", []byte("x"))} {
				require.ErrorContains(t, err, test.want, op)
				require.NotContains(t, err.Error(), "EXECABORT", op)
				e := must.As[*store.Error](t, err)
				require.Equal(t, []string{"k"}, e.Keys)
			}
		})
	}
}

// TestTLSWithoutTLS: rediss:// to a server without TLS names the handshake, whether the
// server waits for more or answers.
func TestTLSWithoutTLS(t *testing.T) {
	for name, answer := range map[string]string{"silent": "", "answers": "-ERR unknown command\r\n"} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				c, err := ln.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				b := make([]byte, 1<<10)
				for n := 1; n > 0; n, _ = c.Read(b) {
					c.Write([]byte(answer))
				}
			}()
			defer func() { ln.Close(); <-ended }()
			_, err = New(t.Context(), "rediss://"+ln.Addr().String()+"?dial_timeout=300ms", Options{TLS: &tls.Config{InsecureSkipVerify: true}})
			require.ErrorContains(t, err, "TLS handshake: ")
			require.ErrorContains(t, err, "use redis://")
		})
	}
}

// TestRefusal is about errors that are no refusals.
func TestRefusal(t *testing.T) {
	other := errors.New("closed")
	require.Equal(t, other, refusal(nil, other))
	require.NoError(t, refusal(nil, nil))
}
