package gloo

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/tcp"
)

// TestJoiningNamesRanks: ranks that have published where they listen but do not connect are
// named, whichever side connects.
func TestJoiningNamesRanks(t *testing.T) {
	for rank := range 2 {
		t.Run(fmt.Sprint("rank ", rank), func(t *testing.T) {
			var ends []*tcp.Endpoint
			var addrs []string
			for range 2 {
				e := must.Get(tcp.Listen(tcp.Options{Host: "127.0.0.1"}))
				defer e.Close()
				ends, addrs = append(ends, e), append(addrs, e.Addr())
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			report := joining(ends[rank])
			text, _ := report(ctx)
			require.Empty(t, text)
			done := make(chan error, 1)
			go func() { _, err := ends[rank].Join(ctx, rank, addrs); done <- err }()
			want := fmt.Sprintf("waiting for rank %d to connect", 1-rank)
			require.Eventually(t, func() bool {
				text, attrs := report(ctx)
				return text == want && len(attrs) == 1 && attrs[0].Key == "missing"
			}, 20*time.Second, time.Millisecond)
			cancel()
			require.Error(t, <-done)
		})
	}
}

// TestVoteNamesRanks: ranks that have not voted are named.
func TestVoteNamesRanks(t *testing.T) {
	f := mem.NewFabric()
	var meshes []transport.Mesh
	for r := range 3 {
		m := must.Get(f.Join("vote", r, 3))
		defer m.Close()
		meshes = append(meshes, m)
	}
	v, other := newVote(meshes[0]), newVote(meshes[1])
	text, _ := v.report(t.Context())
	require.Equal(t, "waiting for ranks 1 and 2 to say whether they share memory", text)
	heard := make(chan error, 1)
	go func() { heard <- v.hear(t.Context(), func(error) {}) }()
	other.cast(nil)
	require.Eventually(t, func() bool {
		text, _ := v.report(t.Context())
		return text == "waiting for rank 2 to say whether they share memory"
	}, 20*time.Second, time.Millisecond)
	third := newVote(meshes[2])
	third.cast(nil)
	require.NoError(t, <-heard)
	text, _ = v.report(t.Context())
	require.Empty(t, text)
}
