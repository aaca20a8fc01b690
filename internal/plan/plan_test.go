package plan

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestGolden holds the plans of whole groups against their text.
func TestGolden(t *testing.T) {
	cases := []struct {
		name string
		size int
		plan func(rank int) *Plan
	}{
		{"allreduce_ring_2x16", 2, func(r int) *Plan { return AllReduceRing(r, 2, 16, 4) }},
		{"allreduce_ring_3x28", 3, func(r int) *Plan { return AllReduceRing(r, 3, 28, 4) }},
		{"allreduce_ring_2x8000000", 2, func(r int) *Plan { return AllReduceRing(r, 2, 8000000, 4) }},
		{"allreduce_bcube_6x28", 6, named(OpAllReduce, "bcube", Call{Size: 6, Bytes: 28, Elem: 4})},
		{"reduce_ring_3x28_to_1", 3, func(r int) *Plan { return ReduceRing(r, 3, 1, 28, 4) }},
		{"reduce_ring_2x6000000_to_0", 2, func(r int) *Plan { return ReduceRing(r, 2, 0, 6000000, 4) }},
		{"broadcast_6_from_2", 6, func(r int) *Plan { return Broadcast(r, 6, 2, 12) }},
		{"allgather_3x5", 3, func(r int) *Plan { return AllGather(r, 3, 5) }},
		{"allgatherv_3", 3, func(r int) *Plan { return AllGatherV(r, []int64{4, 0, 12}) }},
		{"gatherv_3_to_0", 3, func(r int) *Plan { return GatherV(r, 0, []int64{8, 0, 4}) }},
		{"scatter_3x8_from_2", 3, func(r int) *Plan { return Scatter(r, 3, 2, 8) }},
		{"alltoallv_2", 2, func(r int) *Plan {
			m := [][]int64{{1, 2}, {0, 3}}
			return AllToAllV(r, m[r], []int64{m[0][r], m[1][r]})
		}},
		{"barrier_5", 5, func(r int) *Plan { return Barrier(r, 5) }},
		{"allreduce_halving_3x28", 3, named(OpAllReduce, "halving-doubling", Call{Size: 3, Bytes: 28, Elem: 4})},
		{"allreduce_recursive_doubling_3x8", 3, named(OpAllReduce, "recursive-doubling", Call{Size: 3, Bytes: 8, Elem: 4})},
		{"allreduce_two_step_3x28", 3, named(OpAllReduce, "two-step", Call{Size: 3, Bytes: 28, Elem: 4})},
		{"allreduce_chain_3x40", 3, named(OpAllReduce, "chain", Call{Size: 3, Bytes: 40, Elem: 4, Chunk: 8})},
		{"reducescatter_ring_3x8", 3, named(OpReduceScatter, "ring", Call{Size: 3, Bytes: 8, Elem: 4, Chunk: 4})},
		{"reducescatter_halving_3x4", 3, named(OpReduceScatter, "halving", Call{Size: 3, Bytes: 4, Elem: 4})},
		{"gather_binomial_4x2_to_3", 4, named(OpGather, "binomial", Call{Size: 4, Root: 3, Bytes: 2})},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var text strings.Builder
			for r := range c.size {
				fmt.Fprintf(&text, "rank %d: %v\n", r, c.plan(r))
			}
			path := filepath.Join("testdata", c.name+".golden")
			if *update {
				require.NoError(t, os.MkdirAll("testdata", 0o777))
				require.NoError(t, os.WriteFile(path, []byte(text.String()), 0o666))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err, "run with -update to write it")
			require.Equal(t, string(want), text.String())
		})
	}
}

// named returns the plans of an algorithm, by rank.
func named(op Op, name string, c Call) func(rank int) *Plan {
	a, err := Lookup(op, name)
	if err != nil {
		panic(err)
	}
	return func(rank int) *Plan {
		c.Rank = rank
		return a.Plan(c)
	}
}

// flow returns the lengths of what a group's plans send from one rank to another, in order.
func flow(plans []*Plan, from, to int) []int64 {
	var lengths []int64
	for _, s := range plans[from].Steps {
		if s.Kind == Send && int(s.Peer) == to {
			lengths = append(lengths, s.Len)
		}
	}
	return lengths
}

func group(size int, plan func(rank int) *Plan) []*Plan {
	plans := make([]*Plan, size)
	for r := range plans {
		plans[r] = plan(r)
	}
	return plans
}

func repeat(n int, v int64) []int64 {
	all := make([]int64, n)
	for i := range all {
		all[i] = v
	}
	return all
}

// TestMessages holds the messages on the wire against captures of PyTorch 2.6.
func TestMessages(t *testing.T) {
	t.Run("all-reduce of 4 float32 on 2 ranks", func(t *testing.T) {
		plans := group(2, func(r int) *Plan { return AllReduceRing(r, 2, 16, 4) })
		for r, p := range plans {
			require.Equal(t, repeat(4, 4), flow(plans, r, 1-r))
			var posts []Kind
			for _, s := range p.Steps {
				if s.Kind == Send || s.Kind == Recv {
					posts = append(posts, s.Kind)
				}
			}
			require.Equal(t, []Kind{Recv, Send, Recv, Send, Recv, Send, Recv, Send}, posts)
		}
	})
	t.Run("all-reduce of 2000000 float32 on 2 ranks", func(t *testing.T) {
		plans := group(2, func(r int) *Plan { return AllReduceRing(r, 2, 8000000, 4) })
		require.Equal(t, repeat(8, 1000000), flow(plans, 0, 1))
		require.Equal(t, repeat(8, 1000000), flow(plans, 1, 0))
	})
	t.Run("all-reduce of 7 float32 on 3 ranks", func(t *testing.T) {
		plans := group(3, func(r int) *Plan { return AllReduceRing(r, 3, 28, 4) })
		require.Equal(t, []int64{8, 4, 8, 8, 8, 4}, flow(plans, 0, 2))
		require.Equal(t, []int64{8, 8, 8, 4}, flow(plans, 1, 0))
		require.Equal(t, []int64{8, 8, 8, 4, 8, 8}, flow(plans, 2, 1))
	})
	t.Run("reduce of 1500000 float32 on 2 ranks has surplus steps", func(t *testing.T) {
		plans := group(2, func(r int) *Plan { return ReduceRing(r, 2, 0, 6000000, 4) })
		require.Len(t, flow(plans, 0, 1), 4)
		require.Len(t, flow(plans, 1, 0), 4+1)
	})
	t.Run("broadcast on 5 ranks from 3", func(t *testing.T) {
		plans := group(5, func(r int) *Plan { return Broadcast(r, 5, 3, 7) })
		for from, tos := range [][]int{{}, {}, {}, {4, 0, 2}, {1}} {
			for to := range plans {
				want := 0
				for _, x := range tos {
					if x == to {
						want = 1
					}
				}
				require.Len(t, flow(plans, from, to), want, "from %d to %d", from, to)
			}
		}
	})
}

// TestEmpty states which operations without bytes still send messages.
func TestEmpty(t *testing.T) {
	zeros := []int64{0, 0, 0}
	cases := []struct {
		name string
		plan func(r int) *Plan
		want int
	}{
		{"all-reduce", func(r int) *Plan { return AllReduceRing(r, 3, 0, 4) }, 0},
		{"reduce", func(r int) *Plan { return ReduceRing(r, 3, 0, 0, 4) }, 0},
		{"all-gather", func(r int) *Plan { return AllGather(r, 3, 0) }, 0},
		{"all-gather-v", func(r int) *Plan { return AllGatherV(r, zeros) }, 0},
		{"all-gather-v of one byte", func(r int) *Plan { return AllGatherV(r, []int64{0, 1, 0}) }, 6},
		{"broadcast", func(r int) *Plan { return Broadcast(r, 3, 0, 0) }, 2},
		{"gather-v", func(r int) *Plan { return GatherV(r, 0, zeros) }, 2},
		{"scatter", func(r int) *Plan { return Scatter(r, 3, 0, 0) }, 2},
		{"all-to-all-v", func(r int) *Plan { return AllToAllV(r, zeros, zeros) }, 6},
		{"barrier", func(r int) *Plan { return Barrier(r, 3) }, 6},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			plans, sent := group(3, c.plan), 0
			for from := range plans {
				for to := range plans {
					sent += len(flow(plans, from, to))
				}
			}
			require.Equal(t, c.want, sent)
		})
	}
}

func TestMisuse(t *testing.T) {
	for name, call := range map[string]func(){
		"rank too large":     func() { Barrier(3, 3) },
		"rank negative":      func() { AllGather(-1, 3, 4) },
		"no group":           func() { AllGatherV(0, nil) },
		"root too large":     func() { Broadcast(0, 3, 3, 4) },
		"root negative":      func() { GatherV(0, -1, []int64{1}) },
		"bytes negative":     func() { Scatter(0, 3, 0, -1) },
		"count negative":     func() { AllGatherV(0, []int64{1, -1}) },
		"part of an element": func() { AllReduceRing(0, 3, 7, 4) },
		"no element":         func() { ReduceRing(0, 3, 0, 8, 0) },
		"other group":        func() { AllToAllV(0, []int64{1, 1}, []int64{1}) },
		"own part differs":   func() { AllToAllV(0, []int64{1, 1}, []int64{2, 1}) },
	} {
		t.Run(name, func(t *testing.T) { require.Panics(t, call) })
	}
}
