package plan

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/tensor"
)

func randomBytes(rng *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// mix is neither commutative nor associative, so that its result tells in which
// order operands met.
func mix(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 + 0x7f4a7c15
	h ^= h >> 29
	h = h*0xbf58476d1ce4e5b9 + b
	return h ^ h>>32
}

func eachWord(f func(a, b uint64) uint64) func(dst, src []byte) {
	return func(dst, src []byte) {
		for i := 0; i < len(dst); i += 8 {
			binary.LittleEndian.PutUint64(dst[i:], f(binary.LittleEndian.Uint64(dst[i:]), binary.LittleEndian.Uint64(src[i:])))
		}
	}
}

func words(b []byte) []uint64 {
	w := make([]uint64, len(b)/8)
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return w
}

func clone(b []byte) []byte { return append([]byte(nil), b...) }

// ringOrder returns what the elements become when blocks of share elements
// are reduced around the ring, each ending at its owner.
func ringOrder(inputs [][]uint64, share int64) []uint64 {
	size := len(inputs)
	out := make([]uint64, len(inputs[0]))
	for i := range out {
		b := int(int64(i) / share)
		acc := inputs[(b-1+size)%size][i]
		for k := 2; k <= size; k++ {
			acc = mix(inputs[(b-k+size)%size][i], acc)
		}
		out[i] = acc
	}
	return out
}

// cubeOrder returns what the elements become in the cube, by recursion over its factors.
func cubeOrder(inputs [][]uint64) []uint64 {
	size, n := len(inputs), len(inputs[0])
	if size == 1 {
		return inputs[0]
	}
	g := size
	if size%2 == 0 {
		g = 2
	}
	share := (n + g - 1) / g
	// Member m of each first group ends with chunk m, and goes on with those
	// that hold the same chunk.
	var out []uint64
	for m := range g {
		lo, hi := min(m*share, n), min((m+1)*share, n)
		var next [][]uint64
		for base := 0; base < size; base += g {
			acc := append([]uint64(nil), inputs[base+m][lo:hi]...)
			for k := range g {
				for i := range acc {
					if k != m {
						acc[i] = mix(acc[i], inputs[base+k][lo+i])
					}
				}
			}
			next = append(next, acc)
		}
		out = append(out, cubeOrder(next)...)
	}
	return out
}

// TestReductions runs the reductions of groups of 1 to 9 ranks in random orders of events. One
// operator shows the order of the operands; the other is a sum that does not depend on it.
func TestReductions(t *testing.T) {
	rng := must.Rand(t)
	for size := 1; size <= 9; size++ {
		for _, n := range []int64{0, 1, 2, 7, int64(size), int64(2 * size), int64(2*size) + 1, 100, 333} {
			// In bytes: one element a segment, odd, several segments a rank, Gloo's.
			for _, limit := range []int64{8, 27, 64, maxSegment} {
				name := fmt.Sprintf("size %d, %d elements, segments of %d", size, n, limit)
				least := int64(2 * size)
				root := rng.IntN(size)
				for _, c := range []struct {
					name  string
					plan  func(r int) *Plan
					order func(inputs [][]uint64) []uint64
					ends  []int // the ranks that get the result, all if nil
				}{
					{
						"all-reduce",
						func(r int) *Plan { return allReduceRing(r, size, 8*n, 8, limit) },
						func(inputs [][]uint64) []uint64 {
							segments := roundUp(max(ceilDiv(8*n, 8*(limit/8)), least), int64(size))
							return ringOrder(inputs, ceilDiv(n, segments)*(segments/int64(size)))
						},
						nil,
					},
					{
						"reduce",
						func(r int) *Plan { return reduceRing(r, size, root, 8*n, 8, limit) },
						func(inputs [][]uint64) []uint64 {
							segment := min(ceilDiv(ceilDiv(8*n, least), 8), limit/8)
							segments := roundUp(max(ceilDiv(n, max(segment, 1)), least), int64(size))
							return ringOrder(inputs, segment*(segments/int64(size)))
						},
						[]int{root},
					},
					{
						"bcube",
						named(OpAllReduce, "bcube", Call{Size: size, Bytes: 8 * n, Elem: 8}),
						cubeOrder,
						nil,
					},
				} {
					for _, mixing := range []bool{true, false} {
						mems := make([]memory, size)
						inputs := make([][]uint64, size)
						total := make([]uint64, n)
						for r := range mems {
							mems[r].out = randomBytes(rng, 8*n)
							inputs[r] = words(mems[r].out)
							for i, v := range inputs[r] {
								total[i] += v
							}
						}
						want, op := total, eachWord(func(a, b uint64) uint64 { return a + b })
						if mixing {
							want, op = c.order(inputs), eachWord(mix)
						}
						require.NoError(t, newSimulation(group(size, c.plan), mems, op, rng).run(), "%s: %s", name, c.name)
						for r := range mems {
							if c.ends == nil || slices.Contains(c.ends, r) {
								require.True(t, slices.Equal(want, words(mems[r].out)), "%s: %s on rank %d", name, c.name, r)
							}
						}
					}
				}
			}
		}
	}
}

// TestMoves runs the operations that only move bytes.
func TestMoves(t *testing.T) {
	rng := must.Rand(t)
	for size := 1; size <= 9; size++ {
		for _, n := range []int64{0, 1, 2, 3, 8, 1001} {
			for range 3 {
				even := repeat(size, n)
				odd := make([]int64, size)
				for r := range odd {
					odd[r] = rng.Int64N(n + 1)
				}
				root := rng.IntN(size)
				name := fmt.Sprintf("size %d, %d bytes, counts %v, root %d", size, n, odd, root)
				run := func(mems []memory, plan func(r int) *Plan) {
					t.Helper()
					require.NoError(t, newSimulation(group(size, plan), mems, nil, rng).run(), name)
				}
				equal := func(want, got []byte, what string) {
					t.Helper()
					require.True(t, bytes.Equal(want, got), "%s: %s", name, what)
				}

				mems := make([]memory, size)
				for r := range mems {
					mems[r].out = randomBytes(rng, n)
				}
				want := clone(mems[root].out)
				run(mems, func(r int) *Plan { return Broadcast(r, size, root, n) })
				for r := range mems {
					equal(want, mems[r].out, "broadcast")
				}

				for _, counts := range [][]int64{even, odd} {
					uniform := &counts[0] == &even[0]
					_, total := offsets(counts)

					want = want[:0]
					for r := range mems {
						mems[r] = memory{out: randomBytes(rng, total), in: randomBytes(rng, counts[r])}
						want = append(want, mems[r].in...)
					}
					ins := mems
					run(mems, func(r int) *Plan { return AllGatherV(r, counts) })
					for r := range mems {
						equal(want, mems[r].out, "all-gather-v")
						mems[r].out = randomBytes(rng, total)
					}
					if uniform {
						run(mems, func(r int) *Plan { return AllGather(r, size, n) })
						for r := range mems {
							equal(want, mems[r].out, "all-gather")
						}
					}

					for r := range mems {
						mems[r] = memory{in: ins[r].in}
					}
					mems[root].out = randomBytes(rng, total)
					run(mems, func(r int) *Plan { return GatherV(r, root, counts) })
					equal(want, mems[root].out, "gather-v")
				}

				for r := range mems {
					mems[r] = memory{out: randomBytes(rng, n)}
				}
				mems[root].in = randomBytes(rng, int64(size)*n)
				all := clone(mems[root].in)
				run(mems, func(r int) *Plan { return Scatter(r, size, root, n) })
				for r := range mems {
					equal(all[int64(r)*n:][:n], mems[r].out, "scatter")
				}

				send := make([][]int64, size) // by sender
				recv := make([][]int64, size) // by receiver
				for r := range size {
					send[r], recv[r] = make([]int64, size), make([]int64, size)
				}
				for a := range size {
					for b := range size {
						send[a][b] = rng.Int64N(n + 1)
						recv[b][a] = send[a][b]
					}
				}
				wants := make([][]byte, size)
				for r := range mems {
					offs, in := offsets(send[r])
					_, out := offsets(recv[r])
					mems[r] = memory{out: randomBytes(rng, out), in: randomBytes(rng, in)}
					for to := range size {
						wants[to] = append(wants[to], mems[r].in[offs[to]:][:send[r][to]]...)
					}
				}
				run(mems, func(r int) *Plan { return AllToAllV(r, send[r], recv[r]) })
				for r := range mems {
					equal(wants[r], mems[r].out, "all-to-all-v")
				}

				run(make([]memory, size), func(r int) *Plan { return Barrier(r, size) })
			}
		}
	}
}

// TestBarrier proves that no rank ends before every rank has begun.
func TestBarrier(t *testing.T) {
	for size := 2; size <= 20; size++ {
		heard := make([]map[int]bool, size) // of whom each rank knows that it has begun
		for r := range heard {
			heard[r] = map[int]bool{r: true}
		}
		plans := group(size, func(r int) *Plan { return Barrier(r, size) })
		for round := 0; round < len(plans[0].Steps); round += 4 {
			next := make([]map[int]bool, size)
			for r := range next {
				next[r] = map[int]bool{}
				from := int(plans[r].Steps[round].Peer)
				for _, set := range []map[int]bool{heard[r], heard[from]} {
					for k := range set {
						next[r][k] = true
					}
				}
			}
			heard = next
		}
		for r := range heard {
			require.Len(t, heard[r], size, "rank %d of %d", r, size)
		}
	}
}

// TestLarge runs operands of several Gloo segments a rank.
func TestLarge(t *testing.T) {
	rng := must.Rand(t)
	sum := must.Get(reduce.Kernel(reduce.Sum, tensor.Uint64))
	for _, c := range []struct {
		size int
		n    int64
	}{{2, 5<<20 + 8}, {3, 7<<20 + 16}} {
		for _, plan := range []func(r int) *Plan{
			func(r int) *Plan { return AllReduceRing(r, c.size, c.n, 8) },
			func(r int) *Plan { return ReduceRing(r, c.size, 0, c.n, 8) },
		} {
			plans, mems := group(c.size, plan), make([]memory, c.size)
			require.Greater(t, len(flow(plans, 1, 0)), 2*c.size)
			want := make([]byte, c.n)
			for r := range mems {
				mems[r].out = randomBytes(rng, c.n)
				sum(want, mems[r].out)
			}
			require.NoError(t, newSimulation(plans, mems, sum, rng).run())
			require.True(t, bytes.Equal(want, mems[0].out))
		}
	}
}

// TestPyTorch compares the bits of all-reduces with those that groups of
// PyTorch 2.6 returned for x_r[i] = (i mod 97 + 0.1) * (r + 1) in float32.
func TestPyTorch(t *testing.T) {
	rng := must.Rand(t)
	sum := must.Get(reduce.Kernel(reduce.Sum, tensor.Float32))
	for _, c := range []struct {
		n       int64
		digests [4]string // of 2, 3, 4 and 5 ranks
	}{
		{1, [4]string{"45a6d738a7607576", "8e215ece122cf70e", "e00e5eb9444182f3", "8d956cce4c675c74"}},
		{7, [4]string{"8473bdadec77f261", "08866c1d19c6b91b", "e575565f389081cc", "9f7a55d31e14d423"}},
		{100003, [4]string{"506ef08949c9eb37", "686c0c376182234a", "883996cb47696c90", "b58f1e74c1db707e"}},
		{2000000, [4]string{"ab370b81aaa16019", "3cf00d1b3e147e74", "666c85dabcc2af33", "457c527d54d274f2"}},
	} {
		for i, want := range c.digests {
			size := i + 2
			t.Run(fmt.Sprintf("%d elements on %d ranks", c.n, size), func(t *testing.T) {
				mems := make([]memory, size)
				for r := range mems {
					mems[r].out = make([]byte, 4*c.n)
					for i := range c.n {
						v := float32(float32(i%97)+0.1) * float32(r+1)
						binary.NativeEndian.PutUint32(mems[r].out[4*i:], math.Float32bits(v))
					}
				}
				plans := group(size, func(r int) *Plan { return AllReduceRing(r, size, 4*c.n, 4) })
				require.NoError(t, newSimulation(plans, mems, sum, rng).run())
				for r := range mems {
					for i := range c.n { // to little-endian, of which the digests are
						binary.LittleEndian.PutUint32(mems[r].out[4*i:], binary.NativeEndian.Uint32(mems[r].out[4*i:]))
					}
					digest := sha256.Sum256(mems[r].out)
					require.Equal(t, want, hex.EncodeToString(digest[:8]), "rank %d", r)
				}
			})
		}
	}
}

// TestSimulation proves that the simulation sees what it is there to see.
func TestSimulation(t *testing.T) {
	send := func(peer, req int32, off, n int64) Step {
		return Step{Kind: Send, Peer: peer, Req: req, Off: off, Len: n}
	}
	recv := func(peer, req int32, off, n int64) Step {
		return Step{Kind: Recv, Peer: peer, Req: req, Off: off, Len: n}
	}
	wait := func(req int32) Step { return Step{Kind: Wait, Req: req} }
	local := func(off, from, n int64) Step { return Step{Kind: Copy, Off: off, SrcOff: from, Len: n} }
	for name, c := range map[string]struct {
		zero, one []Step
		want      string
	}{
		"deadlock":           {[]Step{recv(1, 0, 0, 4), wait(0), send(1, 0, 0, 4), wait(0)}, []Step{recv(0, 0, 0, 4), wait(0), send(0, 0, 0, 4), wait(0)}, "deadlock"},
		"length":             {[]Step{send(1, 0, 0, 4), wait(0)}, []Step{recv(0, 0, 0, 5), wait(0)}, "4 bytes came"},
		"receive alone":      {[]Step{recv(1, 0, 0, 4), wait(0)}, nil, "deadlock"},
		"no wait":            {[]Step{send(1, 0, 0, 4)}, []Step{recv(0, 0, 0, 4), wait(0)}, "never waited for"},
		"wait for nothing":   {[]Step{wait(0)}, nil, "no such request"},
		"request taken":      {[]Step{send(1, 0, 0, 4), send(1, 0, 0, 4)}, nil, "not free"},
		"request too high":   {[]Step{send(1, 1, 0, 4)}, nil, "not free"},
		"too many requests":  {nil, nil, "asks for 1 requests"},
		"self":               {[]Step{send(0, 0, 0, 4)}, nil, "no such peer"},
		"outside":            {[]Step{send(1, 0, 5, 4)}, nil, "not within"},
		"negative":           {[]Step{send(1, 0, -1, 4)}, nil, "not within"},
		"write under a send": {[]Step{send(1, 0, 0, 4), local(3, 4, 2)}, nil, "belongs to"},
		"read under a recv":  {[]Step{recv(1, 0, 0, 4), local(4, 3, 2)}, nil, "belongs to"},
		"read of nothing":    {[]Step{{Kind: Copy, Src: Scratch, Len: 4}}, nil, "before it was written"},
		"copy of nothing":    {[]Step{local(0, 0, 0)}, nil, "without effect"},
	} {
		t.Run(name, func(t *testing.T) {
			for n := range uint64(20) {
				mems := []memory{{out: make([]byte, 8)}, {out: make([]byte, 8)}}
				plans := []*Plan{{Steps: c.zero, Requests: 1}, {Steps: c.one, Requests: 1}}
				if name == "read of nothing" {
					plans[0].Scratch = 4
				}
				err := newSimulation(plans, mems, nil, rand.New(rand.NewPCG(n, 1))).run()
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

// offsets returns where each of the blocks begins, and their total.
func offsets(counts []int64) (offs []int64, total int64) {
	b := listed(counts)
	return b.offs[:len(counts)], b.total()
}
