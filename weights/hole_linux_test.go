package weights

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/hole"
	"github.com/c10d-go/c10d/internal/must"
)

// TestANameWithAHole: an address that drops packets does not take half of the time to connect.
func TestANameWithAHole(t *testing.T) {
	port := hole.Open(t, true)
	p := must.Get(Listen(within(t), "127.0.0.1:"+port))
	defer p.Close()
	r := dial(t, net.JoinHostPort(hole.Name, port), ReceiverOptions{Timeout: 4 * patience})
	require.Eventually(t, func() bool { return r.Status().Connected }, patience, time.Millisecond)
}
