package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ErrLosesKeys is matched by the error of Kept. Since the store was opened, the server has evicted
// keys, was started again, or was replaced by another one. Keys of the store may be lost.
var ErrLosesKeys = errors.New("the server may have lost keys of this store")

// identity is what a server says of itself.
type identity struct {
	run     string // a random name of its process
	evicted string // how many keys it has evicted
}

// identify reads the incarnation of the prefix, and what the server says of itself: nil if this user may
// not ask.
func (s *Store) identify(ctx context.Context) (incarnation string, now *identity, err error) {
	var found, process, stats *redis.StringCmd
	s.client.Pipelined(ctx, func(p redis.Pipeliner) error { // its error is that of one command
		found, process, stats = p.Get(ctx, s.prefix+incarnationKey), p.Info(ctx, "server"), p.Info(ctx, "stats")
		return nil
	})
	if process.Err() == nil && stats.Err() == nil {
		now = &identity{field(process.Val(), "run_id"), field(stats.Val(), "evicted_keys")}
	}
	return found.Val(), now, found.Err()
}

// field returns the value of a line of INFO.
func field(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Kept implements store.Keeper. Its error matches ErrEmptied or ErrLosesKeys. Without the permission
// for INFO it only notices a server without the store's data.
func (s *Store) Kept(ctx context.Context) error {
	_, err := do(ctx, s, "check", nil, func(ctx context.Context) (struct{}, error) {
		found, now, err := s.identify(ctx)
		was := s.server.Load()
		switch {
		case err == redis.Nil || err == nil && found != *s.incarnation.Load():
			err = emptied{strings.Trim(s.prefix, "{}")}
		case err != nil || now == nil || was == nil:
		case now.run != was.run:
			err = fmt.Errorf("%w: it was started again, or another server has taken its place, and the last keys may be missing", ErrLosesKeys)
		case now.evicted != was.evicted:
			err = fmt.Errorf("%w: it has evicted keys to free memory (evicted_keys was %s, and is %s): set maxmemory-policy noeviction", ErrLosesKeys, was.evicted, now.evicted)
		}
		return struct{}{}, err
	})
	return err
}
