package backend_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestCustomWithoutAFunction: it would end the process, in the middle of an operation.
func TestCustomWithoutAFunction(t *testing.T) {
	for _, op := range []backend.ReduceOp{backend.Custom("f", nil), backend.CustomOf[float32]("f", nil)} {
		require.ErrorContains(t, must.Err(op.Reduction(tensor.Float32, 2)), `"f" has no function`)
	}
}
