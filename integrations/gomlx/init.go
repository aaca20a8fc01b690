package gomlx

import (
	"context"
	"errors"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

// initGroup makes the default group, or one of this process alone.
func initGroup(ctx context.Context) (*pg.ProcessGroup, error) {
	g, err := pg.Init(ctx, "env://")
	if errors.Is(err, pg.ErrNoLauncher) {
		return pg.New(ctx, store.NewHash(), 0, 1)
	}
	return g, err
}
