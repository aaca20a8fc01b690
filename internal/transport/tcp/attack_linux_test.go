package tcp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/strangers"
)

// The attacks are small unless fullEnv is set:
//
//	C10D_MESH_ATTACK=full go test -run TestAttacks -v -timeout 2h ./internal/transport/tcp
//
// attackEnv makes the test binary an attacker: "address kind number". It runs at the lowest priority,
// since an attacker would not use this host's CPUs.
const (
	fullEnv   = "C10D_MESH_ATTACK"
	attackEnv = "C10D_TEST_TCP_ATTACK"
)

func init() {
	if args := os.Getenv(attackEnv); args != "" {
		if err := attacker(args); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// TestAttacks sends messages between two ranks while strangers connect to one of them. Its messages, its
// memory and its descriptors must not suffer. Gloo's wire and shared memory have no listener once a
// group is made.
func TestAttacks(t *testing.T) {
	if testing.Short() {
		t.Skip("opens thousands of connections")
	}
	full := os.Getenv(fullEnv) == "full"
	for _, a := range []struct {
		kind        string
		small, full int
	}{
		{"random", 2000, 500_000},
		{"structured", 2000, 500_000},
		{"idle", 1000, 10_000},
	} {
		t.Run(a.kind, func(t *testing.T) {
			n, atLeast := a.small, time.Second
			if full {
				n, atLeast = a.full, 10*time.Second
			}
			attacked(t, a.kind, n, atLeast)
		})
	}
}

func attacked(t *testing.T, kind string, n int, atLeast time.Duration) {
	ms := join(t, 2)
	quiet := roundTrips(t, ms, time.Now().Add(atLeast), nil)
	before := usedMemory()

	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", attackEnv, ms[0].addrs[0].places[0], kind, n))
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
	defer func() {
		in.Close()
		cmd.Process.Kill()
		<-ended
		cmd.Wait()
	}()
	under := roundTrips(t, ms, time.Now().Add(atLeast), ended)
	more := usedMemory() - before
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	p := func(l []time.Duration, percent int) time.Duration { return l[len(l)*percent/100] }
	t.Logf("%d %s: quiet p50 %v p99 %v, under attack p50 %v p99 %v (%.2fx); memory %d KiB more, %d descriptors",
		n, kind, p(quiet, 50), p(quiet, 99), p(under, 50), p(under, 99), float64(p(under, 99))/float64(p(quiet, 99)), more>>10, len(files))

	require.Less(t, p(under, 99), 2*p(quiet, 99)+200*time.Millisecond)
	limit := strangers.Limit(1)
	require.LessOrEqual(t, ms[0].acceptor.strangers.Len(), limit)
	require.Less(t, len(files), limit+200)
	require.Less(t, more, int64(32<<20))
	for _, m := range ms {
		require.Nil(t, m.Fault())
	}
}

// usedMemory is what the process uses, without what is free for the next allocation.
func usedMemory() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// roundTrips sends 4 bytes back and forth until a time and the end of other. It returns how long each
// took, sorted.
func roundTrips(t *testing.T, ms []*Mesh, until time.Time, other <-chan struct{}) []time.Duration {
	t.Helper()
	over := func() bool {
		select {
		case <-other:
		default:
			if other != nil {
				return false
			}
		}
		return time.Now().After(until)
	}
	var all []time.Duration
	for !over() {
		begun := time.Now()
		for from := range ms {
			r := recv(ms[1-from], from, 1, make([]byte, 4))
			s := send(ms[from], 1-from, 1, make([]byte, 4))
			require.NoError(t, wait(t, s))
			require.NoError(t, wait(t, r))
		}
		all = append(all, time.Since(begun))
		time.Sleep(time.Millisecond) // a job does not send all the time
	}
	slices.Sort(all)
	return all
}

// attacker is the other process.
func attacker(args string) error {
	var addr, kind string
	var n int
	if _, err := fmt.Sscan(args, &addr, &kind, &n); err != nil {
		return err
	}
	syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19)
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	const workers = 16
	var mu sync.Mutex
	var open []net.Conn
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), uint64(n)))
			for range (n + workers - 1) / workers {
				// More addresses than one have more ports than one.
				from := &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+r.IntN(200)))}
				c, err := net.DialTCP("tcp", from, net.TCPAddrFromAddrPort(to))
				if err != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				c.SetLinger(0)
				if kind == "idle" {
					mu.Lock()
					open = append(open, c) // or the garbage collector closes it
					mu.Unlock()
					continue
				}
				c.Write(hostile(r, kind))
				c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(3)) * time.Millisecond))
				io.Copy(io.Discard, c)
				c.Close()
			}
		})
	}
	all.Wait()
	fmt.Println("done")
	io.Copy(io.Discard, os.Stdin)
	runtime.KeepAlive(open)
	return nil
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
