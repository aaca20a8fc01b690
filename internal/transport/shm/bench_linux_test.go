package shm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/stretchr/testify/require"
)

// The ranks of this file are processes: this test binary, started again with
// roleEnv set. A rank prints its address, reads all addresses, joins, and does
// what its role says.
const roleEnv = "C10D_SHM_ROLE"

var roles = map[string]func(g *shm.Group, args []string) error{
	"time":  timeRank,
	"count": countRank,
	"loop":  loopRank,
	"send":  sendRank,
	"copy":  copyRank,
	"mourn": mournRank,
	"lots":  lotsRank,
	"widow": widowRank,

	"limited": limitedRank,
}

// commands is what the ranks of startRanks are told.
var commands = bufio.NewReader(os.Stdin)

// beRank is TestMain of a rank.
func beRank(role string) int {
	if err := runRank(strings.Fields(role)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runRank(role []string) (err error) {
	defer must.Catch(&err)
	rank := must.Get(strconv.Atoi(role[0]))
	e := must.Get(shm.NewEndpoint())
	fmt.Println(e.Addr())
	line, err := commands.ReadString('\n')
	if err != nil {
		return err
	}
	var o shm.Options
	if s := os.Getenv("C10D_SHM_FROM"); s != "" {
		from := must.Get(strconv.ParseInt(s, 10, 64))
		o = o.From(from)
	}
	switch role[1] {
	case "mourn":
		o = holdReads(o.From(1))
	case "widow":
		o = o.From(-1)
	case "limited":
		if rank == 0 {
			err = limitFiles(1 << 30)
		}
	case "cramped":
		if rank == 0 {
			err = limitFiles(1 << 20)
		}
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g, err := e.Join(ctx, rank, strings.Fields(line), o)
	if role[1] == "cramped" {
		fmt.Println(err)
		return nil
	}
	if err != nil {
		return err
	}
	defer g.Close()
	return roles[role[1]](g, role[2:])
}

type process struct {
	*exec.Cmd
	in   io.Writer
	out  *bufio.Reader
	addr string
}

// startRanks starts processes that have joined one group, or will do so soon.
func startRanks(t testing.TB, n int, role string) []process {
	ps := make([]process, n)
	var addrs []string
	for r := range ps {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", roleEnv, r, role))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		in := must.Get(cmd.StdinPipe())
		out := must.Get(cmd.StdoutPipe())
		require.NoError(t, cmd.Start())
		ps[r] = process{Cmd: cmd, in: in, out: bufio.NewReader(out)}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		line := must.Get(ps[r].out.ReadString('\n'))
		ps[r].addr = strings.TrimSpace(line)
		addrs = append(addrs, ps[r].addr)
		defer func() { fmt.Fprintln(in, strings.Join(addrs, " ")) }()
	}
	return ps
}

type timing struct {
	Bytes         int
	Min, P50, P99 float64 // us
}

var benchSizes = []int{4, 1 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}

// blocksOf cuts b into blocks of n bytes.
func blocksOf(b []byte, n int) (all [][]byte) {
	for ; len(b) > 0; b = b[n:] {
		all = append(all, b[:n])
	}
	return all
}

// operation returns a call with a buffer of n bytes, which is the sum of the blocks
// where there are blocks.
func operation(g *shm.Group, op string, n int) func() error {
	a, b := plain(n+2*g.Size()*64), plain(n+2*g.Size()*64)
	return operationOn(g, op, n, a, b)
}

// plain returns n bytes of this process alone.
func plain(n int) []byte {
	t, err := tensor.New(tensor.Uint8, n)
	if err != nil {
		panic(err)
	}
	return t.Bytes()
}

// operationOn is operation with two buffers, of 128 bytes a rank more.
func operationOn(g *shm.Group, op string, n int, a, b []byte) func() error {
	for i := range a {
		a[i], b[i] = 0, 0
	}
	add, err := reduce.Kernel(reduce.Sum, tensor.Float32)
	if err != nil {
		panic(err)
	}
	sum := shm.Operator{Elem: 4, Combine: add, Join: reduce.Join(reduce.Sum, tensor.Float32)}
	one := n / g.Size() &^ 3
	all := one * g.Size()
	switch op {
	case "allreduce":
		return func() error { return g.AllReduce(a[:n], sum, nil) }
	case "reduce":
		return func() error { return g.Reduce(b[:n], a[:n], 0, sum, nil) }
	case "reducescatter":
		return func() error { return g.ReduceScatter(b[:one], a[:all], sum, nil) }
	case "broadcast":
		return func() error { return g.Broadcast(a[:n], 0, nil) }
	case "allgather":
		return func() error { return g.AllGather(b[:all], a[:one], nil) }
	case "alltoall":
		out, in := blocksOf(b[:all], one), blocksOf(a[:all], one)
		return func() error { return g.AllToAllV(out, in, nil) }
	case "gather":
		return func() error { return g.Gather(b[:all], a[:one], 0, nil) }
	case "scatter":
		return func() error { return g.Scatter(b[:one], a[:all], 0, nil) }
	case "barrier":
		return func() error { return g.Barrier(nil) }
	case "sendrecv":
		return pingPong(meshOf(g), a[:n])
	}
	panic(op)
}

var theMesh *shm.Mesh

// meshOf returns the mesh of a process, over one through which no news come.
func meshOf(g *shm.Group) *shm.Mesh {
	if theMesh == nil {
		rest, err := mem.NewFabric().Join("", g.Rank(), g.Size())
		if err != nil {
			panic(err)
		}
		if theMesh, err = shm.NewMesh(g, rest, shm.MeshOptions{Lazy: true}); err != nil {
			panic(err)
		}
	}
	return theMesh
}

// flag waits for one request at a time, by itself or by helping.
type flag struct {
	transport.Request
	ended atomic.Bool
	done  chan struct{}
}

func newFlag() *flag {
	f := &flag{done: make(chan struct{}, 1)}
	f.Owner = f
	return f
}

func (f *flag) Ended(*transport.Request) {
	f.ended.Store(true)
	f.done <- struct{}{}
}

func (f *flag) Finished() bool { return f.ended.Load() }
func (f *flag) Expired() bool  { return false }

// wait posts the request and returns how it ended.
func (f *flag) wait(m *shm.Mesh, post func(*transport.Request), peer int, slot uint64, buf []byte) error {
	f.ended.Store(false)
	f.Peer, f.Slot, f.Buf = peer, slot, buf
	post(&f.Request)
	return f.waitPolling(m)
}

func (f *flag) waitPolling(m *shm.Mesh) error {
	if !f.ended.Load() {
		m.PollUntil(f, nil)
	}
	<-f.done
	return f.Err()
}

// pingPong sends buf from rank 0 to rank 1 and back.
func pingPong(m *shm.Mesh, buf []byte) func() error {
	out, in := newFlag(), newFlag()
	send := func() error { return out.wait(m, m.Send, 1-m.Rank(), 0, buf) }
	recv := func() error { return in.wait(m, m.Recv, 1-m.Rank(), 0, buf) }
	switch m.Rank() {
	case 0:
		return func() error { return errors.Join(send(), recv()) }
	case 1:
		return func() error { return errors.Join(recv(), send()) }
	}
	return func() error { return nil }
}

// timeRank times an operation at all sizes. Rank 0 prints a record a size.
func timeRank(g *shm.Group, args []string) (err error) {
	defer must.Catch(&err)
	sizes := benchSizes
	if args[0] == "barrier" {
		sizes = []int{0}
	}
	for _, n := range sizes {
		f := operation(g, args[0], n)
		iters := min(max(1<<30/(n+1<<16), 30), 4000)
		took := make([]float64, iters)
		for i := -iters / 10; i < iters; i++ {
			must.Do(g.Barrier(nil))
			start := time.Now()
			must.Do(f())
			if i >= 0 {
				took[i] = float64(time.Since(start).Nanoseconds()) / 1e3
				if args[0] == "sendrecv" {
					took[i] /= 2 // one way
				}
			}
		}
		slices.Sort(took)
		if g.Rank() == 0 {
			b := must.Get(json.Marshal(timing{n, took[0], took[iters/2], took[iters*99/100]}))
			fmt.Println(string(b))
		}
	}
	return nil
}

// comparison is what an operation takes staged, direct, and with memory of Alloc, until all
// ranks have ended it.
type comparison struct {
	Op         string
	Bytes      int
	Mean, Best [3]float64 // us; the first are medians
}

// copyRank times operations of the sizes in the arguments, all ways in turns.
// Rank 0 prints a record each.
func copyRank(g *shm.Group, args []string) (err error) {
	defer must.Catch(&err)
	if why := g.WhyStaged() + g.WhyNoArenas(); why != "" {
		return errors.New("shm: " + why)
	}
	for _, op := range strings.Split(args[0], ",") {
		for _, size := range strings.Split(args[1], ",") {
			n := must.Get(strconv.Atoi(size))
			room := n + 2*g.Size()*64
			x := must.Get(g.Alloc(room, nil))
			y := must.Get(g.Alloc(room, nil))
			f := operation(g, op, n)
			fs := [3]func() error{f, f, operationOn(g, op, n, x, y)}
			iters := min(max(256<<20/n, 7), 400)
			var took [3][]float64
			for i := -2; i < iters; i++ {
				for way, limits := range [3][2]int64{{-1, -1}, {1, -1}, {-1, 1}} {
					g.SetFrom(limits[0])
					g.SetMapped(limits[1])
					must.Do(g.Barrier(nil))
					start := time.Now()
					must.Do(errors.Join(fs[way](), g.Barrier(nil)))
					if i >= 0 {
						took[way] = append(took[way], float64(time.Since(start).Nanoseconds())/1e3)
					}
				}
			}
			must.Do(errors.Join(g.Free(x), g.Free(y)))
			if g.Rank() > 0 {
				continue
			}
			c := comparison{Op: op, Bytes: n}
			for way := range took {
				slices.Sort(took[way])
				c.Mean[way], c.Best[way] = took[way][iters/2], took[way][0]
			}
			b := must.Get(json.Marshal(c))
			fmt.Println(string(b))
		}
	}
	return nil
}

// BenchmarkCopies compares, for every operation that need not stage, what it takes with two
// copies, with one out of other processes if it can read those, and with memory of Alloc. A ratio, to two
// copies, above 1 means that it was faster. It is of medians, min of the best, for
// machines that do other work. C10D_SHM_RANKS is "2 4 8" if it is empty; C10D_SHM_OPS chooses
// operations, C10D_SHM_SIZES sizes in bytes. Run it with -benchtime=1x.
func BenchmarkCopies(b *testing.B) {
	get := func(name, otherwise string) []string {
		if s := os.Getenv(name); s != "" {
			otherwise = s
		}
		return strings.Fields(otherwise)
	}
	ops := get("C10D_SHM_OPS", "allreduce reduce reducescatter broadcast allgather alltoall gather scatter sendrecv")
	sizes := get("C10D_SHM_SIZES", "65536 262144 1048576 4194304 16777216 67108864")
	for _, s := range get("C10D_SHM_RANKS", "2 4 8") {
		n, err := strconv.Atoi(s)
		require.NoError(b, err)
		ps := startRanks(b, n, "copy "+strings.Join(ops, ",")+" "+strings.Join(sizes, ","))
		for {
			line, err := ps[0].out.ReadBytes('\n')
			if err != nil {
				break
			}
			var c comparison
			require.NoError(b, json.Unmarshal(line, &c))
			b.Run(fmt.Sprintf("%s/ranks=%d/bytes=%d", c.Op, n, c.Bytes), func(b *testing.B) {
				for way, name := range []string{"staged", "direct", "alloc"} {
					b.ReportMetric(c.Mean[way], "us-"+name)
					if way > 0 {
						b.ReportMetric(c.Mean[0]/c.Mean[way], "ratio-"+name)
						b.ReportMetric(c.Best[0]/c.Best[way], "ratio-min-"+name)
					}
				}
				b.ReportMetric(0, "ns/op")
			})
		}
		for _, p := range ps {
			require.NoError(b, p.Wait())
		}
	}
}

// BenchmarkProcesses times every collective between processes, on the first
// rank, each call after a barrier. The number of ranks is C10D_SHM_RANKS, "1 2 4"
// if that is empty; C10D_SHM_OPS chooses operations. Run it with -benchtime=1x: it counts by itself.
func BenchmarkProcesses(b *testing.B) {
	ranks, ops := os.Getenv("C10D_SHM_RANKS"), os.Getenv("C10D_SHM_OPS")
	if ranks == "" {
		ranks = "1 2 4"
	}
	if ops == "" {
		ops = "allreduce reduce reducescatter broadcast allgather alltoall gather scatter barrier sendrecv"
	}
	for _, op := range strings.Fields(ops) {
		for _, s := range strings.Fields(ranks) {
			n := must.Get(strconv.Atoi(s))
			load, err := os.ReadFile("/proc/loadavg")
			require.NoError(b, err)
			ps := startRanks(b, n, "time "+op)
			for {
				line, err := ps[0].out.ReadBytes('\n')
				if err != nil {
					break
				}
				var t timing
				require.NoError(b, json.Unmarshal(line, &t))
				b.Run(fmt.Sprintf("%s/ranks=%d/bytes=%d", op, n, t.Bytes), func(b *testing.B) {
					b.ReportMetric(t.Min, "us-min")
					b.ReportMetric(t.P50, "us-p50")
					b.ReportMetric(t.P99, "us-p99")
					b.ReportMetric(0, "ns/op")
				})
			}
			for _, p := range ps {
				require.NoError(b, p.Wait())
			}
			b.Logf("load %s", load)
		}
	}
}
