package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
)

// asProgram makes the test binary the program itself, so that the tests run what users run.
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

// reported is what a rank says at its end.
type reported struct{ buckets, gradients, buffers, parameters string }

// trained trains with a rank for each letter, p for PyTorch and g for Go, and returns what they report, and the accuracy.
func trained(t *testing.T, kinds string, epochs int) (all []reported, accuracy float64) {
	t.Helper()
	torchtest.Need(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	script := fmt.Sprintf(`case "$(echo %s | cut -c $((RANK+1)))" in p) exec '%s' '%s' %d ;; *) exec '%s' -epochs %d ;; esac`,
		kinds, torchtest.Interpreter(t), must.Get(filepath.Abs("trainer.py")), epochs, must.Get(os.Executable()), epochs)
	var out, errs bytes.Buffer
	s := must.Get(agent.Run(ctx, agent.Job{
		Procs: len(kinds), Command: []string{"/bin/sh", "-c", script}, Env: append(os.Environ(), asProgram+"=1"), Stdout: &out, Stderr: &errs,
	}))
	require.True(t, s.OK, errs.String())
	all = make([]reported, len(kinds))
	line := regexp.MustCompile(`(?m)^\[rank(\d)\] buckets of \[(.*)\] bytes; gradients (\w{16}), buffers (\w{16}), parameters (\w{16})$`)
	for _, m := range line.FindAllStringSubmatch(out.String(), -1) {
		all[must.Get(strconv.Atoi(m[1]))] = reported{m[2], m[3], m[4], m[5]}
	}
	last := regexp.MustCompile(fmt.Sprintf(`epoch %d/%[1]d .* accuracy ([0-9.]+)%%`, epochs)).FindStringSubmatch(out.String())
	require.NotNil(t, last, out.String())
	return all, must.Get(strconv.ParseFloat(last[1], 64))
}

// TestMixed trains with every kind of rank 0, and both kinds in the majority. Gradients and buffers have the same bits on
// all ranks, parameters on all ranks of a kind.
func TestMixed(t *testing.T) {
	for _, kinds := range []string{"pg", "gp", "gpp", "pgg"} {
		t.Run(kinds, func(t *testing.T) {
			all, accuracy := trained(t, kinds, 3)
			require.Greater(t, accuracy, 90.)
			parameters := make(map[byte]string)
			for r, x := range all {
				require.Equal(t, fmt.Sprint(4*(10+64*10+64+128*64), " ", 4*(128+64*128)), x.buckets)
				require.Equal(t, all[0].gradients, x.gradients, "rank %d", r)
				require.Equal(t, all[0].buffers, x.buffers, "rank %d", r)
				if parameters[kinds[r]] == "" {
					parameters[kinds[r]] = x.parameters
				}
				require.Equal(t, parameters[kinds[r]], x.parameters, "rank %d", r)
			}
		})
	}
}

// TestSameRounding: what the two kinds of ranks differ by is a fused
// multiply-add in PyTorch's optimizer. Told to do without, it computes Go's bits.
func TestSameRounding(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("on other processors Go's compiler fuses multiplications with additions")
	}
	t.Setenv("ATEN_CPU_CAPABILITY", "default")
	all, _ := trained(t, "pg", 3)
	require.Equal(t, all[0], all[1])
	require.Equal(t, 1, strings.Count(all[0].buckets, " "))
}

// TestLayout: a weight that package mlp has row by row of inputs lies in
// PyTorch's order, row by row of outputs.
func TestLayout(t *testing.T) {
	m := must.Get(mlp.New([]int{2, 3}, 1))
	copy(m.Params()[0].Value, []float32{1, 2, 3, 4, 5, 6})
	l := must.Get(newLayout(m))
	require.Equal(t, []int{3, 2}, l.params[0].Value.Shape())
	require.True(t, l.params[0].Value.IsContiguous())
	require.Equal(t, 5., must.Get(l.params[0].Value.Float64At(1, 1)))
	require.NoError(t, l.params[0].Value.Fill(0))
	require.NoError(t, l.params[0].Value.SetFloat64(-1, 2, 0))
	require.NoError(t, l.adopt())
	require.Equal(t, []float32{0, 0, -1, 0, 0, 0}, m.Params()[0].Value)
}
