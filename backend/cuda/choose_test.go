package cuda_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// tableOf writes a table of ways.
func tableOf(t *testing.T, rows string) string {
	file := filepath.Join(t.TempDir(), "table")
	require.NoError(t, os.WriteFile(file, []byte("c10d-table 1\ncommand test\nmachine simulated\n"+rows), 0o644))
	return file
}

// TestTable: a call takes the way that the table has for its size, and Explain says so.
func TestTable(t *testing.T) {
	s := directly(2)
	s.options.Table = tableOf(t, `
all_reduce      peers  2  1  1000  host         1
all_reduce      peers  2  1  2000  host         90
all_reduce      peers  2  1  1000  two-shot     50
all_reduce      peers  2  1  2000  two-shot     1
all_reduce      peers  2  1  3000  two-shot     90
all_reduce      peers  2  1  2000  one-shot:1   50
all_reduce      peers  2  1  3000  one-shot:1   1
all_reduce      peers  2  1  4000  one-shot:1   90
all_reduce      peers  2  1  3000  host-shared  50
all_reduce      peers  2  1  4000  host-shared  1
all_gather      peers  2  1  1000  host         1
all_gather      peers  2  1  1000  direct       2
broadcast       peers  2  1  1000  two-shot     1
reduce_scatter  host   2  1  1000  host         1
`)
	w := newWorld(t, s)
	require.Empty(t, w.ranks[0].b.Explain().DeviceLink)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	e := w.ranks[0].b.Explain()
	require.Equal(t, "peers", e.DeviceLink)
	said := map[string][]string{}
	for _, c := range e.Choices {
		said[c.Op] = append(said[c.Op], fmt.Sprintf("%s up to %d: %s", c.Algorithm, c.UpTo, c.Why))
	}
	contains := func(op work.OpType, want ...string) {
		t.Helper()
		got := said[op.String()]
		require.Len(t, got, len(want), "%v", got)
		for i := range want {
			head, why, _ := strings.Cut(want[i], " ... ")
			require.True(t, strings.HasPrefix(got[i], head), "%s, want %s", got[i], head)
			require.Contains(t, got[i], why)
		}
	}
	contains(work.AllReduce, "host up to 1355 ... ; host: all_reduce of 0 bytes, 2 ranks: host takes 1µs", "direct up to 2355 ... two-shot: ",
		"direct up to 3355 ... one-shot:1: ", "host up to -1 ... page-locked memory that the ranks share")
	contains(work.AllGather, "host up to -1 ... host takes 1µs, next is direct with 2µs")
	contains(work.Broadcast, "direct up to -1 ... two-shot: ")
	contains(work.ReduceScatter, "direct up to -1 ... direct: nothing was measured with 2 ranks")

	for _, c := range []struct{ bytes, launches int }{{1000, 0}, {2000, 2}, {3000, 1}, {4000, 0}, {8000, 0}} {
		ts := make([]*vector, 2)
		w.each(func(x *rank, r int) (err error) {
			ts[r], err = x.vector(tensor.Float32, r, slicesOf(float32(r+1), c.bytes/4))
			return err
		})
		launches := 0
		w.m.Skip(func(c sim.Call) bool {
			if c.Stream == "rank 0/caller 0.0" && c.Name == "Launch" {
				launches++
			}
			return false
		})
		w.each(func(x *rank, r int) error {
			ctx := cuda.InStream(x.ctx, x.stream[r])
			must.Do(x.wait(x.b.AllReduce(ctx, []*tensor.Tensor{ts[r].t}, backend.AllReduceOptions{})))
			got, err := x.bytes(ts[r], r)
			return errors.Join(err, same(got, slicesOf(3, c.bytes/4)))
		})
		w.m.Skip(nil)
		require.Equal(t, c.launches, launches, "%d bytes", c.bytes)
	}
	w.end()
}

// slicesOf returns the bytes of so many numbers.
func slicesOf(v float32, n int) []byte {
	all := make([]float32, n)
	for i := range all {
		all[i] = v
	}
	return tensorBytes(all)
}

// TestTablesDiffer: ranks with different tables do not begin. The variable stands for the option.
func TestTablesDiffer(t *testing.T) {
	m, err := sim.New(sim.Config{Kernels: simkernels.All()})
	require.NoError(t, err)
	w := &world{TB: t, ctx: t.Context(), ranks: make([]*rank, 2)}
	reg, _ := backend.Lookup(cuda.Name)
	open := func(tables ...string) []error {
		st := store.NewHash()
		defer st.Close()
		return runEach(w, func(_ *rank, r int, _ chan struct{}) error {
			d := must.Get(m.Process(fmt.Sprint(r)))
			own := cuda.Options{Driver: d, Table: tables[r]}
			b, err := reg.New(t.Context(), backend.Options{Store: st, Rank: r, Size: 2, Timeout: patience, Specific: own})
			if err == nil {
				err = b.Close()
			}
			return errors.Join(err, d.Close())
		})
	}
	one := tableOf(t, "all_reduce peers 2 1 1000 host 1\n")
	same := tableOf(t, "# the same\n  all_reduce peers 2 1 1000 host 1\n")
	for r, err := range open(one, "") {
		require.ErrorContains(t, err, fmt.Sprintf("cuda: rank %d has another table of ways (Options.Table or C10D_CUDA_TABLE) than rank %d", 1-r, r))
	}
	require.NoError(t, errors.Join(open(one, same)...))
	t.Setenv("C10D_CUDA_TABLE", one)
	require.NoError(t, errors.Join(open("", same)...))
	t.Setenv("C10D_CUDA_TABLE", tableOf(t, "all_reduce peers 2 1 1000 mesh 1\n"))
	for _, err := range open("", "") {
		require.ErrorContains(t, err, `cuda: table of ways: choice: `)
		require.ErrorContains(t, err, `no way "mesh" of all_reduce on CUDA devices`)
	}
	require.NoError(t, m.Close())
}
