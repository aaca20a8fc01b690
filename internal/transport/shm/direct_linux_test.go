package shm_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/copies"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// joinWith is join with options for each rank.
func joinWith(t testing.TB, os ...shm.Options) []*shm.Group {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es, addrs := endpoints(t, len(os))
	gs := make([]*shm.Group, len(os))
	var eg errgroup.Group
	for r, e := range es {
		eg.Go(func() (err error) {
			gs[r], err = e.Join(ctx, r, addrs, os[r])
			return err
		})
	}
	require.NoError(t, eg.Wait())
	for _, g := range gs {
		t.Cleanup(func() { g.Close() })
	}
	return gs
}

// TestProbe: one rank that cannot read the others' memory, or may not, is enough for all to stage. One whose copies are not
// fast is enough for all to read.
func TestProbe(t *testing.T) {
	const from = 1000
	nothing := shm.ReadLimits{AllGather: -1, AllToAll: -1, Scatter: -1}
	refuse := func(e syscall.Errno) shm.Options {
		return shm.Options{}.Reading(func(int, int) error { return e })
	}
	gone := startRanks(t, 1, "count")[0]
	require.NoError(t, gone.Wait())
	other := exec.Command("cat") // which has nothing at a Go program's addresses
	wait := must.Get(other.StdinPipe())
	require.NoError(t, other.Start())
	defer func() {
		wait.Close()
		other.Wait()
	}()
	for name, tc := range map[string]struct {
		second shm.Options
		why    string
	}{
		"all can":       {shm.Options{}, ""},
		"forbidden":     {refuse(syscall.EPERM), "cannot read the memory of rank 0: process_vm_readv: operation not permitted"},
		"no such call":  {refuse(syscall.ENOSYS), "function not implemented"},
		"no process":    {shm.Options{}.Taking(gone.Process.Pid), "no such process"},
		"other process": {shm.Options{}.Taking(other.Process.Pid), "bad address"},
		"other mark":    {shm.Options{}.Taking(0), "rank 1 finds another process where rank 0 should be"},
	} {
		t.Run(name, func(t *testing.T) {
			gs := joinWith(t, shm.Options{}.From(from), tc.second.From(from), shm.Options{}.From(from))
			why := gs[0].WhyStaged()
			for _, g := range gs {
				require.Equal(t, why, g.WhyStaged())
				require.Equal(t, gs[0].ReadLimits(), g.ReadLimits())
				if why != "" {
					require.Equal(t, nothing, g.ReadLimits())
				}
			}
			require.Contains(t, why, tc.why)
			require.Equal(t, tc.why == "", why == "")
			each(t, gs, func(g *shm.Group) error { return call(g, "alltoallv", 3, 2*from, 3*from, 1, 0, false) })
		})
	}
	if copies.Fast() {
		require.Equal(t, nothing, join(t, 2, shm.Options{})[1].ReadLimits(), "two copies are faster")
	}
	if gs := joinWith(t, shm.Options{}, shm.Options{}.SlowCopies()); gs[0].Spins() {
		require.NotEqual(t, nothing, gs[0].ReadLimits(), "one copy is faster")
	}
	require.Equal(t, nothing, join(t, 1, shm.Options{})[0].ReadLimits(), "nobody to copy from")
}

// reading are the collectives that read other ranks' memory.
var reading = []string{"allgather", "allgatherv", "alltoallv", "scatter"}

// TestUnlent: memory that other processes cannot read goes the other way, on all ranks.
func TestUnlent(t *testing.T) {
	const p = 3
	for culprit := range p {
		var asked atomic.Int64
		os := make([]shm.Options, p)
		for r := range os {
			os[r] = shm.Options{Piece: 1, OneShot: -1}.From(1).Reading(func(_, n int) error {
				if n == 1 && r == culprit { // it tries to read its own
					asked.Add(1)
					return syscall.EFAULT
				}
				return nil
			})
		}
		gs := joinWith(t, os...)
		no := 0
		for _, op := range reading {
			for root := range p {
				no++
				each(t, gs, func(g *shm.Group) error { return call(g, op, 11, no, 6000, 4, root, no%2 == 0) })
			}
		}
		require.NotZero(t, asked.Load())
	}
}

// gate lets a rank read the memory of others only when it is open.
type gate struct {
	tried, open chan struct{}
	once        sync.Once
}

func newGate() *gate { return &gate{tried: make(chan struct{}), open: make(chan struct{})} }

func (g *gate) options(o shm.Options) shm.Options {
	return o.Reading(func(_, n int) error {
		if n > shm.MarkLen {
			g.once.Do(func() { close(g.tried) })
			<-g.open
		}
		return nil
	})
}

// TestLenderGivesUp: a rank that reads memory while its owner takes it back does not
// return as if all were well.
func TestLenderGivesUp(t *testing.T) {
	why := errors.New("test: enough")
	for _, op := range reading {
		for how, end := range map[string]func(g *shm.Group){
			"abort": func(g *shm.Group) { g.Abort(why) },
			"close": func(g *shm.Group) { g.Close() },
		} {
			t.Run(op+"/"+how, func(t *testing.T) {
				o := shm.Options{OneShot: -1}.From(1)
				at := newGate()
				gs := joinWith(t, o, at.options(o))
				const n = 40_000
				ended := make(chan error, 2)
				for _, g := range gs {
					go func() {
						err := call(g, op, 12, n/2, n, 4, 0, false)
						if g.Rank() == 0 {
							end(g) // if it has not come to that
						}
						ended <- err
					}()
				}
				select {
				case <-at.tried:
				case err := <-ended:
					t.Fatalf("nothing was read: %v", err)
				}
				end(gs[0])
				first := <-ended
				require.Error(t, first, "the lender returns while the other one reads")
				close(at.open)
				second := <-ended
				require.Error(t, second)
				require.NotContains(t, second.Error(), "wrong result")
				re := must.As[*shm.RankError](t, second)
				require.Zero(t, re.Rank)
			})
		}
	}
}

// TestReaderGivesUp: abort and stop are looked at while a rank reads.
func TestReaderGivesUp(t *testing.T) {
	why := errors.New("test: deadline")
	o := shm.Options{}.From(1)
	at := newGate()
	gs := joinWith(t, o, at.options(o))
	ended := make(chan error, 1)
	const n = 32 << 20 // it reads this in parts
	go func() { ended <- gs[0].Scatter(make([]byte, n), make([]byte, 2*n), 0, late()) }()
	var late atomic.Bool
	go func() {
		<-at.tried
		late.Store(true)
		close(at.open)
	}()
	err := gs[1].Scatter(make([]byte, n), nil, 0, func() error {
		if late.Load() {
			return why
		}
		return nil
	})
	require.ErrorIs(t, err, why)
	require.ErrorIs(t, <-ended, shm.ErrAborted)
}

// TestPanickedOperator: a rank whose operator panics lends nothing any more, and the others' calls end.
func TestPanickedOperator(t *testing.T) {
	for _, op := range []string{"allreduce", "reduce", "reducescatter"} {
		const n = 1 << 20
		gs := join(t, 2, shm.Options{OneShot: -1})
		mems := allocated(t, gs, n)
		for _, g := range gs {
			g.SetMapped(1)
		}
		bad := by(4, func(_, _ []byte) { panic(op) })
		ended := make(chan error, 1)
		go func() { ended <- reduceBy(gs[1], op, mems[1], by(4, mix(4))) }()
		require.PanicsWithValue(t, op, func() { _ = reduceBy(gs[0], op, mems[0], bad) })
		require.False(t, gs[0].Exposes(), op)
		require.ErrorIs(t, <-ended, shm.ErrAborted, op)
	}
}

func reduceBy(g *shm.Group, op string, b []byte, o shm.Operator) error {
	n := len(b)
	switch op {
	case "allreduce":
		return g.AllReduce(b, o, late())
	case "reduce":
		return g.Reduce(make([]byte, n), b, 0, o, late())
	}
	return g.ReduceScatter(b[:n/2], b, o, late())
}

// TestReadFails: a rank whose memory cannot be read is named.
func TestReadFails(t *testing.T) {
	for _, op := range reading {
		o := shm.Options{OneShot: -1}.From(1)
		reads, n := 0, 10_000
		if op == "scatter" {
			n = 3 << 20 // it fails in the middle
		}
		gs := joinWith(t, o, o.Reading(func(_, size int) error {
			if size <= shm.MarkLen {
				return nil
			}
			if reads++; n > 1<<20 && reads < 3 {
				return nil
			}
			return syscall.ESRCH
		}))
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for r, g := range gs {
			wg.Go(func() { errs[r] = call(g, op, 13, n/2, n, 4, 0, false) })
		}
		wg.Wait()
		var re *shm.RankError
		require.ErrorIs(t, errs[1], shm.ErrUnreadable, op)
		require.ErrorIs(t, errs[1], syscall.ESRCH, op)
		require.ErrorAs(t, errs[1], &re, op)
		require.Zero(t, re.Rank, op)
		require.ErrorIs(t, errs[0], shm.ErrAborted, op)
	}
}

// holdReads makes a rank tell when it is about to read another's memory, and wait for a command.
func holdReads(o shm.Options) shm.Options {
	var once sync.Once
	return o.Reading(func(_, n int) error {
		if n > shm.MarkLen {
			once.Do(func() {
				fmt.Println("reading")
				commands.ReadString('\n')
			})
		}
		return nil
	})
}

// mournRank gets from rank 1, which dies, and tells how that ended.
func mournRank(g *shm.Group, args []string) error {
	buf := make([]byte, 8<<20)
	var err error
	all := make([]byte, g.Size()*len(buf))
	switch args[0] {
	case "scatter":
		if g.Rank() != 1 {
			all = nil
		}
		err = g.Scatter(buf, all, 1, late())
	case "allgather":
		err = g.AllGather(all, buf, late())
	}
	fmt.Println(err)
	return nil
}

// TestKillLender: a rank dies while others read its memory.
func TestKillLender(t *testing.T) {
	for _, op := range []string{"scatter", "allgather"} {
		ps := startRanks(t, 3, "mourn "+op)
		for _, r := range []int{0, 2} {
			require.Equal(t, "reading\n", must.Get(ps[r].out.ReadString('\n')))
		}
		require.NoError(t, ps[1].Process.Kill())
		require.Error(t, ps[1].Wait())
		says := map[int]string{0: "the memory of a rank cannot be read: no such process (rank 1)", 2: "group aborted (rank 0)"}
		for _, r := range []int{0, 2} {
			fmt.Fprintln(ps[r].in)
			require.Contains(t, must.Get(ps[r].out.ReadString('\n')), says[r], "%s, rank %d", op, r)
			require.NoError(t, ps[r].Wait())
		}
	}
}
