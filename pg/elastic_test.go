//go:build unix

package pg

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
	"github.com/c10d-go/c10d/store/tcp"
)

var elasticRanks = flag.Int("elastic.ranks", 4, "`n` ranks of TestARankIsKilled")

const (
	elasticURL = "C10D_TEST_ELASTIC_URL"

	// elasticLimit bounds each step of a test on a loaded machine.
	elasticLimit = 20 * time.Second
)

// elasticStep is what a rank writes when it works in an epoch, and when it ends.
type elasticStep struct {
	ID, Epoch int
	IDs       []int
	Suspects  []int         // of the fault
	Failed    time.Time     // when the operation of the epoch before returned its error
	Works     time.Time     // when the first operation of this epoch ended
	Decided   time.Duration // how long Reconfigure took
	Err       string
}

func init() {
	if url := os.Getenv(elasticURL); url != "" {
		out := json.NewEncoder(os.Stdout)
		if err := elasticRank(url, func(s elasticStep) { out.Encode(s) }); err != nil {
			out.Encode(elasticStep{Err: err.Error()})
		}
		os.Exit(0)
	}
}

// elasticRank adds up until its standard input ends on some rank. It survives the others.
func elasticRank(url string, say func(elasticStep)) error {
	ctx := context.Background()
	o := Options{Timeout: elasticLimit, Elastic: os.Getenv("ELASTIC") == "1"}
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	size, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
	var g *ProcessGroup
	if os.Getenv("HOSTED") == "1" {
		g, err = initFrom(ctx, url, InitOptions{Rank: rank, Size: size, Options: o}, func(string) string { return "" })
	} else {
		st, bad := elasticStore(ctx, url)
		if bad != nil {
			return bad
		}
		defer st.Close()
		if err == nil {
			g, err = New(ctx, st, rank, size, o)
		} else {
			g, err = Join(ctx, st, o)
		}
	}
	if err != nil {
		return err
	}
	defer g.Close()
	ended := make(chan bool)
	go func() {
		bufio.NewReader(os.Stdin).ReadByte()
		close(ended)
	}()
	v := View{IDs: g.Ranks()}
	if g.membership != nil {
		v = View{Epoch: g.membership.view.Epoch}
		for _, id := range g.membership.view.IDs {
			v.IDs = append(v.IDs, int(id))
		}
	}
	s := elasticStep{}
	for {
		x := []float32{1, 0, 0} // ranks, those told to end, those that know of newcomers
		select {
		case <-ended:
			x[1] = 1
		default:
		}
		if n, err := g.Pending(ctx); err != nil {
			return err
		} else if n > 0 {
			x[2] = 1
		}
		err := Wait(g.AllReduce(ctx, Slice(x), backend.Sum()))
		switch {
		case err != nil:
			var e *EpochError
			if !errors.As(err, &e) {
				return err
			}
			s = elasticStep{Failed: time.Now(), Suspects: e.Suspects}
			if v, err = g.Reconfigure(ctx, ReconfigureOptions{Timeout: elasticLimit}); err != nil {
				return err
			}
			s.Decided = time.Since(s.Failed)
		case int(x[0]) != len(v.IDs):
			return fmt.Errorf("%v ranks add up to %v", v.IDs, x[0])
		case s.Works.IsZero():
			s.Epoch, s.IDs, s.ID, s.Works = v.Epoch, v.IDs, v.IDs[g.Rank()], time.Now()
			say(s)
		case x[1] > 0:
			return nil
		case x[2] > 0:
			s = elasticStep{}
			if v, err = g.Reconfigure(ctx, ReconfigureOptions{Min: g.Size()}); err != nil {
				return err
			}
		}
		time.Sleep(time.Millisecond) // leaves the CPUs to the others
	}
}

// elasticStore opens the store of a job whose ranks do not host it.
func elasticStore(ctx context.Context, url string) (store.Store, error) {
	if strings.HasPrefix(url, "redis://") {
		return redis.New(ctx, url)
	}
	return tcp.New(ctx, url)
}

// elasticJob is a job whose ranks are processes.
type elasticJob struct {
	t     *testing.T
	url   string
	env   []string
	ranks map[int]*elasticProcess
}

type elasticProcess struct {
	*exec.Cmd
	says chan elasticStep
	end  func() error
}

// newElasticJob starts a job. url is its store; "" means a new TCP store in this process.
func newElasticJob(t *testing.T, url string, size int, env ...string) *elasticJob {
	j := &elasticJob{t: t, url: url, env: append(env, "WORLD_SIZE="+strconv.Itoa(size)), ranks: make(map[int]*elasticProcess)}
	if url == "" {
		server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
		t.Cleanup(func() { server.Close() })
		j.url = server.Addr().String()
	}
	for r := range size {
		j.start(r, strconv.Itoa(r))
	}
	return j
}

func (j *elasticJob) start(id int, rank string) {
	exe, err := os.Executable()
	require.NoError(j.t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), j.env...), elasticURL+"="+j.url, "RANK="+rank)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(j.t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(j.t, err)
	require.NoError(j.t, cmd.Start())
	p := &elasticProcess{cmd, make(chan elasticStep, 16), in.Close}
	done := make(chan bool)
	go func() {
		defer close(done)
		defer close(p.says)
		for dec := json.NewDecoder(out); ; {
			var s elasticStep
			if dec.Decode(&s) != nil {
				return
			}
			p.says <- s
		}
	}()
	j.t.Cleanup(func() {
		cmd.Process.Kill()
		<-done
		cmd.Wait()
	})
	j.ranks[id] = p
}

// next returns what a rank says next.
func (j *elasticJob) next(id int) elasticStep {
	j.t.Helper()
	select {
	case s, ok := <-j.ranks[id].says:
		require.True(j.t, ok, "rank %d has ended", id)
		return s
	case <-time.After(2 * elasticLimit):
		require.Fail(j.t, "nothing happens", "rank %d", id)
	}
	return elasticStep{}
}

// all waits until all ranks work in an epoch.
func (j *elasticJob) all(epoch int) (last elasticStep) {
	j.t.Helper()
	for id := range j.ranks {
		s := j.next(id)
		require.Empty(j.t, s.Err, "rank %d", id)
		require.Equal(j.t, epoch, s.Epoch)
		require.Equal(j.t, id, s.ID)
		require.Len(j.t, s.IDs, len(j.ranks))
		if s.Works.After(last.Works) {
			last = s
		}
	}
	return last
}

// kill kills a rank, and prints how long the others took.
func (j *elasticJob) kill(id, epoch int) {
	j.t.Helper()
	died := time.Now()
	require.NoError(j.t, j.ranks[id].Process.Signal(syscall.SIGKILL))
	delete(j.ranks, id)
	s := j.all(epoch)
	require.Len(j.t, s.Suspects, 1)
	j.t.Logf("member %d of %d killed: the last rank had its error after %v, and its next all_reduce after %v", id, len(j.ranks)+1,
		s.Failed.Sub(died).Round(time.Millisecond), s.Works.Sub(died).Round(time.Millisecond))
}

func (j *elasticJob) stop() {
	for _, p := range j.ranks {
		p.end()
	}
	for id, p := range j.ranks {
		for s := range p.says {
			require.Empty(j.t, s.Err, "rank %d", id)
		}
	}
}

// TestARankIsKilled kills processes one after the other. The rest adds up again, until one is left.
func TestARankIsKilled(t *testing.T) {
	t.Parallel()
	for _, wire := range []string{"native", "tcp", "gloo"} {
		for _, elastic := range []string{"0", "1"} {
			t.Run(fmt.Sprintf("wire %s, elastic %s", wire, elastic), func(t *testing.T) {
				t.Parallel()
				j := newElasticJob(t, "", *elasticRanks, "C10D_WIRE="+wire, "ELASTIC="+elastic)
				j.all(0)
				j.kill(1, 1)
				j.kill(*elasticRanks-1, 2)
				j.kill(0, 3)
				j.stop()
			})
		}
	}
}

// TestAProcessReturns: a process is killed, and another one joins while the rest works.
func TestAProcessReturns(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"tcp", "redis"} {
		t.Run(name, func(t *testing.T) {
			url := ""
			if name == "redis" {
				url = "redis://" + startRedis(t) + "/0?prefix=elastic"
			}
			j := newElasticJob(t, url, 3, "ELASTIC=1")
			j.all(0)
			for i := range 3 {
				j.kill(i, 2*i+1)
				begun := time.Now()
				j.start(3+i, "joins")
				s := j.all(2*i + 2)
				t.Logf("a new process was started, and all %d added up after %v", len(s.IDs), s.Works.Sub(begun).Round(time.Millisecond))
			}
			j.stop()
		})
	}
}

// TestTwoRanksAreKilled at the same moment. With Options.Elastic the store knows both.
func TestTwoRanksAreKilled(t *testing.T) {
	t.Parallel()
	j := newElasticJob(t, "", 5, "ELASTIC=1")
	j.all(0)
	died := time.Now()
	for _, id := range []int{1, 3} {
		require.NoError(t, j.ranks[id].Process.Signal(syscall.SIGKILL))
		delete(j.ranks, id)
	}
	for id := range j.ranks {
		s := j.next(id)
		for len(s.IDs) > 3 && s.Err == "" {
			s = j.next(id) // one of the two voted before it died
		}
		require.Empty(t, s.Err)
		require.Equal(t, []int{0, 2, 4}, s.IDs)
		t.Logf("rank %d: error after %v, next all_reduce after %v", id, s.Failed.Sub(died), s.Works.Sub(died))
	}
	j.stop()
}

// TestTheHostOfTheStoreIsKilled: no rank can go on, and all say why.
func TestTheHostOfTheStoreIsKilled(t *testing.T) {
	j := newElasticJob(t, "tcp://"+freeport.Loopback(t), 3, "HOSTED=1")
	j.all(0)
	require.NoError(t, j.ranks[0].Process.Signal(syscall.SIGKILL))
	delete(j.ranks, 0)
	for id := range j.ranks {
		s := j.next(id)
		require.Contains(t, s.Err, "rank 0, which hosts the store, has ended or closed it", "rank %d", id)
		require.Contains(t, s.Err, "the store has to outlive the ranks")
	}
}

// TestInitJoins: a rank that the launcher starts again joins the group of the others.
func TestInitJoins(t *testing.T) {
	dir := t.TempDir()
	first, file := filepath.Join(dir, "first.json"), filepath.Join(dir, "epoch.json")
	t.Setenv(launch.EpochVariable, first)
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	defer server.Close()
	host, port, _ := net.SplitHostPort(server.Addr().String())
	env := "WORLD_SIZE=2 MASTER_ADDR=" + host + " MASTER_PORT=" + port + " TORCHELASTIC_USE_AGENT_STORE=True C10D_ELASTIC=2:3 RANK="
	ctx, cancel := context.WithTimeout(t.Context(), elasticLimit)
	defer cancel()
	var all errgroup.Group
	var met sync.WaitGroup
	met.Add(2)
	for rank, join := range []string{"0", "1", "0 C10D_JOIN=1"} {
		all.Go(func() error {
			if rank == 2 {
				met.Wait()
				if err := os.Setenv(launch.EpochVariable, file); err != nil {
					return err
				}
			}
			g, err := initFrom(ctx, "env://", InitOptions{Options: Options{Timeout: elasticLimit}}, environ(env+join))
			if err != nil {
				return err
			}
			defer g.Close()
			if rank < 2 {
				met.Done()
				for n := 0; n == 0 && err == nil; {
					n, err = g.Pending(ctx)
				}
				// The launcher can see who waits before any rank can take it in.
				if rank == 0 {
					if e, err := launch.ReadEpoch(file); err != nil || e.Epoch != 0 || e.ID != 2 {
						return fmt.Errorf("the newcomer wrote %+v, %w", e, err)
					}
				}
				v, err := g.Reconfigure(ctx)
				if n, bad := g.Pending(ctx); n > 0 || bad != nil {
					return fmt.Errorf("%d ranks can be taken in: %w", n, bad)
				}
				if err != nil || !slices.Equal(v.IDs, []int{0, 1, 2}) {
					return fmt.Errorf("%+v, %w", v, err)
				}
			}
			x := []float32{float32(g.Rank())}
			if err := Wait(g.AllReduce(ctx, Slice(x), backend.Sum())); err != nil || x[0] != 3 {
				return fmt.Errorf("the sum is %v: %w", x, err)
			}
			if m := g.membership.config(ReconfigureOptions{}); m.Min != 2 || m.Max != 3 {
				return fmt.Errorf("at least %d and at most %d ranks", m.Min, m.Max)
			}
			return g.Barrier(ctx)
		})
	}
	require.NoError(t, all.Wait())
	e, err := launch.ReadEpoch(first)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1}, e.IDs, "the first group is made")
	e = must.Get(launch.ReadEpoch(file))
	require.Equal(t, 1, e.Epoch)
	require.Equal(t, []int{0, 1, 2}, e.IDs)
	_, err = initFrom(ctx, "env://", InitOptions{}, environ("C10D_ELASTIC=many"))
	require.EqualError(t, err, `environment variable C10D_ELASTIC: "many" is no range of ranks, such as 2:4`)
}

// virtualAddress is an address that moves from one server to another, as a failover moves it.
type virtualAddress struct {
	net.Listener
	mu    sync.Mutex
	to    string
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

func newVirtualAddress(t *testing.T, to string) *virtualAddress {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	v := &virtualAddress{Listener: l, to: to, conns: make(map[net.Conn]bool)}
	v.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			v.wg.Go(func() { v.pass(in) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		v.move("")
		v.wg.Wait()
	})
	return v
}

func (v *virtualAddress) pass(in net.Conn) {
	defer in.Close()
	v.mu.Lock()
	out, err := net.Dial("tcp", v.to)
	if err == nil {
		v.conns[in], v.conns[out] = true, true
	}
	v.mu.Unlock()
	if err != nil {
		return
	}
	defer out.Close()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			io.Copy(way[0], way[1])
			way[0].Close()
		})
	}
	both.Wait()
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.conns, in)
	delete(v.conns, out)
}

// move ends all connections. New ones go to another server.
func (v *virtualAddress) move(to string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.to = to
	for c := range v.conns {
		c.Close()
	}
}

// TestRedisLosesKeys: Redis is started again, fails over, or evicts keys. Its views may be lost, so no rank
// makes another one: every Reconfigure says why, nobody is taken in, and the group of before goes on.
func TestRedisLosesKeys(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		happen func(t *testing.T, at *virtualAddress, server *testRedis)
		want   error
		says   string
	}{
		"started again without its data": {nil, func(t *testing.T, at *virtualAddress, server *testRedis) {
			server.kill()
			at.move(newTestRedis(t).addr)
		}, redis.ErrEmptied, "redis"},
		"started again with its data": {[]string{"--appendonly", "yes", "--appendfsync", "always"}, func(t *testing.T, at *virtualAddress, server *testRedis) {
			server.kill()
			at.move(newTestRedis(t, "--appendonly", "yes", "--dir", server.dir).addr)
		}, redis.ErrLosesKeys, "it was started again, or another server has taken its place"},
		"a replica takes its place": {nil, func(t *testing.T, at *virtualAddress, server *testRedis) {
			replica := newTestRedis(t, "--replicaof", strings.ReplaceAll(server.addr, ":", " "))
			replica.await("INFO replication", "master_link_status:up", "master_sync_in_progress:0")
			server.await("INFO replication", "state=online")
			// The group may still be deleting keys of its beginning.
			require.Eventually(t, func() bool { return replica.command("DBSIZE") == server.command("DBSIZE") }, elasticLimit, 10*time.Millisecond)
			replica.command("REPLICAOF NO ONE")
			server.kill()
			at.move(replica.addr)
		}, redis.ErrLosesKeys, "it was started again, or another server has taken its place"},
		"it evicts keys": {[]string{"--maxmemory", "5mb", "--maxmemory-policy", "volatile-ttl"}, func(t *testing.T, _ *virtualAddress, server *testRedis) {
			for i := 0; !strings.Contains(server.command("INFO stats"), "evicted_keys:9"); i++ { // others' keys, which end sooner
				require.Contains(t, server.command(fmt.Sprintf("SET other%d %s EX 1000", i, strings.Repeat("x", 50<<10))), "OK")
			}
		}, redis.ErrLosesKeys, "it has evicted keys to free memory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := newTestRedis(t, tc.args...)
			at := newVirtualAddress(t, server.addr)
			ctx, cancel := context.WithTimeout(t.Context(), 12*elasticLimit)
			defer cancel()
			var groups [3]*ProcessGroup
			each := func(f func(rank int) error) {
				t.Helper()
				var all errgroup.Group
				for rank := range groups {
					all.Go(func() error { return f(rank) })
				}
				require.NoError(t, all.Wait())
			}
			open := func() (store.Store, error) {
				st, err := redis.New(ctx, "redis://"+at.Addr().String()+"/0?prefix=job")
				if err == nil {
					t.Cleanup(func() { st.Close() })
				}
				return st, err
			}
			o := Options{Timeout: elasticLimit, Elastic: true}
			each(func(rank int) error {
				st, err := open()
				if err != nil {
					return err
				}
				if groups[rank], err = New(ctx, st, rank, len(groups), o); err == nil {
					_, err = groups[rank].Reconfigure(ctx)
				}
				return err
			})
			tc.happen(t, at, server)
			newcomer := make(chan error)
			go func() {
				soon, cancel := context.WithTimeout(ctx, 2*time.Second)
				defer cancel()
				st, err := open()
				if err == nil {
					_, err = Join(soon, st, o)
				}
				newcomer <- err
			}()
			each(func(rank int) error {
				for { // the first calls may meet the connections that have ended
					_, err := groups[rank].Reconfigure(ctx)
					if err == nil || ctx.Err() != nil {
						return fmt.Errorf("rank %d: a view although keys may be lost: %w", rank, err)
					}
					if errors.Is(err, tc.want) {
						if !strings.Contains(err.Error(), tc.says) {
							return fmt.Errorf("want %q in: %w", tc.says, err)
						}
						break
					}
				}
				if e := groups[rank].now().world.number; e != 1 {
					return fmt.Errorf("rank %d is in epoch %d", rank, e)
				}
				x := []float32{1}
				if err := Wait(groups[rank].AllReduce(ctx, Slice(x), backend.Sum())); err != nil || x[0] != 3 {
					return fmt.Errorf("the group of before does not work: %v, %w", x, err)
				}
				return nil
			})
			require.Error(t, <-newcomer)
			for _, g := range groups {
				require.NoError(t, g.Close())
			}
		})
	}
}

// testRedis is a redis-server.
type testRedis struct {
	t         *testing.T
	addr, dir string
	kill      func()
}

func newTestRedis(t *testing.T, args ...string) *testRedis {
	t.Helper()
	s := &testRedis{t: t, addr: freeport.Loopback(t), dir: t.TempDir()}
	s.kill = startRedisAt(t, s.addr, append([]string{"--dir", s.dir}, args...)...)
	return s
}

// command returns what the server answers.
func (s *testRedis) command(line string) string {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	require.NoError(s.t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "%s\r\nQUIT\r\n", line)
	require.NoError(s.t, err)
	answer, err := io.ReadAll(conn)
	require.NoError(s.t, err)
	return string(answer)
}

// await waits until the server answers with these texts.
func (s *testRedis) await(line string, texts ...string) {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		got := s.command(line)
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(got, text) })
	}, elasticLimit, 10*time.Millisecond, "%s: %q", line, texts)
}
