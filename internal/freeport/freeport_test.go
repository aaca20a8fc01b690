package freeport

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"sync"
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

// TestProcesses: a port is free although other goroutines start processes.
func TestProcesses(t *testing.T) {
	program, err := exec.LookPath("true")
	if err != nil {
		t.Skip(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var starts sync.WaitGroup
	defer starts.Wait()
	defer cancel()
	for range 4 {
		starts.Go(func() {
			for ctx.Err() == nil {
				exec.Command(program).Run()
			}
		})
	}
	for range 300 {
		l, err := net.Listen("tcp", Loopback(t))
		require.NoError(t, err)
		defer l.Close() // later: a process may have this one, too
	}
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
