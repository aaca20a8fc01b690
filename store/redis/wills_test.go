package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// proxy stands between stores and a server. It brings bytes after a delay each way, unless a filter of their direction
// returns false.
type proxy struct {
	addr               string
	delay              time.Duration
	toServer, toClient atomic.Pointer[func([]byte) bool]

	mu    sync.Mutex
	conns []net.Conn
}

func newProxy(t *testing.T, to string, delay time.Duration) *proxy {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{addr: ln.Addr().String(), delay: delay}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, client, server)
			p.mu.Unlock()
			wg.Go(func() { p.bring(server, client, &p.toServer) })
			wg.Go(func() { p.bring(client, server, &p.toClient) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.cut()
		wg.Wait()
	})
	return p
}

// bring brings bytes until a connection ends.
func (p *proxy) bring(to, from net.Conn, filter *atomic.Pointer[func([]byte) bool]) {
	type chunk struct {
		due  time.Time
		data []byte
	}
	chunks := make(chan chunk, 1000)
	go func() {
		defer close(chunks)
		for {
			data := make([]byte, 64<<10)
			n, err := from.Read(data)
			if err != nil {
				return
			}
			chunks <- chunk{time.Now().Add(p.delay), data[:n]}
		}
	}()
	defer to.Close()
	for c := range chunks {
		time.Sleep(time.Until(c.due))
		if f := filter.Load(); f == nil || (*f)(c.data) {
			_, _ = to.Write(c.data)
		}
	}
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

// willing returns a store that leaves "dead" under a key.
func willing(t *testing.T, url, key string) *Store {
	t.Helper()
	s := connect(t, url, Options{})
	require.NoError(t, s.SetWill(t.Context(), key, nil, []byte("dead")))
	return s
}

// missed waits until somebody has carried out the will for a key.
func missed(t *testing.T, s *Store, key string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	require.NoError(t, s.Wait(ctx, key))
}

// TestWillsOutliveRestart: the server is away for seconds. Its stores come back at different times, and none of them is
// taken for dead.
func TestWillsOutliveRestart(t *testing.T) {
	t.Parallel()
	again := []string{"--port", "PORT", "--appendonly", "yes", "--appendfsync", "always", "--dir", t.TempDir()}
	first := startServer(t, again...)
	var all []*Store
	for i := range 6 {
		all = append(all, willing(t, "redis://"+first.addr+"?prefix=job", fmt.Sprint("gone", i)))
	}
	time.Sleep(2 * lookPause)
	first.kill()
	for i, s := range all { // the more errors there were, the less often go-redis tries to connect
		for range 4 * i {
			_, err := s.Check(t.Context(), "x")
			require.Error(t, err)
		}
	}
	time.Sleep(4 * time.Second)
	startServerAt(t, first.addr, again...)
	time.Sleep(4 * time.Second)
	for i, s := range all {
		gone, err := s.Check(t.Context(), fmt.Sprint("gone", i))
		require.NoError(t, err)
		require.False(t, gone, "store %d", i)
	}
	require.NoError(t, all[2].Close())
	missed(t, all[0], "gone2") // the others have come back, and are heard
}

// TestWillsAfterAnEarlierRun: members of a run that ended as a whole do not hide those of this one. They are removed
// later, without their wills.
func TestWillsAfterAnEarlierRun(t *testing.T) {
	srv := plainServer(t)
	for _, earlier := range []int{0, 1, neighbours, 2 * neighbours} {
		url := fmt.Sprintf("redis://%s?prefix=job%d", srv.addr, earlier)
		var old []*Store
		for i := range earlier {
			old = append(old, willing(t, url, fmt.Sprint("old", i)))
		}
		var wg sync.WaitGroup
		for _, s := range old {
			wg.Go(func() { _ = s.Close() })
		}
		wg.Wait()
		a, b := willing(t, url, "a"), willing(t, url, "b")
		time.Sleep(2 * lookPause)
		require.NoError(t, a.Close())
		missed(t, b, "a")
		b.mourner.mu.Lock()
		b.mourner.end() // this test looks in its place
		b.mourner.mu.Unlock()
		b.mourner.watching.Wait()
		if earlier == 0 {
			continue
		}
		require.NoError(t, b.SetWill(t.Context(), "b", nil, []byte("dead")))
		w := &watch{client: b.client, own: b.mourner.name, number: b.mourner.number, from: "-inf", passed: make(map[string]bool), looks: lastVisit - 1}
		members, err := b.client.ZRange(t.Context(), b.mourners(), 0, -1).Result()
		require.NoError(t, err)
		for _, name := range members[:len(members)-1] {
			w.passed[name] = true
		}
		heard, err := b.lookOnce(t.Context(), w)
		require.NoError(t, err)
		require.True(t, heard)
		members, err = b.client.ZRange(t.Context(), b.mourners(), 0, -1).Result()
		require.NoError(t, err)
		require.Equal(t, []string{b.mourner.name}, members)
		for i := range earlier {
			there, err := b.Check(t.Context(), fmt.Sprint("old", i))
			require.NoError(t, err)
			require.False(t, there)
		}
	}
}

// TestPassedMemberListens: a member that was silent for a moment while another one came counts again when it is heard.
func TestPassedMemberListens(t *testing.T) {
	srv := plainServer(t)
	url := "redis://" + srv.addr + "?prefix=job"
	a, b := willing(t, url, "a"), willing(t, url, "b")
	w := &watch{client: b.client, own: b.mourner.name, number: b.mourner.number, from: "(" + fmt.Sprint(a.mourner.number),
		passed: map[string]bool{a.mourner.name: true}, all: make(map[string]*neighbour), looks: revisit - 1}
	for range 2 {
		_, err := b.lookOnce(t.Context(), w)
		require.NoError(t, err)
	}
	require.Empty(t, w.passed)
	require.Contains(t, w.all, a.mourner.name)
}

// TestWillsNeedRoom: what cannot be written because the server is out of memory is written later.
func TestWillsNeedRoom(t *testing.T) {
	t.Parallel()
	srv := plainServer(t)
	url := "redis://" + srv.addr + "?prefix=job"
	a, b := willing(t, url, "a"), willing(t, url, "b")
	require.NoError(t, b.client.ConfigSet(t.Context(), "maxmemory", "1").Err())
	require.NoError(t, a.Close())
	time.Sleep(time.Second)
	require.NoError(t, b.client.ConfigSet(t.Context(), "maxmemory", "0").Err())
	missed(t, b, "a")
}

// TestWillsChangeMeanwhile: a will that comes while another store carries out the ones that it has read is not lost.
func TestWillsChangeMeanwhile(t *testing.T) {
	srv := plainServer(t)
	s := connect(t, "redis://"+srv.addr+"?prefix=job", Options{})
	hash := s.wills("gone 3")
	require.NoError(t, s.client.HSet(t.Context(), hash, "one", "0 dead", "two", "0 dead", "foreign", "text").Err())
	keys := []string{s.mourners(), hash, s.key("one")}
	done, err := mourn.Run(t.Context(), s.client, keys, "gone 3", 0, 1, "one", "0 dead", "", "dead").Int()
	require.NoError(t, err)
	require.Zero(t, done, "there are more")
	done, err = mourn.Run(t.Context(), s.client, keys, "gone 3", 0, 3, "one", "3 olddead", "old", "dead").Int()
	require.NoError(t, err)
	require.Zero(t, done, "it is another")
	require.NoError(t, s.carryOut(t.Context(), &watch{client: s.client}, "gone 3"))
	for _, key := range []string{"one", "two"} {
		v, err := s.Get(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, "dead", string(v))
	}
	n, err := s.client.Exists(t.Context(), hash).Result()
	require.NoError(t, err)
	require.Zero(t, n)
}

// TestWillsOnSlowNetwork: a store that needs long to connect again is not taken for dead.
func TestWillsOnSlowNetwork(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pool := writeCertificate(t, dir)
	srv := startServer(t, "--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no",
		"--tls-cert-file", filepath.Join(dir, "cert.pem"), "--tls-key-file", filepath.Join(dir, "key.pem"),
		"--tls-ca-cert-file", filepath.Join(dir, "cert.pem"))
	opts := Options{TLS: &tls.Config{RootCAs: pool}}
	open := func(addr, key string) *Store {
		s := connect(t, "rediss://"+addr+"?prefix=job", opts)
		require.NoError(t, s.SetWill(t.Context(), key, nil, []byte("dead")))
		return s
	}
	near := open(srv.addr, "near")
	far := open(newProxy(t, srv.addr, 75*time.Millisecond).addr, "far") // a round trip of 150 ms
	require.Greater(t, silencesOf(far.mourner.name), silences)
	for range 3 {
		time.Sleep(4 * lookPause)
		far.mourner.mu.Lock()
		far.mourner.sub.Close() // as if the network had ended it
		far.mourner.mu.Unlock()
		time.Sleep(2 * time.Second)
		gone, err := near.Check(t.Context(), "far")
		require.NoError(t, err)
		require.False(t, gone)
	}
	require.NoError(t, far.Close())
	missed(t, near, "far")
}

// TestSilencesOf: a foreign name does not make others wait for ever.
func TestSilencesOf(t *testing.T) {
	for name, want := range map[string]int{
		"TEXT 3": 3, "TEXT 9": 9, "TEXT 99999999": mostSilences, "TEXT -1": 3, "TEXT": 3, "": 3, "TEXT x": 3, "TEXT 4 5": 3,
	} {
		require.Equal(t, want, silencesOf(name), name)
	}
	require.Equal(t, silences, silencesFor(100*time.Millisecond))
	require.Equal(t, silences+4, silencesFor(400*time.Millisecond))
	require.Equal(t, mostSilences, silencesFor(time.Minute))
}

// TestCloseWhileListening: Close does not wait for long for a server that answers nothing on new connections.
func TestCloseWhileListening(t *testing.T) {
	t.Parallel()
	srv := plainServer(t)
	p := newProxy(t, srv.addr, 0)
	a := willing(t, "redis://"+p.addr+"?prefix=job", "a")
	var tried atomic.Bool
	drop := func(b []byte) bool {
		text := strings.ToLower(string(b))
		if strings.Contains(text, "hello") || strings.Contains(text, "subscribe") || strings.Contains(text, "{job}i") {
			tried.Store(true)
			return false
		}
		return true
	}
	p.toServer.Store(&drop)
	c := redis.NewClient(&redis.Options{Addr: srv.addr})
	defer c.Close()
	require.NoError(t, c.Do(t.Context(), "CLIENT", "KILL", "TYPE", "pubsub").Err())
	require.Eventually(t, tried.Load, 5*time.Second, 10*time.Millisecond)
	start := time.Now()
	require.NoError(t, a.Close())
	require.Less(t, time.Since(start), 2*lookLimit)
}

// TestDropWillThatMayBeThere: the answer to SetWill is lost. DropWill withdraws the will all the same.
func TestDropWillThatMayBeThere(t *testing.T) {
	srv := plainServer(t)
	p := newProxy(t, srv.addr, 0)
	b := willing(t, "redis://"+srv.addr+"?prefix=job", "b")
	a := willing(t, "redis://"+p.addr+"?prefix=job", "a")
	var sent atomic.Bool
	watched := func(b []byte) bool {
		if strings.Contains(string(b), "withdrawn") && sent.CompareAndSwap(false, true) {
			time.AfterFunc(20*time.Millisecond, p.cut)
		}
		return true
	}
	silent := func([]byte) bool { return !sent.Load() }
	p.toServer.Store(&watched)
	p.toClient.Store(&silent)
	require.Error(t, a.SetWill(t.Context(), "withdrawn", nil, []byte("dead")))
	p.toServer.Store(nil)
	p.toClient.Store(nil)
	there, err := b.client.HExists(t.Context(), b.wills(a.mourner.name), "withdrawn").Result()
	require.NoError(t, err)
	require.True(t, there)
	require.Eventually(t, func() bool { return a.DropWill(t.Context(), "withdrawn") == nil }, 5*time.Second, 10*time.Millisecond)
	there, err = b.client.HExists(t.Context(), b.wills(a.mourner.name), "withdrawn").Result()
	require.NoError(t, err)
	require.False(t, there)
}

// TestMemberBeforeItsWill: a store whose first will has not come yet is a member, and known to those that come then.
func TestMemberBeforeItsWill(t *testing.T) {
	srv := plainServer(t)
	url := "redis://" + srv.addr + "?prefix=job"
	a := connect(t, url, Options{})
	a.mourner.mu.Lock()
	require.NoError(t, a.listen(t.Context()))
	a.mourner.mu.Unlock()
	b := willing(t, url, "b")
	require.NoError(t, a.SetWill(t.Context(), "a", nil, []byte("dead")))
	require.NoError(t, a.Close())
	missed(t, b, "a")
}

// TestWillsLeaveNothing: keys expire also if a user may not listen.
func TestWillsLeaveNothing(t *testing.T) {
	srv := plainServer(t)
	admin := connect(t, "redis://"+srv.addr, Options{})
	require.NoError(t, admin.client.Do(t.Context(), "ACL", "SETUSER", "deaf", "on", ">pass", "~*", "resetchannels", "+@all").Err())
	s := connect(t, "redis://deaf:pass@"+srv.addr, Options{Prefix: "job"})
	require.ErrorIs(t, s.SetWill(t.Context(), "k", nil, []byte("v")), errors.ErrUnsupported)
	keys, err := admin.client.Keys(t.Context(), "{job}*").Result()
	require.NoError(t, err)
	for _, k := range keys {
		left, err := admin.client.PTTL(t.Context(), k).Result()
		require.NoError(t, err)
		require.Positive(t, left, k)
	}
}

// TestIncarnationIsRenewed: an earlier job's may be about to expire when a store comes.
func TestIncarnationIsRenewed(t *testing.T) {
	srv := plainServer(t)
	url := "redis://" + srv.addr + "?prefix=job"
	first, err := New(t.Context(), url, Options{Expiry: 2 * time.Second})
	require.NoError(t, err)
	require.NoError(t, first.Close())
	time.Sleep(1500 * time.Millisecond)
	s := connect(t, url, Options{Expiry: time.Hour})
	left, err := s.client.PTTL(t.Context(), s.prefix+incarnationKey).Result()
	require.NoError(t, err)
	require.Greater(t, left, time.Minute)
}

// TestCloneOfEmptiedServer: a clone promises the same data.
func TestCloneOfEmptiedServer(t *testing.T) {
	srv := plainServer(t)
	s := connect(t, "redis://"+srv.addr+"?prefix=job", Options{})
	require.NoError(t, s.client.FlushAll(t.Context()).Err())
	_, err := s.Clone(t.Context())
	require.ErrorIs(t, err, ErrEmptied)
}

// TestIdleConnections: with TLS, the server ends connections that lie idle before the store uses them again.
func TestIdleConnections(t *testing.T) {
	config, err := parse("redis://localhost?prefix=job", &Options{})
	require.NoError(t, err)
	require.Equal(t, maxIdle, config.ConnMaxIdleTime)
	config, err = parse("redis://localhost?prefix=job&conn_max_idle_time=5s", &Options{})
	require.NoError(t, err)
	require.Equal(t, 5*time.Second, config.ConnMaxIdleTime)
}
