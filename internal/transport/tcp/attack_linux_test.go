package tcp

import (
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
	"github.com/c10d-go/c10d/internal/strangers"
)

// The attacks are small unless fullEnv is set:
//
//	C10D_MESH_ATTACK=full go test -run TestAttacks -v -timeout 2h ./internal/transport/tcp
const fullEnv = "C10D_MESH_ATTACK"

func init() {
	kinds := map[string]attack.Kind{"idle": func(*net.TCPConn, *rand.Rand) bool { return true }}
	for _, kind := range []string{"random", "structured"} {
		kinds[kind] = func(c *net.TCPConn, r *rand.Rand) bool {
			c.Write(hostile(r, kind))
			c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(3)) * time.Millisecond))
			io.Copy(io.Discard, c)
			return false
		}
	}
	kinds["certificate"] = func(c *net.TCPConn, _ *rand.Rand) bool {
		c.SetDeadline(time.Now().Add(patience))
		return attack.BigCertificate(c, 200_000) == nil
	}
	attack.Main(kinds)
}

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
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		err = attack.BigCertificate(conn, c.sent)
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

// TestAttacks sends messages between two ranks while strangers connect to one of them. Its messages, its
// memory and its descriptors must not suffer. Gloo's wire and shared memory have no listener once a
// group is made.
func TestAttacks(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens thousands of connections")
	}
	for _, a := range []struct {
		kind        string
		small, full int
	}{
		{"random", 2000, 500_000},
		{"structured", 2000, 500_000},
		{"idle", 1000, 10_000},
		{"certificate", 700, 10_000},
	} {
		t.Run(a.kind, func(t *testing.T) {
			o := local
			if a.kind == "certificate" {
				ca := newAuthority(t)
				o = secure(ca, ca.issue(t, nil))
			}
			ms := join(t, 2, o)
			roundTrip := func() error {
				for from := range ms {
					r := recv(ms[1-from], from, 1, make([]byte, 4))
					s := send(ms[from], 1-from, 1, make([]byte, 4))
					if err := errors.Join(wait(t, s), wait(t, r)); err != nil {
						return err
					}
				}
				return nil
			}
			n, full := attack.Size(fullEnv, a.small, a.full)
			on := attack.Attack{
				Addr: ms[0].addrs[0].places[0].String(), Kind: a.kind, N: n,
				Calls: []func() error{roundTrip}, AtLeast: time.Second, Slack: 200 * time.Millisecond,
			}
			if full {
				on.AtLeast, on.Slack = 10*time.Second, 0
			}
			if a.kind == "certificate" {
				on.Slack = 200 * time.Millisecond // the plain listener does no handshakes, which take 0.3 ms of a CPU each
			}
			r := attack.Run(t, on)
			limit := strangers.Limit(len(ms)) // of the process, which has both ranks
			require.LessOrEqual(t, ms[0].acceptor.strangers.Len(), limit)
			require.Less(t, r.Files, limit+200)
			require.Less(t, r.Memory, int64(32<<20))
			for _, m := range ms {
				require.Nil(t, m.Fault())
			}
		})
	}
}

// hostile returns what an attacker sends: bytes of any kind, or a hello with a wrong token, and then
// more.
func hostile(r *rand.Rand, kind string) []byte {
	b := make([]byte, r.IntN(200))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	if kind == "random" {
		return b
	}
	h := helloOf(r.Uint32N(3), 2+r.Uint32N(2), r.Uint32N(4), newToken())
	hello := h.encode()
	if r.IntN(4) == 0 {
		binary.LittleEndian.PutUint32(hello[r.IntN(len(hello)-4):], r.Uint32())
	}
	return append(hello[:len(hello)-r.IntN(2)*r.IntN(len(hello))], b...)
}
