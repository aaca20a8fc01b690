package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
)

// asProgram makes the test binary the program itself, so that the tests run
// what users run, launcher and ranks.
const asProgram = "C10D_TORCH_DDP_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// limit is far more than any of these runs takes; it turns a hang into a failure.
const limit = 5 * time.Minute

// program runs the program as the ranks of one job and returns what they print.
func program(t *testing.T, ranks int, args ...string) (s *agent.Summary, stdout, stderr string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var out, errs bytes.Buffer
	s, err = agent.Run(ctx, agent.Job{
		Procs: ranks, Command: append([]string{self, "-python-exe", torchtest.Interpreter(t), "-timeout", "4m"}, args...),
		Env: append(os.Environ(), asProgram+"=1"), Stdout: &out, Stderr: &errs,
	})
	require.NoError(t, err)
	return s, out.String(), errs.String()
}

func trained(t *testing.T, ranks int, args ...string) report {
	t.Helper()
	s, stdout, stderr := program(t, ranks, args...)
	require.True(t, s.OK, stderr)
	line, found := strings.CutPrefix(stdout, "[rank0] ")
	require.True(t, found, stdout)
	var r report
	d := json.NewDecoder(strings.NewReader(line))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&r), stdout)
	return r
}

// tolerance is eight times the largest difference that was seen after 20
// epochs of 23 steps: 2.4e-7.
const tolerance = 2e-6

// TestMixed trains with every kind of rank 0, and both kinds in the majority.
func TestMixed(t *testing.T) {
	torchtest.Need(t)
	for _, c := range []struct {
		args  string
		kinds []kind
	}{
		{"-python 1", []kind{pythonRank, goRank}},
		{"-python 1 -go-first -bucket 1", []kind{goRank, pythonRank}},
		{"-python 1 -batch 1438", []kind{pythonRank, goRank}}, // one step, then an evaluation
		{"-python 2 -go-first", []kind{goRank, pythonRank, pythonRank}},
		{"-python 1 -batch 7 -lr 0.02", []kind{pythonRank, goRank, goRank}}, // shares of two and three images
	} {
		t.Run(c.args, func(t *testing.T) {
			r := trained(t, len(c.kinds), append(strings.Fields(c.args), "-epochs", "3")...)
			require.Equal(t, c.kinds, r.Kinds)
			require.Equal(t, len(c.kinds), r.Ranks)
			require.True(t, r.GradsIdentical)
			require.True(t, r.BuffersIdentical)
			require.Equal(t, map[kind]bool{goRank: true, pythonRank: true}, r.ParamsIdentical)
			require.Less(t, r.MaxAbs, tolerance)
			if !strings.Contains(c.args, "1438") {
				require.Greater(t, r.Accuracy, 0.9)
			}
			want := []int{4 * (10 + 64*10 + 64 + 128*64), 4 * (128 + 64*128)}
			if strings.Contains(c.args, "-bucket") {
				want = []int{4 * (10 + 64*10), 4 * (64 + 128*64), 4 * (128 + 64*128)}
			}
			require.Equal(t, want, r.Buckets)
			require.NotEmpty(t, r.Torch)
			require.Positive(t, r.Seconds)
		})
	}
}

// TestSameRounding: what the two kinds of ranks differ by is a fused
// multiply-add in PyTorch's optimizer. Told to do without, it computes Go's bits.
func TestSameRounding(t *testing.T) {
	torchtest.Need(t)
	if runtime.GOARCH != "amd64" {
		t.Skip("on other processors Go's compiler fuses multiplications with additions")
	}
	t.Setenv("ATEN_CPU_CAPABILITY", "default")
	r := trained(t, 2, "-epochs", "3")
	require.Zero(t, r.MaxAbs)
	require.Equal(t, 1., r.Equal)
}

// TestCompare: a mixed group trains as well as groups of one kind.
func TestCompare(t *testing.T) {
	torchtest.Need(t)
	r := trained(t, 2, "-epochs", "3", "-compare")
	require.Len(t, r.Compare, 2)
	for k, c := range r.Compare {
		require.InDelta(t, r.Accuracy, c.Accuracy, 2./359, "%s", k)
		require.InDelta(t, r.Loss, c.Loss, 1e-5, "%s", k)
		require.Less(t, c.MaxAbs, tolerance, "%s", k)
	}
}

func TestWithoutPython(t *testing.T) {
	r := trained(t, 2, "-python", "0", "-epochs", "2")
	require.Equal(t, []kind{goRank, goRank}, r.Kinds)
	require.True(t, r.GradsIdentical)
	require.True(t, r.BuffersIdentical)
	require.Equal(t, map[kind]bool{goRank: true}, r.ParamsIdentical)
	require.Empty(t, r.Torch)
	require.Greater(t, r.Accuracy, 0.9)
}

// TestMismatch: the rank whose model differs says so, and the launcher blames it.
func TestMismatch(t *testing.T) {
	torchtest.Need(t)
	for args, want := range map[string]string{
		"-mismatch 1":           "[rank1] ddp: ranks disagree on parameter 0: rank 0 has sizes [128 64] and strides [64 1], rank 1 has layer0.weight with sizes [129 64] and strides [64 1]",
		"-mismatch 0 -go-first": "[rank1] RuntimeError: [1]: params[0] in this process with sizes [128, 64] appears not to match sizes of the same param in process 0.",
	} {
		t.Run(args, func(t *testing.T) {
			s, stdout, stderr := program(t, 2, strings.Fields(args)...)
			require.False(t, s.OK)
			require.Empty(t, stdout)
			require.Contains(t, stderr, want)
			require.Equal(t, 1, s.First.Rank, s.Report())
		})
	}
}

func TestRefused(t *testing.T) {
	for args, want := range map[string]string{
		"-python -1":                  "-python -1: must not be negative",
		"-python 2":                   "-python 2: the job has 1 ranks",
		"-epochs 0":                   "-epochs 0",
		"-batch 0":                    "-batch 0 must be between",
		"-bucket 0":                   "-bucket 0 must be between",
		"-timeout 1ms":                "less than a second",
		"more":                        `unexpected argument "more"`,
		"-python-exe /does/not/exist": "-python-exe /does/not/exist has no PyTorch",
		"-x":                          "flag provided but not defined",
	} {
		t.Run(args, func(t *testing.T) {
			s, stdout, stderr := program(t, 1, strings.Fields(args)...)
			require.False(t, s.OK)
			require.Empty(t, stdout)
			require.Contains(t, stderr, want)
		})
	}
}

func TestReport(t *testing.T) {
	kinds := []kind{goRank, pythonRank, goRank}
	results := func() []result {
		out := make([]result, len(kinds))
		for r, k := range kinds {
			out[r] = result{Rank: r, Kind: k, Gradients: "g", Buffers: "b", Params: appendFloats(nil, []float32{1, 2}), Buckets: []int{8}}
		}
		return out
	}
	r, err := newReport(kinds, results())
	require.NoError(t, err)
	require.True(t, r.GradsIdentical && r.BuffersIdentical && r.ParamsIdentical[goRank] && r.ParamsIdentical[pythonRank])
	require.Equal(t, diff{Equal: 1}, r.diff)

	x := results()
	x[1].Gradients, x[2].Buffers, x[2].Params = "h", "c", appendFloats(nil, []float32{1, 3})
	x[1].Params = appendFloats(nil, []float32{1.5, 2})
	r = must.Get(newReport(kinds, x))
	require.False(t, r.GradsIdentical || r.BuffersIdentical || r.ParamsIdentical[goRank])
	require.InDelta(t, 0.5, r.MaxAbs, 0)
	require.InDelta(t, 1./3, r.MaxRel, 1e-15)
	require.InDelta(t, 0.5, r.Equal, 0)

	for name, change := range map[string]func(x []result){
		"buckets of [8 8] bytes on rank 2, of [8] on rank 0":            func(x []result) { x[2].Buckets = []int{8, 8} },
		"the result of rank 1 (python) says that it is rank 2 (python)": func(x []result) { x[1].Rank = 2 },
		"the result of rank 1 (python) says that it is rank 1 (go)":     func(x []result) { x[1].Kind = goRank },
		"2 parameters on rank 0 (go), 1 on rank 1 (python)":             func(x []result) { x[1].Params = x[1].Params[:4] },
	} {
		x := results()
		change(x)
		_, err := newReport(kinds, x)
		require.ErrorContains(t, err, name)
	}
}

// TestLayout: a weight that package mlp has row by row of inputs lies in
// PyTorch's order, row by row of outputs.
func TestLayout(t *testing.T) {
	m := must.Get(mlp.New([]int{2, 3}, 1))
	copy(m.Params()[0].Value, []float32{1, 2, 3, 4, 5, 6})
	copy(m.Params()[1].Value, []float32{7, 8, 9})
	l := must.Get(newLayout(m))
	b := must.Get(pack(nil, l.values))
	require.Equal(t, []float32{1, 4, 2, 5, 3, 6, 7, 8, 9}, floats(b))

	require.NoError(t, l.offer())
	require.Equal(t, []int{3, 2}, l.params[0].Value.Shape())
	require.True(t, l.params[0].Value.IsContiguous())
	require.Equal(t, b[:24], l.params[0].Value.Bytes())
	require.NoError(t, l.params[0].Value.Fill(0))
	require.NoError(t, l.params[0].Value.SetFloat64(-1, 2, 0))
	require.NoError(t, l.adopt())
	require.Equal(t, []float32{0, 0, -1, 0, 0, 0}, m.Params()[0].Value)
}

func TestCentre(t *testing.T) {
	c := &centre{mean: []float32{1, 2}, batches: make([]int64, 1)}
	rows := []float32{3, 2, 5, 4}
	c.forward(rows, true)
	require.Equal(t, []float32{2, 0, 4, 2}, rows)
	require.InDeltaSlice(t, []float32{1.3, 2.1}, c.mean, 1e-6)
	require.Equal(t, int64(1), c.batches[0])
	c.forward(rows, false)
	c.forward(nil, true)
	require.Equal(t, int64(1), c.batches[0])
}
