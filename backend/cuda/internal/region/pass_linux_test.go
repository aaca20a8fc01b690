package region

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestPass opens a region as a process in another PID namespace does, which cannot open the file through /proc.
func TestPass(t *testing.T) {
	path, own := openPath, OwnProcess
	openPath = func(string, string) (*os.File, error) { return nil, errors.New("no such process") }
	OwnProcess = false
	defer func() { openPath, OwnProcess = path, own }()
	r, err := New(PageSize)
	require.NoError(t, err)
	name := r.Name
	var all []*Region
	for range 3 {
		o := must.Get(Open(name, PageSize))
		all = append(all, o)
	}
	r.Word(8).Store(5)
	for _, o := range all {
		require.EqualValues(t, 5, o.Word(8).Load())
	}
	require.ErrorContains(t, must.Err(Open(name, 2*PageSize)), "has 4096 bytes")
	require.NoError(t, r.Hide())
	require.ErrorContains(t, must.Err(Open(name, PageSize)), "no such process; asking process")
	for _, o := range append(all, r) {
		require.NoError(t, o.Leave())
	}
}
