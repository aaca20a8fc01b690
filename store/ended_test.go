package store_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
)

// TestEndedContexts: an operation whose context has ended says so, and names no time that it has
// not waited.
func TestEndedContexts(t *testing.T) {
	needFileLocks(t)
	hash := store.NewHash()
	defer hash.Close()
	file := openFile(t, filepath.Join(t.TempDir(), "store"), 1)
	defer file.Close()
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	for _, s := range []store.Store{hash, file} {
		_, err := s.Add(ctx, "key", 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotRegexp(t, `after \d+h`, err.Error())
		_, err = s.Get(ctx, "key")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotRegexp(t, `after \d+h`, err.Error())
	}
}
