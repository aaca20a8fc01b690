package tcp

import (
	"bytes"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

func meshes(ms []*Mesh) []transport.Mesh {
	out := make([]transport.Mesh, len(ms))
	for i, m := range ms {
		out[i] = m
	}
	return out
}

// kill makes a rank's sockets end as the kernel ends those of a process.
func kill(_ testing.TB, ms []transport.Mesh, rank int) {
	m, ok := ms[rank].(*Mesh)
	if !ok {
		m = ms[rank].(*restless).Mesh
	}
	m.acceptor.listener.Close()
	var conns []net.Conn
	m.Mu.Lock()
	for _, p := range m.pairs {
		if p != nil {
			conns = append(conns, p.first.conn)
			for _, l := range p.bulk {
				conns = append(conns, l.conn)
			}
			conns = slices.AppendSeq(conns, maps.Keys(p.inbound))
		}
	}
	for _, c := range conns {
		c.Close()
	}
	m.Mu.Unlock()
}

// Requests that are posted together meet those of the other rank in their order, whatever
// their sizes and whoever comes first.
func TestPost(t *testing.T) {
	rnd := must.Rand(t)
	for name, o := range map[string]Options{"asleep": local, "polling": polling()} {
		t.Run(name, func(t *testing.T) {
			ms := join(t, 2, o)
			sizes := make([][2][]int, 100) // of what each rank sends, by round
			for i := range sizes {
				for from := range 2 {
					for range rnd.IntN(4) {
						sizes[i][from] = append(sizes[i][from], rnd.IntN(4*defaultEager))
					}
				}
			}
			var wg sync.WaitGroup
			for rank, m := range ms {
				wg.Go(func() {
					for i, n := range sizes {
						var recvs, sends []*transport.Request
						for k, n := range n[1-rank] {
							recvs = append(recvs, req(1-rank, uint64(k%2), make([]byte, n)))
						}
						for k, n := range n[rank] {
							sends = append(sends, req(1-rank, uint64(k%2), bytes.Repeat([]byte{byte(i + k)}, n)))
						}
						m.Post(recvs, sends)
						for _, r := range slices.Concat(sends, recvs) {
							m.PollUntil(waiter{r})
							if err := wait(t, r); !assert.NoError(t, err) {
								return
							}
						}
						for k, r := range recvs {
							assert.Equal(t, len(r.Buf), bytes.Count(r.Buf, []byte{byte(i + k)}), "round %d, message %d", i, k)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// A send uses a GRANT that has come, even if nobody has read it, and makes no OFFER.
func TestPostReadsGrant(t *testing.T) {
	ms := join(t, 2, polling())
	if ms[0].pairs[1].in.sock == nil {
		t.Skip("connections cannot be polled here")
	}
	in := ms[0].pairs[1].in
	in.mu.Lock()
	in.paused = true
	in.sock.notify(false)
	in.mu.Unlock()
	r := recv(ms[1], 0, 1, make([]byte, 2*defaultEager))
	s := req(1, 1, make([]byte, 2*defaultEager))
	p := ms[0].pairs[1]
	for by := time.Now().Add(patience); ; { // the grant is on its way
		ms[0].Mu.Lock()
		ms[0].readGrant(s)
		wants := p.s.needsGrant(s)
		ms[0].Mu.Unlock()
		if !wants {
			break
		}
		require.True(t, time.Now().Before(by), "the grant does not come")
	}
	ms[0].Post(nil, []*transport.Request{s})
	require.NoError(t, waitPolling(t, ms[0], s))
	require.NoError(t, waitPolling(t, ms[1], r))
	ms[0].Mu.Lock()
	require.Empty(t, ms[0].deferred)
	ms[0].Mu.Unlock()
	ms[0].ResumeReaders()
}

func TestF34Mesh(t *testing.T) {
	small := local
	small.Eager, small.Window = 512, minWindow
	small.Lanes, small.bulkyBytes, small.pieceBytes = 2, 64<<10, 20000
	for name, o := range map[string]Options{"default": local, "small": small} {
		t.Run(name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Config{
				New:   func(t testing.TB, size int) []transport.Mesh { return meshes(join(t, size, o)) },
				Kill:  kill,
				Sizes: []int{511, 512, 513, 4095, 4096, copyLimit, copyLimit + 1, readBuffer - headerLen, readBuffer, 512<<10 - 1, 512 << 10},
			})
		})
	}
}
