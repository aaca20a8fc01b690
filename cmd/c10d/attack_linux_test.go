package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/attack"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/sockets"
	"github.com/c10d-go/c10d/store/tcp"
)

var (
	lorises = flag.Int("attack.lorises", 100, "`n` connections that a crowd opens to each port and keeps")
	times   = flag.Bool("attack.times", false, "check how long the job's calls, its page and a new job take")
)

// growth bounds the memory that a process of the job uses more than before the attacks, at any time.
var growth int64 = 64 << 20

const (
	// refusal is how long a listener may take to close the connection of an attacker. Those that
	// say nothing have 10 s.
	refusal = 15 * time.Second

	// slowest bounds a call of the job under attack, on a host that other tests use too.
	slowest = 5 * time.Second
)

// With -attack.times, these hold while the connections of an attack are open.
const (
	pageTime = time.Second      // for the owner of the debug page
	newTime  = 2 * time.Second  // for a new job of two ranks, and for a new client of a store
	slower   = 3                // times the p99 of the job's calls in peace, between the attacks
	timed    = 10 * time.Second // for which they are timed
)

// mode is what protects a job.
type mode string

const (
	withTLS mode = "TLS"
	plain   mode = "plain"
)

// attacked is a job of two nodes with one rank each, of which every process is known.
type attacked struct {
	mode     mode
	programs [2]*program // the launchers, which print what the ranks print
	pids     map[string]int
	ports    map[string]netip.AddrPort // stores, debug page and each rank's mesh
	certs    string                    // directory
	token    string
	phase    string // file for toil
	good     []byte // what a good client of the store has sent
	before   map[string]int64
}

// attacker returns a function that does something to a port. Its error says that the port has not
// refused it.
type attacker func(t *testing.T, j *attacked) func(addr string) error

// refuses returns an error unless the other side ends c without another word than those of a refusal.
func refuses(c net.Conn) error {
	c.SetReadDeadline(time.Now().Add(refusal))
	n, err := io.Copy(io.Discard, io.LimitReader(c, 4<<10))
	switch {
	case timedOut(err):
		return fmt.Errorf("the connection is open after %v", refusal)
	case n == 4<<10:
		return fmt.Errorf("the answer has %d bytes or more", n)
	}
	return nil
}

// sends is an attack with bytes.
func sends(b func(j *attacked) []byte) attacker {
	return func(_ *testing.T, j *attacked) func(string) error {
		text := b(j)
		return func(addr string) error {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return nil // a queue that is full refuses, too
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(refusal))
			c.Write(text)
			return refuses(c)
		}
	}
}

// dialTLS begins a connection with TLS. Its handshake is not done. c is nil if nobody accepts.
func dialTLS(addr string, config *tls.Config) (c *tls.Conn) {
	raw, err := net.Dial("tcp", addr)
	if err != nil {
		return nil // a queue that is full refuses, too
	}
	raw.SetDeadline(time.Now().Add(refusal))
	return tls.Client(raw, config)
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// configuration makes what an attacker dials with.
type configuration func(*testing.T, *attacked) *tls.Config

// overTLS is an attack that does something after a handshake, with its error.
func overTLS(config configuration, then func(j *attacked, c *tls.Conn, handshake error) error) attacker {
	return func(t *testing.T, j *attacked) func(string) error {
		its := config(t, j)
		return func(addr string) error {
			c := dialTLS(addr, its)
			if c == nil {
				return nil
			}
			defer c.Close()
			return then(j, c, c.Handshake())
		}
	}
}

// presents is an attack with a certificate, or without one. A server with TLS has to refuse it by an
// alert, before it waits for a message.
func presents(config configuration) attacker {
	return overTLS(config, func(j *attacked, c *tls.Conn, err error) error {
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		if err == nil || timedOut(err) || j.mode == withTLS && !strings.Contains(err.Error(), "remote error: tls: ") {
			return fmt.Errorf("the server did not refuse the certificate, but said: %v", err)
		}
		return nil
	})
}

// shakes is an attack with a good certificate, and with bytes after the handshake.
func shakes(config configuration, b []byte) attacker {
	return overTLS(config, func(_ *attacked, c *tls.Conn, err error) error {
		if err != nil {
			return err
		}
		c.Write(b)
		return refuses(c)
	})
}

// certificate returns the configuration of an attacker that trusts everybody.
func certificate(name string, until time.Duration, ours bool) configuration {
	return func(t *testing.T, j *attacked) *tls.Config {
		dir := j.certs
		if !ours {
			dir = t.TempDir()
		}
		a, _, err := credentials.OpenAuthority(dir)
		require.NoError(t, err)
		require.NoError(t, a.Issue(dir, name, []string{"127.0.0.1"}, time.Now().Add(until)))
		files := credentials.InDir(dir, name)
		pair := must.Get(tls.LoadX509KeyPair(files.Cert, files.Key))
		return &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}
	}
}

func anyone(*testing.T, *attacked) *tls.Config { return &tls.Config{InsecureSkipVerify: true} }

// falseHello is the hello of a rank, of the right size and with a token that somebody has guessed.
func falseHello() []byte {
	b := make([]byte, 96)
	copy(b, "c10dtcp3")
	binary.LittleEndian.PutUint32(b[12:], 1)
	binary.LittleEndian.PutUint32(b[16:], 2)
	rand.Read(b[64:])
	return b
}

// huge is VALIDATE, and a SET whose key has 10 GiB.
func huge() []byte {
	return binary.LittleEndian.AppendUint64([]byte{0, 0xce, 0xf7, 0x85, 0x3c, 1}, 10<<30)
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	b[0] |= 0x80 // no query of a store, which may wait for the rest of it
	return b
}

// stranger is what one connection of an attacker does. It reports whether the connection stays open.
type stranger func(c *net.TCPConn, r *mrand.Rand) (stays bool)

// crowds are attacks of many connections by other processes.
var crowds = []struct {
	name  string
	modes []mode
	ports string // part of their names
	n     func() int
	kind  stranger
}{
	{"half of a request of 64 MiB", []mode{plain}, "store", func() int { return min(60, *lorises/10) }, func(c *net.TCPConn, r *mrand.Rand) bool {
		c.SetWriteDeadline(time.Now().Add(refusal))
		d := anyDialect(r)
		return d.large(c, d.values*valueBytes-1000) == nil
	}},
	{"random bytes", []mode{withTLS}, "", func() int { return *lorises }, func(c *net.TCPConn, _ *mrand.Rand) bool {
		c.Write(random(4 << 10))
		return false
	}},
	{"most of a large certificate", []mode{withTLS}, "", func() int { return *lorises }, func(c *net.TCPConn, _ *mrand.Rand) bool {
		return attack.BigCertificate(c, 200_000) == nil
	}},
	{"certificate below the limit", []mode{withTLS}, "", func() int { return *lorises }, func(c *net.TCPConn, _ *mrand.Rand) bool {
		return attack.BigCertificate(c, 16_000) == nil
	}},
	{"part of a ClientHello of 60 KiB", []mode{withTLS}, "", func() int { return *lorises },
		says("\x16\x03\x01\x3b\xfb\x01\x00\xf0\x00" + strings.Repeat("\x00", 15<<10))},
	{"nothing", []mode{withTLS, plain}, "", func() int { return *lorises }, says("")},
	{"a false hello of a rank", []mode{plain}, "port", func() int { return *lorises }, func(c *net.TCPConn, _ *mrand.Rand) bool {
		c.Write(falseHello())
		return true
	}},
	{"a byte of a key each second", []mode{plain}, "store", func() int { return *lorises }, func(c *net.TCPConn, r *mrand.Rand) bool {
		c.Write(append(bytes.Clone(anyDialect(r).rank), 1, 0xe8, 3, 0, 0, 0, 0, 0, 0))
		go func() {
			for range time.Tick(time.Second) {
				c.Write([]byte{0})
			}
		}()
		return true
	}},
	{"one byte of TLS", []mode{withTLS, plain}, "", func() int { return *lorises }, says("\x16")},
	{"GET without its body", []mode{withTLS, plain}, "debug page", func() int { return *lorises },
		says("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")},
	{"GETs whose answers are not read", []mode{plain}, "store", func() int { return *lorises },
		func(c *net.TCPConn, r *mrand.Rand) bool {
			c.SetWriteDeadline(time.Now().Add(refusal))
			c.Write(anyDialect(r).gets)
			return true
		}},
	{"says that it is a rank", []mode{plain}, "store of", func() int { return *lorises * 5 / 2 }, func(c *net.TCPConn, r *mrand.Rand) bool {
		c.Write(anyDialect(r).rank)
		return true
	}},
}

// says is what connections do that say something and stay.
func says(text string) stranger {
	return func(c *net.TCPConn, _ *mrand.Rand) bool {
		io.WriteString(c, text)
		return true
	}
}

func init() {
	kinds := make(map[string]stranger)
	for i, a := range crowds {
		kinds[strconv.Itoa(i)] = func(c *net.TCPConn, r *mrand.Rand) bool {
			c.SetReadDeadline(time.Now().Add(refusal))
			return a.kind(c, r)
		}
	}
	if args := strings.Fields(os.Getenv(crowdVariable)); len(args) > 0 {
		if err := crowd(args[0], kinds[args[1]], must.Get(strconv.Atoi(args[2]))); err != nil {
			fmt.Fprintln(os.Stderr, "crowd:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// crowdVariable makes the test binary a crowd: "ADDRESS KIND N".
const crowdVariable = "C10D_TEST_CROWD"

// crowd opens n connections, 16 at a time, and says so. It keeps those that stay open until standard input ends. It
// runs at the lowest priority, because real attackers would not use this host's CPUs.
func crowd(addr string, kind stranger, n int) error {
	syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19)
	to, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return err
	}
	workers := min(16, n)
	var mu sync.Mutex
	var open []net.Conn
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			r := mrand.New(mrand.NewPCG(uint64(w), uint64(n)))
			for range (n + workers - 1) / workers {
				// More addresses than one have more ports than one.
				c, err := net.DialTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+r.IntN(200)))}, to)
				if err != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				c.SetLinger(0)
				if !kind(c, r) {
					c.Close()
					continue
				}
				mu.Lock()
				open = append(open, c) // or the garbage collector closes it
				mu.Unlock()
			}
		})
	}
	all.Wait()
	fmt.Println("done")
	io.Copy(io.Discard, os.Stdin)
	runtime.KeepAlive(open)
	return nil
}

// gather starts a crowd, and returns when it has made all of its connections. Those that stay open do so until the
// test ends.
func gather(t *testing.T, addr, kind string, n int) {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", crowdVariable, addr, kind, n))
	cmd.Stderr = os.Stderr
	in := must.Get(cmd.StdinPipe())
	out := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	bufio.NewReader(out).ReadString('\n')
}

// dialect is one of those that a plain store takes.
type dialect struct {
	rank   []byte // the first messages of a rank
	head   []byte // of a large request
	value  []byte // comes before each value
	values int
	gets   []byte // the first messages of a guest: a value of 15 KB, and requests for it
}

// valueBytes is a little less than the most that a store takes.
const valueBytes = 8<<20 - 4<<10

var dialects = func() []dialect {
	const add, multiSet, ping, hello = 4, 11, 13, 22
	le := binary.LittleEndian
	text := func(b []byte, s string) []byte { return append(le.AppendUint64(b, uint64(len(s))), s...) }
	worker := func(query byte) []byte { return le.AppendUint64(text([]byte{query}, "init/"), 1) }
	frame := func(b []byte, more int) []byte { return append(le.AppendUint64(nil, uint64(4+len(b)+more)), b...) }
	opening := []byte{0, 0xce, 0xf7, 0x85, 0x3c}
	sets := le.AppendUint64([]byte{multiSet}, 7)
	value := le.AppendUint64(text(nil, "/half"), valueBytes)
	found := strings.Repeat("x", 15_000)
	gets := func(set, get byte, frame func([]byte, int) []byte) []byte {
		asks := bytes.Repeat(frame(text([]byte{get}, "/found"), 0), 10)
		return append(frame(text(text([]byte{set}, "/found"), found), 0), asks...)
	}
	bare := func(b []byte, _ int) []byte { return b }
	native := slices.Concat(opening, []byte{ping, 0xcd, 0x80, 0xd2, 0xc1})
	return []dialect{
		{slices.Concat(opening, worker(add)), sets, value, 7, append(opening, gets(1, 3, bare)...)}, // PyTorch
		{slices.Concat(native, frame(text([]byte{hello}, ""), 0), frame(worker(add), 0)),
			frame(sets, 7*(len(value)+valueBytes)), value, 7, append(native, gets(1, 3, frame)...)}, // native
		{worker(3), []byte{0}, value, 1, gets(0, 2, bare)}, // PyTorch up to 2.0, with a SET
	}
}()

func anyDialect(r *mrand.Rand) *dialect { return &dialects[r.IntN(len(dialects))] }

// large sends the messages of a rank, and a large request of which the values have n bytes.
func (d *dialect) large(c net.Conn, n int) error {
	_, err := c.Write(slices.Concat(d.rank, d.head))
	for piece := make([]byte, valueBytes); n > 0 && err == nil; n -= valueBytes {
		if _, err = c.Write(d.value); err == nil {
			_, err = c.Write(piece[:min(n, valueBytes)])
		}
	}
	return err
}

// TestDialects: a store takes what attackers say to be ranks, and would carry out their requests.
func TestDialects(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, d := range dialects {
		s := must.Get(tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{MaxHeld: 256 << 20}))
		defer s.Close()
		c := must.Get(net.Dial("tcp", s.Addr().String()))
		defer c.Close()
		require.NoError(t, d.large(c, d.values*valueBytes))
		good := must.Get(tcp.New(ctx, s.Addr().String()))
		defer good.Close()
		require.EqualValues(t, 1, must.Get(good.Joined(ctx)))
		require.NoError(t, good.Wait(ctx, "half"))
		guest := must.Get(net.Dial("tcp", s.Addr().String()))
		defer guest.Close()
		guest.SetDeadline(time.Now().Add(patience))
		guest.Write(d.gets)
		n, err := io.CopyN(io.Discard, guest, 10*15_000)
		require.NoError(t, err, "%d bytes", n)
	}
}

// TestAttacksOnEveryPort attacks every TCP port that a job of c10d run listens on. These are the
// agents' store, the debug page, the ranks' store, and for each rank one port for gloo and one for cuda. Beside a
// plain job there is a plain c10d store, which knows no world.
// All attacks are refused, or their connections stay open and cost little: no process grows, the job's calls
// go on, its page is shown to whoever may see it, and new clients of the stores and new jobs get in. In full:
//
//	go test ./cmd/c10d -run TestAttacksOnEveryPort -v -attack.lorises 4000 -attack.times -timeout 1h
func TestAttacksOnEveryPort(t *testing.T) {
	onlyTLS := []mode{withTLS}
	attacks := []struct {
		name  string
		modes []mode
		do    attacker
	}{
		{"wrong CA", onlyTLS, presents(certificate("rank1", time.Hour, false))},
		{"no certificate", onlyTLS, presents(anyone)},
		{"expired certificate", onlyTLS, presents(certificate("expired", -time.Minute, true))},
		{"clear text of a store", onlyTLS, sends(func(*attacked) []byte { return append([]byte{0, 0xce, 0xf7, 0x85, 0x3c}, random(128)...) })},
		{"clear text of a rank", onlyTLS, sends(func(*attacked) []byte { return falseHello() })},
		{"clear text of HTTP", onlyTLS, sends(func(*attacked) []byte { return []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat(" ", 100)) })},
		{"replay of a good client", onlyTLS, sends(func(j *attacked) []byte { return j.good })},
		{"false rank with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), falseHello())},
		{"10 GiB length", onlyTLS, sends(func(*attacked) []byte { return append(huge(), random(128)...) })},
		{"10 GiB length with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), append(huge(), random(128)...))},
		{"TLS record of 64 KiB", onlyTLS, sends(func(*attacked) []byte { return append([]byte{0x16, 3, 1, 0xff, 0xff}, random(128)...) })},
		{"garbage", onlyTLS, sends(func(*attacked) []byte { return random(4 << 10) })},
		{"garbage with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), random(4<<10))},
	}
	t.Setenv("C10D_WIRE", "tcp")
	for _, mode := range []mode{withTLS, plain} {
		t.Run(string(mode), func(t *testing.T) {
			if !*times {
				t.Parallel() // refusals wait for timeouts
			}
			j := startAttacked(t, mode)
			t.Run("refused", func(t *testing.T) {
				j.enter(t, "refused")
				var all sync.WaitGroup
				for _, a := range attacks {
					if slices.Contains(a.modes, mode) {
						do := a.do(t, j)
						all.Go(func() {
							j.each("", func(port, addr string) {
								if err := do(addr); err != nil {
									t.Errorf("%s: %s: %v", a.name, port, err)
								}
							})
						})
					}
				}
				all.Wait()
				j.grown(t)
			})
			for i, a := range crowds {
				if !slices.Contains(a.modes, mode) {
					continue
				}
				t.Run(a.name, func(t *testing.T) {
					j.calm(t, "peace")
					j.enter(t, "opening: "+a.name)
					j.each(a.ports, func(_, addr string) {
						gather(t, addr, strconv.Itoa(i), a.n())
					})
					j.goesOn(t)
					j.calm(t, a.name)
					j.grown(t)
				})
			}
			j.end(t)
		})
	}
}

// each calls do at once for all ports of which part is a part of the name.
func (j *attacked) each(part string, do func(port, addr string)) {
	var all sync.WaitGroup
	for port, addr := range j.ports {
		if strings.Contains(port, part) {
			all.Go(func() { do(port, addr.String()) })
		}
	}
	all.Wait()
}

// goesOn checks that whoever has the job's credentials gets in while strangers are there.
func (j *attacked) goesOn(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	within := func(what string, most time.Duration, do func() error) {
		begun := time.Now()
		err := do()
		took := time.Since(begun)
		t.Logf("%s took %v", what, took.Round(time.Millisecond))
		if err != nil || *times && took > most {
			t.Errorf("%s took %v, want at most %v; its error: %v", what, took, most, err)
		}
	}
	within("the debug page", pageTime, func() error { return j.show(ctx) })
	j.each("store", func(port, addr string) {
		within("a new client of the "+port, newTime, func() (err error) {
			defer must.Catch(&err)
			s := must.Get(j.client(ctx, addr))
			return errors.Join(s.Set(ctx, "late", nil), s.Close())
		})
	})
	within("a new job", newTime, func() error {
		p := runRanks(t, "-n 2", "store")
		if p.wait() != 0 {
			return errors.New(p.stderr.String())
		}
		return nil
	})
}

// show has the owner look at the debug page.
func (j *attacked) show(ctx context.Context) (err error) {
	defer must.Catch(&err)
	page, transport := j.ports["debug page"].String(), &http.Transport{}
	defer transport.CloseIdleConnections()
	scheme := "http://"
	if j.mode == withTLS {
		secure := must.Get(credentials.InDir(j.certs, "client").Load())
		scheme, transport.TLSClientConfig = "https://", credentials.ForHost(secure, "127.0.0.1")
	}
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, scheme+page+"/", nil))
	r.SetBasicAuth("", aToken)
	answer := must.Get((&http.Client{Transport: transport}).Do(r))
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, text)
	}
	return err
}

// aToken is the page's.
const aToken = "a token of this page"

// startAttacked starts a job.
func startAttacked(t *testing.T, mode mode) *attacked {
	dir := t.TempDir()
	j := &attacked{
		mode: mode, pids: make(map[string]int), ports: make(map[string]netip.AddrPort),
		certs: filepath.Join(dir, "certs"), token: filepath.Join(dir, "token"), phase: filepath.Join(dir, "phase"),
	}
	j.enter(t, "start")
	require.NoError(t, os.WriteFile(j.token, []byte(aToken), 0o600))
	a, _, err := credentials.OpenAuthority(j.certs)
	require.NoError(t, err)
	for _, name := range []string{"agent", "rank0", "rank1", "client"} {
		require.NoError(t, a.Issue(j.certs, name, []string{"127.0.0.1"}, time.Now().Add(time.Hour)))
	}
	page := freeport.Loopback(t)
	flags := "-debug " + page + " -debug-token-file " + j.token
	if mode == withTLS {
		flags = "-debug " + page + " -tls-dir " + j.certs
	}
	j.programs = nodesOf(t, [2]int{1, 1}, flags, "env:MASTER_PORT", "toil:"+j.phase)
	if mode == plain {
		p := start(t, nil, "store", "-listen", "127.0.0.1:0")
		p.await(1, "listening on ")
		j.pids["c10d store"] = p.cmd.Process.Pid
	}
	var storePort string
	for n, p := range j.programs {
		_, storePort, _ = strings.Cut(p.await(1, "MASTER_PORT=")[0], "=")
		p.await(1, "toiling")
		j.pids[fmt.Sprintf("launcher %d", n)] = p.cmd.Process.Pid
		j.pids[fmt.Sprintf("rank %d", n)] = numbers(t, p.await(1, "pid"))[0]
	}
	for who, pid := range j.pids {
		all := must.Get(sockets.Of(pid))
		for _, s := range all {
			switch port := strconv.Itoa(int(s.Local.Port())); {
			case !s.Listens:
			case port == storePort:
				j.ports["store of ranks"] = s.Local
			case who == "c10d store":
				j.ports[who] = s.Local
			case s.Local.String() == page:
				j.ports["debug page"] = s.Local
			case strings.HasPrefix(who, "launcher"):
				j.ports["store of agents"] = s.Local
			default:
				j.ports[fmt.Sprintf("port %s of %s", port, who)] = s.Local
			}
			require.True(t, s.IsLoopback(), "%s: %v", who, s)
		}
	}
	require.GreaterOrEqual(t, len(j.ports), 5, "%v", j.ports)
	require.Contains(t, j.ports, "debug page")
	t.Log("ports: ", slices.Sorted(maps.Keys(j.ports)))
	j.good = j.record(t, j.ports["store of ranks"].String())
	for who := range j.pids {
		// The most resident bytes are counted from now on.
		require.NoError(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", j.pids[who]), []byte("5"), 0))
	}
	j.before = j.memory(t)
	return j
}

// enter begins a phase of toil.
func (j *attacked) enter(t *testing.T, phase string) {
	require.NoError(t, os.WriteFile(j.phase+".new", []byte(phase), 0o600))
	require.NoError(t, os.Rename(j.phase+".new", j.phase))
}

// calm has the job's calls timed, if they are to be.
func (j *attacked) calm(t *testing.T, phase string) {
	j.enter(t, phase)
	if *times {
		time.Sleep(timed)
	}
}

// end has the job end, and checks how long its calls took in each phase.
func (j *attacked) end(t *testing.T) {
	require.NoError(t, os.Remove(j.phase))
	for n, p := range j.programs {
		require.Zero(t, p.wait(), p.stderr.String())
		var peace time.Duration // the longest p99
		lines := p.await(1, "] phase ")
		for _, under := range []bool{false, true} {
			for _, line := range lines {
				words := strings.Fields(line)
				longest := must.Get(time.ParseDuration(words[len(words)-2]))
				p99 := must.Get(time.ParseDuration(words[len(words)-1]))
				switch {
				case !under && words[2] == "peace":
					peace = max(peace, p99)
				case !under:
				case longest > slowest:
					t.Errorf("node %d: a call took longer than %v: %s", n, slowest, line)
				case *times && p99 > slower*peace && words[2] != "start" && words[2] != "opening:":
					// While connections are opened, the attackers and what goesOn does use the same CPUs.
					t.Errorf("node %d: the p99 is %.1f times that in peace: %s", n, float64(p99)/float64(peace), line)
				default:
					t.Logf("node %d: %s", n, line)
				}
			}
		}
	}
}

// grown compares the most memory that each process of the job has used with that before the attacks.
func (j *attacked) grown(t *testing.T) {
	for who, most := range j.memory(t) {
		more := most - j.before[who]
		t.Logf("%s: %d KiB before, at most %d KiB more", who, j.before[who]>>10, more>>10)
		if more > growth {
			t.Errorf("%s has grown by %d KiB, want at most %d", who, more>>10, growth>>10)
		}
	}
}

// client returns a good client of a store.
func (j *attacked) client(ctx context.Context, addr string) (_ *tcp.Store, err error) {
	defer must.Catch(&err)
	var f credentials.Files
	if j.mode == withTLS {
		f = credentials.InDir(j.certs, "client")
	}
	return tcp.New(ctx, addr, tcp.Options{TLS: must.Get(f.Load())})
}

// record has a good client use the store, through a relay that keeps what the client sends.
func (j *attacked) record(t *testing.T, addr string) []byte {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	var sent bytes.Buffer
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		to, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer to.Close()
		go func() {
			io.Copy(c, to)
			c.Close()
		}()
		io.Copy(to, io.TeeReader(c, &sent))
	}()
	ctx, cancel := context.WithTimeout(context.Background(), refusal)
	defer cancel()
	s := must.Get(j.client(ctx, ln.Addr().String()))
	require.NoError(t, s.Set(ctx, "good", []byte("client")))
	require.NoError(t, s.Close())
	<-done
	require.NotEmpty(t, sent.Bytes())
	return sent.Bytes()
}

// memory returns the most resident bytes that each process of the job has had.
func (j *attacked) memory(t *testing.T) map[string]int64 {
	all := make(map[string]int64)
	for who, pid := range j.pids {
		text := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))
		_, after, _ := strings.Cut(string(text), "VmHWM:")
		kib := must.Get(strconv.ParseInt(strings.Fields(after)[0], 10, 64))
		all[who] = kib << 10
	}
	return all
}
