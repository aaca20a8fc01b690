package sockets

import (
	"net"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func TestOf(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil && addr == "[::1]:0" {
			t.Log("no IPv6: ", err)
			continue
		}
		require.NoError(t, err)
		defer l.Close()
		all := must.Get(Of(os.Getpid()))
		at := l.Addr().(*net.TCPAddr).AddrPort()
		i := slices.IndexFunc(all, func(s Socket) bool { return s.Listens && s.Local == at })
		require.GreaterOrEqual(t, i, 0, "%v in %v", at, all)
		require.Equal(t, addr != ":0", all[i].IsLoopback())
	}
	require.ErrorIs(t, must.Err(Of(-1)), os.ErrNotExist)
}
