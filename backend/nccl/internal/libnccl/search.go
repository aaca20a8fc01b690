package libnccl

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Variable is the environment variable with the library's path.
const Variable = "C10D_NCCL_LIBRARY"

const soname = "libnccl.so.2"

// ErrNoLibrary is matched where no NCCL can be loaded.
var ErrNoLibrary = errors.New("NCCL's library cannot be loaded")

// Candidates returns places of the library, the best first: path, or the value of Variable. Without both it is
// PyTorch's in the packages of Python, and then that of the system's loader.
func Candidates(path string) []string {
	if path != "" {
		return []string{path}
	}
	if path = os.Getenv(Variable); path != "" {
		return []string{path}
	}
	return append(wheels(), soname)
}

// wheels returns the libraries in packages of Python: of the active environment, then of the python3 that is in the
// path, then of the user and of the system.
func wheels() (found []string) {
	roots := []string{os.Getenv("VIRTUAL_ENV"), os.Getenv("CONDA_PREFIX")}
	if python, err := exec.LookPath("python3"); err == nil {
		for _, p := range []func(string) (string, error){filepath.Abs, filepath.EvalSymlinks} {
			if at, err := p(python); err == nil {
				roots = append(roots, filepath.Dir(filepath.Dir(at)))
			}
		}
	}
	if home, err := os.UserHomeDir(); err == nil {
		roots = append(roots, filepath.Join(home, ".local"))
	}
	for _, root := range append(roots, "/usr/local", "/usr", "/opt/conda") {
		if root == "" {
			continue
		}
		for _, pattern := range []string{"lib/python3*/site-packages", "lib/python3*/dist-packages", "lib/python3/dist-packages"} {
			there, _ := filepath.Glob(filepath.Join(root, pattern, "nvidia/nccl/lib", soname))
			slices.Reverse(there) // the newest Python first
			for _, f := range there {
				if !slices.Contains(found, f) {
					found = append(found, f)
				}
			}
		}
	}
	return found
}

// missing is the error for libraries none of which could be loaded.
func missing(tried []string, why error) error {
	return fmt.Errorf("%w (tried %s): %w; give nccl.Options.Library or %s its path, for example "+
		"site-packages/nvidia/nccl/lib/%s of PyTorch's Python", ErrNoLibrary, strings.Join(tried, ", "), why, Variable, soname)
}
