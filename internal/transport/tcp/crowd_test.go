package tcp

import (
	"context"
	"flag"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
)

// The defaults are for two slow CPUs and the race detector. A full run:
//
//	go test ./internal/transport/tcp -run Crowd -crowd 1024 -crowd.processes 256 -crowd.tries 20 -timeout 2h
var (
	crowd          = flag.Int("crowd", 200, "`ranks` of TestCrowd")
	crowdProcesses = flag.Int("crowd.processes", 24, "`ranks` of TestCrowdOfProcesses, each a process")
	crowdTries     = flag.Int("crowd.tries", 1, "`n` groups of each kind")
	crowdStrangers = flag.Int("crowd.strangers", 600, "`n` connections at a door that say nothing")
)

// besiege connects n times with a place of a, and says nothing. The connections are closed with
// the test.
func besiege(t testing.TB, a address, n int) {
	t.Helper()
	for range n {
		c := must.Get(net.Dial("tcp", a.places[0].String()))
		t.Cleanup(func() { c.Close() })
	}
}

// All other ranks connect with rank 0 at once. They do not connect with each other: the
// descriptors of one process do not suffice for that.
func TestCrowd(t *testing.T) {
	for _, n := range []int{0, *crowdStrangers} {
		for range *crowdTries {
			t.Run(fmt.Sprintf("%d strangers", n), func(t *testing.T) { meetZero(t, *crowd, n) })
		}
	}
}

func meetZero(t *testing.T, size, strangers int) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es := make([]*Endpoint, size)
	addrs := make([]string, size)
	for r := range es {
		e := must.Get(Listen(local))
		defer e.Close()
		es[r], addrs[r] = e, e.Addr()
	}
	all := must.Get(checkAddresses(0, es[0].addr, addrs))
	besiege(t, es[0].addr, strangers/2)
	var connected, others sync.WaitGroup
	connected.Add(size - 1)
	for r := 1; r < size; r++ {
		others.Go(func() {
			m := newMesh(r, size, es[r].opts)
			defer m.Close()
			m.addrs = all
			if err := m.connect(ctx, 0); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			connected.Done()
			<-ctx.Done()
		})
	}
	besiege(t, es[0].addr, strangers-strangers/2)
	m, err := es[0].Join(ctx, 0, addrs)
	if err == nil {
		connected.Wait()
	}
	cancel()
	others.Wait()
	require.NoError(t, err)
	require.NoError(t, m.Close())
}

// There is room for all ranks of a large group and for strangers, however late the ranks say
// hello.
func TestRoomForAll(t *testing.T) {
	const size = 600
	o := local
	o.Handshake = patience // until the last of them has said hello
	e := must.Get(Listen(o))
	addrs := []string{e.Addr()}
	peers := make([]address, size)
	for r := 1; r < size; r++ {
		peers[r] = stranger()
		addrs = append(addrs, peers[r].String())
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	joined := make(chan error, 1)
	go func() {
		m, err := e.Join(ctx, 0, addrs)
		if err == nil {
			m.Close()
		}
		joined <- err
	}()
	conns := make([]net.Conn, size)
	for r := 1; r < size; r++ {
		conns[r] = must.Get(net.Dial("tcp", e.addr.places[0].String()))
		defer conns[r].Close()
		conns[r].SetDeadline(time.Now().Add(patience))
	}
	besiege(t, e.addr, strangers.Limit(0))
	for r := 1; r < size; r++ {
		h := helloOf(uint32(r), size, 0, e.addr.token)
		must.Get(conns[r].Write(h.encode()))
	}
	for r := 1; r < size; r++ {
		require.Equal(t, uint32(verdictOK), answerOf(t, conns[r], peers[r].token).verdict)
	}
	require.NoError(t, <-joined)
}

// Many processes meet. Each has all addresses of this host.
func TestCrowdOfProcesses(t *testing.T) {
	for range *crowdTries {
		t.Run("try", func(t *testing.T) {
			ps := spawnProcesses(t, make([][]string, *crowdProcesses))
			defer ps.stop()
			for _, s := range ps.addrs[:min(2, len(ps.addrs))] {
				a := must.Get(parseAddress(s))
				besiege(t, a, *crowdStrangers)
			}
			begun := time.Now()
			ps.run(t, order{Addrs: ps.addrs, Bytes: 1000, Times: 3, Patience: 5 * time.Minute})
			t.Logf("%d processes met in %v", len(ps.ranks), time.Since(begun).Round(time.Millisecond))
		})
	}
}
