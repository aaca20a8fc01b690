package shm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(beRank(role))
	}
	goleak.VerifyTestMain(m)
}

// patience is for what should take milliseconds.
const patience = time.Minute

func endpoints(t testing.TB, n int) (es []*shm.Endpoint, addrs []string) {
	for range n {
		e := must.Get(shm.NewEndpoint())
		t.Cleanup(func() { e.Close() })
		es, addrs = append(es, e), append(addrs, e.Addr())
	}
	return es, addrs
}

// join returns a group of n ranks in this process, each with a mapping of its own.
func join(t testing.TB, n int, o shm.Options) []*shm.Group {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es, addrs := endpoints(t, n)
	gs := make([]*shm.Group, n)
	var eg errgroup.Group
	for r, e := range es {
		eg.Go(func() (err error) {
			gs[r], err = e.Join(ctx, r, addrs, o)
			return err
		})
	}
	require.NoError(t, eg.Wait())
	for r, g := range gs {
		require.Equal(t, r, g.Rank())
		require.Equal(t, n, g.Size())
		require.NoError(t, g.Err())
		t.Cleanup(func() { g.Close() })
	}
	return gs
}

// each runs f for every rank at once.
func each(t testing.TB, gs []*shm.Group, f func(g *shm.Group) error) {
	t.Helper()
	var eg errgroup.Group
	for _, g := range gs {
		eg.Go(func() error { return f(g) })
	}
	require.NoError(t, eg.Wait())
}

// late returns a function stop that gives up after patience.
func late() func() error {
	end := time.Now().Add(patience)
	return func() error {
		if time.Now().After(end) {
			return errors.New("test: hangs")
		}
		return nil
	}
}

// mix is neither commutative nor associative, so its result tells the order.
func mix(elem int) func(dst, src []byte) {
	return func(dst, src []byte) {
		if len(dst) != len(src) || len(dst)%elem != 0 {
			panic(fmt.Sprintf("%d and %d bytes of elements of %d", len(dst), len(src), elem))
		}
		for i := range dst {
			dst[i] = dst[i]*3 + src[i]
		}
	}
}

// by returns an operator without a Join.
func by(elem int, f func(dst, src []byte)) shm.Operator {
	return shm.Operator{Elem: elem, Combine: f}
}

// joining returns by with a Join.
func joining(elem int, f func(dst, src []byte)) shm.Operator {
	o := by(elem, f)
	o.Join = func(dst []byte, operands [][]byte) {
		sum := bytes.Clone(operands[0])
		for _, src := range operands[1:] {
			f(sum, src)
		}
		if copy(dst, sum) != len(sum) {
			panic(fmt.Sprintf("%d bytes for a result of %d", len(dst), len(sum)))
		}
	}
	return o
}

// input is what rank r has in call number n.
func input(seed uint64, call, r, n int) []byte {
	rng := rand.New(rand.NewPCG(seed, uint64(call)<<16|uint64(r)))
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.NativeEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b[:n:n]
}

func reduced(ins [][]byte) []byte {
	out := bytes.Clone(ins[0])
	for _, b := range ins[1:] {
		mix(1)(out, b)
	}
	return out
}

var collectiveNames = []string{"allreduce", "reduce", "broadcast", "allgather", "reducescatter", "alltoallv", "gather", "scatter", "barrier", "allgatherv"}

// call does a collective on blocks of n bytes and compares with the plain reference.
func call(g *shm.Group, op string, seed uint64, no, n, elem, root int, inPlace bool) error {
	return callIn(func(n int) []byte { return make([]byte, n) }, g, op, seed, no, n, elem, root, inPlace)
}

// callIn is call with buffers out of room, which are full of anything.
func callIn(room func(n int) []byte, g *shm.Group, op string, seed uint64, no, n, elem, root int, inPlace bool) error {
	clone := func(b []byte) []byte {
		c := room(len(b))
		copy(c, b)
		return c
	}
	p, r := g.Size(), g.Rank()
	stop := late()
	ins := make([][]byte, p) // of all ranks, p blocks
	for i := range ins {
		ins[i] = input(seed, no, i, n*p)
	}
	in := clone(ins[r])
	out := room(n * p)
	block := func(b []byte, i int) []byte { return b[i*n : (i+1)*n : (i+1)*n] }
	list := func(b []byte) (parts [][]byte) {
		for i := range p {
			parts = append(parts, clone(block(b, i)))
		}
		return parts
	}
	lists := (no+r)%2 == 0 // the others have their blocks in one piece
	mixing := by(elem, mix(elem))
	if (no+r)%3 > 0 {
		mixing = joining(elem, mix(elem))
	}
	posts := (no+r)%5 < 2 // the others do all in the call
	var got, want []byte
	var err error
	switch op {
	case "allreduce":
		got, want = in, reduced(ins)
		if posts {
			g.PostAllReduce(in, elem)
		}
		err = g.AllReduce(in, mixing, stop)
	case "reduce":
		if inPlace {
			out = in
		}
		if r == root {
			got, want = out, reduced(ins)
		} else {
			out, got, want = nil, in, ins[r]
		}
		err = g.Reduce(out, in, root, mixing, stop)
	case "broadcast":
		got, want = in, ins[root]
		err = g.Broadcast(in, root, stop)
	case "allgather":
		mine := block(in, 0)
		if inPlace {
			copy(block(out, r), mine)
			mine = block(out, r)
		}
		if posts {
			g.PostAllGather(mine)
		}
		for i := range p {
			want = append(want, block(ins[i], 0)...)
		}
		if lists {
			parts := list(out)
			if inPlace {
				mine = parts[r]
			}
			err = g.AllGatherList(parts, mine, stop)
			got = bytes.Join(parts, nil)
			break
		}
		got = out
		err = g.AllGather(out, mine, stop)
	case "reducescatter":
		got = block(out, 0)
		if inPlace {
			got = block(in, r)
		}
		want = block(reduced(ins), r)
		err = g.ReduceScatter(got, in, mixing, stop)
	case "alltoallv":
		// Rank i sends (i*j+no)%(n+1) bytes to rank j.
		var outs, parts [][]byte
		for i := range p {
			outs = append(outs, room((i*r+no)%(n+1)))
			parts = append(parts, block(in, i)[:(i*r+no)%(n+1)])
			want = append(want, block(ins[i], r)[:(i*r+no)%(n+1)]...)
		}
		err = g.AllToAllV(outs, parts, stop)
		got = bytes.Join(outs, nil)
	case "gather":
		mine := block(in, 0)
		if r != root {
			err = g.Gather(nil, mine, root, stop)
			break
		}
		if inPlace {
			copy(block(out, r), mine)
			mine = block(out, r)
		}
		for i := range p {
			want = append(want, block(ins[i], 0)...)
		}
		if lists {
			parts := list(out)
			if inPlace {
				mine = parts[r]
			}
			err = g.GatherList(parts, mine, root, stop)
			got = bytes.Join(parts, nil)
			break
		}
		got = out
		err = g.Gather(out, mine, root, stop)
	case "scatter":
		got, want = block(out, 0), block(ins[root], r)
		if r != root {
			in = nil
		} else if inPlace {
			got = block(in, r)
		}
		if r == root && lists {
			parts := list(in)
			if inPlace {
				got = parts[r]
			}
			err = g.ScatterList(got, parts, root, stop)
			break
		}
		err = g.Scatter(got, in, root, stop)
	case "allgatherv":
		// Rank i has (i+no)%3*n/2 bytes, or so.
		var counts []int64
		for i := range p {
			counts = append(counts, int64((i+no)%3*n/2))
			want = append(want, ins[i][:counts[i]]...)
		}
		got = room(len(want))
		mine := in[:counts[r]]
		if inPlace {
			mine = got[len(bytes.Join(blocks(ins[:r], counts), nil)):][:counts[r]]
			copy(mine, in)
		}
		err = g.AllGatherV(got, mine, counts, stop)
	case "barrier":
		if posts {
			g.PostBarrier()
		}
		err = g.Barrier(stop)
	}
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("wrong result")
	}
	if err != nil {
		return fmt.Errorf("call %d, %s of blocks of %d, elements of %d, root %d, in place %v, rank %d: %w", no, op, n, elem, root, inPlace, r, err)
	}
	return nil
}

// blocks are the beginnings of all buffers.
func blocks(bs [][]byte, counts []int64) (out [][]byte) {
	for i, b := range bs {
		out = append(out, b[:counts[i]])
	}
	return out
}

// TestCollectives makes random calls, the same on all ranks, which are out of step.
func TestCollectives(t *testing.T) {
	seed := must.Seed(t)
	elems := []int{1, 2, 4, 8, 16, 3, 63}
	for p := 1; p <= 9; p++ {
		for name, o := range map[string]shm.Options{
			"default":   {},
			"small":     {Piece: 1}, // 4 KiB a rank
			"never one": {Piece: 1, OneShot: -1},
			"direct":    shm.Options{Piece: 1, OneShot: -1}.From(1),
			"mixed":     shm.Options{Piece: 1, OneShot: -1}.From(20_000).Tile(4096),
		} {
			t.Run(fmt.Sprintf("%d ranks, %s", p, name), func(t *testing.T) {
				gs := join(t, p, o)
				// Piece numbers wrap during the calls.
				for _, g := range gs {
					g.StartAt(1<<32 - 100)
				}
				calls := testsize.Of(8, 10, 25)
				each(t, gs, func(g *shm.Group) error {
					rng := rand.New(rand.NewPCG(seed, uint64(p)))
					skew := rand.New(rand.NewPCG(seed, uint64(g.Rank())))
					for no := range calls {
						op := collectiveNames[rng.IntN(len(collectiveNames))]
						elem := elems[rng.IntN(len(elems))]
						n := []int{0, 1, rng.IntN(20), rng.IntN(3000), rng.IntN(30000)}[rng.IntN(5)] * elem
						n = min(n, 100_000/p/elem*elem)
						root := rng.IntN(p)
						inPlace := rng.IntN(2) == 0
						if skew.IntN(4) == 0 {
							time.Sleep(time.Duration(skew.IntN(1000)) * time.Microsecond)
						}
						if err := call(g, op, seed, no, n, elem, root, inPlace); err != nil {
							g.Abort(err)
							return err
						}
					}
					return nil
				})
			})
		}
	}
}

// TestSizes goes over the sizes about each limit, at every collective.
func TestSizes(t *testing.T) {
	const p = 3
	o := shm.Options{Piece: 16 << 10, OneShot: 1 << 10}
	for name, o := range map[string]shm.Options{"staged": o.From(-1), "direct": o.From(1).Tile(4096)} {
		limits := []int{0, 64, 1 << 10, 16 << 10 / 3 &^ 63, 16 << 10, 5 * 16 << 10}
		if name == "direct" {
			limits = []int{64, 4096, 16 << 10}
		}
		t.Run(name, func(t *testing.T) {
			gs := join(t, p, o)
			no := 0
			for _, op := range collectiveNames {
				for _, limit := range limits {
					for _, n := range []int{limit - 4, limit, limit + 4} {
						if n < 0 {
							continue
						}
						no++
						each(t, gs, func(g *shm.Group) error { return call(g, op, 1, no, n, 4, no%p, no%2 == 0) })
					}
				}
			}
		})
	}
}

// TestSameBits: size, algorithm and place make no difference to a sum's bits.
func TestSameBits(t *testing.T) {
	const p, n = 4, 50000
	one := join(t, p, shm.Options{Piece: 1 << 20, OneShot: 1 << 20})
	for _, many := range [][]*shm.Group{
		join(t, p, shm.Options{OneShot: -1}.From(-1)), join(t, p, shm.Options{OneShot: -1}.From(1)),
	} {
		each(t, one, func(g *shm.Group) (err error) {
			defer must.Catch(&err)
			a, b := input(7, 0, g.Rank(), n), input(7, 0, g.Rank(), n)
			must.Do(g.AllReduce(a, by(4, mix(4)), late()))
			must.Do(many[g.Rank()].AllReduce(b, by(4, mix(4)), late()))
			if !bytes.Equal(a, b) {
				return errors.New("bits differ")
			}
			return nil
		})
	}
}

func TestWrongCalls(t *testing.T) {
	g := join(t, 2, shm.Options{})[0]
	add := mix(1)
	b := make([]byte, 10)
	for name, err := range map[string]error{
		"elem 0":         g.AllReduce(b, by(0, add), nil),
		"elem 65":        g.AllReduce(b[:0], by(65, add), nil),
		"half element":   g.AllReduce(b, by(4, add), nil),
		"nil function":   g.AllReduce(b, by(1, nil), nil),
		"root":           g.Broadcast(b, 2, nil),
		"negative root":  g.Reduce(b, b, -1, by(1, add), nil),
		"reduce":         g.Reduce(b[:9], b, 0, by(1, add), nil),
		"reduce scatter": g.ReduceScatter(b[:6], b, by(1, add), nil),
		"all-gather":     g.AllGather(b, b[:4], nil),
		"gather":         g.Gather(b, b[:4], 0, nil),
		"gather root":    g.Gather(b, b[:4], 7, nil),
		"scatter":        g.Scatter(b, b, 0, nil),
		"scatter root":   g.Scatter(b, b, 7, nil),
		"counts":         g.AllGatherV(b, b[:5], []int64{5, 4}, nil),
		"own count":      g.AllGatherV(b, b[:5], []int64{4, 6}, nil),
		"negative count": g.AllGatherV(b, b[:5], []int64{11, -1}, nil),
		"one count":      g.AllGatherV(b, b, []int64{10}, nil),
		"all-to-all-v":   g.AllToAllV([][]byte{b}, [][]byte{b}, nil),
		"list":           g.AllGatherList([][]byte{b}, b, nil),
		"list's block":   g.AllGatherList([][]byte{b, b[:9]}, b, nil),
		"gather's list":  g.GatherList([][]byte{b}, b, 0, nil),
		"scatter's list": g.ScatterList(b, [][]byte{b, b[:9]}, 0, nil),
		"own block":      g.AllToAllV([][]byte{b, b}, [][]byte{b[:9], b}, nil),
	} {
		require.ErrorContains(t, err, "shm: ", name)
	}
	require.NoError(t, g.Err(), "a wrong call does no harm")
}

// TestForeignAbort has a word say that a rank aborted that the group does not have.
func TestForeignAbort(t *testing.T) {
	for _, by := range []uint32{3, 1 << 31, 1<<32 - 16} {
		gs := join(t, 2, shm.Options{})
		gs[0].ScribbleAbort(by)
		err := gs[0].Barrier(late())
		require.ErrorIs(t, err, shm.ErrAborted)
		var culprit *shm.RankError
		require.NotErrorAs(t, err, &culprit)
	}
}

func TestAbort(t *testing.T) {
	seed := must.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	why := errors.New("test: enough")
	for i := range 20 {
		p := 2 + i%4
		op := collectiveNames[i%len(collectiveNames)]
		o := shm.Options{Piece: 64 << 10}
		if i%3 > 0 {
			o = o.From(1)
		}
		gs := join(t, p, o)
		culprit := rng.IntN(p)
		pause := time.Duration(rng.IntN(20_000)) * time.Microsecond
		var eg errgroup.Group
		for _, g := range gs {
			eg.Go(func() error {
				for no := 0; ; no++ {
					if g.Rank() == culprit && i%2 == 1 && no == 3 {
						return nil // the others wait for good
					}
					if err := call(g, op, seed, no, 40000, 4, 0, false); err != nil {
						var re *shm.RankError
						switch {
						case !errors.Is(err, shm.ErrAborted):
							return err
						case g.Rank() == culprit && !errors.Is(err, why):
							return err
						case g.Rank() != culprit && (!errors.As(err, &re) || re.Rank != culprit):
							return err
						}
						return nil
					}
				}
			})
		}
		time.Sleep(pause)
		gs[culprit].Abort(why)
		gs[culprit].Abort(errors.New("test: too late"))
		require.NoError(t, eg.Wait(), op)
		for _, g := range gs {
			require.ErrorIs(t, g.Err(), shm.ErrAborted)
			require.ErrorIs(t, g.Barrier(nil), shm.ErrAborted)
			require.NoError(t, g.Close())
		}
	}
}

func TestStop(t *testing.T) {
	gs := join(t, 3, shm.Options{})
	why := errors.New("test: deadline")
	end := time.Now().Add(20 * time.Millisecond)
	done := make(chan error)
	go func() { done <- gs[2].Barrier(late()) }()
	err := gs[0].Barrier(func() error {
		if time.Now().After(end) {
			return why
		}
		return nil
	})
	require.ErrorIs(t, err, why)
	for _, err := range []error{<-done, gs[1].Barrier(nil)} {
		re := must.As[*shm.RankError](t, err)
		require.ErrorIs(t, err, shm.ErrAborted)
		require.Zero(t, re.Rank)
	}
	require.ErrorIs(t, gs[0].Barrier(nil), why)
}

func TestClose(t *testing.T) {
	gs := join(t, 3, shm.Options{})
	each(t, gs, func(g *shm.Group) error { return g.Barrier(late()) })
	done := make(chan error)
	go func() { done <- gs[0].Barrier(late()) }()
	require.NoError(t, gs[1].Close())
	require.NoError(t, gs[1].Close())
	gs[1].Abort(nil) // too late to do harm
	var re *shm.RankError
	err := <-done
	require.ErrorAs(t, err, &re)
	require.ErrorIs(t, err, shm.ErrLeft)
	require.Equal(t, 1, re.Rank)
	require.ErrorIs(t, gs[1].Barrier(nil), shm.ErrClosed)
	require.ErrorIs(t, gs[1].Err(), shm.ErrClosed)

	// Close ends an operation of its own rank.
	gs = join(t, 2, shm.Options{})
	go func() { done <- gs[0].Barrier(late()) }()
	require.NoError(t, gs[0].Close())
	require.ErrorIs(t, <-done, shm.ErrClosed)
}

// TestCloseLate: what a rank has sent arrives even if it is gone by then.
func TestCloseLate(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	require.NoError(t, gs[0].Broadcast([]byte("farewell"), 0, nil))
	require.NoError(t, gs[0].Close())
	b := make([]byte, 8)
	require.NoError(t, gs[1].Broadcast(b, 0, late()))
	require.Equal(t, "farewell", string(b))
}

func TestMismatch(t *testing.T) {
	buf := func(n int) []byte { return make([]byte, n) }
	for name, f := range map[string]func(g *shm.Group) error{
		"size": func(g *shm.Group) error { return g.AllReduce(buf(100+g.Rank()), by(1, mix(1)), late()) },
		"big":  func(g *shm.Group) error { return g.AllGather(buf(2*(1<<20<<g.Rank())), buf(1<<20<<g.Rank()), late()) },
		"elem": func(g *shm.Group) error { return g.AllReduce(buf(8), by(1<<g.Rank(), mix(1)), late()) },
		"operation": func(g *shm.Group) error {
			if g.Rank() == 0 {
				return g.Barrier(late())
			}
			return g.Reduce(buf(2), buf(2), 1, by(1, mix(1)), late())
		},
		"sender": func(g *shm.Group) error {
			if g.Rank() == 0 {
				return g.AllReduce(buf(2), by(1, mix(1)), late())
			}
			return g.Broadcast(buf(2), 0, late())
		},
		"counts": func(g *shm.Group) error { // 30 bytes on both ranks
			n := int64(10 + 5*g.Rank())
			counts := []int64{n, 30 - n}
			return g.AllGatherV(buf(30), buf(int(counts[g.Rank()])), counts, late())
		},
		"total": func(g *shm.Group) error {
			return g.AllGatherV(buf(20+g.Rank()), buf(10), [][]int64{{10, 10}, {11, 10}}[g.Rank()], late())
		},
		"block": func(g *shm.Group) error { // rank 0 expects 3 bytes, rank 1 sends 4
			return g.AllToAllV([][]byte{buf(3 + g.Rank()), buf(3)}, [][]byte{buf(3 + g.Rank()), buf(3)}, late())
		},
	} {
		for mode, from := range map[string]int64{"staged": -1, "direct": 1} {
			t.Run(name+"/"+mode, func(t *testing.T) {
				gs := join(t, 2, shm.Options{OneShot: -1}.From(from))
				errs := make([]error, 2)
				var wg sync.WaitGroup
				for r, g := range gs {
					wg.Go(func() {
						errs[r] = f(g)
						if errs[r] == nil {
							errs[r] = g.Barrier(late())
						}
					})
				}
				wg.Wait()
				require.Error(t, errs[0])
				require.Error(t, errs[1])
				all := errors.Join(errs...)
				require.ErrorIs(t, all, shm.ErrMismatch)
				require.NotErrorIs(t, all, shm.ErrLeft)
			})
		}
	}
}

func TestJoinErrors(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	change := func(addr string, field int, to string) string {
		f := strings.Split(addr, ";")
		f[field] = to
		return strings.Join(f, ";")
	}
	es, addrs := endpoints(t, 8)
	_, err := es[0].Join(ctx, 0, []string{addrs[0], change(addrs[1], 1, "elsewhere/net:[1]")}, shm.Options{})
	require.ErrorIs(t, err, shm.ErrOtherHost)
	_, err = es[1].Join(ctx, 1, []string{addrs[0], addrs[1]}, shm.Options{})
	require.ErrorIs(t, err, shm.ErrOtherHost, "nobody listens: rank 0 has given up")
	require.ErrorContains(t, must.Err(es[2].Join(ctx, 0, nil, shm.Options{})), "rank 0 of 0 ranks")
	_, err = es[3].Join(ctx, 1, []string{addrs[3], addrs[2]}, shm.Options{})
	require.ErrorContains(t, err, "not that of this endpoint")
	for _, bad := range []string{"", "shm1;a;b;c", "shm9" + addrs[0][4:], strings.Repeat(";", 5000)} {
		e, err := shm.NewEndpoint()
		require.NoError(t, err)
		_, err = e.Join(ctx, 1, []string{bad, e.Addr()}, shm.Options{})
		require.ErrorContains(t, err, "that are no address (rank 0)")
	}

	// Rank 1 never comes; strangers do.
	short, end := context.WithCancelCause(ctx)
	why := errors.New("test: rank 1 cannot")
	done := make(chan error)
	go func() {
		_, err := es[4].Join(short, 0, addrs[4:6], shm.Options{})
		done <- err
	}()
	socket := "@c10d-" + strings.Split(addrs[4], ";")[2]
	dial := func() net.Conn {
		return must.Get(net.Dial("unixpacket", socket))
	}
	rude, silent := dial(), dial()
	defer rude.Close()
	defer silent.Close()
	must.Get(rude.Write([]byte("let me in")))
	n, err := rude.Read(make([]byte, 10))
	require.True(t, n == 0 || err != nil, "a stranger gets nothing")
	_, err = es[5].Join(ctx, 1, []string{change(addrs[4], 3, strings.Repeat("0", 32)), addrs[5]}, shm.Options{})
	require.Error(t, err, "wrong token")
	end(why)
	err = <-done
	require.ErrorIs(t, err, why)
	require.ErrorContains(t, err, "0 of 1 other ranks have come")

	// Rank 1 says no to the memory.
	go func() {
		_, err := es[6].Join(ctx, 0, addrs[6:8], shm.Options{})
		done <- err
	}()
	f := strings.Split(addrs[6], ";")
	socket = "@c10d-" + f[2]
	c := dial()
	defer c.Close()
	hello := binary.NativeEndian.AppendUint64(nil, shm.Magic)
	hello = binary.NativeEndian.AppendUint32(hello, 1)
	hello = binary.NativeEndian.AppendUint32(hello, 2)
	must.Get(c.Write(append(hello, f[3]...)))
	must.Get(c.Read(make([]byte, 100)))
	must.Get(c.Write([]byte("nmmap is forbidden")))
	require.ErrorContains(t, <-done, "rank 1: mmap is forbidden")
}

// A malformed address may be one with a token.
func TestErrorHidesToken(t *testing.T) {
	es, addrs := endpoints(t, 2)
	f := strings.Split(addrs[0], ";")
	_, err := es[1].Join(context.Background(), 1, []string{addrs[0] + "x", addrs[1]}, shm.Options{})
	require.ErrorContains(t, err, "that are no address")
	require.NotContains(t, err.Error(), f[2][:8])
	require.NotContains(t, err.Error(), f[3][:8])
}

// asUser runs f on a thread of another user.
func asUser(uid int, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends
		const keep = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
			panic(errno)
		}
		f()
	}()
	<-done
}

// A process of another user gets nothing, even if it knows the token.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	const nobody = 65534
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es, addrs := endpoints(t, 2)
	host, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		_, err := es[0].Join(host, 0, addrs, shm.Options{})
		done <- err
	}()
	asUser(nobody, func() {
		f := strings.Split(addrs[0], ";")
		c, err := net.Dial("unixpacket", "@c10d-"+f[2])
		if err != nil {
			t.Errorf("dial: %v", err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		hello := binary.NativeEndian.AppendUint64(nil, shm.Magic)
		hello = binary.NativeEndian.AppendUint32(hello, 1)
		hello = binary.NativeEndian.AppendUint32(hello, 2)
		c.Write(append(hello, f[3]...))
		if n, err := c.Read(make([]byte, 100)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read %d bytes, error %v", n, err)
		}
		_, err = es[1].Join(ctx, 1, addrs, shm.Options{})
		if want := "this process runs as user 65534, its peer as user 0 (rank 0)"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Join: %v, want %q", err, want)
		}
	})
	stop()
	require.ErrorContains(t, <-done, "0 of 1 other ranks have come")
}

// Silent strangers are bounded, and keep no rank out.
func TestManyStrangers(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es, addrs := endpoints(t, 2)
	var groups [2]*shm.Group
	var wg sync.WaitGroup
	join := func(r int) {
		wg.Go(func() {
			g, err := es[r].Join(ctx, r, addrs, shm.Options{})
			if groups[r] = g; err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	join(0)
	var held []net.Conn
	for range strangers.Limit(1) + 100 {
		c := must.Get(net.Dial("unixpacket", "@c10d-"+strings.Split(addrs[0], ";")[2]))
		defer c.Close()
		held = append(held, c)
	}
	for _, c := range held[:100] {
		c.SetDeadline(time.Now().Add(patience))
		_, err := c.Read(make([]byte, 1))
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the oldest are closed")
	}
	join(1)
	wg.Wait()
	for _, g := range groups {
		if g != nil {
			require.NoError(t, g.Close())
		}
	}
}

// TestLies: a rank that says it has the memory, but has not written to it, is found out.
func TestLies(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es, addrs := endpoints(t, 3)
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() {
			_, err := es[r].Join(ctx, r, addrs, shm.Options{})
			if !errors.Is(err, shm.ErrOtherHost) && (err == nil || !strings.Contains(err.Error(), "does not see what rank 2 wrote")) {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	f := strings.Split(addrs[0], ";")
	c := must.Get(net.Dial("unixpacket", "@c10d-"+f[2]))
	defer c.Close()
	hello := binary.NativeEndian.AppendUint64(nil, shm.Magic)
	hello = binary.NativeEndian.AppendUint32(hello, 2)
	hello = binary.NativeEndian.AppendUint32(hello, 3)
	must.Get(c.Write(append(hello, f[3]...)))
	must.Get(c.Write([]byte("y")))
	wg.Wait()
}

func count(t *testing.T) (fds, maps int) {
	ds := must.Get(os.ReadDir("/proc/self/fd"))
	return len(ds), strings.Count(string(must.Get(os.ReadFile("/proc/self/maps"))), "memfd:c10d")
}

func TestNothingLeft(t *testing.T) {
	for range 3 { // the runtime opens its own the first time
		each(t, join(t, 2, shm.Options{}), func(g *shm.Group) error { return errors.Join(g.Barrier(late()), g.Close()) })
	}
	fds, maps := count(t)
	gs := join(t, 4, shm.Options{})
	open, mapped := count(t)
	require.Equal(t, fds, open, "a group holds no descriptor")
	require.GreaterOrEqual(t, mapped, maps+8, "each rank has the memory and the arenas")
	each(t, gs, func(g *shm.Group) error { return errors.Join(g.Barrier(late()), g.Close()) })
	after, mapped := count(t)
	require.Equal(t, fds, after)
	require.Equal(t, maps, mapped)
}

func TestAllocations(t *testing.T) {
	for name, o := range map[string]shm.Options{
		"staged": shm.Options{}.From(-1), "direct": shm.Options{OneShot: -1}.From(1),
	} {
		t.Run(name, func(t *testing.T) { testAllocations(t, join(t, 2, o)) })
	}
}

func testAllocations(t *testing.T, gs []*shm.Group) {
	const runs = 50
	add := mix(4)
	halves := []int64{100 << 10, 100 << 10}
	f := func(g *shm.Group, small, big, wide, other []byte, to, from [][]byte) {
		err := errors.Join(
			g.AllReduce(small, by(4, add), nil), g.AllReduce(big, by(4, add), nil),
			g.Reduce(big, big, 0, by(4, add), nil), g.ReduceScatter(big, wide, by(4, add), nil),
			g.Broadcast(big, 0, nil), g.AllGather(wide, big, nil), g.AllGatherV(wide, big, halves, nil),
			g.AllToAllV(to, from, nil),
			g.Gather(wide, big, 0, nil), g.Scatter(big, wide, 0, nil), g.Barrier(nil))
		if err != nil {
			panic(err)
		}
	}
	run := func(g *shm.Group) func() {
		wide, other := make([]byte, 200<<10), make([]byte, 200<<10)
		small, big := make([]byte, 64), make([]byte, 100<<10)
		to, from := [][]byte{wide[:4096], wide[4096:]}, [][]byte{other[:4096], other[4096:]}
		if g.Rank() == 1 {
			to[0], from[0] = wide[:196<<10], other[:196<<10]
			to[1], from[1] = wide[196<<10:], other[196<<10:]
		}
		return func() { f(g, small, big, wide, other, to, from) }
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		f := run(gs[1])
		for range runs + 1 {
			f()
		}
	})
	require.Zero(t, testing.AllocsPerRun(runs, run(gs[0])))
	wg.Wait()
}

// countRank makes calls with known results.
func countRank(g *shm.Group, args []string) error {
	for no := range 200 {
		op := collectiveNames[no%len(collectiveNames)]
		if err := call(g, op, 5, no, no*no, 1, no%g.Size(), no%3 == 0); err != nil {
			return err
		}
	}
	fmt.Println("counted")
	return nil
}

// loopRank makes calls until the group ends, which signal USR1 does, and says why.
func loopRank(g *shm.Group, args []string) error {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGUSR1)
	go func() {
		<-c
		g.Abort(errors.New("told so"))
	}()
	for no := 0; ; no++ {
		if no == 10 {
			fmt.Println("running")
		}
		if err := call(g, args[0], 5, no, 30000, 1, 0, false); err != nil {
			fmt.Println(err)
			return nil
		}
	}
}

// sendRank sends round a ring until the group ends, as loopRank.
func sendRank(g *shm.Group, args []string) error {
	m := meshOf(g)
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGUSR1)
	go func() {
		<-c
		m.Abort(&transport.Fault{Kind: transport.FaultPeerDied, Rank: 1, Reporter: g.Rank(), Err: errors.New("told so")})
	}()
	p, r := g.Size(), g.Rank()
	for no := 0; ; no++ {
		if no == 10 {
			fmt.Println("running")
		}
		const n = 3 << 20
		out := post(m.Send, (r+1)%p, uint64(no), input(5, no, r, n))
		in := post(m.Recv, (r+p-1)%p, uint64(no), make([]byte, n))
		err := errors.Join(in.waitPolling(m), out.waitPolling(m))
		if err == nil && !bytes.Equal(in.Buf, input(5, no, (r+p-1)%p, n)) {
			err = errors.New("test: another message")
		}
		if err != nil {
			fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
			return nil
		}
	}
}

func TestProcesses(t *testing.T) {
	for _, from := range []string{"", "1"} {
		t.Setenv("C10D_SHM_FROM", from)
		for _, n := range []int{2, 4} {
			for r, p := range startRanks(t, n, "count") {
				line, err := p.out.ReadString('\n')
				require.NoError(t, err, "rank %d of %d", r, n)
				require.Equal(t, "counted\n", line)
				require.NoError(t, p.Wait())
			}
		}
	}
}

// TestKill: a rank dies; somebody who has noticed aborts, and all ranks end.
func TestKill(t *testing.T) {
	for _, role := range []string{"loop allreduce", "loop alltoallv", "loop barrier", "send"} {
		ps := startRanks(t, 3, role)
		for _, p := range ps {
			require.Equal(t, "running\n", must.Get(p.out.ReadString('\n')))
		}
		require.NoError(t, ps[1].Process.Kill())
		require.Error(t, ps[1].Wait())
		sockets := must.Get(os.ReadFile("/proc/net/unix"))
		require.NotContains(t, string(sockets), strings.Split(ps[1].addr, ";")[2])
		require.NoError(t, ps[0].Process.Signal(syscall.SIGUSR1))
		all := map[int]string{0: "group aborted: told so", 2: "group aborted (rank 0)"}
		if role == "send" {
			all = map[int]string{0: "rank 1 died (noticed by rank 0): told so", 2: "rank 0 aborted the group"}
		}
		for r, says := range all {
			require.Contains(t, must.Get(ps[r].out.ReadString('\n')), says)
			require.NoError(t, ps[r].Wait())
		}
	}
}
