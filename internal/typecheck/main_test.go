package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCheck has a module with mistakes in files of some platforms.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":             "module example.com/m\n\ngo 1.25\n",
		"m.go":               "package m\n\nimport \"os\"\n\nvar Args = os.Args\n",
		"m_darwin.go":        "package m\n\nfunc f() int { return \"\" }\n",
		"m_386.go":           "package m\n\nconst large int = 1 << 40\n",
		"m_freebsd.go":       "package m\n\nimport \"syscall\"\n\nvar _ = syscall.Flock\n",
		"m_windows.go":       "package m\n\nimport \"syscall\"\n\nvar _ = syscall.Flock\n",
		"only/only_plan9.go": "package only\n\nimport \"os\"\n\nvar x = os.Nothing\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	for platform, want := range map[string]string{
		"linux/arm64": "", "freebsd/amd64": "", "darwin/arm64": "m_darwin.go:3:23", "linux/386": "m_386.go:3",
		"windows/amd64": "undefined: syscall.Flock", "plan9/amd64": "undefined: os.Nothing", "linux/none": "want a platform",
	} {
		n, err := check(dir, platform)
		if want == "" {
			require.NoError(t, err, platform)
			require.Equal(t, 1, n)
		} else {
			require.ErrorContains(t, err, want, platform)
		}
	}
}
