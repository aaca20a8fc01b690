package tcp

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
	"github.com/c10d-go/c10d/internal/must"
)

// A stranger may not send more than a hello and small certificates, however it spreads that over time.
func TestBigCertificate(t *testing.T) {
	a := newAuthority(t)
	o := secure(a, a.issue(t, nil))
	o.Handshake = 10 * patience
	ms := join(t, 2, o)
	addr := ms[0].addrs[0].places[0].String()
	for _, c := range []struct {
		sent  int
		taken bool
	}{{12 << 10, true}, {17 << 10, false}, {200_000, false}} {
		conn := must.Get(net.Dial("tcp", addr))
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		err := attack.BigCertificate(conn, c.sent)
		if c.taken {
			require.NoError(t, err)
			eventually(t, "the stranger has no place", func() bool { return ms[0].acceptor.strangers.Len() == 1 })
			continue
		}
		for err == nil {
			_, err = conn.Read(make([]byte, 4<<10)) // there may be an alert
		}
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "%d bytes", c.sent)
	}
	require.Equal(t, 1, ms[0].acceptor.strangers.Len())
}
