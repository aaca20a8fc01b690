// Package attack is for tests of listeners that strangers attack. It measures a job's calls three
// times:
//
//   - in peace;
//   - while an attacker connects to a plain listener of another process, which accepts and closes, or
//     only accepts if the attack keeps its connections. This is what the attacker's own use of the CPUs
//     and of the kernel costs the job;
//   - while the same attacker connects to the job.
//
// The attacker and the plain listener are the test binary, started again:
//
//	func init() { attack.Main(map[string]attack.Kind{"idle": func(*net.TCPConn, *rand.Rand) bool { return true }}) }
//
// Attackers run at the lowest priority, because a real one would not use this host's CPUs.
package attack

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// environment makes the test binary another program: "attack ADDRESS KIND N", "listen" or "listen keep".
const environment = "C10D_TEST_ATTACK"

// Kind is what one connection of an attacker does. It reports whether the connection stays open.
type Kind func(c *net.TCPConn, r *rand.Rand) (stays bool)

// Main makes this process an attacker or the plain listener and does not return, if Run has started
// the process as one.
func Main(kinds map[string]Kind) {
	args := strings.Fields(os.Getenv(environment))
	if len(args) == 0 {
		return
	}
	var err error
	if args[0] == "listen" {
		err = listen(len(args) > 1)
	} else {
		err = attacker(args[1], kinds[args[2]], args[3])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "attack:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// kept are the connections that the plain listener keeps. The garbage collector would close them.
var kept []net.Conn

// listen accepts connections until standard input ends, and closes them unless it is to keep them.
func listen(keep bool) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	go func() {
		for {
			switch c, err := ln.Accept(); {
			case err != nil:
			case keep:
				kept = append(kept, c)
			default:
				c.Close()
			}
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// attacker opens number connections, 16 at a time, and says so. It keeps those that stay open until
// standard input ends.
func attacker(addr string, kind Kind, number string) error {
	var n int
	if _, err := fmt.Sscan(number, &n); err != nil {
		return err
	}
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
			r := rand.New(rand.NewPCG(uint64(w), uint64(n)))
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

// Size returns how many connections an attack has. An environment variable says it: "full" means full, a
// number means so many and at most full, and without it the attack has small. whole reports whether the
// variable is set.
func Size(variable string, small, full int) (n int, whole bool) {
	text := os.Getenv(variable)
	if text == "full" {
		return full, true
	}
	if n, err := strconv.Atoi(text); err == nil && n > 0 {
		return min(n, full), true
	}
	return small, false
}

// Attack is an attack on a job in this process.
type Attack struct {
	Addr    string // of the job's listener
	Kind    string // a key of Main's map
	N       int    // connections
	Stays   bool   // connections stay open
	Calls   []func() error
	AtLeast time.Duration // each measurement takes this long, and until all connections were made
	Slack   time.Duration // how much longer a call may take than the bar
}

// Result is what an attack has cost the job. The attacker runs on until the test ends.
type Result struct {
	Memory int64 // bytes that this process uses more than before the attack
	Files  int   // file descriptors that it has open
}

// Run measures the job's calls. Each element of Calls is called again and again by a goroutine of
// its own. The limit of the 99th percentile is twice that without an attack, or twice that beside an
// attack on a plain listener, whichever is longer.
func Run(t *testing.T, a Attack) Result {
	t.Helper()
	calm := a.measure(t, nil)
	listen := "listen"
	if a.Stays {
		listen += " keep"
	}
	plain, stopPlain := start(t, listen)
	addr, err := plain.ReadString('\n')
	require.NoError(t, err)
	ended, stop := Begin(t, strings.TrimSpace(addr), a.Kind, a.N)
	beside := a.measure(t, ended)
	stop()
	stopPlain()

	before := memory()
	ended, _ = Begin(t, a.Addr, a.Kind, a.N)
	under := a.measure(t, ended)
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	r := Result{Memory: memory() - before, Files: len(files)}
	bar := 2 * max(calm.p(99), beside.p(99))
	t.Logf("%d %s: p50 and p99 in peace %v and %v, beside the attack on a plain listener %v and %v, under attack %v and %v (%.2f of the bar); memory %d KiB more, %d descriptors",
		a.N, a.Kind, calm.p(50), calm.p(99), beside.p(50), beside.p(99), under.p(50), under.p(99), float64(under.p(99))/float64(bar), r.Memory>>10, r.Files)
	require.LessOrEqual(t, under.p(99), bar+a.Slack)
	return r
}

// Begin starts an attacker that makes n connections with a listener. ended is closed when it has made all.
// Those that stay open do so until stop, or the end of the test.
func Begin(t *testing.T, addr, kind string, n int) (ended <-chan struct{}, stop func()) {
	out, stop := start(t, fmt.Sprint("attack ", addr, " ", kind, " ", n))
	done := make(chan struct{})
	go func() {
		defer close(done)
		out.ReadString('\n')
	}()
	return done, stop
}

// start runs the test binary as another program, at most until the test ends.
func start(t *testing.T, args string) (out *bufio.Reader, stop func()) {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), environment+"="+args)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	pipe, w, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdout = w
	require.NoError(t, cmd.Start())
	w.Close()
	stop = sync.OnceFunc(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
		pipe.Close()
	})
	t.Cleanup(stop)
	return bufio.NewReader(pipe), stop
}

// latencies are sorted.
type latencies []time.Duration

func (l latencies) p(percent int) time.Duration { return l[min(len(l)-1, len(l)*percent/100)] }

// measure returns how long the calls take, until AtLeast has passed and the end of other.
func (a Attack) measure(t *testing.T, other <-chan struct{}) latencies {
	t.Helper()
	until := time.Now().Add(a.AtLeast)
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
	var mu sync.Mutex
	var all latencies
	var wg sync.WaitGroup
	for _, call := range a.Calls {
		wg.Go(func() {
			var mine latencies
			for !over() {
				begun := time.Now()
				if err := call(); err != nil {
					t.Errorf("a call of the job failed: %v", err)
					return
				}
				mine = append(mine, time.Since(begun))
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
