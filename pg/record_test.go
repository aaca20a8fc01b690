package pg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func TestRecordError(t *testing.T) {
	now := time.Unix(1700000000, 999)
	failure := errors.New("gloo: \"rank 1\"\nleft")
	file := filepath.Join(t.TempDir(), "error.json")
	env := func(path string) func(string) string {
		return func(name string) string {
			require.Equal(t, "TORCHELASTIC_ERROR_FILE", name)
			return path
		}
	}

	require.NoError(t, recordError(nil, env(file), now))
	told := fmt.Errorf("stopped: %w", context.Canceled)
	require.Equal(t, told, recordError(told, env(file), now))
	require.NoFileExists(t, file)
	require.Equal(t, failure, recordError(failure, env(""), now))

	// A restarted rank writes over what it left before.
	require.NoError(t, os.WriteFile(file, []byte("of an earlier attempt, and longer than what comes now: "+string(make([]byte, 1000))), 0o600))
	require.Equal(t, failure, recordError(failure, env(file), now))
	text := must.Get(os.ReadFile(file))
	require.JSONEq(t, `{"message":{"message":"gloo: \"rank 1\"\nleft","extraInfo":{"timestamp":"1700000000"}}}`, string(text))

	err := recordError(failure, env(filepath.Join(file, "below")), now)
	require.ErrorIs(t, err, failure)
	require.ErrorContains(t, err, "pg: TORCHELASTIC_ERROR_FILE: ")
	must.As[*os.PathError](t, err)
}
