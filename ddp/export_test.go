package ddp

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// NeedTorch returns a python that has PyTorch.
func NeedTorch(t *testing.T) string {
	t.Helper()
	const python = "/usr/bin/python3"
	if err := exec.Command(python, "-c", "import torch").Run(); err != nil {
		require.Empty(t, os.Getenv("C10D_REQUIRE_SERVICES"), "no PyTorch: %v", err)
		t.Skipf("%s has no torch: %v", python, err)
	}
	return python
}
