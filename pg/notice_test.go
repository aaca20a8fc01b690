package pg

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/must"
)

// TestTold: the error of a rank has another rank's fault, and what happened to this rank only if that is something else.
func TestTold(t *testing.T) {
	cause := errors.New(`no interface "ens9"`)
	fault := &meet.Fault{Rank: 0, By: 0, Text: fmt.Sprintf("rank 0 of 2: %v", cause)}
	require.EqualError(t, told{fault, fmt.Errorf("rank 1 of 2: %w", cause)}, `rank 0 of 2: no interface "ens9"`)
	require.EqualError(t, told{fault, errors.New("EOF")}, `rank 0 of 2: no interface "ens9" (this rank: EOF)`)
	must.As[*meet.Fault](t, told{fault, cause})
	require.ErrorIs(t, told{fault, cause}, cause)
}
