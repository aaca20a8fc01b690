package directway

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestSettling has messages that are posted while the ranks connect. They wait no longer than their context
// and their timeout.
func TestSettling(t *testing.T) {
	d := &Group{B: &group.Engine{}}
	d.lanes.state, d.lanes.settled = laneSettling, make(chan struct{})
	x, err := tensor.New(tensor.Float32, 1)
	require.NoError(t, err)
	soon := func(what string, f func() error) error {
		ended := make(chan error, 1)
		go func() { ended <- f() }()
		return must.Receive(t, what, ended)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.NoError(t, soon("a send whose context ends", func() error {
		k, err := d.admit(ctx, work.Send, backend.P2POptions{Timeout: time.Hour}, x, 1, out, nil)
		k.refuse() // the engine refuses it
		return err
	}))
	require.ErrorIs(t, soon("a receive whose time is over", func() error {
		_, err := d.admit(t.Context(), work.Recv, backend.P2POptions{Timeout: 10 * time.Millisecond}, x, 1, in, nil)
		return err
	}), work.ErrTimeout)
	require.ErrorIs(t, soon("a receive from any rank", func() error {
		return must.Err(d.seek(t.Context(), backend.P2POptions{Timeout: 10 * time.Millisecond}, nil, nil))
	}), work.ErrTimeout)
	require.Zero(t, d.lanes.hosted)
	close(d.lanes.settled)
}
