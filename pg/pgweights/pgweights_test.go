package pgweights_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/pg/pgweights"
	"github.com/c10d-go/c10d/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// model returns parameters whose elements follow from seed.
func model(seed int) (all []pgweights.Named) {
	add := func(name string, d tensor.DType, shape ...int) {
		t := must.Get(tensor.New(d, shape...))
		must.Do(t.Fill(float64(seed)))
		all = append(all, pgweights.Named{Name: name, Tensor: t})
	}
	for i := range 40 {
		add(fmt.Sprint("layer ", i), tensor.BFloat16, i, 3)
	}
	add("scalar", tensor.Float64)
	add("mask", tensor.Bool, 5)
	return all
}

// into returns what places parameters in tensors of a model.
func into(all []pgweights.Named) func(pgweights.Param) (*tensor.Tensor, error) {
	return func(p pgweights.Param) (*tensor.Tensor, error) {
		for _, n := range all {
			if n.Name == p.Name {
				return n.Tensor, nil
			}
		}
		return nil, nil
	}
}

func TestVersions(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		own := model(0)
		for v := 1; v <= 2; v++ {
			want := model(v)
			if g.Rank() == 1 {
				require.NoError(t, pgweights.Publish(t.Context(), g, uint64(v), want))
				continue
			}
			require.EqualValues(t, v, must.Get(pgweights.Receive(t.Context(), g, 1, into(own))))
			for i := range want {
				require.Equal(t, want[i].Tensor.Dump(), own[i].Tensor.Dump(), want[i].Name)
			}
		}
	})
}

// TestRefused: a rank that has no tensor for a parameter ends the group.
func TestRefused(t *testing.T) {
	none := errors.New("no room")
	for want, place := range map[string]func(pgweights.Param) (*tensor.Tensor, error){
		"there is no tensor for it": func(pgweights.Param) (*tensor.Tensor, error) { return nil, nil },
		"no room":                   func(pgweights.Param) (*tensor.Tensor, error) { return nil, none },
		"it is of bfloat16 [0 3], the tensor for it of float32 [2]": func(pgweights.Param) (*tensor.Tensor, error) {
			return tensor.New(tensor.Float32, 2)
		},
	} {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			if g.Rank() == 0 {
				require.ErrorContains(t, pgweights.Publish(t.Context(), g, 5, model(1)), want)
				return
			}
			_, err := pgweights.Receive(t.Context(), g, 0, place)
			require.ErrorContains(t, err, `version 5: parameter "layer 0": `+want)
			require.Error(t, g.Barrier(t.Context()))
		})
	}
}

// TestUnusable: nothing is sent of tensors that cannot be.
func TestUnusable(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		err := pgweights.Publish(t.Context(), g, 1, []pgweights.Named{{Name: "w"}})
		require.ErrorContains(t, err, `parameter "w" is no dense tensor`)
		require.NoError(t, g.Barrier(t.Context()))
	})
}

// TestTorch has PyTorch publish, by the function in the package's documentation.
func TestTorch(t *testing.T) {
	torchtest.Need(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	var function strings.Builder
	for line := range strings.Lines(string(must.Get(os.ReadFile("pgweights.go")))) {
		if code, ok := strings.CutPrefix(line, "//\t"); ok && (function.Len() > 0 || strings.HasPrefix(code, "def ")) {
			function.WriteString(code)
		}
	}
	program := function.String() + `
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[1], rank=0, world_size=2)
for version in (1, 2):
    publish(version, [("w", torch.full((2, 3), version + 0.5)), ("t", torch.arange(6.0).view(2, 3).t()), ("n", torch.tensor(version))])
dist.barrier()
`
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := torchtest.Command(ctx, t, "-c", program, port)
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	require.NoError(t, cmd.Start())
	g, err := pg.Init(ctx, fmt.Sprintf("tcp://127.0.0.1:%s?rank=1&world_size=2", port))
	require.NoError(t, err, &said)
	own := map[string]*tensor.Tensor{}
	for v := 1; v <= 2; v++ {
		got, err := pgweights.Receive(ctx, g, 0, func(p pgweights.Param) (_ *tensor.Tensor, err error) {
			own[p.Name], err = tensor.New(p.DType, p.Shape...)
			return own[p.Name], err
		})
		require.NoError(t, err, &said)
		require.EqualValues(t, v, got)
		require.Equal(t, []float32{0, 3, 1, 4, 2, 5}, must.Get(tensor.Data[float32](own["t"])))
		require.Equal(t, float32(v)+0.5, must.Get(tensor.Data[float32](own["w"]))[5])
		require.Equal(t, []int64{int64(v)}, must.Get(tensor.Data[int64](own["n"])))
	}
	require.NoError(t, g.Barrier(ctx))
	require.NoError(t, cmd.Wait(), &said)
	require.NoError(t, g.Close())
}
