package pg

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store/tcp"
)

// TestRequestsOfASubgroup: a sub-group costs its ranks the same in a large group and in a small one, and alone or with
// others of one call. Ranks outside a part make no requests.
func TestRequestsOfASubgroup(t *testing.T) {
	const size, members = 24, 8
	server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	defer server.Close()
	errs, made, split, cut := make([]error, size), make([]int64, size), make([]int64, size), make([]int64, size)
	part := make([]int, members)
	for i := range part {
		part[i] = i
	}
	var all sync.WaitGroup
	for r := range size {
		all.Go(func() {
			defer must.Catch(&errs[r])
			var n atomic.Int64
			st := must.Get(tcp.New(t.Context(), server.Addr().String()))
			defer st.Close()
			g := must.Get(New(t.Context(), CountedStore{st, &n}, r, size))
			must.Do(Wait(g.AllReduce(t.Context(), Slice([]float32{1}), backend.Sum())))
			g.now().tidier.wait()
			made[r] = n.Load()
			x := must.Get(g.SplitRanks(t.Context(), [][]int{part}))
			must.Do(x.Close())
			split[r] = n.Load() - made[r]
			sub := must.Get(g.NewSubgroups(t.Context(), 2))
			must.Do(Wait(sub.AllReduce(t.Context(), Slice([]float32{1}), backend.Sum())))
			must.Do(g.Close())
			cut[r] = n.Load() - made[r] - split[r]
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Log("requests of each rank to make the default group", made, "the part", split, "and the sub-groups", cut)
	for r, n := range split {
		if r < members {
			require.LessOrEqual(t, n, int64(12+2*members), "rank %d: one deletes the keys of all", r)
		} else {
			require.Zero(t, n, "rank %d", r)
		}
		if r > 1 { // one of all deletes the keys of the first sub-group
			require.LessOrEqual(t, cut[r], int64(26), "rank %d: sub-groups", r)
		}
	}
}
