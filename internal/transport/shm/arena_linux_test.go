package shm_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// allocated calls Alloc on all ranks.
func allocated(t testing.TB, gs []*shm.Group, n int) [][]byte {
	t.Helper()
	bs := make([][]byte, len(gs))
	each(t, gs, func(g *shm.Group) (err error) {
		bs[g.Rank()], err = g.Alloc(n, late())
		return err
	})
	return bs
}

// lot hands out parts of memory of Alloc, of all lengths and at odd places, and other
// memory in between, as rng says.
type lot struct {
	rng     *rand.Rand
	mem     []byte
	taken   int
	foreign int // out of so many, one is other memory; 0 for none
}

func (l *lot) room(n int) []byte {
	skip := l.rng.IntN(200)
	if l.foreign > 0 && l.rng.IntN(l.foreign) == 0 || l.taken+skip+n > len(l.mem) {
		return make([]byte, n)
	}
	b := l.mem[l.taken+skip:][:n:n]
	l.taken += skip + n
	return b
}

// randomCalls makes random calls, the same on all ranks, with buffers in mem and elsewhere.
func randomCalls(g *shm.Group, seed uint64, mem []byte, calls int) error {
	rng := rand.New(rand.NewPCG(seed, 0))
	own := rand.New(rand.NewPCG(seed, uint64(g.Rank())+1))
	for no := range calls {
		op := collectiveNames[rng.IntN(len(collectiveNames))]
		elem := []int{1, 4, 8, 3, 63}[rng.IntN(5)]
		n := []int{0, 1, rng.IntN(20), rng.IntN(3000), rng.IntN(30000)}[rng.IntN(5)] * elem
		n = min(n, 100_000/g.Size()/elem*elem)
		root, inPlace := rng.IntN(g.Size()), rng.IntN(2) == 0
		// In one third of the calls every buffer is in the arenas, in one only some ranks' are.
		l := lot{rng: own, mem: mem}
		switch rng.IntN(3) {
		case 1:
			l.foreign = 4
		case 2:
			if own.IntN(2) == 0 {
				l.foreign = 1
			}
		}
		if err := callIn(l.room, g, op, seed, no, n, elem, root, inPlace); err != nil {
			g.Abort(err)
			return err
		}
	}
	return nil
}

// TestMapped: memory of Alloc and any other make no difference to the results.
func TestMapped(t *testing.T) {
	seed := must.Seed(t)
	for p := 1; p <= 5; p++ {
		for name, o := range map[string]shm.Options{
			"default":   {},
			"alone":     shm.Options{Piece: 1, OneShot: -1}.From(-1).Tile(4096).Section(8192),
			"claimed":   shm.Options{Piece: 1, OneShot: -1}.From(-1).SlowCopies(),
			"direct":    shm.Options{Piece: 1, OneShot: -1}.From(1).Tile(4096).Section(4096),
			"forbidden": shm.Options{Piece: 1, OneShot: -1}.Reading(func(int, int) error { return syscall.EPERM }),
		} {
			t.Run(fmt.Sprintf("%d ranks, %s", p, name), func(t *testing.T) {
				gs := join(t, p, o.Arena(4<<20))
				mems := allocated(t, gs, 1<<20)
				if name != "default" {
					for _, g := range gs {
						g.SetMapped(1)
					}
				}
				calls := testsize.Of(10, 10, 30)
				each(t, gs, func(g *shm.Group) error { return randomCalls(g, seed, mems[g.Rank()], calls) })
			})
		}
	}
}

// lotsRank is TestMapped in a process.
func lotsRank(g *shm.Group, args []string) (err error) {
	defer must.Catch(&err)
	var seed uint64
	must.Get(fmt.Sscan(args[0], &seed))
	mem := must.Get(g.Alloc(1<<20, late()))
	g.SetMapped(1)
	err = randomCalls(g, seed, mem, 60)
	if err == nil {
		err = g.Free(mem)
	}
	fmt.Println(err)
	return err
}

func TestMappedProcesses(t *testing.T) {
	seed := must.Seed(t)
	for _, p := range startRanks(t, 3, fmt.Sprint("lots ", seed)) {
		require.Equal(t, "<nil>\n", must.Get(p.out.ReadString('\n')))
		require.NoError(t, p.Wait())
	}
}

// TestNoArenas: one rank that cannot have them is enough for all to have none, and to know why.
func TestNoArenas(t *testing.T) {
	for culprit := range 3 {
		os := make([]shm.Options, 3)
		os[culprit] = os[culprit].NoArenas(syscall.ENOMEM)
		gs := joinWith(t, os...)
		each(t, gs, func(g *shm.Group) error {
			if want := fmt.Sprintf("rank %d cannot map it: cannot allocate memory", culprit); g.WhyNoArenas() != want {
				return fmt.Errorf("%q, want %q", g.WhyNoArenas(), want)
			}
			if _, err := g.Alloc(1, late()); !errors.Is(err, shm.ErrNoArenas) {
				return err
			}
			if err := g.Free(make([]byte, 1)); !errors.Is(err, shm.ErrNotAllocated) {
				return err
			}
			return call(g, "allreduce", 1, 0, 200_000, 4, 0, false)
		})
	}
	require.Empty(t, join(t, 2, shm.Options{})[0].WhyNoArenas())
}

// limitedRank is a rank whose files have a limit, and says why there are no arenas.
func limitedRank(g *shm.Group, _ []string) error {
	fmt.Println(g.WhyNoArenas())
	return nil
}

// limitFiles must not make rank 0 ask for more than it may have.
func limitFiles(bytes uint64) error {
	return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: unix.RLIM_INFINITY})
}

func TestLimited(t *testing.T) {
	for _, p := range startRanks(t, 2, "limited") {
		line := must.Get(p.out.ReadString('\n'))
		require.Equal(t, "rank 0 has a limit on addresses or files (ulimit -v, -f)\n", line)
		require.NoError(t, p.Wait())
	}
}

// TestCramped: if the segments are longer than a file of rank 0 may be, no rank shares memory, and rank 0 lives.
func TestCramped(t *testing.T) {
	ps := startRanks(t, 2, "cramped")
	for r, want := range []string{
		`rank 0 cannot join: \d+ bytes of shared memory: files of this process may have 1048576 bytes \(ulimit -f\): file too large`,
		"rank 1 cannot join: ",
	} {
		line, err := ps[r].out.ReadString('\n')
		require.NoError(t, err, "rank %d", r)
		require.Regexp(t, want, line)
		require.NoError(t, ps[r].Wait())
	}
}

// TestExhausted: when one rank has no room, nobody gets any, and all go on.
func TestExhausted(t *testing.T) {
	const size = 4 << 20
	gs := join(t, 3, shm.Options{}.Arena(size))
	kept := allocated(t, gs, 5000)
	for r, b := range kept {
		require.Equal(t, make([]byte, 5000), b)
		for i := range b {
			b[i] = byte(r + 1)
		}
	}
	errs := make([]error, 3)
	each(t, gs, func(g *shm.Group) error {
		n := 1000
		if g.Rank() == 1 {
			n = size
		}
		b, err := g.Alloc(n, late())
		errs[g.Rank()] = err
		if b != nil {
			return errors.New("memory and an error")
		}
		return nil
	})
	require.EqualError(t, errs[0], "shm: no memory of Alloc is left on rank 1")
	require.EqualError(t, errs[1], fmt.Sprintf("shm: no memory of Alloc is left: %d bytes requested, %d of %d are free", size, size-8192, size))
	require.EqualError(t, errs[2], "shm: no memory of Alloc is left on rank 1")
	for range 3 { // what has been given back is there again, and zero
		all := allocated(t, gs, size-hugePage)
		for r, b := range all {
			require.Zero(t, len(bytes.TrimLeft(b, "\x00")))
			for i := range b {
				b[i] = 0xff
			}
			require.NoError(t, gs[r].Free(b))
		}
	}
	for r, b := range kept {
		require.Equal(t, bytes.Repeat([]byte{byte(r + 1)}, 5000), b)
	}
	each(t, gs, func(g *shm.Group) error {
		for _, n := range []int{-1, 0} {
			b, err := g.Alloc(n, late())
			if (err != nil) != (n < 0) || b != nil {
				return fmt.Errorf("%d bytes: %v, %v", n, b, err)
			}
		}
		return call(g, "allgather", 1, 0, 10_000, 1, 0, false)
	})
}

// hugePage is what large allocations are aligned to.
const hugePage = 2 << 20

func TestFree(t *testing.T) {
	g := join(t, 1, shm.Options{})[0]
	b := must.Get(g.Alloc(10_000, nil))
	for name, wrong := range map[string][]byte{
		"nothing": nil, "other": make([]byte, 10_000), "begin": b[:9_999], "end": b[1:], "middle": b[4096:4097],
	} {
		require.ErrorIs(t, g.Free(wrong), shm.ErrNotAllocated, name)
	}
	require.NoError(t, g.Free(b))
	require.ErrorIs(t, g.Free(b), shm.ErrNotAllocated)
}

// TestAllocatedOutlivesGroup: what has been allocated is there until it is freed.
func TestAllocatedOutlivesGroup(t *testing.T) {
	_, before := count(t)
	gs := join(t, 2, shm.Options{}.Arena(4<<20))
	one, two := allocated(t, gs, 5000), allocated(t, gs, 3<<19)
	require.NoError(t, gs[1].Close())
	require.NoError(t, gs[0].Close())
	for r, g := range gs {
		for _, b := range [][]byte{one[r], two[r]} {
			for i := range b {
				b[i]++
			}
			_, maps := count(t)
			require.Greater(t, maps, before)
			require.NoError(t, g.Free(b))
		}
		require.ErrorIs(t, g.Free(one[r]), shm.ErrNotAllocated)
		require.ErrorIs(t, must.Err(g.Alloc(1, nil)), shm.ErrClosed)
	}
	_, after := count(t)
	require.Equal(t, before, after)
}

// TestAllocMismatch: all ranks have to call it.
func TestAllocMismatch(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	ended := make(chan error)
	go func() { ended <- gs[1].Barrier(late()) }()
	_, err := gs[0].Alloc(1, late())
	other := <-ended
	require.True(t, errors.Is(err, shm.ErrMismatch) || errors.Is(other, shm.ErrMismatch), "%v, %v", err, other)
	require.Error(t, err)
	require.Error(t, other)
}

// TestShowerGivesUp: a rank reads another's arena while that rank gives up and frees it. It
// ends with an error and without a page fault.
func TestShowerGivesUp(t *testing.T) {
	const n = 3 << 20
	why := errors.New("test: enough")
	for name, op := range map[string]func(g *shm.Group, b, c []byte, stop func() error) error{
		"broadcast": func(g *shm.Group, b, _ []byte, stop func() error) error { return g.Broadcast(b, 0, stop) },
		"allgather": func(g *shm.Group, b, c []byte, stop func() error) error { return g.AllGather(c, b, stop) },
		"allreduce": func(g *shm.Group, b, _ []byte, stop func() error) error { return g.AllReduce(b, by(1, mix(1)), stop) },
		"scatter": func(g *shm.Group, b, c []byte, stop func() error) error {
			if g.Rank() > 0 {
				return g.Scatter(b, nil, 0, stop)
			}
			return g.Scatter(b, c, 0, stop)
		},
	} {
		for how, end := range map[string]func(g *shm.Group){
			"abort": func(g *shm.Group) { g.Abort(why) },
			"close": func(g *shm.Group) { g.Close() },
		} {
			t.Run(name+"/"+how, func(t *testing.T) {
				gs := join(t, 2, shm.Options{}.From(-1).Arena(16<<20))
				bs, cs := allocated(t, gs, n), allocated(t, gs, 2*n)
				for _, g := range gs {
					g.SetMapped(1)
				}
				tried, open := make(chan struct{}), make(chan struct{})
				var first atomic.Bool
				hold := func() error {
					if first.CompareAndSwap(false, true) {
						close(tried)
						<-open
					}
					return nil
				}
				ended := make(chan error, 2)
				go func() { ended <- op(gs[0], bs[0], cs[0], late()) }()
				go func() { ended <- op(gs[1], bs[1], cs[1], hold) }()
				<-tried
				end(gs[0])
				require.Error(t, <-ended, "the lender returns while the other one takes")
				require.NoError(t, errors.Join(gs[0].Free(bs[0]), gs[0].Free(cs[0])))
				close(open)
				re := must.As[*shm.RankError](t, <-ended)
				require.Zero(t, re.Rank)
			})
		}
	}
}

// widowRank takes from the arena of rank 1, which dies, and tells how that ended.
func widowRank(g *shm.Group, args []string) error {
	const n = 8 << 20
	buf, err := g.Alloc(n, late())
	if err != nil {
		return err
	}
	g.SetMapped(1)
	all := make([]byte, g.Size()*n)
	for i := range buf {
		buf[i] = byte(g.Rank())
	}
	seen := 0
	stop := func() error {
		switch seen++; seen {
		case 1:
			fmt.Println("taking")
			commands.ReadString('\n')
		case 50: // nobody here notices a death
			return errors.New("test: enough")
		}
		return nil
	}
	switch args[0] {
	case "broadcast":
		err = g.Broadcast(buf, 1, stop)
		all = buf
	case "allgather":
		err = g.AllGather(all, buf, stop)
	case "allreduce":
		err = g.AllReduce(buf, by(1, mix(1)), stop)
	}
	if err == nil && !bytes.Equal(all, bytes.Repeat([]byte{1}, len(all))) {
		err = errors.New("other data")
	}
	fmt.Println(err)
	return nil
}

// TestKillShower: a rank dies while others take from its arena, which stays.
func TestKillShower(t *testing.T) {
	for op, says := range map[string]string{
		"broadcast": "<nil>", // all of it was there
		"allgather": "test: enough",
		"allreduce": "test: enough",
	} {
		ps := startRanks(t, 2, "widow "+op)
		for _, p := range ps {
			require.Equal(t, "taking\n", must.Get(p.out.ReadString('\n')))
		}
		require.NoError(t, ps[1].Process.Kill())
		require.Error(t, ps[1].Wait())
		fmt.Fprintln(ps[0].in)
		require.Equal(t, says, strings.TrimSpace(must.Get(ps[0].out.ReadString('\n'))), op)
		require.NoError(t, ps[0].Wait())
	}
}

// TestMessagesMapped: messages out of memory of Alloc are taken where they are.
func TestMessagesMapped(t *testing.T) {
	ms := meshes(t, 2)
	gs := []*shm.Group{ms[0].Group(), ms[1].Group()}
	mems := allocated(t, gs, 4<<20)
	for _, g := range gs {
		g.SetMapped(1)
	}
	var wg sync.WaitGroup
	for r, m := range ms {
		l := lot{rng: rand.New(rand.NewPCG(1, uint64(r))), mem: mems[r]}
		wg.Go(func() {
			for round := range 4 {
				var fs []*flag
				for i, n := range []int{100, 70_000, 3, 512<<10 + 1} {
					out := l.room(n)
					copy(out, input(3, 10*round+i, r, n))
					fs = append(fs, post(m.Recv, 1-r, uint64(i), l.room(n)), post(m.Send, 1-r, uint64(i), out))
				}
				for i, f := range fs {
					if err := f.waitPolling(m); err != nil {
						t.Errorf("rank %d, request %d: %v", r, i, err)
					}
					if i%2 == 0 && !bytes.Equal(f.Buf, input(3, 10*round+i/2, 1-r, len(f.Buf))) {
						t.Errorf("rank %d, message %d is another", r, i/2)
					}
				}
			}
		})
	}
	wg.Wait()
}

// meshes makes meshes that move nothing by themselves.
func meshes(t testing.TB, size int) (ms []*shm.Mesh) {
	f := newFabric()
	for r, g := range join(t, size, shm.Options{}) {
		rest := must.Get(f.Join("mapped", r, size))
		m := must.Get(shm.NewMesh(g, rest, shm.MeshOptions{Lazy: true}))
		t.Cleanup(func() { m.Close() })
		ms = append(ms, m)
	}
	return ms
}

// TestMessageOutsideArena: a rank that names a place outside its arena ends the group, and nothing is read there.
func TestMessageOutsideArena(t *testing.T) {
	ms := meshes(t, 2)
	ms[1].NameOutside(0, 5, 1<<20)
	err := post(ms[0].Recv, 1, 5, make([]byte, 1<<20)).waitPolling(ms[0])
	f := must.As[*transport.Fault](t, err)
	require.Equal(t, transport.FaultProtocol, f.Kind)
	require.ErrorContains(t, err, "outside its arena")
}

// TestSenderFrees: a message that has not been taken when its sender gives up ends with an error.
func TestSenderFrees(t *testing.T) {
	ms := meshes(t, 2)
	gs := []*shm.Group{ms[0].Group(), ms[1].Group()}
	mems := allocated(t, gs, 1<<20)
	out := post(ms[0].Send, 1, 5, mems[0])
	ms[0].Abort(&transport.Fault{Kind: transport.FaultTimeout, Rank: 0, Reporter: 0})
	require.Error(t, out.waitPolling(ms[0]))
	require.NoError(t, gs[0].Free(mems[0]))
	require.Error(t, post(ms[1].Recv, 0, 5, make([]byte, 1<<20)).waitPolling(ms[1]))
}

func TestMappedAllocations(t *testing.T) {
	const runs, n = 15, 100 << 10
	gs := join(t, 2, shm.Options{OneShot: -1}.From(-1).Arena(4<<20))
	bs, cs := allocated(t, gs, 2*n), allocated(t, gs, 2*n)
	add := mix(4)
	round := func(g *shm.Group) error {
		b, c := bs[g.Rank()], cs[g.Rank()]
		return errors.Join(
			g.AllReduce(b, by(4, add), nil), g.Reduce(c, b, 0, by(4, add), nil), g.ReduceScatter(c[:n], b, by(4, add), nil),
			g.Broadcast(b, 1, nil), g.AllGather(b, c[:n], nil),
		)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range runs + 1 {
			if err := round(gs[1]); err != nil {
				panic(err)
			}
		}
	})
	require.Zero(t, testing.AllocsPerRun(runs, func() {
		if err := round(gs[0]); err != nil {
			panic(err)
		}
	}))
	wg.Wait()
}
