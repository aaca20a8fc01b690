package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func runReport(t *testing.T, nproc, epochs int) report {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), nproc, epochs, &out))
	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
	require.Len(t, lines, epochs+1)
	var r report
	require.NoError(t, json.Unmarshal(lines[epochs], &r))
	require.Equal(t, nproc, r.Ranks)
	require.True(t, r.ParamsIdentical)
	return r
}

// TestRanksAgree: one rank and three compute the same but for rounding, three
// with parts of unequal size.
func TestRanksAgree(t *testing.T) {
	one, three := runReport(t, 1, 4), runReport(t, 3, 4)
	require.InDelta(t, one.Loss, three.Loss, 1e-5*one.Loss)
	require.InDelta(t, one.Accuracy, three.Accuracy, 2./359)
	require.Greater(t, three.Accuracy, 0.93)
}

func TestFlags(t *testing.T) {
	for _, c := range [][2]int{{-1, 1}, {17, 1}, {1, 0}} {
		require.Error(t, run(t.Context(), c[0], c[1], nil))
	}
}
