package store

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHashForgetsItsWaiters(t *testing.T) {
	h := NewHash()
	h.SetTimeout(time.Millisecond)
	for _, k := range []string{"a", "b"} {
		require.ErrorIs(t, h.Wait(t.Context(), k), ErrTimeout)
	}
	require.Empty(t, h.signals)

	h.SetTimeout(time.Minute)
	done := make(chan error)
	go func() { done <- h.Wait(t.Context(), "c") }()
	require.NoError(t, h.Set(t.Context(), "c", nil))
	require.NoError(t, <-done)
	require.Empty(t, h.signals)
}
