//go:build noredis

package pg

import (
	"context"
	"errors"

	"github.com/c10d-go/c10d/store"
)

func openRedis(context.Context, string, string, InitOptions) (store.Store, error) {
	return nil, errors.New("redis:// is not in this program: it was built with the tag noredis; build it without that tag")
}
