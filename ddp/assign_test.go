package ddp

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/tensor"
)

const mib = 1 << 20

func f32(n int) item   { return item{bytes: 4 * n, dtype: tensor.Float32} }
func f64(n int) item   { return item{bytes: 8 * n, dtype: tensor.Float64} }
func alone(n int) item { return item{bytes: 4 * n, dtype: tensor.Float32, alone: true} }

// What PyTorch 1.13.1's _compute_bucket_assignment_by_size returns.
func TestAssignGolden(t *testing.T) {
	big := slices.Repeat([]item{f32(300_000)}, 5)
	mixed := []item{f32(10), f64(10), f32(30), f64(10), f32(100), f32(0), f32(1)}
	for _, tc := range []struct {
		name   string
		items  []item
		order  []int // numbers; nil: definition order, sorted
		limits []int
		want   [][]int
	}{
		{"first bucket is small", big, nil, []int{mib, 25 * mib}, [][]int{{0}, {1, 2, 3, 4}}},
		{"in the order of readiness", big, []int{4, 3, 2, 1, 0}, []int{mib, 25 * mib}, [][]int{{4}, {3, 2, 1, 0}}},
		{"a kind closes on its own", mixed, nil, []int{40, 100}, [][]int{{0}, {1}, {2}, {3}, {4}, {5, 6}}},
		{"open ones last, latest kind first", []item{f32(1), f64(1), {bytes: 2, dtype: tensor.Float16}, f32(1)}, []int{3, 2, 1, 0}, []int{1000}, [][]int{{1}, {2}, {3, 0}}},
		{"kinds with rebuilt order", mixed, []int{6, 5, 4, 3, 2, 1, 0}, []int{40, 100}, [][]int{{6}, {5}, {4}, {2}, {3}, {1, 0}}},
		{"sparse alone", []item{f32(10), alone(10), f32(10), f32(10), alone(10), f32(10)}, []int{5, 4, 3, 2, 1, 0}, []int{80, 80}, [][]int{{4}, {5, 3}, {1}, {2, 0}}},
		{"unlimited", mixed, nil, []int{math.MaxInt}, [][]int{{0, 2, 4, 5, 6}, {1, 3}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			items := slices.Clone(tc.items)
			for i := range items {
				items[i].number = i
				if tc.order != nil {
					items[i].number = tc.order[i]
				}
			}
			require.Equal(t, tc.want, assign(items, tc.limits, tc.order == nil))
		})
	}
}

func TestAssignAgreesWithPyTorch(t *testing.T) {
	torchtest.Need(t)
	rnd := must.Rand(t)
	dtypes := []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16}
	type question struct {
		Sizes  []int
		DTypes []string
		Sparse []bool // by number
		Order  []int  // empty: sorted
		Limits []int
	}
	var questions []question
	var answers [][][]int
	for range 300 {
		n := 1 + rnd.IntN(30)
		q := question{Limits: []int{1 + rnd.IntN(500), 1 + rnd.IntN(3000)}, Order: []int{}, Sparse: make([]bool, n)}
		order := rnd.Perm(n)
		if rnd.IntN(2) == 0 {
			q.Order = order
		} else {
			slices.Sort(order)
		}
		kinds := 1 + rnd.IntN(len(dtypes))
		for i := range q.Sparse {
			q.Sparse[i] = rnd.IntN(8) == 0
		}
		var items []item
		for _, k := range order {
			size, dt := rnd.IntN(200), dtypes[rnd.IntN(kinds)]
			q.Sizes = append(q.Sizes, size)
			q.DTypes = append(q.DTypes, dt.String())
			items = append(items, item{number: k, bytes: size * dt.Size(), dtype: dt, alone: q.Sparse[k]})
		}
		questions = append(questions, q)
		answers = append(answers, assign(items, q.Limits, len(q.Order) == 0))
	}
	in := must.Get(json.Marshal(questions))
	cmd := torchtest.Command(t.Context(), t, "-c", `
import json, sys, torch, torch.distributed as dist
print(json.dumps([dist._compute_bucket_assignment_by_size(
    [torch.zeros(n, dtype=getattr(torch, d)) for n, d in zip(q["Sizes"], q["DTypes"])],
    q["Limits"], q["Sparse"], q["Order"])[0] for q in json.load(sys.stdin)]))`)
	cmd.Stdin = strings.NewReader(string(in))
	out := must.Get(cmd.Output())
	var want [][][]int
	require.NoError(t, json.Unmarshal(out, &want))
	for i := range want {
		require.Equal(t, want[i], answers[i], "%+v", questions[i])
	}
}

// Rank 0 may be another program: what it says about buckets is checked.
func TestReadAssignmentRefusesNonsense(t *testing.T) {
	d := &DDP{}
	for i := range 4 {
		dt := tensor.Float32
		if i == 3 {
			dt = tensor.Float64
		}
		v := must.Get(tensor.New(dt, 2))
		d.train = append(d.train, &param{Param: Param{Value: v}, index: i, number: i})
	}
	sparse := must.Get(tensor.FromDense(d.train[2].Value, 1))
	d.train[2].Grad = sparse
	got := must.Get(d.readAssignment([]int32{3, 1, 0, 2}, []int32{1, 2, 1}))
	require.Equal(t, [][]int{{3}, {1, 0}, {2}}, got)
	for name, tc := range map[string]struct{ numbers, lengths []int32 }{
		"twice":         {[]int32{3, 1, 1, 2}, []int32{1, 2, 1}},
		"out of range":  {[]int32{3, 1, 4, 2}, []int32{1, 2, 1}},
		"negative":      {[]int32{3, 1, -1, 2}, []int32{1, 2, 1}},
		"too long":      {[]int32{3, 1, 0, 2}, []int32{1, 4}},
		"empty bucket":  {[]int32{3, 1, 0, 2}, []int32{1, 0, 2, 1}},
		"huge bucket":   {[]int32{3, 1, 0, 2}, []int32{1 << 30}},
		"left over":     {[]int32{3, 1, 0, 2}, []int32{1, 2}},
		"mixed dtypes":  {[]int32{3, 1, 0, 2}, []int32{2, 1, 1}},
		"sparse shares": {[]int32{3, 1, 0, 2}, []int32{1, 1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, must.Err(d.readAssignment(tc.numbers, tc.lengths)), "ddp: rank 0")
		})
	}
}
