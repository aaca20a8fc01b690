package option_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/option"
)

func TestLast(t *testing.T) {
	type options struct{ n int }
	call := func(o ...options) int { return option.Last(o).n }
	require.Zero(t, call())
	require.Equal(t, 1, call(options{1}))
	require.Equal(t, 2, call(options{1}, options{2}))
	require.Zero(t, testing.AllocsPerRun(100, func() { call(options{1}) }))
}
