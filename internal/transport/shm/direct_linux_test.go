package shm_test

import (
	"bytes"
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
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
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
	nothing := shm.Limits{AllReduce: -1, Reduce: -1, ReduceScatter: -1, Broadcast: -1, AllGather: -1, AllGatherV: -1, Gather: -1, Scatter: -1, AllToAll: -1, Message: -1}
	refuse := func(e syscall.Errno) shm.Options {
		return shm.Options{}.Reading(func(int, int) error { return e })
	}
	gone := startRanks(t, 1, "count")[0]
	require.NoError(t, gone.Wait())
	other := exec.Command("cat") // which has nothing at a Go program's addresses
	wait, err := other.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	defer func() {
		wait.Close()
		other.Wait()
	}()
	for name, tc := range map[string]struct {
		second shm.Options
		why    string
	}{
		"all can":       {shm.Options{}.Strangers(), ""},
		"option":        {shm.Options{Staged: true}, "rank 1 is told not to"},
		"forbidden":     {refuse(syscall.EPERM), "rank 1 cannot read the memory of rank 0: process_vm_readv: operation not permitted (Yama"},
		"no such call":  {refuse(syscall.ENOSYS), "function not implemented (kernel or seccomp)"},
		"no process":    {shm.Options{}.Taking(gone.Process.Pid), "no such process (different pid namespaces)"},
		"other process": {shm.Options{}.Taking(other.Process.Pid), "bad address (different pid namespaces)"},
		"other mark":    {shm.Options{}.Taking(0), "rank 1 finds another process where rank 0 should be"},
	} {
		t.Run(name, func(t *testing.T) {
			gs := joinWith(t, shm.Options{}.SlowCopies(), tc.second, shm.Options{})
			why := gs[0].WhyStaged()
			for _, g := range gs {
				require.Equal(t, why, g.WhyStaged())
				require.Equal(t, gs[0].Limits(), g.Limits())
				if why != "" {
					require.Equal(t, nothing, g.Limits())
				}
			}
			require.Contains(t, why, tc.why)
			require.Equal(t, tc.why == "", why == "")
			n := 1000
			if why == "" {
				require.NotEqual(t, nothing, gs[0].Limits())
				n = int(gs[0].Limits().AllToAll)/len(gs) + 1
			}
			each(t, gs, func(g *shm.Group) error { return call(g, "alltoall", 3, 0, n, 1, 0, false) })
		})
	}
	if copies.Fast() {
		require.Equal(t, nothing, joinWith(t, shm.Options{}, shm.Options{})[1].Limits(), "two copies are faster")
	}
	require.Equal(t, nothing, join(t, 1, shm.Options{})[0].Limits(), "nobody to copy from")
}

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
		for _, op := range collectiveNames {
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
	for _, op := range collectiveNames {
		if op == "barrier" {
			continue
		}
		for how, end := range map[string]func(g *shm.Group){
			"abort": func(g *shm.Group) { g.Abort(why) },
			"close": func(g *shm.Group) { g.Close() },
		} {
			t.Run(op+"/"+how, func(t *testing.T) {
				o := shm.Options{OneShot: -1}.From(1)
				at := newGate()
				gs := joinWith(t, o.Strangers(), at.options(o))
				root := 0
				if op == "gather" || op == "reduce" {
					root = 1
				}
				const n = 40_000
				ended := make(chan error, 2)
				for _, g := range gs {
					go func() {
						err := call(g, op, 12, n/2, n, 4, root, false)
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
				var re *shm.RankError
				require.ErrorAs(t, second, &re)
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
	gs := joinWith(t, o.Strangers(), at.options(o))
	ended := make(chan error, 1)
	const n = 64 << 20 // it reads this in parts
	go func() { ended <- gs[0].Broadcast(make([]byte, n), 0, late()) }()
	var late atomic.Bool
	go func() {
		<-at.tried
		late.Store(true)
		close(at.open)
	}()
	err := gs[1].Broadcast(make([]byte, n), 0, func() error {
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
		gs := join(t, 2, shm.Options{OneShot: -1}.From(1))
		bad := by(4, func(_, _ []byte) { panic(op) })
		const n = 1 << 20
		ended := make(chan error, 1)
		go func() { ended <- reduceBy(gs[1], op, n, by(4, mix(4))) }()
		require.PanicsWithValue(t, op, func() { _ = reduceBy(gs[0], op, n, bad) })
		require.False(t, gs[0].Exposes(), op)
		require.ErrorIs(t, <-ended, shm.ErrAborted, op)
	}
}

func reduceBy(g *shm.Group, op string, n int, o shm.Operator) error {
	b := make([]byte, n)
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
	for _, op := range collectiveNames {
		if op == "barrier" {
			continue
		}
		o := shm.Options{OneShot: -1}.From(1)
		reads, n := 0, 10_000
		if op == "broadcast" {
			n = 3 << 20 // it fails in the middle
		}
		gs := joinWith(t, o.Strangers(), o.Reading(func(_, size int) error {
			if size <= shm.MarkLen {
				return nil
			}
			if reads++; n > 1<<20 && reads < 3 {
				return nil
			}
			return syscall.ESRCH
		}))
		root := 0
		if op == "gather" || op == "reduce" {
			root = 1
		}
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for r, g := range gs {
			wg.Go(func() { errs[r] = call(g, op, 13, n/2, n, 4, root, false) })
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
	switch args[0] {
	case "broadcast":
		err = g.Broadcast(buf, 1, late())
	case "allgather":
		err = g.AllGather(make([]byte, g.Size()*len(buf)), buf, late())
	case "allreduce":
		err = g.AllReduce(buf, by(1, mix(1)), late())
	case "message":
		m := meshOf(g)
		if g.Rank() == 1 {
			for peer := 0; peer < g.Size(); peer += 2 {
				post(m.Send, peer, 1, buf)
			}
			select {}
		}
		in := post(m.Recv, 1, 1, buf)
		err = in.waitPolling(m)
	}
	fmt.Println(err)
	return nil
}

// TestKillLender: a rank dies while others read its memory.
func TestKillLender(t *testing.T) {
	for _, op := range []string{"broadcast", "allgather", "allreduce"} {
		ps := startRanks(t, 3, "mourn "+op)
		for _, r := range []int{0, 2} {
			line, err := ps[r].out.ReadString('\n')
			require.NoError(t, err)
			require.Equal(t, "reading\n", line)
		}
		require.NoError(t, ps[1].Process.Kill())
		require.Error(t, ps[1].Wait())
		says := map[int]string{0: "the memory of a rank cannot be read: no such process (rank 1)", 2: "group aborted (rank 0)"}
		for _, r := range []int{0, 2} {
			fmt.Fprintln(ps[r].in)
			line, err := ps[r].out.ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, line, says[r], "%s, rank %d", op, r)
			require.NoError(t, ps[r].Wait())
		}
	}
}

// directly makes meshes whose ranks read each other's memory from 64 KiB on.
func directly(f *fabric, t testing.TB, size int, lazy bool, os ...shm.Options) []*shm.Mesh {
	if os == nil {
		for range size {
			os = append(os, shm.Options{}.From(1).Strangers())
		}
	}
	name := fmt.Sprint("direct", f.n.Add(1))
	ms := make([]*shm.Mesh, size)
	for r, g := range joinWith(t, os...) {
		rest, err := f.Join(name, r, size)
		require.NoError(t, err)
		ms[r], err = shm.NewMesh(g, rest, shm.MeshOptions{Lazy: lazy})
		require.NoError(t, err)
		f.names[ms[r]] = name
		t.Cleanup(func() { ms[r].Close() })
	}
	return ms
}

func TestMeshDirect(t *testing.T) {
	f := newFabric()
	transporttest.Run(t, transporttest.Config{
		New: func(t testing.TB, size int) []transport.Mesh {
			var ms []transport.Mesh
			for _, m := range directly(f, t, size, false) {
				ms = append(ms, m)
			}
			return ms
		},
		Kill:  f.die,
		Sizes: []int{64<<10 + 1, 256<<10 + 1},
	})
}

// exchange sends several messages both ways at a time and looks at them.
func exchange(t *testing.T, ms []*shm.Mesh) {
	t.Helper()
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() {
			r := m.Rank()
			var fs []*flag
			for i, n := range []int{100, 70_000, 3, 512<<10 + 1} {
				fs = append(fs, post(m.Recv, 1-r, uint64(i), make([]byte, n)), post(m.Send, 1-r, uint64(i), input(3, i, r, n)))
			}
			for i, f := range fs {
				if err := f.waitPolling(m); err != nil {
					t.Errorf("rank %d, request %d: %v", r, i, err)
				}
				if i%2 == 0 && !bytes.Equal(f.Buf, input(3, i/2, 1-r, len(f.Buf))) {
					t.Errorf("rank %d, message %d is another", r, i/2)
				}
			}
		})
	}
	wg.Wait()
}

// TestMessageFallsBack: what cannot be read, or no further, is sent.
func TestMessageFallsBack(t *testing.T) {
	o := shm.Options{}.From(1)
	for name, before := range map[string]func(n int) error{
		"unlent": func(n int) error {
			if n == 1 {
				return syscall.EFAULT
			}
			return nil
		},
		"unreadable": func(n int) error {
			if n > shm.MarkLen {
				return syscall.EFAULT
			}
			return nil
		},
		"unreadable end": func(n int) error {
			if n > shm.MarkLen && n < 256<<10 {
				return syscall.EFAULT
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			var refused atomic.Int64
			seam := func(_, n int) error {
				err := before(n)
				if err != nil {
					refused.Add(1)
				}
				return err
			}
			ms := directly(newFabric(), t, 2, true, o.Reading(seam), o.Reading(seam))
			exchange(t, ms)
			require.NotZero(t, refused.Load())
		})
	}
	t.Run("both", func(t *testing.T) { exchange(t, directly(newFabric(), t, 2, true)) })
}

// TestSenderGivesUp: a receive ends with an error if the sender has its memory back
// before it has been read.
func TestSenderGivesUp(t *testing.T) {
	for how, end := range map[string]func(m *shm.Mesh) error{
		"abort": func(m *shm.Mesh) error {
			m.Abort(&transport.Fault{Kind: transport.FaultTimeout, Rank: 0, Reporter: 0})
			return nil
		},
		"close": func(m *shm.Mesh) error { return m.Close() },
	} {
		t.Run(how, func(t *testing.T) {
			o := shm.Options{}.From(1)
			at := newGate()
			ms := directly(newFabric(), t, 2, true, o.Strangers(), at.options(o))
			out := post(ms[0].Send, 1, 5, input(1, 0, 0, 200<<10))
			ended := make(chan error, 1)
			go func() { ended <- post(ms[1].Recv, 0, 5, make([]byte, 200<<10)).waitPolling(ms[1]) }()
			<-at.tried
			closed := make(chan error, 1)
			go func() { closed <- end(ms[0]) }()
			require.Error(t, out.waitPolling(ms[0]), "the sender returns while the other one reads")
			clear(out.Buf)
			close(at.open)
			require.Error(t, <-ended)
			require.NoError(t, <-closed)
		})
	}
}

func TestMessagesAllocateNothingDirectly(t *testing.T) {
	ms := directly(newFabric(), t, 2, true)
	const runs, n = 50, 100 << 10
	var wg sync.WaitGroup
	wg.Go(func() {
		f := pingPong(ms[1], make([]byte, n))
		for range runs + 1 {
			if err := f(); err != nil {
				panic(err)
			}
		}
	})
	f := pingPong(ms[0], make([]byte, n))
	require.Zero(t, testing.AllocsPerRun(runs, func() {
		if err := f(); err != nil {
			panic(err)
		}
	}))
	wg.Wait()
}
