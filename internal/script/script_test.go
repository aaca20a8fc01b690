package script_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// run runs a script on size ranks and returns each rank's results.
func run(t *testing.T, size int, text string) [][]script.Result {
	t.Helper()
	all := make([][]script.Result, size)
	pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
		lines := must.Get(script.Parse(strings.NewReader(text), size))
		require.NoError(t, script.Run(t.Context(), g, lines, func(r script.Result) {
			all[g.Rank()] = append(all[g.Rank()], r)
		}))
	})
	return all
}

// k is the number behind element i of rank r's tensor j under a seed.
func k(i, r, j, seed int) int { return (7*(i+1009*j)+13*r+31*seed)%17 - 8 }

// number is k as it lies in a tensor.
func number(d tensor.DType, k int) float64 {
	switch {
	case d == tensor.Bool:
		return float64(k & 1)
	case d.IsUnsigned():
		return float64(k + 8)
	}
	return float64(k)
}

// encode is the bytes of a number that the dtype holds exactly.
func encode(d tensor.DType, v float64) []byte {
	t, err := tensor.New(d, 1)
	if err != nil {
		panic(err)
	}
	switch d {
	case tensor.Bool:
		t.Bytes()[0] = byte(v)
	case tensor.Float16:
		x := uint16(tensor.F16From(float32(v)))
		copy(t.Bytes(), []byte{byte(x), byte(x >> 8)})
	case tensor.BFloat16:
		x := uint16(tensor.BF16From(float32(v)))
		copy(t.Bytes(), []byte{byte(x), byte(x >> 8)})
	case tensor.Float8E4M3:
		t.Bytes()[0] = byte(tensor.F8E4M3From(float32(v)))
	case tensor.Float8E5M2:
		t.Bytes()[0] = byte(tensor.F8E5M2From(float32(v)))
	case tensor.Float32:
		f, _ := tensor.Data[float32](t)
		f[0] = float32(v)
	case tensor.Float64:
		f, _ := tensor.Data[float64](t)
		f[0] = v
	case tensor.Complex64:
		f, _ := tensor.Data[complex64](t)
		f[0] = complex(float32(v), 0)
	case tensor.Complex128:
		f, _ := tensor.Data[complex128](t)
		f[0] = complex(v, 0)
	default: // integers, two's complement
		x := uint64(int64(v))
		for i := range t.Bytes() {
			t.Bytes()[i] = byte(x >> (8 * i))
		}
	}
	return t.Bytes()
}

// fold is the reference reduction, on numbers.
func fold(d tensor.DType, op string, vs []float64) float64 {
	acc := vs[0]
	for _, v := range vs[1:] {
		a, b := int64(acc), int64(v)
		switch op {
		case "", "sum":
			if d == tensor.Bool {
				acc = float64(a | b)
			} else {
				acc += v
			}
		case "product":
			acc *= v
		case "min":
			acc = min(acc, v)
		case "max":
			acc = max(acc, v)
		case "band":
			acc = float64(a & b)
		case "bor":
			acc = float64(a | b)
		case "bxor":
			acc = float64(a ^ b)
		}
	}
	return acc
}

// expect returns the digest that rank r of size prints for a line with fill int.
func expect(l script.Line, d tensor.DType, r, size int) string {
	in := func(rank, j, i int) float64 { return number(d, k(i, rank, j, l.Seed)) }
	n := 1
	for _, s := range l.Shape {
		n *= s
	}
	var out []byte
	put := func(v float64) { out = append(out, encode(d, v)...) }
	reduced := func(j, i int) float64 {
		vs := make([]float64, size)
		for q := range vs {
			vs[q] = in(q, j, i)
		}
		return fold(d, l.Reduce, vs)
	}
	switch l.Op {
	case "barrier":
		return ""
	case "all_reduce", "reduce":
		if l.Op == "reduce" && r != l.Root {
			return ""
		}
		for i := range n {
			put(reduced(0, i))
		}
	case "all_reduce_coalesced":
		for j, s := range l.Shapes {
			m := 1
			for _, x := range s {
				m *= x
			}
			for i := range m {
				put(reduced(j, i))
			}
		}
	case "broadcast":
		for i := range n {
			put(in(l.Root, 0, i))
		}
	case "all_gather", "all_gather_into_tensor", "gather":
		if l.Op == "gather" && r != l.Root {
			return ""
		}
		for q := range size {
			for i := range n {
				put(in(q, 0, i))
			}
		}
	case "scatter":
		for i := range n {
			put(in(l.Root, r, i))
		}
	case "reduce_scatter":
		for i := range n {
			put(reduced(r, i))
		}
	case "reduce_scatter_tensor":
		for i := range n {
			put(reduced(0, r*n+i))
		}
	case "all_to_all":
		for q := range size {
			for i := range n {
				put(in(q, r, i))
			}
		}
	case "all_to_all_single":
		for q := range size {
			first, count := r*n, n
			if l.Splits != nil {
				first, count = 0, l.Splits[q][r]
				for _, s := range l.Splits[q][:r] {
					first += s
				}
			}
			for i := range count {
				put(in(q, 0, first+i))
			}
		}
	case "send_recv", "recv_any":
		if r != l.Dst {
			return ""
		}
		for i := range n {
			put(in(l.Src, 0, i))
		}
	}
	sum := sha256.Sum256(out)
	return hex.EncodeToString(sum[:])
}

// fits reports whether a dtype holds every result of an operator exactly.
func fits(d tensor.DType, op string, size int) bool {
	switch op {
	case "band", "bor", "bxor":
		return d.IsInteger() || d == tensor.Bool
	case "min", "max":
		return !d.IsComplex()
	case "product": // up to 16^size
		switch d {
		case tensor.Int64, tensor.Uint64, tensor.Float64:
			return size <= 9
		case tensor.Float32:
			return size <= 5
		case tensor.Bool:
			return true
		}
		return false
	}
	return d != tensor.Float8E4M3 && d != tensor.Float8E5M2 || size == 1
}

// TestEveryOperation runs every operation on every world size, dtype and
// operator against a plain reference.
func TestEveryOperation(t *testing.T) {
	seed := must.Seed(t)
	for size := 1; size <= 9; size++ {
		t.Run(fmt.Sprintf("%d ranks", size), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(size)))
			var lines []script.Line
			shape := func() []int {
				return [][]int{{1}, {3, 5}, {7}, {size}, {2, 1, 3}, {257}, {0}, {4, 0}, {1031}}[rng.IntN(9)]
			}
			add := func(l script.Line, d tensor.DType) {
				l.DType, l.Seed = d.String(), rng.IntN(1000)
				lines = append(lines, l)
			}
			for _, d := range tensor.DTypes() {
				for _, op := range []string{"sum", "product", "min", "max", "band", "bor", "bxor"} {
					if !fits(d, op, size) {
						continue
					}
					add(script.Line{Op: "all_reduce", Shape: shape(), Reduce: op}, d)
					add(script.Line{Op: "reduce", Shape: shape(), Reduce: op, Root: rng.IntN(size)}, d)
					add(script.Line{Op: "reduce_scatter", Shape: shape(), Reduce: op}, d)
					add(script.Line{Op: "reduce_scatter_tensor", Shape: shape(), Reduce: op}, d)
					add(script.Line{Op: "all_reduce_coalesced", Shapes: [][]int{shape(), {}, shape()}, Reduce: op}, d)
				}
				add(script.Line{Op: "all_reduce", Shape: []int{}}, d)
				if !fits(d, "sum", size) {
					lines = lines[:len(lines)-1]
				}
				add(script.Line{Op: "broadcast", Shape: shape(), Root: rng.IntN(size)}, d)
				add(script.Line{Op: "all_gather", Shape: shape()}, d)
				add(script.Line{Op: "all_gather_into_tensor", Shape: shape()}, d)
				add(script.Line{Op: "gather", Shape: shape(), Root: rng.IntN(size)}, d)
				add(script.Line{Op: "scatter", Shape: shape(), Root: rng.IntN(size)}, d)
				add(script.Line{Op: "all_to_all", Shape: shape()}, d)
				add(script.Line{Op: "all_to_all_single", Shape: shape()}, d)
				splits := make([][]int, size)
				for i := range splits {
					for range size {
						splits[i] = append(splits[i], rng.IntN(5))
					}
				}
				add(script.Line{Op: "all_to_all_single", Splits: splits}, d)
				if size > 1 {
					src := rng.IntN(size)
					dst := (src + 1 + rng.IntN(size-1)) % size
					add(script.Line{Op: "send_recv", Shape: shape(), Src: src, Dst: dst, Tag: uint32(rng.IntN(5))}, d)
					add(script.Line{Op: "recv_any", Shape: shape(), Src: src, Dst: dst, Tag: uint32(1000 + len(lines))}, d)
				}
				add(script.Line{Op: "barrier"}, d)
			}
			rng.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
			var text bytes.Buffer
			for _, l := range lines {
				b := must.Get(json.Marshal(l))
				text.Write(append(b, '\n'))
			}
			for r, results := range run(t, size, text.String()) {
				require.Len(t, results, len(lines))
				for i, got := range results {
					d := must.Get(tensor.ParseDType(lines[i].DType))
					require.Empty(t, got.Error, "%+v", lines[i])
					require.Equal(t, expect(lines[i], d, r, size), got.SHA256, "rank %d of %d: %+v", r, size, lines[i])
				}
			}
		})
	}
}

func TestGroupsAndErrors(t *testing.T) {
	all := run(t, 4, `
# odd ranks on their own
{"op":"new_group","ranks":[3,1],"name":"odd"}
{"op":"all_reduce","shape":[5],"group":"odd"}
{"op":"broadcast","shape":[5],"group":"odd","root":3}
{"op":"all_reduce","dtype":"int32","shape":[2],"reduce":"avg"}
{"op":"all_reduce","shape":[2],"reduce":"avg"}
{"op":"all_reduce","shape":[2],"reduce":"premul_sum","factor":0.5}
# even ranks, and nobody else takes part
{"op":"new_group","ranks":[0,2],"name":"even","local":true}
{"op":"all_reduce","shape":[5],"group":"even"}
`)
	for r, res := range all {
		require.Equal(t, r%2 == 0, res[7].SHA256 != "")
		require.Empty(t, res[7].Error)
		if r%2 == 0 {
			require.Empty(t, res[1].SHA256)
			require.Empty(t, res[1].Error)
		} else {
			require.NotEmpty(t, res[1].SHA256)
			require.Equal(t, all[3][2].SHA256, res[2].SHA256)
		}
		require.Contains(t, res[3].Error, "int32", "refused at the call, and the script goes on")
		require.NotEmpty(t, res[4].SHA256)
		require.Equal(t, all[0][5].SHA256, res[5].SHA256)
	}
}

func TestFractionsAgreeOnAllRanks(t *testing.T) {
	var text strings.Builder
	for _, d := range tensor.DTypes() {
		if d.IsFloat() || d.IsComplex() {
			fmt.Fprintf(&text, `{"op":"all_reduce","dtype":"%v","shape":[1000],"fill":"frac"}`+"\n", d)
		}
	}
	all := run(t, 3, text.String())
	for _, res := range all {
		require.Equal(t, len(all[0]), len(res))
		for i := range res {
			require.NotEmpty(t, res[i].SHA256)
			require.Equal(t, all[0][i].SHA256, res[i].SHA256)
		}
	}
}

func TestParseNamesTheLine(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"not json", "\n{", "line 2"},
		{"two objects", `{"op":"barrier"} {"op":"barrier"}`, "more than one"},
		{"unknown field", `{"op":"barrier","shap":[1]}`, "shap"},
		{"unknown op", `{"op":"allreduce"}`, `unknown op "allreduce" (known: all_gather,`},
		{"unknown dtype", `{"op":"barrier","dtype":"float31"}`, "float31"},
		{"unknown operator", `{"op":"all_reduce","reduce":"mean"}`, "mean"},
		{"unknown fill", `{"op":"barrier","fill":"x"}`, `"x"`},
		{"frac of integers", `{"op":"all_reduce","dtype":"int8","fill":"frac"}`, "floating"},
		{"root outside", `{"op":"broadcast","root":2}`, "root 2"},
		{"to itself", `{"op":"send_recv","src":1,"dst":1}`, "src 1 and dst 1"},
		{"huge", `{"op":"all_reduce","shape":[1000000,1000000]}`, "too large"},
		{"negative", `{"op":"all_reduce","shape":[-1]}`, "negative"},
		{"no group", `{"op":"barrier","group":"g"}`, `no group "g"`},
		{"group twice", "{\"op\":\"new_group\",\"ranks\":[0],\"name\":\"g\"}\n{\"op\":\"new_group\",\"ranks\":[0],\"name\":\"g\"}", "line 2"},
		{"rank twice", `{"op":"new_group","ranks":[0,0],"name":"g"}`, "distinct"},
		{"rows", `{"op":"all_to_all_single","splits":[[1,1]]}`, "1 rows"},
		{"row", `{"op":"all_to_all_single","splits":[[1],[1]]}`, "row 0"},
		{"split", `{"op":"all_to_all_single","splits":[[1,-1],[1,1]]}`, "negative"},
		{"no shapes", `{"op":"all_reduce_coalesced"}`, "needs shapes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.ErrorContains(t, must.Err(script.Parse(strings.NewReader(tc.text), 2)), tc.want)
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"op":"all_reduce","dtype":"float32","shape":[3,5],"reduce":"sum","fill":"int","seed":7}`, 3)
	f.Add(`{"op":"new_group","ranks":[0,1],"name":"a"}`, 2)
	f.Add(`{"op":"all_to_all_single","splits":[[1,2],[3,4]]}`, 2)
	f.Fuzz(func(t *testing.T, text string, size int) {
		if size < 1 || size > 64 {
			return
		}
		_, _ = script.Parse(strings.NewReader(text), size)
	})
}
