package weights

import (
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testcerts"
)

// TestHandshakesOfStrangers: what strangers send before they have proved who they are costs a publisher 64 MB at most, and
// keeps no receiver out.
func TestHandshakesOfStrangers(t *testing.T) {
	cert, key, ca := testcerts.Files(t)
	server, client, err := credentials.Files{Cert: cert, Key: key, CA: ca}.Configs()
	require.NoError(t, err)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc + m.StackInuse)
	}
	hello := make([]byte, 15<<10) // of a ClientHello of 60 KiB
	copy(hello, []byte{22, 3, 1, 0x3b, 0xfb, 1, 0, 0xf0, 0})
	for name, c := range map[string]struct {
		count int
		send  func(net.Conn)
	}{
		"most of a certificate": {600, func(c net.Conn) { attack.BigCertificate(c, 200<<10) }},
		"part of a ClientHello": {4000, func(c net.Conn) { c.Write(hello) }},
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t, PublisherOptions{TLS: server, Timeout: 10 * patience})
			before := heap()
			for range c.count {
				conn := must.Get(net.Dial("tcp", p.Addr()))
				defer conn.Close()
				c.send(conn) // the publisher may have closed it
			}
			require.Less(t, heap()-before, int64(64<<20))
			dial(t, p.Addr(), ReceiverOptions{TLS: client})
			require.NoError(t, p.Await(within(t), 1))
		})
	}
}
