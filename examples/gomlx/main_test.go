package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/dataset"
)

// tolerance is by how much the loss of an epoch may differ from that of one process, relative to it.
const tolerance = 1e-5

// TestSameCurve compares 1, 2 and 4 ranks, and 3 with unequal parts, with one process, on the digits.
func TestSameCurve(t *testing.T) {
	for _, nproc := range []int{1, 2, 3, 4} {
		t.Run(fmt.Sprint(nproc), func(t *testing.T) {
			var out bytes.Buffer
			const epochs = 4
			require.NoError(t, run(t.Context(), nproc, epochs, &out))
			lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
			require.Len(t, lines, epochs+2)
			var r report
			require.NoError(t, json.Unmarshal(lines[epochs+1], &r))
			require.Equal(t, nproc, r.Ranks)
			require.True(t, r.ParamsIdentical)
			require.Less(t, r.LossDifference, tolerance, out.String())
			require.InDelta(t, r.SingleAccuracy, r.Accuracy, 2./359)
			require.Greater(t, r.Accuracy, 0.93)
		})
	}
}

func TestFlags(t *testing.T) {
	for _, c := range [][2]int{{-1, 1}, {17, 1}, {1, 0}} {
		require.Error(t, run(t.Context(), c[0], c[1], nil))
	}
}

// TestInterrupted: a training in one process, which calls no other rank, ends with its context.
func TestInterrupted(t *testing.T) {
	data, err := dataset.Digits()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = fit(ctx, nil, data, 1)
	require.ErrorIs(t, err, context.Canceled)
}
