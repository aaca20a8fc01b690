//go:build unix

package netns

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestNotPermitted: only what the system does not permit is ErrNotPermitted, for which tests are skipped.
func TestNotPermitted(t *testing.T) {
	for text, permitted := range map[string]bool{
		`mount --make-shared /run/netns failed: Operation not permitted`:  false,
		`mkdir /run/netns failed: Permission denied`:                      false,
		`Cannot create namespace file "/run/netns/c10d1xbr": File exists`: true,
		`Error: Unknown device type.`:                                     true,
	} {
		dir := t.TempDir()
		script := "#!/bin/sh\necho '" + text + "' >&2\nexit 1\n"
		require.NoError(t, os.WriteFile(filepath.Join(dir, "ip"), []byte(script), 0o700))
		t.Setenv("PATH", dir)
		err := must.Err(New("x", 1))
		require.ErrorContains(t, err, text)
		if permitted {
			require.NotErrorIs(t, err, ErrNotPermitted)
		} else {
			require.ErrorIs(t, err, ErrNotPermitted)
		}
	}
}
