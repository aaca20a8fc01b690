package cuda_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// apart is a rank in a process of its own.
type apart struct {
	rank, size int
	st         store.Store
	d          driver.Driver
	simulated  bool
}

// What ranks do in processes of their own, by name.
func (a *apart) run(t *testing.T, what string) {
	switch what {
	case "floods":
		o := sharing{size: a.size, apart: a, room: 64 << 20, cycles: 100_000, fill: 32, Options: cuda.Options{Chunk: 1 << 18, Pinned: 1 << 30, Scratch: 1 << 30}}
		operations, largest := 1000, 1<<18
		if a.simulated {
			o.room, o.fill, o.Options = 16<<20, 4, cuda.Options{Chunk: 2000}
			largest = 1 << 12
		}
		floods(t, a.d, o, 4, operations, largest)
	case "3 GiB":
		gib := 1 << 30
		n := 3*gib + 5
		if a.simulated {
			n = 1<<20 + 5
		}
		for _, way := range []string{cuda.BroadcastDirect, cuda.BroadcastChain} {
			if way != cuda.BroadcastDirect || a.size <= a.d.Count() {
				a.spread(t, way, n)
			}
		}
	case operationsApart:
		a.operate(t)
	case sparseApart:
		a.sum(t)
	default:
		t.Fatalf("nothing is called %q", what)
	}
}

// operationsApart is the name of random operations.
const operationsApart = "operations"

// spread broadcasts n bytes in one way, from rank 0.
func (a *apart) spread(t *testing.T, way string, n int) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	x := must.Get(newSpreader(ctx, a.d, a.rank, a.size, n, a.st, loopback(""), way))
	require.NoError(t, x.run(a.rank == 0, 0, 0, 0, n, 17), "way %q, rank %d", way, a.rank)
	require.NoError(t, x.b.Close())
	require.NoError(t, x.close())
}

// What a rank in a process of its own is told, beside envRank, envStore and envSim.
const (
	envSize = "C10D_CUDA_TEST_SIZE"
	envWhat = "C10D_CUDA_TEST_WHAT"
)

// TestApart is a rank of runApart in another process. By itself it does nothing.
func TestApart(t *testing.T) {
	what := os.Getenv(envWhat)
	if what == "" {
		return
	}
	rank := must.Get(strconv.Atoi(os.Getenv(envRank)))
	size := must.Get(strconv.Atoi(os.Getenv(envSize)))
	oneApart(t, what, rank, size, os.Getenv(envStore), os.Getenv(envSim))
}

func oneApart(t *testing.T, what string, rank, size int, path, dir string) {
	d, _, err := openFor(dir, max(size, 2))
	require.NoError(t, err)
	st := must.Get(store.NewFile(path, size))
	a := &apart{rank: rank, size: size, st: st, d: d, simulated: dir != ""}
	a.run(t, what)
	require.NoError(t, d.Close())
	require.NoError(t, st.Close())
}

// runApart has ranks do something, the first one in this process and each other one in
// one of its own. Without a folder for simulated devices they have GPUs.
func runApart(t *testing.T, what string, size int, dir string) {
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	path := filepath.Join(t.TempDir(), "store")
	said := make([]transcript, size)
	var others []*exec.Cmd
	ended := make([]error, size)
	var waited bool
	wait := func() {
		if waited {
			return
		}
		waited = true
		for i, cmd := range others {
			ended[1+i] = cmd.Wait()
		}
	}
	t.Cleanup(func() {
		cancel()
		wait()
		for r := range said {
			if t.Failed() && r > 0 {
				t.Logf("rank %d: %v\n%s", r, ended[r], &said[r])
			}
		}
	})
	for r := 1; r < size; r++ {
		cmd := exec.CommandContext(ctx, self, "-test.run=^TestApart$", "-test.v")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", envRank, r), fmt.Sprintf("%s=%d", envSize, size),
			envStore+"="+path, envSim+"="+dir, envWhat+"="+what)
		cmd.Stdout, cmd.Stderr = &said[r], &said[r]
		require.NoError(t, cmd.Start())
		others = append(others, cmd)
	}
	oneApart(t, what, 0, size, path, dir)
	wait()
	for r, err := range ended {
		require.NoError(t, err, "rank %d", r)
	}
}
