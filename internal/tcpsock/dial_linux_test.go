package tcpsock

import (
	"context"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/hole"
	"github.com/c10d-go/c10d/internal/must"
)

// TestDialPastAHole: of two addresses one drops packets. Dial reaches the other one long before its context of a minute
// ends. net.Dialer waits for half of that minute, or for all of it if the other address refuses.
func TestDialPastAHole(t *testing.T) {
	for name, first := range map[string]bool{"listens": true, "refuses": false} {
		t.Run(name, func(t *testing.T) {
			port := hole.Open(t, first)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			begun := time.Now()
			if first {
				l := must.Get(net.Listen("tcp", "127.0.0.1:"+port))
				defer l.Close()
			}
			c, err := Dial(ctx, "tcp", net.JoinHostPort(hole.Name, port))
			if first {
				require.NoError(t, err)
				require.NoError(t, c.Close())
			} else {
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			}
			require.Less(t, time.Since(begun), 20*time.Second)
		})
	}
}
