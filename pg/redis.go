//go:build !noredis

package pg

import (
	"context"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
)

// openRedis opens the store of redis:// and rediss://. Compiling go-redis takes as long
// as everything else together, so a program can be built without it (-tags noredis).
func openRedis(ctx context.Context, url, prefix string, o InitOptions) (store.Store, error) {
	return redis.New(ctx, url, redis.Options{Prefix: prefix, Timeout: o.Timeout, TLS: o.TLS})
}
