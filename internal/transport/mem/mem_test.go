package mem_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
)

func group(t *testing.T, f *mem.Fabric, size int) []transport.Mesh {
	t.Helper()
	ms := make([]transport.Mesh, size)
	for r := range ms {
		m := must.Get(f.Join("g", r, size))
		t.Cleanup(func() { m.Close() })
		ms[r] = m
	}
	return ms
}

// TestKillOfAGroupWithSeveralNetworks: the rank dies on all of them, and on no other group's.
func TestKillOfAGroupWithSeveralNetworks(t *testing.T) {
	f := mem.NewFabric()
	ms := make(map[string]transport.Mesh)
	for _, name := range []string{"g/0", "g/1", "g/sub/0", "g"} {
		for r := range 2 {
			m := must.Get(f.Join(name, r, 2))
			defer m.Close()
			ms[name] = m // of rank 1
		}
	}
	f.Kill("g", 0)
	for name, m := range ms {
		died := name == "g/0" || name == "g/1"
		require.Equal(t, died, m.Diagnose(0)[0].Died, name)
		require.Nil(t, m.Fault(), "nobody needs it")
		r := post(m.Recv, 0, 1, 4)
		if died {
			<-r.Done()
			require.Equal(t, transport.FaultPeerDied, m.Fault().Kind, name)
			require.Zero(t, m.Fault().Rank)
		}
	}
}

func post(f func(*transport.Request), peer int, slot uint64, n int) *transport.Request {
	r := transport.NewRequest()
	r.Peer, r.Slot, r.Buf = peer, slot, make([]byte, n)
	f(r)
	return r
}

func TestAbortAfterCloseTellsNobody(t *testing.T) {
	ms := group(t, mem.NewFabric(), 2)
	require.NoError(t, ms[0].Close())
	ms[0].Abort(&transport.Fault{Kind: transport.FaultAborted})
	require.Nil(t, ms[1].Fault())
}

// TestRecvAnyWithNobodyLeft: as on the wire, it fails with the last departure.
func TestRecvAnyWithNobodyLeft(t *testing.T) {
	for _, early := range []bool{true, false} {
		ms := group(t, mem.NewFabric(), 3)
		var r *transport.Request
		if early {
			r = post(ms[0].RecvAny, -1, 1, 1)
		}
		require.NoError(t, ms[1].Close())
		require.Nil(t, ms[0].Fault(), "rank 2 may send")
		require.NoError(t, ms[2].Close())
		if !early {
			r = post(ms[0].RecvAny, -1, 1, 1)
		}
		require.NotNil(t, ms[0].Fault())
		<-r.Done()
		f := must.As[*transport.Fault](t, r.Err())
		require.Equal(t, transport.FaultPeerLeft, f.Kind)
		require.Equal(t, 2, f.Rank)
	}
}
