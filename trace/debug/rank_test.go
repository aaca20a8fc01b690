package debug

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func TestRankAddr(t *testing.T) {
	for _, c := range []struct {
		addr  string
		local int
		want  string
	}{
		{"127.0.0.1:6060", 3, "127.0.0.1:6063"},
		{"127.0.0.1:6060", -1, "127.0.0.1:6060"},
		{"[::1]:6060", 1, "[::1]:6061"},
		{"127.0.0.1:0", 3, "127.0.0.1:0"},
		{"unix:/tmp/page", 3, "unix:/tmp/page"},
	} {
		require.Equal(t, c.want, must.Get(rankAddr(c.addr, c.local)))
	}
	require.ErrorContains(t, must.Err(rankAddr("127.0.0.1:65535", 1)), "local rank 1 would have port 65536")
}
