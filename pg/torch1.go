package pg

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

// torch1Store is the store of ranks of PyTorch up to 2.0.
type torch1Store struct{ store.Store }

func (torch1Store) IsTorch1() bool { return true }

func (s torch1Store) LocalAddr() netip.Addr { return store.LocalAddrOf(s.Store) }

// torch1Keys returns where ranks of PyTorch up to 2.0 have the keys that others have in st. They keep the agents'
// store over restarts; later ones get a new one each time.
func torch1Keys(st store.Store, from origin) store.Store {
	if from.agents != nil {
		st = store.Prefix("/worker/attempt_"+strconv.Itoa(from.attempt)+"/default_pg", from.agents)
	}
	return torch1Store{st}
}

// torch1Came is the first key that a rank writes.
func torch1Came(group string, rank int) string { return group + "/0/rank_" + strconv.Itoa(rank) }

// finishTorch1 is the last part of making a group in PyTorch up to 2.0: a barrier of all ranks in the
// store, and the sequence number from rank 0 to the members. Rank 0 writes the number first,
// because with TORCH_DISTRIBUTED_DEBUG=DETAIL other ranks read it before the barrier.
func (w *world) finishTorch1(ctx context.Context, g *epoch, s groupSpec) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if g.rank == 0 {
		if err := g.store.Set(ctx, seqKey, binary.LittleEndian.AppendUint64(nil, 1)); err != nil {
			return err
		}
	}
	key := countKey(s)
	g.tidier.note(key)
	g.tidier.note(g.within + seqKey)
	came := func(ctx context.Context) (int64, error) { return w.store.Add(ctx, key, 0) }
	defer waiting.Start(ctx, w.options.Logger, g.barrierReport(came, int64(w.size)))()
	n, err := w.store.Add(ctx, key, 1)
	for err == nil && n < int64(w.size) {
		// PyTorch polls as often; no key shows that the count is reached.
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(10 * time.Millisecond):
			var now int64
			if now, err = w.store.Add(ctx, key, 0); err == nil {
				n = now
			}
		}
		if ctx.Err() != nil && n < int64(w.size) {
			return fmt.Errorf("pg: store barrier of %s: %d of %d ranks came: %w", g.names.Group(s.name), n, w.size, ctx.Err())
		}
	}
	if err == nil && g.rank > 0 {
		_, err = g.store.Get(ctx, seqKey)
	}
	return err
}

// countKey is barrierKey of PyTorch up to 2.0.
func countKey(s groupSpec) string { return "store_based_barrier_key:" + strconv.Itoa(s.counted) }

// seqKey is where rank 0 of a group writes its sequence number for PyTorch up to 2.0.
const seqKey = "SEQ_NUM_STORE_KEY"
