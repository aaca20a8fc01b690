package run_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
)

// TestConnectionsEndAfterSilence: on both wires, the sockets of all connections have the time
// limits that Options.Silence says.
func TestConnectionsEndAfterSilence(t *testing.T) {
	for name, tc := range map[string]struct {
		silence            time.Duration
		user, idle, pauses int
	}{
		"default": {0, 15_000, 6, 3},
		"20 s":    {20 * time.Second, 20_000, 8, 4},
	} {
		for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP} {
			t.Run(string(wire)+", "+name, func(t *testing.T) {
				o := gloo.Options{Wire: wire, Silence: tc.silence}
				_, errs := connectWith(t, time.Minute, o, o, o)
				require.NoError(t, errors.Join(errs...))
				fds := must.Get(os.ReadDir("/proc/self/fd"))
				connections := 0
				for _, f := range fds {
					fd := must.Get(strconv.Atoi(filepath.Base(f.Name())))
					if peer, err := unix.Getpeername(fd); err != nil || !isInet(peer) {
						continue
					}
					connections++
					for option, want := range map[int]int{
						unix.TCP_USER_TIMEOUT: tc.user, unix.TCP_KEEPIDLE: tc.idle, unix.TCP_KEEPINTVL: tc.pauses, unix.TCP_KEEPCNT: 3,
					} {
						got := must.Get(unix.GetsockoptInt(fd, unix.IPPROTO_TCP, option))
						require.Equal(t, want, got, "option %d", option)
					}
					got := must.Get(unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE))
					require.Equal(t, 0, got, "within the host")
				}
				require.GreaterOrEqual(t, connections, 6, "both ends of each pair")
			})
		}
	}
}

func isInet(a unix.Sockaddr) bool {
	switch a.(type) {
	case *unix.SockaddrInet4, *unix.SockaddrInet6:
		return true
	}
	return false
}
