package main

import (
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
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/sockets"
	"github.com/c10d-go/c10d/store/tcp"
)

var (
	lorises   = flag.Int("attack.lorises", 200, "`n` connections of slow loris, to each port")
	garbageOf = flag.Duration("attack.garbage", 150*time.Millisecond, "`duration` of random bytes, to each port")
)

const (
	// refusal is how long a listener may take to close the connection of an attacker. Those that
	// say nothing have 10 s.
	refusal = 15 * time.Second

	// growth bounds the memory that attacks cost a process of the job, besides the connections that
	// are open at once. A process has at most two listeners.
	growth, eachOpen = 96 << 20, 2 * 8 << 10

	// slowest bounds a call of the job under attack, on a host that other tests use too.
	slowest = 5 * time.Second
)

// attacked is a job of two nodes with one rank each, of which every process is known.
type attacked struct {
	secure bool
	pids   map[string]int
	ports  map[string]netip.AddrPort // agent, store and each rank's mesh
	certs  string                    // directory
	token  string
	good   []byte // what a good client of the store has sent
}

// attack returns a function that does something to a port. Its error says that the port has not
// refused it.
type attack func(t *testing.T, j *attacked) func(addr string) error

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
func sends(b func(j *attacked) []byte) attack {
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
func overTLS(config configuration, then func(j *attacked, c *tls.Conn, handshake error) error) attack {
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
func presents(config configuration) attack {
	return overTLS(config, func(j *attacked, c *tls.Conn, err error) error {
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		if err == nil || timedOut(err) || j.secure && !strings.Contains(err.Error(), "remote error: tls: ") {
			return fmt.Errorf("the server did not refuse the certificate, but said: %v", err)
		}
		return nil
	})
}

// shakes is an attack with a good certificate, and with bytes after the handshake.
func shakes(config configuration, b []byte) attack {
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
		pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
		require.NoError(t, err)
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

// plainly is an attack that needs nothing of the job.
func plainly(do func(string) error) attack {
	return func(*testing.T, *attacked) func(string) error { return do }
}

// silence opens connections, each with one byte, and keeps them for a moment.
func silence(addr string) error {
	first := []byte{0x16}
	var all []net.Conn
	defer func() {
		for _, c := range all {
			c.Close()
		}
	}()
	for range *lorises {
		c, err := net.DialTimeout("tcp", addr, refusal)
		if err != nil {
			continue
		}
		c.Write(first)
		all = append(all, c)
	}
	time.Sleep(100 * time.Millisecond)
	return nil
}

// storm sends random bytes on connections, one after the other, for a time.
func storm(addr string) error {
	for until := time.Now().Add(*garbageOf); time.Now().Before(until); {
		c, err := net.DialTimeout("tcp", addr, refusal)
		if err != nil {
			continue
		}
		c.SetDeadline(time.Now().Add(refusal))
		c.Write(random(4 << 10))
		c.Close()
	}
	return nil
}

// TestAttacksOnEveryPort attacks every TCP port that a job of c10d run listens on. These are the
// agents' store, the debug page, the ranks' store, and for each rank one port for gloo and one for cuda.
// All attacks are refused, no process grows, and the job's calls go on.
//
//	go test ./cmd/c10d -run TestAttacksOnEveryPort -v -attack.lorises 10000 -attack.garbage 1m
func TestAttacksOnEveryPort(t *testing.T) {
	const onlyTLS, always = true, false
	attacks := []struct {
		name    string
		onlyTLS bool
		do      attack
	}{
		{"wrong CA", always, presents(certificate("rank1", time.Hour, false))},
		{"no certificate", always, presents(anyone)},
		{"expired certificate", always, presents(certificate("expired", -time.Minute, true))},
		{"clear text of a store", always, sends(func(*attacked) []byte { return append([]byte{0, 0xce, 0xf7, 0x85, 0x3c}, random(128)...) })},
		{"clear text of a rank", always, sends(func(*attacked) []byte { return falseHello() })},
		{"clear text of HTTP", always, sends(func(*attacked) []byte { return []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat(" ", 100)) })},
		{"replay of a good client", always, sends(func(j *attacked) []byte { return j.good })},
		{"false rank with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), falseHello())},
		{"10 GiB length", always, sends(func(*attacked) []byte { return append(huge(), random(128)...) })},
		{"10 GiB length with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), append(huge(), random(128)...))},
		{"TLS record of 64 KiB", always, sends(func(*attacked) []byte { return append([]byte{0x16, 3, 1, 0xff, 0xff}, random(128)...) })},
		{"garbage", always, sends(func(*attacked) []byte { return random(4 << 10) })},
		{"garbage with a good certificate", onlyTLS, shakes(certificate("rank1", time.Hour, true), random(4<<10))},
		{"random bytes", always, plainly(storm)},
		{"slow loris", always, plainly(silence)},
	}
	for name, secure := range map[string]bool{"TLS": true, "plain with a token": false} {
		t.Run(name, func(t *testing.T) {
			j, programs, stop := startAttacked(t, secure)
			before := j.memory(t)
			for _, a := range attacks {
				if a.onlyTLS && !secure {
					continue
				}
				t.Run(a.name, func(t *testing.T) {
					do := a.do(t, j)
					var all sync.WaitGroup
					for port, addr := range j.ports {
						all.Go(func() {
							if err := do(addr.String()); err != nil {
								t.Errorf("%s: %v", port, err)
							}
						})
					}
					all.Wait()
				})
			}
			for who, after := range j.memory(t) {
				more := after - before[who]
				t.Logf("%s: %d KiB before, %d KiB more", who, before[who]>>10, more>>10)
				require.Less(t, more, int64(growth+*lorises*eachOpen), who)
			}
			stop()
			for n, p := range programs {
				require.Zero(t, p.wait(), p.stderr.String())
				line := strings.Fields(p.await(1, "slowest")[0])
				took, err := time.ParseDuration(line[len(line)-1])
				require.NoError(t, err)
				t.Logf("node %d: %s", n, strings.Join(line, " "))
				require.Less(t, took, slowest)
			}
		})
	}
}

// startAttacked starts a job. Stop has its ranks end.
func startAttacked(t *testing.T, secure bool) (j *attacked, programs [2]*program, stop func()) {
	t.Setenv("C10D_WIRE", "tcp")
	dir := t.TempDir()
	j = &attacked{secure: secure, pids: make(map[string]int), ports: make(map[string]netip.AddrPort), certs: filepath.Join(dir, "certs"), token: filepath.Join(dir, "token")}
	toil := filepath.Join(dir, "toil")
	require.NoError(t, os.WriteFile(toil, nil, 0o600))
	require.NoError(t, os.WriteFile(j.token, []byte("a token of this job"), 0o600))
	a, _, err := credentials.OpenAuthority(j.certs)
	require.NoError(t, err)
	for _, name := range []string{"agent", "rank0", "rank1", "client"} {
		require.NoError(t, a.Issue(j.certs, name, []string{"127.0.0.1"}, time.Now().Add(time.Hour)))
	}
	page := freeport.Loopback(t)
	flags := "-debug " + page + " "
	if secure {
		flags += "-tls-dir " + j.certs
	} else {
		flags += "-token-file " + j.token + " -debug-token-file " + j.token
	}
	programs = nodesOf(t, [2]int{1, 1}, flags, "env:MASTER_PORT", "toil:"+toil)
	var storePort string
	for n, p := range programs {
		_, storePort, _ = strings.Cut(p.await(1, "MASTER_PORT=")[0], "=")
		p.await(1, "toiling")
		j.pids[fmt.Sprintf("agent %d", n)] = p.cmd.Process.Pid
		j.pids[fmt.Sprintf("rank %d", n)] = numbers(t, p.await(1, "pid"))[0]
	}
	for who, pid := range j.pids {
		all, err := sockets.Of(pid)
		require.NoError(t, err)
		for _, s := range all {
			switch port := strconv.Itoa(int(s.Local.Port())); {
			case !s.Listens:
			case port == storePort:
				j.ports["store"] = s.Local
			case s.Local.String() == page:
				j.ports["debug page"] = s.Local
			case strings.HasPrefix(who, "agent"):
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
	j.good = j.record(t, j.ports["store"].String())
	return j, programs, func() { require.NoError(t, os.Remove(toil)) }
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
	f := credentials.Files{Token: j.token}
	if j.secure {
		f = credentials.InDir(j.certs, "client")
	}
	secure, token, err := f.Load()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), refusal)
	defer cancel()
	s, err := tcp.New(ctx, ln.Addr().String(), tcp.Options{TLS: secure, Token: token})
	require.NoError(t, err)
	require.NoError(t, s.Set(ctx, "good", []byte("client")))
	require.NoError(t, s.Close())
	<-done
	require.NotEmpty(t, sent.Bytes())
	return sent.Bytes()
}

// memory returns the resident bytes of each process of the job.
func (j *attacked) memory(t *testing.T) map[string]int64 {
	all := make(map[string]int64)
	for who, pid := range j.pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		require.NoError(t, err)
		_, after, _ := strings.Cut(string(text), "VmRSS:")
		kib, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
		require.NoError(t, err)
		all[who] = kib << 10
	}
	return all
}
