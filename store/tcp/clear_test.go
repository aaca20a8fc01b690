package tcp

import (
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A rank without TLS in a job with TLS is refused, and the other ranks can find out which it is.
func TestARankWithoutTLSIsNamed(t *testing.T) {
	certs := newCerts(t)
	for _, token := range []Token{"", "secret of the store"} {
		server := serve(t, ServerOptions{TLS: certs.both, Token: token})
		addr := server.Addr().String()
		good := join(t, addr, Options{TLS: certs.trust, Token: token})
		_, ok, err := good.Refused(t.Context(), 2)
		require.NoError(t, err)
		require.False(t, ok)
		_, err = New(t.Context(), addr, Options{Rank: 2, WorldSize: 4, Token: token})
		require.ErrorContains(t, err, "the server speaks TLS")
		var from string
		until(t, func() bool {
			from, ok, err = good.Refused(t.Context(), 2)
			return err != nil || ok
		})
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(from, "127.0.0.1:"), from)
		_, ok, err = good.Refused(t.Context(), -1)
		require.NoError(t, err)
		require.False(t, ok)
		raw, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		_, err = raw.Write(append(slices.Clone(opening), make([]byte, 100)...)) // as PyTorch's ranks begin
		require.NoError(t, err)
		require.NoError(t, raw.(*net.TCPConn).CloseWrite())
		until(t, func() bool {
			_, ok, err = good.Refused(t.Context(), -1)
			return err != nil || ok
		})
		require.NoError(t, err)
		raw.Close()
		_, ok, err = good.Refused(t.Context(), 1)
		require.NoError(t, err)
		require.False(t, ok)
	}
}

// The server keeps few of the ranks that strangers say they are.
func TestManyFalseRanks(t *testing.T) {
	server := serve(t, ServerOptions{TLS: newCerts(t).both})
	for r := range mostClear + 20 {
		_, err := New(t.Context(), server.Addr().String(), Options{Rank: r, WorldSize: 1 << 30})
		require.ErrorContains(t, err, "the server speaks TLS")
	}
	until(t, func() bool { return server.Stats().Clients == 0 })
	require.Equal(t, mostClear, server.Stats().Keys)
}

// A client with TLS says nothing in clear text, whatever the server answers.
func TestTLSClientsSayNothingInClear(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	heard := make(chan []byte, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b := make([]byte, 1<<12)
		n, _ := c.Read(b)
		c.Write([]byte(alert))
		rest, _ := c.Read(b[n:])
		heard <- b[:n+rest]
	}()
	_, err = New(t.Context(), ln.Addr().String(), Options{Rank: 1, WorldSize: 2, TLS: &tls.Config{InsecureSkipVerify: true}})
	require.Error(t, err)
	require.NotContains(t, string(<-heard), "rank")
}

func FuzzClearText(f *testing.F) {
	f.Add([]byte(clearText + "1 of 4\n"))
	f.Add([]byte(clearText + clearText + "3 of 3\n"))
	f.Add([]byte(clearText + "-1 of 99999999999999999999"))
	f.Fuzz(func(t *testing.T, b []byte) {
		rank, ok := parseClear(b)
		require.True(t, rank >= 0)
		if ok {
			again, still := parseClear(fmt.Appendf(nil, "%s%d of %d\n", clearText, rank, rank+1))
			require.True(t, still)
			require.Equal(t, rank, again)
		}
	})
}
