package work_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/work"
)

// TestAbortWithoutACause: the backend always learns a cause.
func TestAbortWithoutACause(t *testing.T) {
	p := work.NewPromise(info)
	p.RunBy(aborter(func(cause error) { p.Complete(cause) }))
	p.Work().Abort(nil)
	require.ErrorIs(t, p.Work().Wait(t.Context()), work.ErrAborted)
}
