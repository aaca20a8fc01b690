//go:build noredis

package pg

import (
	"context"
	"errors"
	"time"

	"github.com/c10d-go/c10d/store"
)

func openRedis(context.Context, string, string, time.Duration) (store.Store, error) {
	return nil, errors.New("redis:// is not in this program: it was built with the tag noredis, build it without")
}
