package redis

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
)

// TestKept: the store says when its server may have lost keys, and why.
func TestKept(t *testing.T) {
	s := connect(t, "redis://"+plainServer(t).addr+"?prefix=job", Options{})
	require.NoError(t, s.Set(t.Context(), "key", []byte("value")))
	require.NoError(t, store.Kept(t.Context(), store.Prefix("group", s)))
	require.NoError(t, s.client.FlushDB(t.Context()).Err())
	require.ErrorIs(t, store.Kept(t.Context(), store.Prefix("group", s)), ErrEmptied)
}

func TestKeptEviction(t *testing.T) {
	server := startServer(t, "--port", "PORT", "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-random")
	s := connect(t, "redis://"+server.addr+"?prefix=job", Options{})
	other := connect(t, "redis://"+server.addr+"?prefix=other", Options{})
	for i := 0; s.Kept(t.Context()) == nil; i++ {
		require.Less(t, i, 1000, "nothing is evicted")
		require.NoError(t, other.Set(t.Context(), fmt.Sprint(i), bytes.Repeat([]byte("x"), 100<<10)))
		// The incarnation may be the key that is evicted.
		require.NoError(t, s.client.SetNX(t.Context(), s.prefix+incarnationKey, *s.incarnation.Load(), 0).Err())
	}
	err := s.Kept(t.Context())
	require.ErrorIs(t, err, ErrLosesKeys)
	require.ErrorContains(t, err, "it has evicted keys to free memory (evicted_keys was 0, and is ")
	require.ErrorContains(t, err, server.addr)
}

// TestKeptRestart: a server that has its data back may lack the last of them.
func TestKeptRestart(t *testing.T) {
	again := []string{"--port", "PORT", "--appendonly", "yes", "--appendfsync", "always", "--dir", t.TempDir()}
	first := startServer(t, again...)
	s := connect(t, "redis://"+first.addr+"?prefix=job", Options{})
	require.NoError(t, s.Set(t.Context(), "key", []byte("value")))
	require.NoError(t, s.Kept(t.Context()))
	first.kill()
	startServerAt(t, first.addr, again...)
	require.Eventually(t, func() bool { // the old connection ends first
		_, err := s.Check(t.Context(), "key")
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
	err := s.Kept(t.Context())
	require.ErrorIs(t, err, ErrLosesKeys)
	require.ErrorContains(t, err, "it was started again, or another server has taken its place")
}
