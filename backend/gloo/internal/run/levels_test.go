package run_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// numbers are n elements that nobody else has, and small enough for exact sums.
func numbers(t testing.TB, rank, salt, n int) *tensor.Tensor {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32((rank*7919 + salt*104729 + i*31) % 65537)
	}
	return of(t, v, n)
}

// bytesOf returns the elements of a tensor, which may be a column of a matrix.
func bytesOf(x *tensor.Tensor) []byte { return must.Get(x.Contiguous()).Bytes() }

func empty(t testing.TB, n int) *tensor.Tensor {
	return of(t, slices.Repeat([]float32{-1}, n), n)
}

// sum adds up what make gives for each rank.
func sum(t testing.TB, ranks, n int, make func(rank int) *tensor.Tensor) *tensor.Tensor {
	all := empty(t, n)
	to := must.Get(tensor.Data[float32](all))
	clear(to)
	for r := range ranks {
		v := must.Get(tensor.Data[float32](make(r)))
		for i := range v {
			to[i] += v[i]
		}
	}
	return all
}

func each(n int, f func(i int) *tensor.Tensor) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, n)
	for i := range ts {
		ts[i] = f(i)
	}
	return ts
}

// levelled is a collective with its arguments on a rank: the memory that it changes, the bytes
// that are wanted there, and the call. Draw is of the same numbers on all ranks. Other
// returns a tensor's elements in other memory, in some calls.
type levelled struct {
	name      string
	got, want []*tensor.Tensor
	call      func() (*work.Work, error)
}

const levelledKinds = 12

func drawLevelledOf(t testing.TB, r *rand.Rand, b *gloo.Backend, salt, kind int, other func(x *tensor.Tensor) *tensor.Tensor) levelled {
	ctx, size, me := context.Background(), b.Size(), b.Rank()
	root := r.IntN(size)
	n := []int{0, 1, 3, 100, 1024, 1025, 2048, 2049, 5000, 20_000}[r.IntN(10)]
	lay := func(x *tensor.Tensor) *tensor.Tensor { return x }
	switch r.IntN(3) {
	case 0:
		if lay = other; r.IntN(8) == 0 {
			n = 140_001
		}
	case 1:
		lay = func(x *tensor.Tensor) *tensor.Tensor { // as a column of a matrix
			column := must.Get(must.Get(tensor.New(tensor.Float32, x.Len(), 2)).Select(1, 0))
			require.NoError(t, column.CopyFrom(x))
			return column
		}
	}
	lengths := make([]int, size*size)
	for i := range lengths {
		lengths[i] = []int{n, n, 0, 1, n / 2, 3000}[r.IntN(6)]
	}
	mine := func(rank, n int) *tensor.Tensor { return numbers(t, rank, salt, n) }
	block := func(from, to, n int) *tensor.Tensor { return numbers(t, from*100+to, salt, n) }
	joined := func(ts []*tensor.Tensor) *tensor.Tensor {
		var v []float32
		for _, x := range ts {
			d := must.Get(tensor.Data[float32](x))
			v = append(v, d...)
		}
		return of(t, v, len(v))
	}
	switch kind {
	case 0:
		x := lay(mine(me, n))
		return levelled{"all_reduce", list(x), list(sum(t, size, n, func(q int) *tensor.Tensor { return mine(q, n) })),
			func() (*work.Work, error) { return b.AllReduce(ctx, list(x), backend.AllReduceOptions{}) }}
	case 1:
		x, want := lay(mine(me, n)), mine(me, n)
		if me == root {
			want = sum(t, size, n, func(q int) *tensor.Tensor { return mine(q, n) })
		}
		return levelled{"reduce", list(x), list(want), func() (*work.Work, error) { return b.Reduce(ctx, x, backend.ReduceOptions{Root: root}) }}
	case 2:
		x := lay(mine(me, n))
		return levelled{"broadcast", list(x), list(mine(root, n)),
			func() (*work.Work, error) { return b.Broadcast(ctx, list(x), backend.BroadcastOptions{Root: root}) }}
	case 3:
		out := each(size, func(int) *tensor.Tensor { return lay(empty(t, n)) })
		return levelled{"all_gather", out, each(size, func(q int) *tensor.Tensor { return mine(q, n) }),
			func() (*work.Work, error) { return b.AllGather(ctx, out, lay(mine(me, n)), backend.AllGatherOptions{}) }}
	case 4:
		out := each(size, func(q int) *tensor.Tensor { return empty(t, lengths[q]) })
		return levelled{"all_gather_v", out, each(size, func(q int) *tensor.Tensor { return mine(q, lengths[q]) }),
			func() (*work.Work, error) {
				return b.AllGatherV(ctx, out, mine(me, lengths[me]), backend.AllGatherOptions{})
			}}
	case 5, 6:
		length, call := func(int) int { return n }, b.Gather
		if kind == 6 {
			length, call = func(q int) int { return lengths[q] }, b.GatherV
		}
		var out, want []*tensor.Tensor
		if me == root {
			out = each(size, func(q int) *tensor.Tensor { return lay(empty(t, length(q))) })
			want = each(size, func(q int) *tensor.Tensor { return mine(q, length(q)) })
		}
		return levelled{[]string{"gather", "gather_v"}[kind-5], out, want,
			func() (*work.Work, error) {
				return call(ctx, out, lay(mine(me, length(me))), backend.GatherOptions{Root: root})
			}}
	case 7:
		var in []*tensor.Tensor
		if me == root {
			in = each(size, func(q int) *tensor.Tensor { return lay(block(root, q, n)) })
		}
		out := lay(empty(t, n))
		return levelled{"scatter", list(out), list(block(root, me, n)),
			func() (*work.Work, error) { return b.Scatter(ctx, out, in, backend.ScatterOptions{Root: root}) }}
	case 8:
		out := empty(t, lengths[me])
		in := each(size, func(q int) *tensor.Tensor { return block(me, q, lengths[q]) })
		return levelled{"reduce_scatter", list(out), list(sum(t, size, lengths[me], func(q int) *tensor.Tensor { return block(q, me, lengths[me]) })),
			func() (*work.Work, error) { return b.ReduceScatter(ctx, out, in, backend.ReduceScatterOptions{}) }}
	case 9:
		out := empty(t, n)
		in := joined(each(size, func(q int) *tensor.Tensor { return block(me, q, n) }))
		return levelled{"reduce_scatter_tensor", list(out), list(sum(t, size, n, func(q int) *tensor.Tensor { return block(q, me, n) })),
			func() (*work.Work, error) {
				return b.ReduceScatterTensor(ctx, out, in, backend.ReduceScatterOptions{})
			}}
	case 10:
		out := each(size, func(q int) *tensor.Tensor { return lay(empty(t, lengths[q*size+me])) })
		in := each(size, func(q int) *tensor.Tensor { return lay(block(me, q, lengths[me*size+q])) })
		return levelled{"all_to_all", out, each(size, func(q int) *tensor.Tensor { return block(q, me, lengths[q*size+me]) }),
			func() (*work.Work, error) { return b.AllToAll(ctx, out, in, backend.AllToAllOptions{}) }}
	}
	in := joined(each(size, func(q int) *tensor.Tensor { return block(me, q, n) }))
	out := empty(t, n*size)
	return levelled{"all_to_all_single", list(out), list(joined(each(size, func(q int) *tensor.Tensor { return block(q, me, n) }))),
		func() (*work.Work, error) {
			return b.AllToAllSingle(ctx, out, in, nil, nil, backend.AllToAllOptions{})
		}}
}

// exchangeMessages has each rank send to another, which takes it from that one or from anybody.
func exchangeMessages(t *testing.T, common *rand.Rand, b *gloo.Backend, salt int) (end func() bool) {
	ctx, size := context.Background(), b.Size()
	to := common.Perm(size)
	n := []int{0, 1, 1000, 20_000, 200_000}[common.IntN(5)]
	any := common.IntN(2) == 0
	var sends, recvs []*work.Work
	o := backend.P2POptions{Tag: uint32(common.IntN(3))}
	if any {
		o.Tag = uint32(100 + salt) // ranks may be ahead
	}
	from := slices.Index(to, b.Rank())
	got := empty(t, n)
	note := func(ws *[]*work.Work, w *work.Work, err error) {
		if assert.NoError(t, err) {
			*ws = append(*ws, w)
		}
	}
	recv := func() {
		if from == b.Rank() {
			return
		}
		if any {
			w, err := b.RecvAnySource(ctx, got, o)
			note(&recvs, w, err)
		} else {
			w, err := b.Recv(ctx, got, from, o)
			note(&recvs, w, err)
		}
	}
	early := (b.Rank()+salt)%2 == 0
	if early {
		recv()
	}
	if peer := to[b.Rank()]; peer != b.Rank() {
		w, err := b.Send(ctx, numbers(t, b.Rank(), salt, n), peer, o)
		note(&sends, w, err)
	}
	return func() bool {
		if !early {
			recv()
		}
		for _, w := range slices.Concat(recvs, sends) {
			if !assert.NoError(t, w.Wait(ctx), "rank %d, message of round %d", b.Rank(), salt) {
				return false
			}
		}
		if len(recvs) == 0 {
			return true
		}
		src, err := recvs[0].SourceRank()
		return assert.NoError(t, err) && assert.Equal(t, from, src) &&
			assert.True(t, bytes.Equal(numbers(t, from, salt, n).Bytes(), got.Bytes()), "rank %d, message of round %d from %d", b.Rank(), salt, from)
	}
}

// TestLevelsMismatch has ranks of two hosts disagree on blocks that go together, by lengths
// that come to the same sum.
func TestLevelsMismatch(t *testing.T) {
	onLinux(t)
	for _, tc := range []struct {
		name string
		call func(b *gloo.Backend) (*work.Work, error)
	}{
		{"all_to_all", func(b *gloo.Backend) (*work.Work, error) {
			send := []int{3, 3, 3, 3}
			if b.Rank() == 0 {
				send = []int{3, 3, 4, 2}
			}
			return b.AllToAllSingle(context.Background(), empty(t, 12), empty(t, 12), []int{3, 3, 3, 3}, send, backend.AllToAllOptions{})
		}},
		{"gather_v", func(b *gloo.Backend) (*work.Work, error) {
			var out []*tensor.Tensor
			if b.Rank() == 0 {
				out = each(4, func(int) *tensor.Tensor { return empty(t, 3) })
			}
			return b.GatherV(context.Background(), out, empty(t, []int{3, 3, 4, 2}[b.Rank()]), backend.GatherOptions{})
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bs := grouped(t, gloo.Options{Host: "a"}, gloo.Options{Host: "a"}, gloo.Options{Host: "b"}, gloo.Options{Host: "b"})
			onAll(t, bs, func(rank int, b *gloo.Backend) {
				err := wait(tc.call(b))
				if err == nil { // its part was done
					err = barrier(b)
				}
				assert.ErrorIs(t, err, work.ErrMismatch, "rank %d", rank)
			})
		})
	}
}

// TestLevelsSendLess counts what goes between hosts, and compares it with what went there from
// rank to rank.
func TestLevelsSendLess(t *testing.T) {
	onLinux(t)
	ctx := context.Background()
	const length, few = 40_000, 100
	many := func(size, n int) []*tensor.Tensor {
		return each(size, func(int) *tensor.Tensor { return empty(t, n) })
	}
	rooted := func(b *gloo.Backend, ts []*tensor.Tensor) []*tensor.Tensor {
		if b.Rank() != 1 {
			return nil
		}
		return ts
	}
	type spread struct {
		hosts      []int // how many ranks are on each
		size, root int   // the root's host
	}
	type call struct {
		name string
		run  func(b *gloo.Backend) (*work.Work, error)
		// What is to go between hosts, of the ranks that are on each: messages, or -1 for any
		// number, and bytes besides seals.
		messages, bytes, seals func(l spread) int
	}
	none := func(spread) int { return 0 }
	whatever := func(spread) int { return -1 }
	others := func(l spread) int { return len(l.hosts) - 1 }
	pairs := func(l spread) int { return len(l.hosts) * (len(l.hosts) - 1) }
	away := func(l spread) int { return l.size - l.hosts[l.root] }
	crossing := func(l spread) (n int) {
		for _, k := range l.hosts {
			n += k * (l.size - k)
		}
		return n
	}
	times := func(f func(spread) int, n int) func(spread) int {
		return func(l spread) int { return f(l) * n }
	}
	for _, c := range []call{
		{"reduce_scatter", func(b *gloo.Backend) (*work.Work, error) {
			return b.ReduceScatter(ctx, empty(t, length), many(b.Size(), length), backend.ReduceScatterOptions{})
		}, whatever, func(l spread) int { return (len(l.hosts) - 1) * l.size * 4 * length }, none},
		{"all_gather", func(b *gloo.Backend) (*work.Work, error) {
			return b.AllGather(ctx, many(b.Size(), length), empty(t, length), backend.AllGatherOptions{})
		}, whatever, func(l spread) int { return (len(l.hosts) - 1) * l.size * 4 * length }, none},
		{"gather", func(b *gloo.Backend) (*work.Work, error) {
			return b.Gather(ctx, rooted(b, many(b.Size(), few)), empty(t, few), backend.GatherOptions{Root: 1})
		}, others, times(away, 4*few), none},
		{"gather of long blocks", func(b *gloo.Backend) (*work.Work, error) {
			return b.Gather(ctx, rooted(b, many(b.Size(), length)), empty(t, length), backend.GatherOptions{Root: 1})
		}, away, times(away, 4*length), none},
		{"scatter", func(b *gloo.Backend) (*work.Work, error) {
			return b.Scatter(ctx, empty(t, few), rooted(b, many(b.Size(), few)), backend.ScatterOptions{Root: 1})
		}, others, times(away, 4*few), none},
		{"scatter of long blocks", func(b *gloo.Backend) (*work.Work, error) {
			return b.Scatter(ctx, empty(t, length), rooted(b, many(b.Size(), length)), backend.ScatterOptions{Root: 1})
		}, away, times(away, 4*length), none},
		{"all_to_all", func(b *gloo.Backend) (*work.Work, error) {
			return b.AllToAll(ctx, many(b.Size(), few), many(b.Size(), few), backend.AllToAllOptions{})
		}, pairs, times(crossing, 4*few), pairs},
		{"all_to_all of long blocks", func(b *gloo.Backend) (*work.Work, error) {
			return b.AllToAll(ctx, many(b.Size(), length), many(b.Size(), length), backend.AllToAllOptions{})
		}, crossing, times(crossing, 4*length), none},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, at := range []string{"010120", "001122", "000112"}[:testsize.Of(1, 1, 3)] {
				size := len(at)
				l := spread{hosts: make([]int, 3), size: size, root: int(at[1] - '0')}
				for _, h := range at {
					l.hosts[h-'0']++
				}
				count := func(wire gloo.Wire) (messages, bytes int) {
					o := make([]gloo.Options, size)
					for r := range o {
						o[r] = gloo.Options{Wire: wire, Host: at[r : r+1]}
					}
					bs, errs := connectWith(t, run.GroupTimeout, o...)
					traffic := make([]*run.Traffic, size)
					for r, err := range errs {
						require.NoError(t, err)
						traffic[r] = bs[r].Count()
					}
					onAll(t, bs, func(_ int, b *gloo.Backend) { assert.NoError(t, wait(c.run(b))) })
					for from, sent := range traffic {
						for to := range size {
							if at[from] != at[to] {
								bytes += int(sent.To[to].Load())
							} else if wire == gloo.WireNative {
								assert.Zero(t, sent.To[to].Load(), "between ranks %d and %d of a host", from, to)
							}
						}
						messages += int(sent.Messages.Load())
					}
					return messages, bytes
				}
				flatMessages, flat := count(gloo.WireTCP)
				messages, bytes := count(gloo.WireNative)
				if want := c.messages(l); want >= 0 {
					assert.Equal(t, want, messages, "messages, hosts %s", at)
				}
				assert.Equal(t, c.bytes(l), bytes-8*c.seals(l), "bytes, hosts %s", at)
				assert.LessOrEqual(t, messages, flatMessages, "hosts %s", at)
				assert.LessOrEqual(t, bytes-8*c.seals(l), flat, "hosts %s", at)
				t.Logf("hosts %s: %d messages and %d bytes between hosts, %d and %d from rank to rank", at, messages, bytes, flatMessages, flat)
			}
		})
	}
}
