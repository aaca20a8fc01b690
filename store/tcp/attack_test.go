//go:build linux

package tcp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The attacks are small unless fullEnv is set:
//
//	C10D_STORE_ATTACK=full go test -run TestAttacks -v -timeout 1h ./store/tcp
//
// attackEnv makes the test binary an attacker: "address kind number". Attackers run at the lowest
// priority, since they would not use this host's CPUs.
const (
	fullEnv   = "C10D_STORE_ATTACK"
	attackEnv = "C10D_TCP_TEST_ATTACK"
)

func init() { otherProcesses[attackEnv] = attacker }

// TestAttacks measures the calls of a job's ranks while clients attack the server. A new rank must
// always get in, and memory and descriptors stay bounded.
func TestAttacks(t *testing.T) {
	full := os.Getenv(fullEnv) == "full"
	if testing.Short() {
		t.Skip("opens thousands of connections")
	}
	for _, a := range []struct {
		kind        string
		small, full int
	}{
		{"random", 2000, 500_000},
		{"structured", 2000, 500_000},
		{"idle", 300, 10_000},
		{"loris", 300, 10_000},
		{"guests", 300, 10_000},
		{"list", 4, 4},
	} {
		t.Run(a.kind, func(t *testing.T) {
			n, opts := a.small, ServerOptions{MaxClients: 200}
			if full {
				n, opts = a.full, ServerOptions{}
			}
			attacked(t, a.kind, n, opts, full)
		})
	}
}

func attacked(t *testing.T, kind string, n int, opts ServerOptions, full bool) {
	s := serve(t, opts)
	var ranks []*Store
	for r := range 3 {
		ranks = append(ranks, join(t, s.Addr().String(), Options{WorldSize: 3, Rank: r}))
	}
	if kind == "list" {
		size, count := 500, 2000
		if full {
			size, count = 50, 1<<20
		}
		fill(t, ranks[0], count, size)
	}
	atLeast := time.Second
	if full {
		atLeast = 10 * time.Second
	}
	quiet := measure(t, ranks, time.Now().Add(atLeast), nil)
	before := memory()

	at := attack(t, s.Addr().String(), kind, n)
	under := measure(t, ranks, time.Now().Add(atLeast), at.ended)
	works(t, join(t, s.Addr().String(), Options{WorldSize: 3, Rank: 2}))
	during, files := memory(), openFiles(t)
	stats := s.Stats()
	t.Logf("%s: quiet p50 %v p99 %v, under attack p50 %v p99 %v (%.2fx); memory %d KiB more, %d descriptors, %+v",
		kind, quiet.p(50), quiet.p(99), under.p(50), under.p(99), float64(under.p(99))/float64(quiet.p(99)),
		(during-before)>>10, files, stats)
	at.stop()

	require.LessOrEqual(t, stats.Clients, s.opts.MaxClients)
	require.LessOrEqual(t, files, s.opts.MaxClients+200)
	require.LessOrEqual(t, during-before, int64(64<<20)+int64(s.opts.MaxClients)*32<<10)
	require.Less(t, under.p(99), 2*quiet.p(99)+200*time.Millisecond)
	if kind != "list" && kind != "guests" {
		require.Positive(t, stats.Refused+int64(stats.Clients)-4)
	}
	for _, r := range ranks {
		works(t, r)
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

// latencies are sorted.
type latencies []time.Duration

func (l latencies) p(percent int) time.Duration { return l[min(len(l)-1, len(l)*percent/100)] }

// measure makes the ranks set and get keys, until a time and the end of other.
func measure(t *testing.T, ranks []*Store, until time.Time, other <-chan struct{}) latencies {
	t.Helper()
	var mu sync.Mutex
	var all latencies
	over := func() bool {
		if other != nil {
			select {
			case <-other:
			default:
				return false
			}
		}
		return time.Now().After(until)
	}
	var wg sync.WaitGroup
	for r, s := range ranks {
		wg.Go(func() {
			var mine latencies
			for i := 0; !over(); i++ {
				key := fmt.Sprint(r, " ", i%100)
				start := time.Now()
				err := s.Set(t.Context(), key, []byte("127.0.0.1:12345"))
				if err == nil {
					_, err = s.Get(t.Context(), key)
				}
				mine = append(mine, time.Since(start)/2)
				if err != nil {
					t.Errorf("a rank's call failed: %v", err)
					return
				}
				time.Sleep(time.Millisecond) // a job does not call all the time
			}
			mu.Lock()
			all = append(all, mine...)
			mu.Unlock()
		})
	}
	wg.Wait()
	slices.Sort(all)
	require.NotEmpty(t, all)
	return all
}

// memory is what the process uses, without what is free for the next allocation.
func memory() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

func openFiles(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(files)
}

// attacking is an attack by another process.
type attacking struct {
	ended <-chan struct{} // when all is sent or open
	stop  func()
}

func attack(t *testing.T, addr, kind string, n int) attacking {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", attackEnv, addr, kind, n))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		bufio.NewReader(out).ReadString('\n')
	}()
	stop := sync.OnceFunc(func() {
		in.Close()
		cmd.Process.Kill()
		<-ended
		cmd.Wait()
	})
	t.Cleanup(stop)
	return attacking{ended, stop}
}

// attacker is the other process.
func attacker(args string) error {
	var addr, kind string
	var n int
	if _, err := fmt.Sscan(args, &addr, &kind, &n); err != nil {
		return err
	}
	syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19)
	to, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return err
	}
	// More addresses than one have more ports than one.
	connect := func() (*net.TCPConn, error) {
		c, err := net.DialTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+rand.IntN(200)))}, to)
		if err == nil {
			c.SetLinger(0)
		}
		return c, err
	}
	workers := 16
	if kind == "list" {
		workers = n
	}
	var mu sync.Mutex
	var open []*net.TCPConn
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), uint64(n)))
			for range (n + workers - 1) / workers {
				c, err := connect()
				if err != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				switch kind {
				case "random", "structured":
					c.Write(hostile(r, kind))
					c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(3)) * time.Millisecond))
					io.Copy(io.Discard, c)
					c.Close()
					continue
				case "loris":
					c.Write(cat(opening, 1, "/k", uint64(1000)))
				case "guests":
					c.Write(cat(opening, int(qPing), u32(7)))
				case "list":
					c.Write(opening)
					for range 5 {
						c.Write([]byte{byte(qListKeys)})
						if !readListing(c) {
							break
						}
					}
				}
				mu.Lock()
				open = append(open, c) // or the garbage collector closes it
				mu.Unlock()
			}
		})
	}
	all.Wait()
	fmt.Println("done")
	go func() {
		for range time.Tick(time.Second) {
			if kind == "loris" {
				for _, c := range open {
					c.Write([]byte{0})
				}
			}
		}
	}()
	io.Copy(io.Discard, os.Stdin)
	runtime.KeepAlive(open)
	return nil
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
