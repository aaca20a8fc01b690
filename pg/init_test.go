package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testcerts"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// meetOnly is a backend that does nothing but meet the other ranks in the store.
type meetOnly struct {
	backend.Backend
	closed bool
}

func (m *meetOnly) Close() error { m.closed = true; return nil }
func (m *meetOnly) Abort(error)  {}

var registerMeet = sync.OnceValue(func() error {
	return backend.Register(backend.Registration{
		Name: "init-meet", Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (_ backend.Backend, err error) {
			defer must.Catch(&err)
			must.Do(o.Store.Set(ctx, strconv.Itoa(o.Rank), []byte("here")))
			for r := range o.Size {
				must.Do(o.Store.Wait(ctx, strconv.Itoa(r)))
			}
			return &meetOnly{}, nil
		},
	})
})

func environ(vars string) func(string) string {
	m := make(map[string]string)
	for _, kv := range strings.Fields(vars) {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	return func(k string) string { return m[k] }
}

// patience bounds what the tests wait for.
const patience = 20 * time.Second

// initAll runs Init on every rank, with "%d" in url and env standing for the rank.
func initAll(t *testing.T, size int, url, env string, o InitOptions) []*ProcessGroup {
	t.Helper()
	require.NoError(t, registerMeet())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	o.Backend = "init-meet"
	groups := make([]*ProcessGroup, size)
	var all errgroup.Group
	for r := range size {
		fill := func(s string) string { return strings.ReplaceAll(s, "%d", strconv.Itoa(r)) }
		all.Go(func() (err error) {
			o := o
			if o.Size > 0 {
				o.Rank = r
			}
			groups[r], err = initFrom(ctx, fill(url), o, environ(fill(env)))
			return err
		})
	}
	require.NoError(t, all.Wait())
	for r, g := range groups {
		require.Equal(t, []int{r, size}, []int{g.Rank(), g.Size()})
	}
	return groups
}

func closeAll(t *testing.T, groups []*ProcessGroup) {
	for _, g := range groups {
		b := must.Get(g.Backend(tensor.CPU))
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
		require.True(t, b.(*meetOnly).closed)
		require.Error(t, g.now().world.owned.Set(context.Background(), "k", nil), "the group left its store open")
	}
}

// rewrite writes the keys again that groups have written in order to meet, and deleted.
func rewrite(t *testing.T, groups []*ProcessGroup) {
	t.Helper()
	for _, g := range groups {
		g.now().tidier.wait()
	}
	for _, g := range groups {
		for _, key := range g.now().tidier.written {
			require.NoError(t, g.now().world.store.Set(t.Context(), key, nil))
		}
	}
}

func keys(t *testing.T, st store.Store) string {
	return fmt.Sprint(must.Get(st.ListKeys(context.Background())))
}

// runKey matches the key of a run of Go ranks alone that stands for one of PyTorch's.
func runKey(key string) string {
	return strings.Replace(regexp.QuoteMeta(key), "default_pg/", "default_pg/c10d-go/run/[0-9a-f]{32}/", 1)
}

// A limit below 0 is no limit to a store, but not to Init.
func TestInitTimeout(t *testing.T) {
	for _, limit := range []time.Duration{-1, 0, time.Hour} {
		for _, url := range []string{"file://" + filepath.Join(t.TempDir(), "f"), "tcp://127.0.0.1:0"} {
			groups := initAll(t, 1, url, "", InitOptions{Options: Options{Timeout: limit}, Size: 1})
			want := backend.DefaultTimeout
			if limit > 0 {
				want = limit
			}
			require.Equal(t, want, groups[0].Timeout())
			require.Equal(t, want, groups[0].Store().Timeout())
			closeAll(t, groups)
		}
	}
}

func TestInitURLs(t *testing.T) {
	addr := freeport.Loopback(t)
	host, port, _ := net.SplitHostPort(addr)
	master := "MASTER_ADDR=" + host + " MASTER_PORT=" + port
	dir := t.TempDir()
	for _, c := range []struct {
		name, url, env string
		o              InitOptions
	}{
		{name: "env", url: "env://", env: "RANK=%d WORLD_SIZE=3 " + master},
		{name: "no URL", env: "RANK=%d WORLD_SIZE=3 " + master},
		{name: "env, options win", url: "env://", env: "RANK=7 WORLD_SIZE=9 LOCAL_WORLD_SIZE=9 " + master, o: InitOptions{Size: 3}},
		{name: "env, the URL wins", url: "env://?rank=%d", env: "RANK=7 WORLD_SIZE=3 " + master},
		{name: "env, Slurm", url: "env://", env: "SLURM_PROCID=%d SLURM_NTASKS=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_RESV_PORTS=" + port},
		{name: "tcp", url: "tcp://" + addr + "?rank=%d&world_size=3&use_libuv=0"},
		{name: "tcp with options", url: "tcp://" + addr, o: InitOptions{Size: 3}},
		{name: "tcp with options that agree", url: "tcp://" + addr + "?rank=%d&world_size=3", o: InitOptions{Size: 3}},
		{name: "tcp in mpirun", url: "tcp://" + addr, env: "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=3"},
		{name: "tcp in torchrun, elsewhere", url: "tcp://" + addr, env: "RANK=%d WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=1 TORCHELASTIC_USE_AGENT_STORE=True"},
		{name: "file", url: "file://" + filepath.Join(dir, "a") + "?rank=%d&world_size=3"},
		{name: "barrier", url: "file://" + filepath.Join(dir, "b"), o: InitOptions{Size: 3}, env: "TORCH_DIST_INIT_BARRIER=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			groups := initAll(t, 3, c.url, c.env, c.o)
			rewrite(t, groups)
			rewrite(t, groups)
			require.Regexp(t, runKey("default_pg/0//cpu//2"), keys(t, groups[0].now().world.owned))
			require.Equal(t, c.name == "barrier", groups[0].now().world.options.InitBarrier)
			closeAll(t, groups)
		})
	}
	require.NoFileExists(t, filepath.Join(dir, "a"))
}

// TestInitDetail states what TORCH_DISTRIBUTED_DEBUG does, and where the
// control groups meet.
func TestInitDetail(t *testing.T) {
	for _, c := range []struct {
		level, key string
	}{
		{"OFF", ""},
		{"info", ""},
		{"detail", "default_pg/0//cpu//pg_wrapper:0/c10d-go/1"},
	} {
		t.Run(c.level, func(t *testing.T) {
			inMemory := gloo.Options{Fabric: gloo.NewFabric()}
			groups := initAll(t, 2, "file://"+filepath.Join(t.TempDir(), "store")+"?rank=%d&world_size=2",
				"TORCH_DISTRIBUTED_DEBUG="+c.level, InitOptions{Options: Options{
					BackendOptions: BackendOptions{inMemory},
				}})
			rewrite(t, groups)
			got := keys(t, groups[0].now().world.owned)
			require.Equal(t, c.key != "", strings.Contains(got, "pg_wrapper"), got)
			require.Regexp(t, runKey(c.key), got)
			for _, g := range groups {
				b := must.Get(g.Backend(tensor.CPU))
				d, checked := b.(*detail.Backend)
				require.Equal(t, c.key != "", checked)
				require.NoError(t, g.Close())
				if checked {
					require.True(t, d.Unwrap().(*meetOnly).closed)
				}
			}
		})
	}
}

func TestInitAgentStore(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, scheme := range []string{"env", "tcp"} {
		agent := must.Get(tcp.New(ctx, "127.0.0.1:0", tcp.Options{Server: true}))
		defer agent.Close()
		url := map[string]string{"env": "env://", "tcp": "tcp://" + agent.Addr()}[scheme]
		host, port, _ := net.SplitHostPort(agent.Addr())
		groups := initAll(t, 2, url, "RANK=%d WORLD_SIZE=2 MASTER_ADDR="+host+" MASTER_PORT="+port+
			" TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=4", InitOptions{})
		rewrite(t, groups)
		closeAll(t, groups)
		require.Regexp(t, runKey("default_pg/0//cpu//1"), keys(t, agent))
	}
}

// TestTorch1Keys states where ranks of PyTorch up to 2.0 have their keys.
func TestTorch1Keys(t *testing.T) {
	agents := store.NewHash()
	defer agents.Close()
	for key, from := range map[string]origin{
		"default_pg/k":                   {attempt: 4},
		"/worker/attempt_4/default_pg/k": {attempt: 4, agents: agents},
	} {
		st := torch1Keys(store.Prefix("default_pg", agents), from)
		require.True(t, store.IsTorch1(store.Prefix("0", st)))
		require.NoError(t, st.Set(t.Context(), "k", nil))
		require.True(t, must.Get(agents.Delete(t.Context(), key)), key)
	}
}

func TestInitRefuses(t *testing.T) {
	for _, c := range []struct {
		url, env, want string
		o              InitOptions
	}{
		{url: "env://", want: "launch: environment variable RANK expected, but not set, nor are those of any launcher: start the program with a launcher, for example `c10d run -n 2 -- PROGRAM`"},
		{url: "tcp://h:1", want: "launch: environment variable RANK expected, but not set, nor are those of any launcher: start the program with a launcher, for example `c10d run -n 2 -- PROGRAM`, or give rank and size in InitOptions or in the URL (?rank=0&world_size=2)"},
		{url: "env://", env: "RANK=0 WORLD_SIZE=1", want: "launch: torchrun/env: environment variables MASTER_ADDR and MASTER_PORT expected, but not set; found RANK=0, WORLD_SIZE=1"},
		{url: "env://", o: InitOptions{Size: 2}, want: "launch: environment variables MASTER_ADDR and MASTER_PORT expected, but not set; found rank 0 given by the caller, world size 2 given by the caller"},
		{url: "env://", o: InitOptions{Rank: 4, Size: 4}, want: "rank 4 is not within a world of 4: the caller gave both, in InitOptions or in the URL"},
		{url: "env://?rank=4", env: "RANK=0 WORLD_SIZE=4", want: "launch: torchrun/env: rank 4 is not within a world of 4; found rank 4 given by the caller, WORLD_SIZE=4"},
		{url: "env://?worldsize=1", want: `env:// has no parameter "worldsize"`},
		{url: "tcp://127.0.0.1?rank=0&world_size=1", want: `tcp:// needs host and port, not "127.0.0.1"`},
		{url: "tcp://127.0.0.1:0?rank=0&world_size=2", want: "tcp:// with port 0: give a port that all ranks know"},
		{url: "tcp://127.0.0.1:1?rank=0", want: "tcp:// with a rank needs world_size too"},
		{url: "tcp://127.0.0.1:1?world_size=2", env: "RANK=0 WORLD_SIZE=3", want: "tcp:// with a world_size needs rank too"},
		{url: "tcp://127.0.0.1:1?rank=1&world_size=2", o: InitOptions{Rank: 0, Size: 2}, want: "rank is 1 in the URL and 0 in the options"},
		{url: "tcp://127.0.0.1:1?rank=x&world_size=2", want: `rank="x" in the URL is not a number of 0 or more`},
		{url: "tcp://127.0.0.1:1?rank=2&world_size=2", want: "rank 2 is not within a world of 2: the caller gave both, in InitOptions or in the URL"},
		{url: "tcp://127.0.0.1:1", o: InitOptions{Rank: 1}, want: "Rank is 1 and Size is 0: give both, with Rank below Size"},
		{url: "file://a/b?rank=0&world_size=1", want: `file:// needs the absolute path of a file, not "a/b"`},
		{url: "redis://h?rank=0&world_size=1", want: "redis:// needs a name that tells this run from others: ?prefix=NAME"},
		{url: "redis://h", env: "RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none", want: "redis:// needs a name that tells this run from others: ?prefix=NAME"},
		{url: "redis://u:secret@h\x7f", want: "the URL cannot be parsed"},
		{url: "tcp://127.0.0.1:1?rank=0&world_size=1", env: "TORCH_DISTRIBUTED_DEBUG=ALL", want: `TORCH_DISTRIBUTED_DEBUG is "ALL"; it must be OFF, INFO or DETAIL`},
		{url: "etcd://h", want: `store: no store for scheme "etcd": there are env, tcp, file, redis, rediss and those of store.Register`},
	} {
		_, err := initFrom(context.Background(), c.url, c.o, environ(c.env))
		require.EqualError(t, err, c.want, c.url)
	}
	_, err := Init(context.Background(), "mpi://")
	require.ErrorContains(t, err, "pg: Init: store: no store for scheme")
}

// schemes counts the runs of TestInitRegistered: a scheme is registered for good.
var schemes atomic.Int64

// TestInitRegistered: Init takes URLs of a scheme that the program has registered, with a prefix.
func TestInitRegistered(t *testing.T) {
	st := store.NewHash()
	var got store.OpenOptions
	scheme := fmt.Sprint("inittest", schemes.Add(1))
	store.Register(scheme, func(_ context.Context, url string, o store.OpenOptions) (store.Store, error) {
		require.Equal(t, scheme+"://h/x?y=z", url)
		got = o
		return st, nil
	})
	_, err := Init(t.Context(), scheme+"://h/x?y=z&rank=0&world_size=1")
	require.ErrorContains(t, err, scheme+":// needs a name that tells this run from others: ?prefix=NAME")
	g, err := Init(t.Context(), scheme+"://h/x?y=z&prefix=p&rank=0&world_size=1", InitOptions{Options: Options{Timeout: time.Minute}})
	require.NoError(t, err)
	require.Equal(t, store.OpenOptions{Prefix: "p", Timeout: time.Minute}, got)
	require.NoError(t, g.Close())
	require.ErrorIs(t, must.Err(st.NumKeys(t.Context())), store.ErrClosed)
}

func TestInitPrefix(t *testing.T) {
	for env, want := range map[string]string{
		"RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=job-3 TORCHELASTIC_RESTART_COUNT=2": "job-3/attempt_2",
		"SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_ID=77 SLURM_STEP_ID=3":              "77.3",
	} {
		m := must.Get(resolve("redis://u:secret@h:1/2?pool_size=4", InitOptions{}, environ(env)))
		require.Equal(t, want, m.prefix)
		require.Equal(t, "redis://u:secret@h:1/2?pool_size=4", m.url)
	}
}

// TestNumbered: the launcher knows a rank by its number in the world, unless the program numbers ranks otherwise.
func TestNumbered(t *testing.T) {
	const env = "RANK=1 WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=7 TORCHELASTIC_USE_AGENT_STORE=True"
	for _, c := range []struct {
		url  string
		o    InitOptions
		want bool
	}{
		{"", InitOptions{}, true},
		{"env://?rank=1&world_size=3", InitOptions{}, true},
		{"env://", InitOptions{Rank: 1, Size: 3}, true},
		{"tcp://h:7?rank=1&world_size=3", InitOptions{}, true},
		{"env://?rank=0&world_size=3", InitOptions{}, false},
		{"env://", InitOptions{Rank: 1, Size: 2}, false},
	} {
		m := must.Get(resolve(c.url, c.o, environ(env)))
		require.True(t, m.env.AgentStore)
		require.Equal(t, c.want, m.numbered, "%+v", c)
	}
}

// TestInitCloses checks that the store does not outlive an Init that failed.
func TestInitCloses(t *testing.T) {
	addr := freeport.Loopback(t)
	_, err := initFrom(context.Background(), "tcp://"+addr+"?rank=0&world_size=1", InitOptions{Options: Options{Backend: "no-such"}}, environ(""))
	require.ErrorIs(t, err, backend.ErrUnknownBackend)
	ln, err := net.Listen("tcp", addr)
	require.NoError(t, err, "the store of a failed Init still listens")
	require.NoError(t, ln.Close())
}

// startRedis returns the address of a Redis server of the test's own.
func startRedis(t *testing.T) string {
	t.Helper()
	addr := freeport.Loopback(t)
	startRedisAt(t, addr)
	return addr
}

// startRedisAt starts a server, and returns what kills it.
func startRedisAt(t *testing.T, addr string, args ...string) (kill func()) {
	t.Helper()
	server, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
		}
		t.Skip("redis-server is not installed: ", err)
	}
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command(server, append([]string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir(), "--repl-diskless-sync-delay", "0"}, args...)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	kill = sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("redis-server at %s:\n%s", addr, &log)
		}
	})
	t.Cleanup(kill)
	require.Eventually(t, func() bool { // it listens before it answers
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return false
		}
		defer conn.Close()
		_, err = io.WriteString(conn, "PING\r\nQUIT\r\n")
		answer, _ := io.ReadAll(conn)
		return err == nil && strings.HasPrefix(string(answer), "+PONG")
	}, patience, 10*time.Millisecond)
	return kill
}

func TestInitRedis(t *testing.T) {
	addr := startRedis(t)
	groups := initAll(t, 3, "redis://"+addr+"/0?prefix=run-1&rank=%d&world_size=3", "", InitOptions{})
	rewrite(t, groups)
	require.Regexp(t, runKey("default_pg/0//cpu//2"), keys(t, groups[0].now().world.owned))
	closeAll(t, groups)
}

// TestInitTLS has TLS of Init, or of the environment, cover what the ranks send each
// other as well as the store.
func TestInitTLS(t *testing.T) {
	t.Parallel()
	cert, key, ca := testcerts.Files(t)
	env := fmt.Sprintf("C10D_TLS_CERT=%s C10D_TLS_KEY=%s C10D_TLS_CA=%s", cert, key, ca)
	secret := filepath.Join(t.TempDir(), "tls-secret")
	require.NoError(t, credentials.WriteSecret(secret))
	config := testcerts.Config(t)
	for name, c := range map[string]struct {
		env string
		o   InitOptions
	}{
		"options":             {"", InitOptions{TLS: config}},
		"environment":         {env, InitOptions{}},
		"security":            {"", InitOptions{Security: Security{Cert: cert, Key: key, CA: ca}}},
		"one secret":          {"C10D_TLS_SECRET=" + secret, InitOptions{}},
		"security wins":       {env, InitOptions{Security: Security{Secret: secret}}},
		"options win":         {"C10D_TLS_CERT=/no/such", InitOptions{TLS: config}},
		"only in the backend": {"", InitOptions{Options: Options{BackendOptions: BackendOptions{gloo.Options{TLS: config}}}}},
	} {
		t.Run(name, func(t *testing.T) {
			addr := freeport.Loopback(t)
			var ranks errgroup.Group
			for r := range 2 {
				ranks.Go(func() (err error) {
					defer must.Catch(&err)
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					defer cancel()
					o := c.o
					o.Rank, o.Size = r, 2
					g := must.Get(initFrom(ctx, "tcp://"+addr, o, environ(c.env)))
					defer g.Close()
					sub := must.Get(g.NewGroup(ctx, []int{0, 1}))
					for _, of := range []*ProcessGroup{g, sub} {
						if e := of.Explain()[0]; e.Wire != "native" || !strings.Contains(e.Why, "TLS") {
							return fmt.Errorf("wire %s: %s", e.Wire, e.Why)
						}
					}
					return Wait(sub.AllReduce(ctx, Slice([]float32{1}), backend.Sum()))
				})
			}
			require.NoError(t, ranks.Wait())
		})
	}
	for want, c := range map[string]struct{ url, env string }{
		"give both -tls-cert":            {"tcp://127.0.0.1:0", "C10D_TLS_CERT=a"},
		"need -tls-ca (C10D_TLS_CA)":     {"tcp://127.0.0.1:0", "C10D_TLS_CERT=a C10D_TLS_KEY=a"},
		"no such file":                   {"tcp://127.0.0.1:0", "C10D_TLS_SECRET=/no/such"},
		"either -tls-secret":             {"tcp://127.0.0.1:0", "C10D_TLS_CERT=a C10D_TLS_SECRET=b"},
		"no part in the job's secret":    {"rediss://127.0.0.1:1?prefix=p", "C10D_TLS_SECRET=" + secret},
		"the URL's scheme is not rediss": {"redis://127.0.0.1:1?prefix=p", env},
	} {
		_, err := initFrom(t.Context(), c.url, InitOptions{Size: 1}, environ(c.env))
		require.ErrorContains(t, err, want)
	}
}

// TestARankWithoutTLS has one rank of a job with TLS speak clear text. It is refused at once. The others
// wait for it, and name it when their time is over.
func TestARankWithoutTLS(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "tls-secret")
	require.NoError(t, credentials.WriteSecret(secret))
	// start starts ranks of a world, of which some have TLS.
	start := func(addr string, size int, timeout time.Duration, secure map[int]bool) func() []error {
		errs := make([]error, size)
		var ranks sync.WaitGroup
		for r, has := range secure {
			ranks.Go(func() {
				o := InitOptions{Rank: r, Size: size, Options: Options{Timeout: timeout}}
				if has {
					o.Security.Secret = secret
				}
				var g *ProcessGroup
				if g, errs[r] = initFrom(context.Background(), "tcp://"+addr, o, environ("")); errs[r] == nil {
					g.Close()
				}
			})
		}
		return func() []error {
			ranks.Wait()
			return errs
		}
	}
	last := start(freeport.Loopback(t), 3, 6*time.Second, map[int]bool{0: true, 1: false, 2: true})
	host := start(freeport.Loopback(t), 2, 6*time.Second, map[int]bool{0: false, 1: true})
	errs := last()
	require.ErrorContains(t, errs[1], "the server speaks TLS, and this side does not")
	for _, r := range []int{0, 2} {
		require.ErrorContains(t, errs[r], "rank 1 has not called Init")
		require.NotContains(t, errs[r].Error(), "rank 0 has not")
		require.NotContains(t, errs[r].Error(), "rank 2 has not")
	}

	// Without rank 0, which hosts the store, the others fail at once.
	errs = host()
	require.ErrorContains(t, errs[1], "rank 0 hosts the store: the server refuses this side's TLS")
	require.ErrorContains(t, errs[0], "rank 1 has not called Init")
}

// freeJob returns a name for a job whose port nobody listens on.
func freeJob(t *testing.T, prefix string) (name string, port int) {
	t.Helper()
	for i := range 1000 {
		name := fmt.Sprint(prefix, i)
		e, err := launch.Detect(environ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_NAMESPACE=" + name))
		require.NoError(t, err)
		if ln, err := net.Listen("tcp", net.JoinHostPort(e.Addr, strconv.Itoa(e.Port))); err == nil {
			require.NoError(t, ln.Close())
			return name, e.Port
		}
	}
	t.Fatal("no port is free")
	return "", 0
}

// TestInitTwoJobsOfMPI starts two jobs with the variables that mpirun sets, rank 1
// of each before rank 0.
func TestInitTwoJobsOfMPI(t *testing.T) {
	require.NoError(t, registerMeet())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	var groups []*ProcessGroup
	var all errgroup.Group
	for _, job := range []string{"a", "b"} {
		name, port := freeJob(t, job)
		for _, r := range []int{1, 0} {
			all.Go(func() error {
				g, err := initFrom(ctx, "", InitOptions{Options: Options{Backend: "init-meet"}}, environ(fmt.Sprintf(
					"OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=%[1]d OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=%s", r, name)))
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				groups = append(groups, g)
				if got := g.now().world.owned.(*tcp.Store).Addr(); got != net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) {
					return fmt.Errorf("job %s met at %s", name, got)
				}
				return nil
			})
		}
	}
	require.NoError(t, all.Wait())
	closeAll(t, groups)
}

// TestInitStrangers: where two jobs have one port nevertheless, every rank of the
// second is told so.
func TestInitStrangers(t *testing.T) {
	addr := freeport.Loopback(t)
	host, port, _ := net.SplitHostPort(addr)
	first, err := tcp.New(t.Context(), addr, tcp.Options{Server: true, Job: "a"})
	require.NoError(t, err)
	defer first.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for r, want := range []string{
		"bind: address already in use: wait until its owner has ended, or choose another port (MASTER_PORT)",
		`the store's job is "a", the client's is "b"; give this job an address of its own (MASTER_PORT)`,
	} {
		_, err := initFrom(ctx, "", InitOptions{}, environ(fmt.Sprintf(
			"OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=%[1]d OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=b MASTER_ADDR=%s MASTER_PORT=%s", r, host, port)))
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, port)
	}
	require.Zero(t, first.Server().Stats().Keys, "a stranger has joined")
}

// TestInitRankZeroTwice: both processes of a rank 0 that hosts the store learn it, whoever else has come.
func TestInitRankZeroTwice(t *testing.T) {
	t.Parallel()
	for name, ranks := range map[string][]int{"alone": {0, 0}, "with rank 1": {0, 1, 0}} {
		t.Run(name, func(t *testing.T) {
			addr := freeport.Loopback(t)
			host, port, _ := net.SplitHostPort(addr)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			errs := make([]error, len(ranks))
			var all sync.WaitGroup
			for i, r := range ranks {
				if i == len(ranks)-1 { // the others are not too late
					st := must.Get(tcp.New(ctx, addr))
					for _, r := range ranks[:i] {
						require.NoError(t, st.Wait(ctx, fmt.Sprint("default_pg/c10d-go/meet/-/0/rank/", r)))
					}
					require.NoError(t, st.Close())
				}
				all.Go(func() {
					// Rank 2 of 3 never comes.
					_, errs[i] = initFrom(ctx, "", InitOptions{Options: Options{Timeout: patience}}, environ(fmt.Sprintf(
						"RANK=%d WORLD_SIZE=3 MASTER_ADDR=%s MASTER_PORT=%s", r, host, port)))
				})
			}
			all.Wait()
			for i := range ranks {
				require.ErrorIs(t, errs[i], ErrDuplicateRank, "process %d", i)
				require.ErrorContains(t, errs[i], "rank 0 was started twice: pid ")
			}
		})
	}
}

// TestInitRankZeroOfAnotherJob: a group that exists is not ended by a rank 0 that finds its port taken.
func TestInitRankZeroOfAnotherJob(t *testing.T) {
	t.Parallel()
	addr := freeport.Loopback(t)
	o := InitOptions{Options: Options{Timeout: patience}, Size: 2}
	groups := make([]*ProcessGroup, 2)
	var all errgroup.Group
	for r := range groups {
		all.Go(func() (err error) {
			o := o
			o.Rank = r
			groups[r], err = initFrom(t.Context(), "tcp://"+addr, o, environ(""))
			return err
		})
	}
	require.NoError(t, all.Wait())
	_, err := initFrom(t.Context(), "tcp://"+addr, o, environ(""))
	require.ErrorContains(t, err, "address already in use")
	require.NotErrorIs(t, err, ErrDuplicateRank)
	for _, g := range groups {
		all.Go(func() error {
			return errors.Join(Wait(g.AllReduce(t.Context(), Slice([]float32{1}), backend.Sum())), g.Close())
		})
	}
	require.NoError(t, all.Wait())
}

// TestInitAgain: ranks make one group after the other at one address. Rank 0, which hosts the store, is the last
// to leave a group: the others do not take its store for that of the next one.
func TestInitAgain(t *testing.T) {
	addr := freeport.Loopback(t)
	make1 := func(rank int) (*ProcessGroup, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return initFrom(ctx, "tcp://"+addr, InitOptions{Rank: rank, Size: 3}, environ(""))
	}
	groups := make([]*ProcessGroup, 3)
	var first errgroup.Group
	for r := range groups {
		first.Go(func() (err error) { groups[r], err = make1(r); return err })
	}
	require.NoError(t, first.Wait())
	var next errgroup.Group
	server := groups[0].now().world.owned.(*tcp.Store).Server()
	for _, r := range []int{1, 2} {
		require.NoError(t, groups[r].Close())
	}
	before := server.Stats().Accepted
	for _, r := range []int{1, 2} {
		next.Go(func() (err error) { groups[r], err = make1(r); return err })
	}
	require.Eventually(t, func() bool { return server.Stats().Accepted > before+2 }, patience, time.Millisecond, "they look for another server")
	require.NoError(t, groups[0].Close())
	next.Go(func() (err error) { groups[0], err = make1(0); return err })
	require.NoError(t, next.Wait())
	for _, g := range groups {
		require.NoError(t, g.Close())
	}
}

// The limits of the store that rank 0 hosts come from InitOptions.
func TestInitStoreServer(t *testing.T) {
	_, err := Init(t.Context(), "tcp://"+freeport.Loopback(t), InitOptions{Size: 1, StoreServer: tcp.ServerOptions{MaxMemory: -1}})
	require.ErrorContains(t, err, "MaxMemory is -1: it must not be negative")
	g, err := Init(t.Context(), "tcp://"+freeport.Loopback(t), InitOptions{Size: 1, StoreServer: tcp.ServerOptions{MaxMemory: 1 << 20}})
	require.NoError(t, err)
	defer g.Close()
	require.ErrorIs(t, g.Store().Set(t.Context(), "k", make([]byte, 2<<20)), store.ErrTooLarge)
}
