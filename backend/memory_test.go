package backend_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestCheckMemory has the forms in place, and what a refusal names. The group has three ranks, this is rank 1.
func TestCheckMemory(t *testing.T) {
	whole := must.Get(tensor.New(tensor.Int32, 60))
	view := func(shape, strides []int, offset int) *tensor.Tensor {
		return must.Get(whole.AsStrided(shape, strides, offset))
	}
	part := func(from, n int) *tensor.Tensor { return view([]int{n}, []int{1}, from) }
	column := func(i int) *tensor.Tensor { return view([]int{3}, []int{10}, i) }
	l := func(ts ...*tensor.Tensor) []*tensor.Tensor { return ts }
	other, err := tensor.New(tensor.Int32, 12)
	require.NoError(t, err)
	a, b, c := part(0, 4), part(4, 4), part(8, 4)
	abc := part(0, 12)
	rows := view([]int{6, 2}, []int{10, 1}, 0)
	row := view([]int{2, 2}, []int{10, 1}, 20) // rows 2 and 3
	turned := view([]int{2, 2}, []int{1, 10}, 20)

	for _, tc := range []struct {
		name    string
		op      work.OpType
		out, in []*tensor.Tensor
		want    string // "" for none
	}{
		{"none", work.Barrier, nil, nil, ""},
		{"apart", work.AllToAllSingle, l(abc), l(other), ""},
		{"all_to_all_single", work.AllToAllSingle, l(abc), l(abc), "the input and the output overlap in memory"},
		{"all_to_all", work.AllToAll, l(a, b, c), l(part(20, 4), part(24, 4), part(6, 4)), "input 2 and output 1 overlap in memory"},
		{"all_to_all, own part", work.AllToAll, l(a, b, c), l(part(20, 4), b, part(24, 4)), "input 1 and output 1 overlap in memory"},
		{"two inputs", work.AllToAll, l(a, b, c), l(part(20, 4), part(20, 4), part(21, 4)), ""},
		{"input with itself", work.AllGather, l(a, b, c), l(view([]int{4}, []int{0}, 30)), ""},
		{"output with itself", work.AllGatherIntoTensor, l(view([]int{3, 4}, []int{1, 1}, 0)), l(part(20, 4)),
			"elements of the output (int32[3 4] with strides [1 1]) overlap in memory"},
		{"received with itself", work.Recv, l(view([]int{4}, []int{0}, 0)), nil, "elements of the tensor (int32[4] with strides [0]) overlap in memory"},

		{"all_reduce", work.AllReduce, l(a), nil, ""},
		{"all_reduce of two", work.AllReduce, l(a, b), nil, ""},
		{"all_reduce twice", work.AllReduce, l(b, a, b), nil, "tensor 0 and tensor 2 overlap in memory"},
		{"columns", work.AllReduceCoalesced, l(column(0), column(2), column(1)), nil, ""},
		{"a column twice", work.AllReduceCoalesced, l(column(0), column(2), view([]int{1}, []int{1}, 22)), nil, "tensor 1 and tensor 2 overlap in memory"},

		{"all_gather in place", work.AllGather, l(a, b, c), l(b), ""},
		{"all_gather, another's part", work.AllGather, l(a, b, c), l(c),
			"the input and output 2 overlap in memory, and are not the same elements of this rank's own part: in place, the input is output 1"},
		{"all_gather, a piece", work.AllGather, l(a, b, c), l(part(5, 4)), "the input and output 1 overlap in memory, and are not"},
		{"one tensor for all", work.AllGather, l(a, a, a), l(b), "output 0 and output 1 overlap in memory"},
		{"into tensor in place", work.AllGatherIntoTensor, l(abc), l(b), ""},
		{"into tensor, another's part", work.AllGatherIntoTensor, l(abc), l(a), "this rank's own part: in place, the input is part 1 of the output"},
		{"strided in place", work.AllGatherIntoTensor, l(rows), l(row), ""},
		{"stacked in place", work.AllGatherIntoTensor, l(view([]int{3, 2, 2}, []int{20, 10, 1}, 0)), l(row), ""},
		{"transposed", work.AllGatherIntoTensor, l(rows), l(turned), "the input and the output overlap in memory, and are not"},
		{"coalesced in place", work.AllGatherCoalesced, l(a, part(20, 2), b, part(22, 2), c, part(24, 2)), l(b, part(22, 2)), ""},
		{"coalesced, exchanged", work.AllGatherCoalesced, l(a, part(20, 4), b, part(24, 4), c, part(28, 4)), l(part(24, 4), other),
			"input 0 and output 1 of list 1 overlap in memory, and are not the same elements of this rank's own part: in place, input i is output i of list 1"},
		{"into tensors in place", work.AllGatherCoalesced, l(abc, part(20, 6)), l(b, part(22, 2)), ""},
		{"into tensors, exchanged", work.AllGatherCoalesced, l(abc, part(20, 12)), l(part(24, 4), b), "in place, input i is part 1 of output i"},
		{"gather in place", work.Gather, l(a, b, c), l(b), ""},
		{"gather elsewhere", work.Gather, nil, l(b), ""},

		{"scatter in place", work.Scatter, l(b), l(a, b, c), ""},
		{"scatter, another's part", work.Scatter, l(a), l(a, b, c), "input 0 and the output overlap in memory, and are not the same elements of this rank's own part: in place, the output is input 1"},
		{"reduce_scatter in place", work.ReduceScatter, l(b), l(a, b, c), ""},
		{"reduce_scatter of one tensor", work.ReduceScatter, l(b), l(b, b, b), "overlap in memory, and are not"},
		{"reduce_scatter_tensor in place", work.ReduceScatterTensor, l(b), l(abc), ""},
		{"reduce_scatter_tensor, a piece", work.ReduceScatterTensor, l(part(2, 4)), l(abc), "in place, the output is part 1 of the input"},
		{"reduce_scatter_tensor, expanded", work.ReduceScatterTensor, l(a), l(view([]int{3, 4}, []int{0, 1}, 0)), "in place, the output is part 1 of the input"},
		{"reduce_scatter_tensors in place", work.ReduceScatterTensorCoalesced, l(b, part(22, 2)), l(abc, part(20, 6)), ""},
		{"reduce_scatter_tensors, a later input", work.ReduceScatterTensorCoalesced, l(part(22, 4), other), l(abc, part(20, 12)),
			"input 1 and output 0 overlap in memory, and are not the same elements of this rank's own part: in place, output i is part 1 of input i"},

		{"batch", work.Coalesced, l(a, nil, b, nil), l(nil, c, nil, c), ""},
		{"batch that sends what it receives", work.Coalesced, l(nil, part(2, 4)), l(a, nil), "the send of operation 0 and the receive of operation 1 overlap in memory"},
		{"batch that receives twice", work.Coalesced, l(a, nil, a), l(nil, b, nil), "the receive of operation 0 and the receive of operation 2 overlap in memory"},
		{"no elements", work.AllToAllSingle, l(part(0, 0)), l(part(0, 0)), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := backend.CheckMemory(tc.op, 1, tc.out, tc.in)
			if tc.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tc.want)
		})
	}

	long := func(n int) (ts []*tensor.Tensor) {
		for i := range n {
			ts = append(ts, part(2*i, 2))
		}
		return ts
	}
	for name, lists := range map[string][2][]*tensor.Tensor{
		"pair": {l(abc), l(other)}, "in place": {l(abc), l(b)}, "lists": {long(7), l(part(40, 2), part(42, 2))},
	} {
		require.Zero(t, testing.AllocsPerRun(10, func() {
			if err := backend.CheckMemory(work.AllGatherIntoTensor, 1, lists[0], lists[1]); err != nil {
				t.Fatal(err)
			}
		}), name)
	}
	large := long(30)
	require.ErrorContains(t, backend.CheckMemory(work.AllReduceCoalesced, 0, append(large, part(17, 2)), nil), "tensor 8 and tensor 30 overlap in memory")
}
