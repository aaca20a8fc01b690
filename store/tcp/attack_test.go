//go:build linux

package tcp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
)

// The attacks are small unless fullEnv is set:
//
//	C10D_STORE_ATTACK=full go test -run TestAttacks -v -timeout 1h ./store/tcp
const fullEnv = "C10D_STORE_ATTACK"

func init() {
	kinds := map[string]attack.Kind{
		"idle": func(*net.TCPConn, *rand.Rand) bool { return true },
		"loris": func(c *net.TCPConn, _ *rand.Rand) bool {
			c.Write(cat(opening, 1, "/k", uint64(1000)))
			go func() {
				for range time.Tick(time.Second) {
					c.Write([]byte{0})
				}
			}()
			return true
		},
		"guests": func(c *net.TCPConn, _ *rand.Rand) bool {
			c.Write(cat(opening, int(qPing), u32(7)))
			return true
		},
		"list": func(c *net.TCPConn, _ *rand.Rand) bool {
			c.Write(opening)
			for range 5 {
				c.Write([]byte{byte(qListKeys)})
				if !readListing(c) {
					break
				}
			}
			return true
		},
	}
	for _, kind := range []string{"random", "structured"} {
		kinds[kind] = func(c *net.TCPConn, r *rand.Rand) bool {
			c.Write(hostile(r, kind))
			c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(3)) * time.Millisecond))
			io.Copy(io.Discard, c)
			return false
		}
	}
	attack.Main(kinds)
}

// TestAttacks measures the calls of a job's ranks while clients attack the server. A new rank must
// always get in, and memory and descriptors stay bounded.
func TestAttacks(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens thousands of connections")
	}
	for _, a := range []struct {
		kind        string
		small, full int
		stays       bool
	}{
		{"random", 2000, 500_000, false},
		{"structured", 2000, 500_000, false},
		{"idle", 300, 10_000, true},
		{"loris", 300, 10_000, true},
		{"guests", 300, 10_000, true},
		{"list", 4, 4, false},
	} {
		t.Run(a.kind, func(t *testing.T) {
			opts := ServerOptions{MaxClients: 200}
			n, full := attack.Size(fullEnv, a.small, a.full)
			on := attack.Attack{Kind: a.kind, N: n, Stays: a.stays, AtLeast: time.Second, Slack: 200 * time.Millisecond}
			size, count := 500, 2000 // of the keys that "list" lists
			if full {
				opts = ServerOptions{}
				on.AtLeast, on.Slack = 10*time.Second, 0
				size, count = 50, 1<<20
			}
			s := serve(t, opts)
			on.Addr = s.Addr().String()
			var ranks []*Store
			for r := range 3 {
				rank := join(t, on.Addr, Options{WorldSize: 3, Rank: r})
				ranks = append(ranks, rank)
				n := 0
				on.Calls = append(on.Calls, func() error {
					n++
					key := fmt.Sprint(r, " ", n%100)
					if err := rank.Set(t.Context(), key, []byte("127.0.0.1:12345")); err != nil {
						return err
					}
					_, err := rank.Get(t.Context(), key)
					return err
				})
			}
			if a.kind == "list" {
				fill(t, ranks[0], count, size)
			}
			r := attack.Run(t, on)
			works(t, join(t, on.Addr, Options{WorldSize: 3, Rank: 2}))
			stats := s.Stats()
			require.LessOrEqual(t, stats.Clients, s.opts.MaxClients)
			require.LessOrEqual(t, r.Files, s.opts.MaxClients+200)
			require.LessOrEqual(t, r.Memory, int64(64<<20)+int64(s.opts.MaxClients)*32<<10)
			if a.kind != "list" && a.kind != "guests" {
				require.Positive(t, stats.Refused+int64(stats.Clients)-4)
			}
			for _, r := range ranks {
				works(t, r)
			}
		})
	}
}

// fill sets count keys of size bytes.
func fill(t *testing.T, s *Store, count, size int) {
	for i := 0; i < count; i += 1000 {
		keys, values := make([]string, 1000), make([][]byte, 1000)
		for k := range keys {
			keys[k] = fmt.Sprintf("%0*d", size, i+k)
		}
		require.NoError(t, s.MultiSet(t.Context(), keys, values))
	}
}

// readListing reads a whole reply to LIST_KEYS.
func readListing(c net.Conn) bool {
	r := bufio.NewReaderSize(c, 64<<10)
	n, err := readInt64(r)
	for ; n > 0 && err == nil; n-- {
		var size int64
		if size, err = readInt64(r); err == nil {
			_, err = r.Discard(int(size))
		}
	}
	return err == nil
}

// hostile returns what a connection of an attacker sends.
func hostile(r *rand.Rand, kind string) []byte {
	b := make([]byte, r.IntN(200))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	if kind == "random" {
		return b
	}
	start := [][]byte{opening, nil, []byte(hello), []byte(tlsBegin), cat(opening, int(qPing), u32(uint32(offer)<<16|0xabcd))}[r.IntN(5)]
	var all []byte
	all = append(all, start...)
	for range r.IntN(5) {
		key := fmt.Sprint("/hostile", r.IntN(1000))
		q := 1 + r.IntN(int(qHello))
		part := [][]byte{
			cat(q, key, "value"),
			cat(q, key, uint64(r.Uint64())),
			cat(q, uint64(r.IntN(200000)), key, key),
			cat(q, uint64(r.Uint64()), key),
			cat(int(qSet), key, strings.Repeat("v", r.IntN(3000))),
			cat(int(qWait), uint64(2), key, "/never"),
			cat(int(qQueuePush), key, "v"),
		}[r.IntN(7)]
		if len(start) > len(opening) {
			part = slices.Concat(u32(uint32(4+len(part))), u32(r.Uint32()), part)
		}
		all = append(all, part...)
	}
	return bytes.Clone(append(all, b[:len(b)/4]...))
}
