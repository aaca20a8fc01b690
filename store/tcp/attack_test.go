//go:build linux

package tcp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
	"github.com/c10d-go/c10d/internal/credentials"
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
		"ranks": func(c *net.TCPConn, _ *rand.Rand) bool {
			c.Write(cat(opening, int(qAdd), workers, uint64(1)))
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
		{"ranks", 300, 10_000, true},
		{"list", 4, 4, false},
	} {
		t.Run(a.kind, func(t *testing.T) {
			opts := ServerOptions{MaxClients: 200, World: 3}
			n, full := attack.Size(fullEnv, a.small, a.full)
			on := attack.Attack{Kind: a.kind, N: n, Stays: a.stays, AtLeast: time.Second, Slack: 200 * time.Millisecond}
			size, count := 500, 2000 // of the keys that "list" lists
			if full {
				opts.MaxClients = 0
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
			require.LessOrEqual(t, r.Memory, int64(mostMemory))
			if a.kind != "list" && a.kind != "guests" && a.kind != "ranks" {
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

// mostMemory is how much a server may grow under an attack.
const mostMemory = 64 << 20

// victimEnv makes the test binary a server, with a file of a secret or without TLS: "FILE" or "-".
const victimEnv = "C10D_TCP_TEST_VICTIM"

func init() {
	otherProcesses[victimEnv] = func(secret string) error {
		opts := ServerOptions{World: 2}
		var err error
		if secret != "-" {
			if opts.TLS, opts.Token, err = (credentials.Files{Secret: secret}).Load(); err != nil {
				return err
			}
		}
		s, err := Listen(context.Background(), local, opts)
		if err != nil {
			return err
		}
		fmt.Println(s.Addr())
		io.Copy(io.Discard, os.Stdin)
		return s.Close()
	}
}

// victim starts such a server. grown returns how much more memory it has had since than at first.
func victim(t *testing.T, secret string) (addr string, grown func() int64) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+secret)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		cmd.Wait()
	})
	addr, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	memory := func(field string) (bytes int64) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(status), field+":")
		_, err = fmt.Sscan(rest, &bytes)
		require.NoError(t, err)
		return bytes << 10
	}
	before := memory("VmRSS")
	return strings.TrimSpace(addr), func() int64 { return memory("VmHWM") - before }
}

// Ranks, or those who say so, do not make the server hold much by requests that are almost whole.
func TestHalfRequests(t *testing.T) {
	if race {
		t.Skip("the race detector allocates")
	}
	values := []any{int(qMultiSet), uint64(8)}
	for i := range 8 {
		values = append(values, fmt.Sprint("/", i), uint64(8<<20), make([]byte, 8<<20))
	}
	empty := cat(int(qMultiSet), uint64(128<<10), bytes.Repeat(cat("", ""), 128<<10))
	for name, request := range map[string][]byte{"64 MiB": cat(values...), "131072 keys": empty} {
		t.Run(name, func(t *testing.T) {
			addr, grown := victim(t, "-")
			first := join(t, addr, Options{WorldSize: 2, NoWait: true})
			var all sync.WaitGroup
			for range 60 {
				c := dialRaw(t, addr, opening...)
				c.request(v2d, number(qAdd, workers, 1))
				all.Go(func() { c.Write(request[:len(request)-1]) })
			}
			all.Wait()
			t.Logf("the server has had %d MiB more", grown()>>20)
			require.Less(t, grown(), int64(mostMemory))
			works(t, first)
			works(t, join(t, addr, Options{WorldSize: 2, Rank: 1}))
		})
	}
}

// stingy is a connection that writes so many bytes and drops the others.
type stingy struct {
	net.Conn
	left int
}

func (c *stingy) Write(b []byte) (int, error) {
	n := min(len(b), c.left)
	c.left -= n
	if _, err := c.Conn.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}

// A stranger's certificate is not read to its end, however long the server waits for a handshake.
func TestLargeCertificates(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber:    big.NewInt(1),
		ExtraExtensions: []pkix.Extension{{Id: []int{1, 2, 3, 4}, Value: make([]byte, 250_000)}},
	}
	der, err := x509.CreateCertificate(crand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	large := &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
	}}
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(secret))
	var opts Options
	opts.TLS, opts.Token, err = (credentials.Files{Secret: secret}).Load()
	require.NoError(t, err)

	n, full := attack.Size(fullEnv, 60, 4000)
	grown := func() int64 { return 0 }
	var addr string
	if full {
		addr, grown = victim(t, secret)
	} else {
		addr = serve(t, ServerOptions{TLS: opts.TLS, Token: opts.Token, OpeningTimeout: time.Hour}).Addr().String()
	}
	var all sync.WaitGroup
	for range n {
		c := dialRaw(t, addr)
		all.Go(func() {
			tls.Client(&stingy{c, 200_000}, large).Handshake()
			if !full {
				io.Copy(io.Discard, c) // until it is closed
			}
		})
	}
	all.Wait()
	begun := time.Now()
	works(t, join(t, addr, opts))
	t.Logf("the server has had %d MiB more, a new client took %v", grown()>>20, time.Since(begun))
	require.Less(t, grown(), int64(mostMemory))
}
