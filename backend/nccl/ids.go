package nccl

import (
	"context"
	"fmt"
	"math/bits"
	"strconv"

	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
)

// ranksPerRoot is how many ranks meet at one root, as PyTorch has it without TORCH_NCCL_RANKS_PER_ROOT.
const ranksPerRoot = 128

// roots returns the ranks that have an id for the others of a communicator: the first of each run of ranks. The first
// runs may have a rank more than the last ones.
func roots(size int) []int {
	n := (size + ranksPerRoot - 1) / ranksPerRoot
	all := make([]int, n)
	for i := range all {
		all[i] = i*(size/n) + min(i, size%n)
	}
	return all
}

// collectiveIDs returns the ids of the group's next communicator, under PyTorch's keys: a number that counts a rank's
// communicators, or UniqueNCCLID:i if there are several roots.
func (b *Backend) collectiveIDs(ctx context.Context) ([]libnccl.UniqueID, error) {
	if b.size > ranksPerRoot && b.api.Version() >= libnccl.ScalableVersion {
		var keys []string
		for i, r := range roots(b.size) {
			keys = append(keys, "UniqueNCCLID:"+strconv.Itoa(i))
			if r == b.rank {
				if err := b.offerID(ctx, keys[i]); err != nil {
					return nil, err
				}
			}
		}
		values, err := b.store.MultiGet(ctx, keys)
		if err != nil {
			return nil, fmt.Errorf("waiting for the ids of ranks %v: %w", roots(b.size), err)
		}
		ids := make([]libnccl.UniqueID, len(values))
		for i, v := range values {
			if ids[i], err = parseID(keys[i], v); err != nil {
				return nil, err
			}
		}
		return ids, nil
	}
	key := strconv.Itoa(b.ids)
	b.ids++
	return b.oneID(ctx, key, 0, b.rank == 0)
}

// pairIDs returns the id of the communicator of this rank and another one.
func (b *Backend) pairIDs(ctx context.Context, peer int) ([]libnccl.UniqueID, error) {
	low, high := min(b.rank, peer), max(b.rank, peer)
	return b.oneID(ctx, fmt.Sprintf("%d:%d", low, high), low, b.rank == low)
}

// oneID returns the id that the owner has under key.
func (b *Backend) oneID(ctx context.Context, key string, owner int, own bool) ([]libnccl.UniqueID, error) {
	if b.size == 1 { // nobody else needs it
		id, r := b.api.UniqueID()
		return []libnccl.UniqueID{id}, libnccl.Check(b.api, 0, "GetUniqueId", r)
	}
	if own {
		if err := b.offerID(ctx, key); err != nil {
			return nil, err
		}
	}
	v, err := b.store.Get(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("waiting for the id of rank %d under key %q: %w", owner, key, err)
	}
	id, err := parseID(key, v)
	return []libnccl.UniqueID{id}, err
}

// offerID writes an id of this rank.
func (b *Backend) offerID(ctx context.Context, key string) error {
	id, r := b.api.UniqueID()
	if err := libnccl.Check(b.api, 0, "GetUniqueId", r); err != nil {
		return err
	}
	return b.store.Set(ctx, key, id[:])
}

func parseID(key string, v []byte) (id libnccl.UniqueID, err error) {
	if len(v) != len(id) {
		return id, fmt.Errorf("key %q has %d bytes, want an id of %d", key, len(v), len(id))
	}
	copy(id[:], v)
	return id, nil
}

// color returns the color by which PyTorch's new_group splits the default group's communicator for these ranks. It is
// CPython's hash of the tuple, without its sign, modulo 2^31.
func color(ranks []int) int {
	const p1, p2, p5 uint64 = 11400714785074694791, 14029467366897019727, 2870177450012600261
	h := p5
	for _, r := range ranks {
		h = bits.RotateLeft64(h+uint64(r)*p2, 31) * p1
	}
	h += uint64(len(ranks)) ^ p5 ^ 3527539
	if h == 1<<64-1 {
		h = 1546275796
	}
	if int64(h) < 0 {
		h = -h
	}
	return int(h % (1 << 31))
}
