package hostmesh

import (
	"context"
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// TestNear has meshes of ranks of which every other is on another host. TestOneProgram has other hosts.
func TestNear(t *testing.T) {
	transporttest.Run(t, transporttest.Config{
		New:   func(t testing.TB, size int) []transport.Mesh { return nearMeshes(t, size, 2) },
		Sizes: []int{8 << 10, 64<<10 + 1, 256 << 10},
		No:    []transporttest.Feature{transporttest.Allocations}, // a receive from any rank makes two
	})
}

// nearMeshes connects ranks of which number i is on host i modulo hosts.
func nearMeshes(t testing.TB, size, hosts int) []transport.Mesh {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ends, addrs := make([]*tcp.Endpoint, size), make([]string, size)
	near, places := make([]*shm.Endpoint, size), make([]string, size)
	for r := range size {
		ends[r] = must.Get(tcp.Listen(tcp.Options{Host: "127.0.0.1"}))
		addrs[r] = ends[r].Addr()
		near[r] = must.Get(shm.NewEndpoint())
		places[r] = near[r].Addr()
	}
	ms, errs := make([]transport.Mesh, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			all, err := ends[r].Join(ctx, r, addrs)
			if errs[r] = err; err != nil {
				return
			}
			var members []int
			var here []string
			for q := r % hosts; q < size; q += hosts {
				members, here = append(members, q), append(here, places[q])
			}
			ms[r] = all
			if len(members) == 1 {
				errs[r] = near[r].Close()
				return
			}
			local, err := near[r].Join(ctx, r/hosts, here, shm.Options{})
			if errs[r] = err; err == nil {
				ms[r], errs[r] = New(local, all, members, shm.MeshOptions{})
			}
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, m := range ms {
			wg.Go(func() { m.Close() })
		}
		wg.Wait()
	})
	for _, err := range errs {
		require.NoError(t, err)
	}
	return ms
}

// TestNearLastWords has a receive from any rank wait while the others leave. The last of them sends
// first. It is on this host or on another one, as it comes.
func TestNearLastWords(t *testing.T) {
	for i := range 20 {
		ms := nearMeshes(t, 4, 2)
		any := func() *transport.Request {
			r := transport.NewRequest()
			r.Peer, r.Slot, r.Buf = -1, 7, make([]byte, 3)
			ms[0].RecvAny(r)
			return r
		}
		waiting := any()
		last := 1 + i%3
		for r := 1; r < len(ms); r++ {
			if r != last {
				require.NoError(t, ms[r].Close())
			}
		}
		s := transport.NewRequest()
		s.Peer, s.Slot, s.Buf = 0, 7, []byte("bye")
		ms[last].Send(s)
		must.Receive(t, "the last message of a rank", s.Done())
		require.NoError(t, s.Err())
		require.NoError(t, ms[last].Close())
		must.Receive(t, "a receive from any rank", waiting.Done())
		require.NoError(t, waiting.Err())
		require.Equal(t, last, waiting.Peer)
		require.Equal(t, "bye", string(waiting.Buf))

		after := any()
		must.Receive(t, "a receive from any rank after all have left", after.Done())
		f := must.As[*transport.Fault](t, after.Err())
		require.Equal(t, transport.FaultPeerLeft, f.Kind)
		require.ErrorAs(t, ms[0].Fault(), &f)
	}
}

// TestNearFromAnybody has all send on one slot to a rank that takes what comes: each message once,
// those of a rank in order.
func TestNearFromAnybody(t *testing.T) {
	for _, n := range []int{8, 200_000} {
		const each, window = 60, 5
		ms := nearMeshes(t, 4, 2)
		var wg sync.WaitGroup
		for _, m := range ms[1:] {
			wg.Go(func() {
				for i := range each {
					s := transport.NewRequest()
					s.Peer, s.Slot, s.Buf = 0, 7, make([]byte, n)
					binary.LittleEndian.PutUint32(s.Buf[n-4:], uint32(i))
					m.Send(s)
					<-s.Done()
					if !assert.NoError(t, s.Err()) {
						return
					}
				}
			})
		}
		var posted []*transport.Request
		next := make([]uint32, len(ms))
		for i := range 3*each + window {
			if i < 3*each {
				r := transport.NewRequest()
				r.Peer, r.Slot, r.Buf = -1, 7, make([]byte, n)
				ms[0].RecvAny(r)
				posted = append(posted, r)
			}
			if i < window {
				continue
			}
			r := posted[i-window]
			must.Receive(t, "a receive from any rank", r.Done())
			require.NoError(t, r.Err())
			require.Equal(t, next[r.Peer], binary.LittleEndian.Uint32(r.Buf[n-4:]), "from rank %d", r.Peer)
			next[r.Peer]++
		}
		require.Equal(t, []uint32{0, each, each, each}, next)
		wg.Wait()
	}
}
