package tcp

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/hole"
)

// TestANameWithAHole: an address that drops packets does not keep a client from trying the other one again. It is not
// parallel: it changes how names are looked up.
func TestANameWithAHole(t *testing.T) {
	addr := net.JoinHostPort(hole.Name, hole.Open(t, false))
	_, err := New(t.Context(), addr, Options{Timeout: 6 * time.Second})
	require.ErrorContains(t, err, "connection refused (attempt ")
}
