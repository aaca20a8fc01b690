package freeport

import (
	"fmt"
	"net"
	"os"
	"regexp"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestLoopback wants a port where nobody listens and everybody who names it can.
func TestLoopback(t *testing.T) {
	addr := Loopback(t)
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", host)
	require.Error(t, must.Err(net.Dial("tcp", addr)))
	for _, at := range []string{addr, ":" + port, addr} {
		require.NoError(t, must.Get(net.Listen("tcp", at)).Close())
	}
}

// TestKept looks for what keeps the port: a socket at the end of its life.
func TestKept(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("not promised but on Linux")
	}
	_, port, err := net.SplitHostPort(Loopback(t))
	require.NoError(t, err)
	n := must.Get(net.LookupPort("tcp", port))
	sockets := must.Get(os.ReadFile("/proc/net/tcp"))
	const ending = "0[456]" // FIN_WAIT1 and 2, TIME_WAIT
	local := regexp.MustCompile(`(?m)^ *\d+: 0100007F:` + fmt.Sprintf("%04X", n) + ` 0100007F:[0-9A-F]{4} ` + ending + ` `)
	require.Regexp(t, local, string(sockets))
}

// TestNotGivenAway: the kernel gives such ports to nobody who asks for any, and Loopback gives none twice.
func TestNotGivenAway(t *testing.T) {
	given := make(map[string]bool)
	for range 300 {
		addr := Loopback(t)
		require.False(t, given[addr], addr)
		given[addr] = true
		_, port, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		require.Less(t, must.Get(net.LookupPort("tcp", port)), 1<<15)
	}
}
