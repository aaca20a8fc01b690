package tcp

import (
	"bufio"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

func TestAnotherJobIsRefused(t *testing.T) {
	server := serve(t, ServerOptions{Job: "A"})
	addr := server.Addr().String()
	join(t, addr, Options{Job: "A"})
	join(t, addr, Options{})
	join(t, serve(t, ServerOptions{}).Addr().String(), Options{Job: "A"})

	start := time.Now()
	_, err := New(t.Context(), addr, Options{Job: "B", Timeout: patience})
	require.ErrorIs(t, err, ErrOtherJob)
	require.ErrorContains(t, err, `the store's job is "A", the client's is "B"`)
	require.Less(t, time.Since(start), patience/2, "the client tried again")
	until(t, func() bool { return server.Stats().Clients == 2 })

	_, err = Listen(t.Context(), local, ServerOptions{Job: string(make([]byte, 1<<20))})
	require.ErrorIs(t, err, store.ErrTooLarge)
	_, err = New(t.Context(), addr, Options{Job: string(make([]byte, 9<<10)), Timeout: patience})
	require.ErrorIs(t, err, store.ErrTooLarge)
	require.ErrorContains(t, err, "the name of a job of 9216 bytes")
}

// TestARestartedServer states that a client does not take an empty server for
// the one that it joined.
func TestARestartedServer(t *testing.T) {
	first := serve(t, ServerOptions{})
	addr := first.Addr().String()
	s := join(t, addr, Options{})
	n := must.Get(s.Add(t.Context(), "n", 1))
	require.EqualValues(t, 1, n)
	require.NoError(t, first.Close())
	second, err := Listen(t.Context(), addr)
	require.NoError(t, err)
	defer second.Close()

	until(t, func() bool {
		_, err = s.Add(t.Context(), "n", 1)
		require.Error(t, err)
		return !errors.Is(err, ErrDisconnected) // of the connection to the first
	})
	require.ErrorIs(t, err, ErrRestarted)
	require.ErrorContains(t, err, addr)
	require.ErrorIs(t, must.Err(s.Clone(t.Context())), ErrRestarted)
	until(t, func() bool { return second.Stats().Keys == 0 && second.Stats().Clients == 0 })
}

func TestPortInUse(t *testing.T) {
	addr := serve(t, ServerOptions{}).Addr().String()
	_, err := New(t.Context(), addr, Options{Server: true})
	require.ErrorContains(t, err, addr+": bind: address already in use: wait until its owner has ended, or choose another port (MASTER_PORT)")
}

func TestGreetingsThatAreNone(t *testing.T) {
	for name, reply := range map[string][]byte{
		"short":            cat(u32(frameHead+8+3), u32(0), int(done), u64(3), 1, 2, 3),
		"of other request": cat(u32(frameHead+8+8), u32(1), int(done), u64(8), u64(1)),
		"too long":         cat(u32(1<<30), u32(0), int(done), u64(1<<30)),
		"too short":        cat(u32(1), u32(0), int(done)),
		"not a frame":      cat(u32(frameHead+8), u32(0), int(done), u64(9)),
	} {
		t.Run(name, func(t *testing.T) {
			client, server := net.Pipe()
			defer client.Close()
			defer server.Close()
			answered := go1(func() error {
				b := make([]byte, 64)
				if _, err := server.Read(b); err != nil {
					return err
				}
				server.Write(reply)
				return server.Close()
			})
			d := dialer{addr: "there"}
			require.Error(t, d.greet(&conn{Conn: client, r: bufio.NewReader(client), dialect: native}))
			client.Close()
			require.NoError(t, await(t, answered))
			require.Nil(t, d.server)
		})
	}
}
