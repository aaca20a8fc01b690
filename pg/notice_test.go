package pg

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/notice"
)

// TestTold: the error of a rank has another rank's fault, and what happened to this rank only if that is something else.
func TestTold(t *testing.T) {
	cause := errors.New(`no interface "ens9"`)
	fault := &GroupFault{Rank: 0, By: 0, Text: fmt.Sprintf("rank 0 of 2: %v", cause)}
	require.EqualError(t, told{fault, fmt.Errorf("rank 1 of 2: %w", cause)}, `rank 0 of 2: no interface "ens9"`)
	require.EqualError(t, told{fault, errors.New("EOF")}, `rank 0 of 2: no interface "ens9" (this rank: EOF)`)
	var other *notice.Fault
	require.ErrorAs(t, told{fault, cause}, &other)
	require.ErrorIs(t, told{fault, cause}, cause)
}
