package shm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/transport/shm"
	"github.com/c10d-go/c10d/internal/reduce"
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
}

// beRank is TestMain of a rank.
func beRank(role string) int {
	if err := runRank(strings.Fields(role)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runRank(role []string) error {
	rank, err := strconv.Atoi(role[0])
	if err != nil {
		return err
	}
	e, err := shm.NewEndpoint()
	if err != nil {
		return err
	}
	fmt.Println(e.Addr())
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return err
	}
	var o shm.Options
	if s := os.Getenv("C10D_SHM_PIECE"); s != "" {
		if o.Piece, err = strconv.Atoi(s); err != nil {
			return err
		}
	}
	if s := os.Getenv("C10D_SHM_ONESHOT"); s != "" {
		if o.OneShot, err = strconv.Atoi(s); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g, err := e.Join(ctx, rank, strings.Fields(line), o)
	if err != nil {
		return err
	}
	defer g.Close()
	return roles[role[1]](g, role[2:])
}

type process struct {
	*exec.Cmd
	out  *bufio.Reader
	addr string
}

// startRanks starts processes that have joined one group, or will do so soon.
func startRanks(t testing.TB, n int, role string) []process {
	ps := make([]process, n)
	var addrs []string
	for r := range ps {
		cmd := exec.Command(os.Args[0])
		if os.Getenv("C10D_SHM_PIN") != "" {
			cmd = exec.Command("taskset", "-c", strconv.Itoa(r%runtime.NumCPU()), os.Args[0])
		}
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", roleEnv, r, role))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		ps[r] = process{Cmd: cmd, out: bufio.NewReader(out)}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		line, err := ps[r].out.ReadString('\n')
		require.NoError(t, err)
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

// operations are called with a buffer of n bytes, which is the sum of the blocks
// where there are blocks.
func operation(g *shm.Group, op string, n int) func() error {
	buf, err := tensor.New(tensor.Uint8, n+2*g.Size()*64)
	if err != nil {
		panic(err)
	}
	other, err := tensor.New(tensor.Uint8, n+2*g.Size()*64)
	if err != nil {
		panic(err)
	}
	a, b := buf.Bytes(), other.Bytes()
	for i := range a {
		a[i], b[i] = 0, 0
	}
	add, err := reduce.Kernel(reduce.Sum, tensor.Float32)
	if err != nil {
		panic(err)
	}
	one := n / g.Size() &^ 3
	all := one * g.Size()
	switch op {
	case "allreduce":
		return func() error { return g.AllReduce(a[:n], 4, add, nil) }
	case "reduce":
		return func() error { return g.Reduce(b[:n], a[:n], 0, 4, add, nil) }
	case "reducescatter":
		return func() error { return g.ReduceScatter(b[:one], a[:all], 4, add, nil) }
	case "broadcast":
		return func() error { return g.Broadcast(a[:n], 0, nil) }
	case "allgather":
		return func() error { return g.AllGather(b[:all], a[:one], nil) }
	case "alltoall":
		return func() error { return g.AllToAll(b[:all], a[:all], nil) }
	case "gather":
		return func() error { return g.Gather(b[:all], a[:one], 0, nil) }
	case "scatter":
		return func() error { return g.Scatter(b[:one], a[:all], 0, nil) }
	case "barrier":
		return func() error { return g.Barrier(nil) }
	}
	panic(op)
}

// timeRank times an operation at all sizes. Rank 0 prints a record a size.
func timeRank(g *shm.Group, args []string) error {
	sizes := benchSizes
	if args[0] == "barrier" {
		sizes = []int{0}
	}
	for _, n := range sizes {
		f := operation(g, args[0], n)
		iters := min(max(1<<30/(n+1<<16), 30), 4000)
		took := make([]float64, iters)
		for i := -iters / 10; i < iters; i++ {
			if err := g.Barrier(nil); err != nil {
				return err
			}
			start := time.Now()
			if err := f(); err != nil {
				return err
			}
			if i >= 0 {
				took[i] = float64(time.Since(start).Nanoseconds()) / 1e3
			}
		}
		slices.Sort(took)
		if g.Rank() == 0 {
			b, err := json.Marshal(timing{n, took[0], took[iters/2], took[iters*99/100]})
			if err != nil {
				return err
			}
			fmt.Println(string(b))
		}
	}
	return nil
}

// BenchmarkProcesses times every collective between processes, on the first
// rank, each call after a barrier. The number of ranks is C10D_SHM_RANKS, "1 2 4"
// if that is empty; C10D_SHM_OPS, C10D_SHM_PIECE and C10D_SHM_ONESHOT choose
// operations and options; with C10D_SHM_PIN=1 each rank stays on one CPU. Run it with -benchtime=1x: it counts by itself.
func BenchmarkProcesses(b *testing.B) {
	ranks, ops := os.Getenv("C10D_SHM_RANKS"), os.Getenv("C10D_SHM_OPS")
	if ranks == "" {
		ranks = "1 2 4"
	}
	if ops == "" {
		ops = "allreduce reduce reducescatter broadcast allgather alltoall gather scatter barrier"
	}
	for _, op := range strings.Fields(ops) {
		for _, s := range strings.Fields(ranks) {
			n, err := strconv.Atoi(s)
			require.NoError(b, err)
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
