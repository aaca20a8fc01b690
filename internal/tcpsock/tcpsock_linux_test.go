package tcpsock_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/tcpsock"
)

// A few bytes wake nobody, and are there when the limit is taken back.
func TestWakeAt(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	accepted, err := ln.Accept()
	require.NoError(t, err)
	c := accepted.(*net.TCPConn)
	defer c.Close()

	require.NoError(t, tcpsock.WakeAt(c, 16<<10))
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err = c.Read(make([]byte, 1)) // empties the poller
	require.Error(t, err)
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 100))
		read <- err
	}()
	time.Sleep(50 * time.Millisecond) // it has to begin before the bytes come
	_, err = client.Write([]byte("some bytes"))
	require.NoError(t, err)
	select {
	case <-read:
		t.Fatal("woken by a few bytes")
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, tcpsock.WakeAt(c, 1))
	select {
	case err := <-read:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		t.Fatal("not woken")
	}
}
