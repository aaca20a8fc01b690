package ddp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// Each rank's error when a model differs in a group with PyTorch 1.13. Every rank must have one:
// none waits for a rank that has given up.
func TestMismatchWithPyTorch(t *testing.T) {
	torchtest.Need(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	// What gloo says depends on what it is doing. An operation that sends can
	// miss the end of a connection; then its own timeout ends it.
	const gone = "by peer|Broken pipe|Timed out waiting"
	type says struct {
		pattern  string
		mismatch bool // errors.Is ErrModelMismatch
	}
	for name, c := range map[string]struct {
		torch  int // the PyTorch rank
		shapes [3][][]int
		want   [3]says
	}{
		"shape, found in Go": {0, [3][][]int{{{4}, {2, 3}}, {{4}, {2, 3}}, {{4}, {3, 2}}}, [3]says{
			{gone, false},
			{"rank 2 aborted|rank 0 died", false},
			{`rank 0 has sizes \[2 3\] and strides \[3 1\], rank 2 has p1 with sizes \[3 2\] and strides \[2 1\]`, true},
		}},
		"shape, found in PyTorch": {2, [3][][]int{{{4}, {2, 3}}, {{4}, {2, 3}}, {{4}, {3, 2}}}, [3]says{
			{"rank 2 may have left because its parameters' shapes differ from rank 0's", false},
			{"rank 2 died", false},
			{`params\[1\] in this process with sizes \[3, 2\] appears not to match sizes of the same param in process 0`, false},
		}},
		"count": {1, [3][][]int{{{4}, {2, 3}}, {{4}}, {{4}, {2, 3}}}, [3]says{
			{"rank 0 has 2 trained parameters, rank 1 has 1", true},
			{"Rank 1 has 1 params, while rank 0 has inconsistent 2 params", false},
			{"rank 0 has 2 trained parameters, rank 1 has 1", true},
		}},
		"dimensions, PyTorch is rank 0": {0, [3][][]int{{{6}}, {{2, 3}}, {{6}}}, [3]says{
			{gone, false},
			{"other numbers of dimensions.*rank 0 sent 16 bytes .* where 32 were expected", true},
			{"rank 0", false},
		}},
		"dimensions, PyTorch is not": {1, [3][][]int{{{6}}, {{2, 3}}, {{6}}}, [3]says{
			{"other numbers of dimensions.*rank 1 receives 32 bytes .* where this rank sends 16", true},
			{gone, false},
			{"rank 1", false},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			_, port, err := net.SplitHostPort(freeport.Loopback(t))
			require.NoError(t, err)
			var said [3]string
			var errs [3]error
			var wg sync.WaitGroup
			for r := range said {
				wg.Go(func() {
					if r == c.torch {
						said[r], errs[r] = torchSays(soon(t), t, r, port, c.shapes[r])
						return
					}
					errs[r] = construct(t, r, port, c.shapes[r], true)
				})
			}
			wg.Wait()
			for r, want := range c.want {
				if r == c.torch {
					require.NoError(t, errs[r], said[r])
					require.Regexp(t, want.pattern, said[r])
					continue
				}
				require.Error(t, errs[r], "rank %d", r)
				require.Regexp(t, want.pattern, errs[r].Error(), "rank %d", r)
				if want.mismatch {
					require.ErrorIs(t, errs[r], ddp.ErrModelMismatch, "rank %d", r)
				}
			}
		})
	}
}

// Without Options.PyTorch a Go rank notices that it is missing and ends the group. One that has
// heard nothing of the PyTorch rank by then learns who ended it.
func TestPyTorchRankIsNoticed(t *testing.T) {
	torchtest.Need(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	for torch := range 3 {
		t.Run(fmt.Sprint("rank ", torch), func(t *testing.T) {
			_, port, err := net.SplitHostPort(freeport.Loopback(t))
			require.NoError(t, err)
			shapes := [][]int{{4}, {2, 3}}
			var errs [3]error
			var wg sync.WaitGroup
			for r := range errs {
				wg.Go(func() {
					if r == torch {
						_, errs[r] = torchSays(soon(t), t, r, port, shapes)
						return
					}
					errs[r] = construct(t, r, port, shapes, false)
				})
			}
			wg.Wait()
			noticed, want := 0, fmt.Sprintf("rank %d is PyTorch's: set Options.PyTorch on every Go rank", torch)
			for r, err := range errs {
				switch {
				case r == torch:
				case err != nil && strings.Contains(err.Error(), want):
					noticed++
				default:
					require.ErrorContains(t, err, "aborted the group", "rank %d", r)
				}
			}
			require.Positive(t, noticed)
		})
	}
}

func torchSays(ctx context.Context, t *testing.T, rank int, port string, shapes [][]int) (_ string, err error) {
	defer must.Catch(&err)
	b := must.Get(json.Marshal(shapes))
	out, err := torchtest.Command(ctx, t, "testdata/mismatch.py", fmt.Sprint(rank), "3", port, string(b)).CombinedOutput()
	return string(out), err
}

// construct makes a DDP in a group with PyTorch ranks and, if that works, an iteration.
func construct(t *testing.T, rank int, port string, shapes [][]int, told bool) (err error) {
	defer must.Catch(&err)
	ctx := soon(t)
	g, err := pg.Init(ctx, fmt.Sprintf("tcp://127.0.0.1:%s", port), pg.InitOptions{
		Rank: rank, Size: 3, Options: pg.Options{Timeout: patience},
	})
	if err != nil {
		return err
	}
	defer g.Close()
	var ps []ddp.Param
	for i, shape := range shapes {
		ps = append(ps, ddp.Param{Name: fmt.Sprintf("p%d", i), Value: zeros(t, tensor.Float32, shape...), Grad: zeros(t, tensor.Float32, shape...)})
	}
	return tryIteration(t, must.Get(ddp.New(ctx, g, ps, ddp.Options{PyTorch: told})), len(ps))
}
