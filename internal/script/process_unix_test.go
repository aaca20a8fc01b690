//go:build unix

package script_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store/tcp"
)

// TestProcessesThatEnd kills or stops one rank of four while the others wait for it. Each
// of them names it: a dead rank at once, long before the operation's limit, and a stopped
// one at the limit.
func TestProcessesThatEnd(t *testing.T) {
	const size, victim = 4, 2
	for _, op := range []string{"all_reduce", "barrier", "recv"} {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(op+" "+sig.String(), func(t *testing.T) {
				srv, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
				require.NoError(t, err)
				defer srv.Close()
				limit := 2 * patience
				if sig == syscall.SIGSTOP {
					limit = 3 * time.Second
				}
				ranks := make([]*rank, size)
				for r := range ranks {
					ranks[r] = startRank(t, op, r, size, victim, srv.Addr().String(), limit)
				}
				for _, p := range ranks {
					require.Equal(t, "in", p.next(t))
				}
				killed := time.Now()
				require.NoError(t, ranks[victim].cmd.Process.Signal(sig))
				named, slow := make(map[int]int), false
				for r, p := range ranks {
					if r == victim {
						continue
					}
					var got report
					require.NoError(t, json.Unmarshal([]byte(p.next(t)), &got))
					t.Logf("rank %d, after %v: %s", r, time.Since(killed).Round(time.Millisecond), got.Error)
					if sig == syscall.SIGKILL {
						require.True(t, got.Died, got.Error)
					} else {
						require.True(t, got.Timeout, got.Error)
					}
					named[r] = got.Peer
					// On a busy machine a rank may be too slow to say in a third
					// of a second that it lives. Then it is named as well.
					if silent := strings.Count(got.Error, "does not answer"); silent > 1 {
						require.Contains(t, got.Error, fmt.Sprintf("rank %d does not answer", victim))
						slow = true
					}
				}
				if !slow {
					require.Equal(t, map[int]int{0: victim, 1: victim, 3: victim}, named)
				}
			})
		}
	}
}
