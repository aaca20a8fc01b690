package redis

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// cluster starts a Redis Cluster of three nodes, with a third of the slots each.
func cluster(t *testing.T) (nodes [3]*server, clients [3]*redis.Client) {
	t.Helper()
	for i := range nodes {
		_, bus, err := net.SplitHostPort(freeport.Loopback(t))
		require.NoError(t, err)
		nodes[i] = startServer(t, "--port", "PORT", "--cluster-enabled", "yes", "--cluster-port", bus)
		clients[i] = redis.NewClient(&redis.Options{Addr: nodes[i].addr})
		t.Cleanup(func() { clients[i].Close() })
		const slots = 16384
		require.NoError(t, clients[i].ClusterAddSlotsRange(t.Context(), i*slots/3, (i+1)*slots/3-1).Err())
		if i > 0 { // go-redis does not pass on the port of the bus
			host, port, _ := net.SplitHostPort(nodes[i].addr)
			require.NoError(t, clients[0].Do(t.Context(), "cluster", "meet", host, port, bus).Err())
		}
	}
	require.Eventually(t, func() bool {
		for _, c := range clients {
			info, err := c.ClusterInfo(t.Context()).Result()
			if err != nil || !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_known_nodes:3") {
				return false
			}
		}
		return true
	}, time.Minute, 10*time.Millisecond)
	return nodes, clients
}

// TestCluster: whichever node of a Redis Cluster the ranks name, they meet at the one that has their keys.
func TestCluster(t *testing.T) {
	t.Parallel()
	nodes, clients := cluster(t)
	for job := range 5 { // in several slots
		prefix := fmt.Sprint("job", job)
		var all []*Store
		for _, n := range nodes {
			s := connect(t, "redis://"+n.addr+"/0?prefix="+prefix, Options{Timeout: 20 * time.Second})
			require.Equal(t, "127.0.0.1", s.LocalAddr().String())
			all = append(all, s)
		}
		require.NoError(t, all[0].Set(t.Context(), "k", []byte("v")))
		require.NoError(t, all[1].QueuePush(t.Context(), "q", []byte("e")))
		clone := must.Get(all[1].Clone(t.Context()))
		t.Cleanup(func() { clone.Close() })
		for _, s := range append([]store.Store{clone}, all[1], all[2]) {
			v := must.Get(s.Get(t.Context(), "k"))
			require.Equal(t, "v", string(v))
			must.Get(s.Add(t.Context(), "n", 1))
		}
		require.Equal(t, "e", string(must.Get(all[2].QueuePop(t.Context(), "q", false))))
	}
	for _, n := range nodes {
		_, err := New(t.Context(), "redis://"+n.addr+"/1")
		require.ErrorContains(t, err, "database 1: ERR SELECT is not allowed in cluster mode")
	}

	// The cluster gives the keys to another node.
	s := connect(t, "redis://"+nodes[0].addr+"/0?prefix=moves", Options{})
	from := 0
	for nodes[from].addr != s.config.Addr {
		from++
	}
	to := (from + 1) % 3
	slot := must.Get(clients[0].ClusterKeySlot(t.Context(), s.key("k")).Result())
	id := must.Get(clients[to].Do(t.Context(), "cluster", "myid").Text())
	require.NoError(t, clients[from].FlushAll(t.Context()).Err())
	for _, i := range []int{to, from} {
		require.NoError(t, clients[i].Do(t.Context(), "cluster", "setslot", strconv.FormatInt(slot, 10), "node", id).Err())
	}
	err := s.Set(t.Context(), "k", nil)
	require.ErrorContains(t, err, `the Redis Cluster has moved the keys of prefix "moves" to the node `+nodes[to].addr+"; start the job again, with that node in the URL")
}

func TestAtNode(t *testing.T) {
	for _, c := range []struct{ url, addr, want, err string }{
		{url: "redis://u:p@a:1/0?prefix=x", addr: "b:2", want: "redis://u:p@b:2/0?prefix=x"},
		{url: "redis://a:1", addr: ":2", want: "redis://a:2"},
		{url: "rediss://[::1]:1", addr: "?:2", want: "rediss://[::1]:2"},
		{url: "redis://a:1", addr: "fe80::1:7", want: "redis://[fe80::1]:7"},
		{url: "redis://a:1", addr: "b", err: `the node "b" has no port`},
		{url: "unix:///run/redis.sock", addr: "b:2", err: `give the address of the node "b:2" in place of the socket`},
	} {
		got, err := atNode(c.url, c.addr)
		require.Equal(t, c.want, got, "%+v", c)
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
		}
	}
}
