package ddp_test

import (
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/pg"
)

var _ ddp.Group = (*pg.ProcessGroup)(nil)
