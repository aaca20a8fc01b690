package main

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func TestRun(t *testing.T) {
	for _, where := range []string{"sim", "cuda"} {
		t.Run(where, func(t *testing.T) {
			if where == "sim" {
				defer goleak.VerifyNone(t)
			}
			sums, err := run(where, 2)
			if where == "cuda" && errors.Is(err, driver.ErrNoDevice) {
				t.Skip(err)
			}
			require.NoError(t, err)
			require.Len(t, sums, elements)
			for i, v := range sums {
				require.Equal(t, uint32(i*i+(i+1)*(i+1)), v)
			}
		})
	}
}

//go:embed squares.cu
var source []byte

// TestSource: the PTX is the one of the source beside it.
func TestSource(t *testing.T) {
	first, _, _ := bytes.Cut(squares, []byte("\n"))
	require.Equal(t, fmt.Sprintf("// squares.cu has SHA-256 %x", sha256.Sum256(source)), string(first), "run examples/internal/ptx.sh")
}

func TestNowhere(t *testing.T) {
	_, err := run("tpu", 2)
	require.EqualError(t, err, `kernel: -device: "tpu" must be sim or cuda`)
}
