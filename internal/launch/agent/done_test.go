package agent

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// dying is the store of an agent that dies before it is counted.
type dying struct{ store.Store }

func (dying) Add(context.Context, string, int64) (int64, error) { return 0, errors.New("dead") }

// TestDoneOrder: a node that is not counted is not marked either, so that node 0 does not wait for it.
func TestDoneOrder(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	a := &agent{Job: Job{Nodes: 2, NodeRank: 1}, nodes: dying{st}}
	a.done("done", "end")
	require.False(t, must.Get(st.Check(t.Context(), nodeDoneKey("done", 1))))
}
