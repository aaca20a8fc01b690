package run_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

const leaverVariable = "C10D_TEST_LEAVER"

// leaver is a rank in a process of its own. Rank 1 ends without Close once its call has succeeded. The
// others read a line before they call if they are late, and before they go on.
type leaver struct {
	File  string // of the store
	Wire  gloo.Wire
	Host  string
	Rank  int
	Late  int // this rank calls after rank 1 has ended; -1 for none
	Op    string
	Close bool // then the others close the group, else they call a barrier
	Seed  uint64
}

const (
	leavers = 4
	ended   = 1 // the rank that ends
)

var leaverWires = map[string]leaver{
	"memory":   {Host: "aaaa"},
	"tcp":      {Host: "aaaa", Wire: gloo.WireTCP},
	"gloo":     {Host: "aaaa", Wire: gloo.WireGloo},
	"clusters": {Host: "aabb"},
}

// leaverSays is what became of a rank's call and of what it did then.
type leaverSays struct {
	Call, Then string
	Died       bool
	Peer       int
}

func init() {
	if text := os.Getenv(leaverVariable); text != "" {
		var l leaver
		err := json.Unmarshal([]byte(text), &l)
		if err == nil {
			err = l.live()
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func (l *leaver) live() (err error) {
	defer must.Catch(&err)
	st := must.Get(store.NewFile(l.File, leavers+1))
	ctx := context.Background()
	b, err := gloo.New(ctx, backend.Options{
		Store: st, Rank: l.Rank, Size: leavers, Timeout: run.GroupTimeout, Specific: gloo.Options{Host: l.Host, Wire: l.Wire},
	})
	if err != nil {
		return err
	}
	must.Do(barrier(b))
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	if l.Rank == l.Late {
		in.ReadString('\n')
	}
	if l.Op == "random" {
		return l.random(ctx, b)
	}
	err = l.call(ctx, b)
	if l.Rank == ended {
		return err
	}
	says := leaverSays{Call: fmt.Sprint(err), Peer: -1}
	fmt.Println("called")
	in.ReadString('\n')
	if l.Close {
		err = b.Close()
	} else {
		err = barrier(b)
	}
	says.Then, says.Died = fmt.Sprint(err), errors.Is(err, work.ErrPeerDied)
	var e *work.Error
	if errors.As(err, &e) {
		says.Peer = e.Peer
	}
	return json.NewEncoder(os.Stdout).Encode(says)
}

// call is the rank's call. Its result must be right.
func (l *leaver) call(ctx context.Context, b *gloo.Backend) error {
	got := []float32{float32(l.Rank), 2, 3, 4}
	x := vec(got...)
	want := []float32{0, 2, 3, 4}
	var w *work.Work
	var err error
	switch l.Op {
	case "broadcast":
		w, err = b.Broadcast(ctx, list(x), backend.BroadcastOptions{})
	case "broadcast of nothing":
		x, want = vec(), nil
		w, err = b.Broadcast(ctx, list(x), backend.BroadcastOptions{})
	case "all_reduce":
		w, err = b.AllReduce(ctx, list(x), backend.AllReduceOptions{})
		want = []float32{6, 8, 12, 16}
	case "reduce":
		w, err = b.Reduce(ctx, x, backend.ReduceOptions{})
		if want = nil; l.Rank == 0 {
			want = []float32{6, 8, 12, 16}
		}
	case "gather":
		var out []*tensor.Tensor
		if want = nil; l.Rank == 0 {
			got, want = make([]float32, 4), []float32{ended, 2, 3, 4}
			out = list(vec(0, 0, 0, 0), vec(got...), vec(0, 0, 0, 0), vec(0, 0, 0, 0))
		}
		w, err = b.Gather(ctx, out, x, backend.GatherOptions{})
	case "messages":
		want = []float32{ended, 2, 3, 4}
		if l.Rank != ended {
			w, err = b.Recv(ctx, x, ended, backend.P2POptions{Tag: 7})
			break
		}
		for r := range leavers {
			if r != ended && err == nil {
				err = wait(b.Send(ctx, x, r, backend.P2POptions{Tag: 7}))
			}
		}
		return err
	}
	if err := wait(w, err); err != nil {
		return err
	}
	if want != nil && !slices.Equal(got, want) {
		return fmt.Errorf("result %v, want %v", got, want)
	}
	return nil
}

// TestARankEndsAfterItsSuccess without Close: ranks that call later, or take longer, have what it gave them. Who
// needs it then learns at once that it has died, and Close works.
func TestARankEndsAfterItsSuccess(t *testing.T) {
	onLinux(t)
	ops := map[string][]int{ // and who may be late
		"broadcast": {2, 3}, "broadcast of nothing": {3}, "all_reduce": {ended}, "reduce": {0}, "gather": {0}, "messages": {0, 3},
	}
	for wire, l := range leaverWires {
		for op, lates := range ops {
			for _, l.Late = range lates {
				if wire == "gloo" && l.Late != 2 {
					l.Late = ended // rank 1 sends to that rank, and such a send waits for the receiver
				}
				if wire == "clusters" && l.Late == 2 {
					continue // rank 3 gets it from rank 2, which is not the matter here
				}
				l.Close = !l.Close
				l := l
				t.Run(fmt.Sprintf("%s/%s/%d", wire, op, l.Late), func(t *testing.T) {
					t.Parallel()
					l.Op, l.File = op, t.TempDir()+"/store"
					leave(t, l)
				})
			}
		}
	}
}

// random calls 25 collectives and rings of messages.
func (l *leaver) random(ctx context.Context, b *gloo.Backend) error {
	rng := rand.New(rand.NewPCG(l.Seed, 0))
	for i := range 25 {
		n := []int{0, 1, 4, 1000, 20_000, 200_000}[rng.IntN(6)]
		op, root := rng.IntN(7), rng.IntN(leavers)
		x := vec(make([]float32, n)...)
		var w *work.Work
		var err error
		switch op {
		case 0:
			w, err = b.Broadcast(ctx, list(x), backend.BroadcastOptions{Root: root})
		case 1:
			w, err = b.AllReduce(ctx, list(x), backend.AllReduceOptions{})
		case 2:
			w, err = b.Reduce(ctx, x, backend.ReduceOptions{Root: root})
		case 3:
			err = barrier(b)
		case 4, 5:
			var out []*tensor.Tensor
			if l.Rank == root {
				for range leavers {
					out = append(out, vec(make([]float32, n)...))
				}
			}
			if op == 4 {
				w, err = b.Gather(ctx, out, x, backend.GatherOptions{Root: root})
			} else {
				w, err = b.Scatter(ctx, x, out, backend.ScatterOptions{Root: root})
			}
		default:
			in, posted := b.Recv(ctx, vec(make([]float32, n)...), (l.Rank+leavers-1)%leavers, backend.P2POptions{})
			err = errors.Join(posted, wait(b.Send(ctx, x, (l.Rank+1)%leavers, backend.P2POptions{})))
			if err == nil {
				w = in
			}
		}
		if w != nil {
			err = wait(w, err)
		}
		if err != nil {
			return fmt.Errorf("call %d: %w", i, err)
		}
	}
	return nil
}

// TestRanksEndAfterTheirLastSuccess without Close: nobody fails.
func TestRanksEndAfterTheirLastSuccess(t *testing.T) {
	onLinux(t)
	for wire, l := range leaverWires {
		for range testsize.Of(1, 1, 5) {
			l := l
			l.Op, l.Late, l.Seed = "random", -1, rand.Uint64()
			t.Run(fmt.Sprintf("%s/%d", wire, l.Seed), func(t *testing.T) {
				t.Parallel()
				l.File = t.TempDir() + "/store"
				cmds, _, outs := startLeavers(t, l)
				for r, out := range outs {
					said := must.Get(io.ReadAll(out)) // before Wait closes it
					assert.NoError(t, cmds[r].Wait(), "rank %d: %s", r, said)
				}
			})
		}
	}
}

// startLeavers starts the ranks in processes of their own. Host has a letter for each.
func startLeavers(t *testing.T, l leaver) (cmds []*exec.Cmd, ins []io.Writer, outs []*bufio.Reader) {
	hosts := l.Host
	for r := range leavers {
		l.Rank, l.Host = r, hosts[r:r+1]
		c, in, out := startAgain(t, leaverVariable, l, nil)
		ins, outs, cmds = append(ins, in), append(outs, out), append(cmds, c)
	}
	for r, out := range outs {
		require.Equal(t, "ready\n", must.Get(out.ReadString('\n')), "rank %d", r)
	}
	return cmds, ins, outs
}

func leave(t *testing.T, l leaver) {
	cmds, ins, outs := startLeavers(t, l)
	if l.Late == ended {
		fmt.Fprintln(ins[ended])
	}
	rest := must.Get(io.ReadAll(outs[ended]))
	require.NoError(t, cmds[ended].Wait(), "%s", rest)
	if l.Late != ended {
		fmt.Fprintln(ins[l.Late])
	}
	for r, out := range outs {
		if r != ended {
			require.Equal(t, "called\n", must.Get(out.ReadString('\n')), "rank %d", r)
		}
	}
	for r, in := range ins {
		if r != ended {
			fmt.Fprintln(in)
		}
	}
	for r, out := range outs {
		if r == ended {
			continue
		}
		line, err := out.ReadString('\n')
		require.NoError(t, err, "rank %d: %s", r, line)
		var says leaverSays
		require.NoError(t, json.Unmarshal([]byte(line), &says), "rank %d: %s", r, line)
		require.Equal(t, "<nil>", says.Call, "rank %d", r)
		if l.Close {
			require.Equal(t, "<nil>", says.Then, "rank %d closes", r)
			continue
		}
		require.True(t, says.Died, "rank %d: %s", r, says.Then)
		require.Equal(t, ended, says.Peer, "rank %d: %s", r, says.Then)
	}
}
