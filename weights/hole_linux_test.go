package weights

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/hole"
)

// TestANameWithAHole: an address that drops packets does not take half of the time to connect.
func TestANameWithAHole(t *testing.T) {
	port := hole.Open(t, true)
	p, err := Listen(within(t), "127.0.0.1:"+port, PublisherOptions{})
	require.NoError(t, err)
	defer p.Close()
	r := dial(t, net.JoinHostPort(hole.Name, port), ReceiverOptions{Timeout: 4 * patience})
	require.Eventually(t, func() bool { return r.Status().Connected }, patience, time.Millisecond)
}
