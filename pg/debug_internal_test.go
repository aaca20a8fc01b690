package pg

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/rankpage"
)

// TestNoDebugPage: a program without trace/debug works, says what it lacks, and tells c10d run.
func TestNoDebugPage(t *testing.T) {
	serve := rankpage.Serve
	require.NotNil(t, serve, "the tests import trace/debug")
	rankpage.Serve = nil
	defer func() { rankpage.Serve = serve }()
	path := filepath.Join(t.TempDir(), "page0")
	for _, addr := range []string{"127.0.0.1:0", "unix:" + path} {
		require.False(t, rankpage.Declined(path))
		var lines strings.Builder
		o := InitOptions{Options: Options{Logger: slog.New(slog.NewTextHandler(&lines, nil))}}
		url := "tcp://127.0.0.1:0?rank=0&world_size=1"
		require.NoError(t, must.Get(initFrom(t.Context(), url, o, environ("C10D_DEBUG_ADDR="+addr))).Close())
		require.Contains(t, lines.String(), "no debug page of rank 0")
		require.Contains(t, lines.String(), `lacks import _ \"github.com/c10d-go/c10d/trace/debug\"`)
	}
	require.True(t, rankpage.Declined(path))
}
