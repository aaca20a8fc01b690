package script_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestMain lets the test binary be a rank of its own tests.
func TestMain(m *testing.M) {
	if op := os.Getenv("SCRIPT_TEST_OP"); op != "" {
		os.Exit(victimOrSurvivor(op))
	}
	os.Exit(m.Run())
}

// patience is a limit that only what hangs reaches: a process may take tens of
// seconds to import PyTorch.
const patience = 3 * time.Minute

// report is what a surviving rank says of its failure.
type report struct {
	Peer          int
	Died, Timeout bool
	Error         string
}

// victimOrSurvivor joins by the environment, says that it is in, and runs an
// operation that cannot end because one rank does not take part. It returns the exit code.
func victimOrSurvivor(op string) int {
	limit, err := time.ParseDuration(os.Getenv("SCRIPT_TEST_TIMEOUT"))
	if err != nil {
		panic(err)
	}
	say := func(r report) {
		b, _ := json.Marshal(r)
		fmt.Println(string(b))
	}
	ctx := context.Background()
	o := pg.Options{Timeout: patience}
	if op == "rendezvous" {
		o.Timeout = limit
	}
	if os.Getenv("SCRIPT_TEST_TORCH") == "1" {
		o.Dialect = store.DialectV1
	}
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: o})
	if err != nil {
		say(report{Peer: -1, Error: err.Error()})
		return 3
	}
	w, err := g.Barrier(ctx, backend.BarrierOptions{})
	if err == nil {
		err = w.Wait(ctx)
	}
	if err != nil {
		say(report{Peer: -1, Error: err.Error()})
		return 3
	}
	g.SetTimeout(limit)
	fmt.Println("in")
	if os.Getenv("SCRIPT_TEST_VICTIM") == os.Getenv("RANK") {
		select {} // until the test ends this process
	}
	x, err := tensor.New(tensor.Float32, 1<<20)
	if err != nil {
		panic(err)
	}
	switch op {
	case "all_reduce":
		w, err = g.AllReduce(ctx, []*tensor.Tensor{x}, backend.AllReduceOptions{})
	case "barrier":
		w, err = g.Barrier(ctx, backend.BarrierOptions{})
	case "recv":
		w, err = g.Recv(ctx, x, (g.Rank()+1)%g.Size(), backend.P2POptions{})
	}
	if err == nil {
		err = w.Wait(ctx)
	}
	r := report{Peer: -1}
	var e *work.Error
	if errors.As(err, &e) {
		r.Peer, r.Error = e.Peer, e.Error()
		r.Died, r.Timeout = errors.Is(err, work.ErrPeerDied), errors.Is(err, work.ErrTimeout)
	}
	g.Close()
	say(r)
	return 0
}

// rank is a process of a test.
type rank struct {
	cmd   *exec.Cmd
	lines chan string // closed at the end of its output
}

// startRank runs this library's rank r of an operation.
func startRank(t *testing.T, op string, r, size, victim int, addr string, limit time.Duration) *rank {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "SCRIPT_TEST_OP="+op, "SCRIPT_TEST_TIMEOUT="+limit.String(),
		"SCRIPT_TEST_VICTIM="+strconv.Itoa(victim))
	return start(t, cmd, r, size, addr)
}

// start runs a process as rank r of a job whose store is at addr.
func start(t *testing.T, cmd *exec.Cmd, r, size int, addr string) *rank {
	t.Helper()
	host, port, _ := strings.Cut(addr, ":")
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, "RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(size), "GLOO_SOCKET_IFNAME=lo",
		"MASTER_ADDR="+host, "MASTER_PORT="+port, "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &rank{cmd: cmd, lines: make(chan string, 16)}
	go p.read(out)
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return p
}

func (p *rank) read(out io.Reader) {
	defer close(p.lines)
	for sc := bufio.NewScanner(out); sc.Scan(); {
		p.lines <- sc.Text()
	}
}

// next returns the next line, or fails the test after a limit at which something hangs.
func (p *rank) next(t *testing.T) string {
	t.Helper()
	select {
	case s, ok := <-p.lines:
		require.True(t, ok, "the rank ended without a word")
		return s
	case <-time.After(patience):
		t.Fatal("a rank hangs")
	}
	return ""
}

// TestDeathDuringRendezvous kills a rank that has come to the store while all wait
// for one that never comes. The others hear of the death at once, from the store.
func TestDeathDuringRendezvous(t *testing.T) {
	srv, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
	require.NoError(t, err)
	defer srv.Close()
	const size, victim, limit = 4, 1, 10 * time.Second
	ranks := make([]*rank, size-1) // rank 3 never comes
	for r := range ranks {
		ranks[r] = startRank(t, "rendezvous", r, size, victim, srv.Addr().String(), limit)
	}
	st, err := tcp.New(t.Context(), srv.Addr().String(), tcp.Options{Timeout: patience})
	require.NoError(t, err)
	defer st.Close()
	for r := range ranks {
		_, err := st.Get(t.Context(), fmt.Sprintf("default_pg/c10d-go/rollcall/-/0/rank/%d", r))
		require.NoError(t, err, "all three come")
	}
	killed := time.Now()
	require.NoError(t, ranks[victim].cmd.Process.Kill())
	for _, r := range []int{0, 2} {
		var got report
		require.NoError(t, json.Unmarshal([]byte(ranks[r].next(t)), &got))
		t.Logf("rank %d, after %v: %s", r, time.Since(killed).Round(time.Millisecond), got.Error)
		// Either the roll call or the group's notice was first.
		require.Regexp(t, `rank 1 \(.*\) died, or lost the store, before (all ranks had called Init|the group was made)`, got.Error)
	}
}

// TestDeathBesidePyTorch kills PyTorch's rank under this library's, and the
// other way round.
func TestDeathBesidePyTorch(t *testing.T) {
	needTorch(t)
	t.Setenv("SCRIPT_TEST_TORCH", "1")
	for _, goRank := range []int{0, 1} {
		for _, victim := range []int{0, 1} {
			t.Run(fmt.Sprintf("PyTorch on %d, rank %d is killed", 1-goRank, victim), func(t *testing.T) {
				srv, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
				require.NoError(t, err)
				defer srv.Close()
				role := "wait"
				if victim != goRank {
					role = "sleep"
				}
				ranks := make([]*rank, 2)
				ranks[goRank] = startRank(t, "all_reduce", goRank, 2, victim, srv.Addr().String(), 2*patience)
				ranks[1-goRank] = start(t, exec.Command(python, "testdata/peer.py", role), 1-goRank, 2, srv.Addr().String())
				for _, p := range ranks {
					require.Equal(t, "in", p.next(t))
				}
				killed := time.Now()
				require.NoError(t, ranks[victim].cmd.Process.Kill())
				line := ranks[1-victim].next(t)
				t.Logf("after %v: %s", time.Since(killed).Round(time.Millisecond), line)
				if victim == goRank {
					require.Regexp(t, "Connection (closed|reset) by peer|Broken pipe", line)
					return
				}
				var got report
				require.NoError(t, json.Unmarshal([]byte(line), &got))
				require.Equal(t, victim, got.Peer)
				require.True(t, got.Died, got.Error)
			})
		}
	}
}
