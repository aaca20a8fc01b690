package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// jobVariable makes TestRank a rank of the job that it names by a number.
const jobVariable = "C10D_TEST_JOB"

// jobLimit bounds a whole job of processes on a loaded machine.
const jobLimit = 2 * time.Minute

// TestRank is no test but a small program that launchers start.
func TestRank(t *testing.T) {
	job, err := strconv.Atoi(os.Getenv(jobVariable))
	if err != nil {
		return // not within a job
	}
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	g := must.Get(pg.Init(ctx, "", pg.InitOptions{Options: pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}}))
	defer g.Close()
	require.NoError(t, sum(ctx, g, job))
	fmt.Println("summed up")
}

// sum adds up what the ranks of a job have, and fails if a rank of another job
// is among them.
func sum(ctx context.Context, g *pg.ProcessGroup, job int) (err error) {
	defer must.Catch(&err)
	v := []float64{float64(job), 1}
	x := must.Get(tensor.Of(v, 2))
	w, err := g.AllReduce(ctx, x, pg.Sum())
	if err == nil {
		err = w.Wait(ctx)
	}
	if err == nil && (v[0] != float64(job*g.Size()) || v[1] != float64(g.Size())) {
		err = fmt.Errorf("rank %d of job %d has a sum of %v", g.Rank(), job, v)
	}
	return err
}

// TestTwoMpiruns starts pairs of jobs at the same time on this host, as two users
// would. Pairs that take each other's keys did so nearly every time.
func TestTwoMpiruns(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	for name, programs := range map[string][]string{"Open MPI": {"mpirun.openmpi", "mpirun"}, "MPICH": {"mpiexec.hydra"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mpirun, err := exec.LookPath(programs[0])
			if err != nil {
				mpirun, err = exec.LookPath(programs[len(programs)-1])
			}
			if err != nil {
				if name == "Open MPI" && os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
					require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
				}
				t.Skip(name, " is not installed: ", err)
			}
			twoJobs(t, mpirun, "-n", "2", self, "-test.run=^TestRank$", "-test.count=1")
			if name == "MPICH" {
				// A proxy for each of two hosts.
				twoJobs(t, mpirun, "-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-n", "2", "env", "MASTER_ADDR=127.0.0.1",
					self, "-test.run=^TestRank$", "-test.count=1")
				// A script of two programs.
				twoJobs(t, mpirun, "-n", "2", "sh", "-c", `"$0" "$@" >/dev/null && "$0" "$@"`, self, "-test.run=^TestRank$", "-test.count=1")
			}
		})
	}
	t.Run("hydra's process", func(t *testing.T) {
		t.Parallel()
		if runtime.GOOS != "linux" {
			t.Skip("the launcher's processes are found on Linux only")
		}
		proxy := filepath.Join(t.TempDir(), "hydra_pmi_proxy")
		require.NoError(t, os.Symlink(self, proxy))
		twoJobs(t, proxy, "-test.run=^TestHydraProxy$", "-test.count=1")
	})
}

// TestHydraProxy is no test but a program that starts two ranks as hydra's does.
func TestHydraProxy(t *testing.T) {
	if filepath.Base(os.Args[0]) != "hydra_pmi_proxy" {
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	var ranks errgroup.Group
	for r := range 2 {
		ranks.Go(func() error {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", `"$0" -test.run=^TestRank$ -test.count=1; exit $?`, self)
			cmd.Env = append(os.Environ(), "PMI_SIZE=2", "MPI_LOCALNRANKS=2", fmt.Sprint("PMI_RANK=", r), fmt.Sprint("MPI_LOCALRANKID=", r))
			out, err := cmd.CombinedOutput()
			os.Stdout.Write(out)
			return err
		})
	}
	require.NoError(t, ranks.Wait())
}

// twoJobs runs a command that starts a job of two ranks, two at once.
func twoJobs(t *testing.T, command string, args ...string) {
	t.Helper()
	for pair := range testsize.Of(1, 1, 7) {
		var all errgroup.Group
		for job := range 2 {
			all.Go(func() error {
				ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
				defer cancel()
				cmd := exec.CommandContext(ctx, command, args...)
				// Open MPI refuses root and more ranks than CPUs. Two mpiruns that make its folder
				// under /tmp at the same moment fail by themselves.
				cmd.Env = append(os.Environ(), jobVariable+"="+strconv.Itoa(job+1), "OMPI_MCA_orte_tmpdir_base="+t.TempDir(),
					"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1")
				cmd.WaitDelay = time.Second
				out, err := cmd.CombinedOutput()
				if err == nil && bytes.Count(out, []byte("summed up")) != 2 {
					err = errors.New("not every rank summed up")
				}
				if err != nil {
					return fmt.Errorf("pair %d, job %d: %w\n%s", pair, job, err, out)
				}
				return nil
			})
		}
		require.NoError(t, all.Wait())
	}
}

// TestTenJobsInOneStore runs jobs one after the other where each leaves its keys:
// the launcher gives no name, and every rank is of this library.
func TestTenJobsInOneStore(t *testing.T) {
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	defer server.Close()
	host, port, _ := net.SplitHostPort(server.Addr().String())
	t.Setenv("MASTER_ADDR", host)
	t.Setenv("MASTER_PORT", port)
	t.Setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
	urls := map[string]string{
		"c10d store": "tcp://" + server.Addr().String(),
		"file":       "file://" + filepath.Join(t.TempDir(), "store"),
	}
	if redis := redisServer(t); redis != "" {
		urls["redis"] = "redis://" + redis + "/0?prefix=jobs"
	}
	for name, url := range urls {
		t.Run(name, func(t *testing.T) {
			for job := range 10 {
				const size = 3
				ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
				if job == 4 {
					crash(t, ctx, url, size)
				}
				var all errgroup.Group
				for r := range size {
					all.Go(func() error {
						g, err := pg.Init(ctx, url, pg.InitOptions{Rank: r, Size: size, Options: pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}})
						if err != nil {
							return err
						}
						defer g.Close()
						if err := sum(ctx, g, job+1); err != nil {
							return err
						}
						sub, err := g.NewGroup(ctx, []int{0, 2})
						if err != nil || !sub.IsMember() {
							return err
						}
						return sum(ctx, sub, job+1)
					})
				}
				require.NoError(t, all.Wait(), "job %d", job)
				cancel()
			}
		})
	}
}

// crash is a job of which only some ranks come, and end.
func crash(t *testing.T, ctx context.Context, url string, size int) {
	t.Helper()
	for _, r := range []int{0, 2} {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		_, err := pg.Init(ctx, url, pg.InitOptions{Rank: r, Size: size, Options: pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}})
		cancel()
		require.Error(t, err)
	}
}

// redisServer starts a Redis server and returns its address, "" if there is none.
func redisServer(t *testing.T) string {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
		}
		return ""
	}
	addr := freeport.Loopback(t)
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command(path, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	return addr
}

// TestStartedTwice, TestWorldsDiffer and TestStaleKeys state what users of Init see.
func TestStartedTwice(t *testing.T) {
	hash := store.NewHash()
	defer hash.Close()
	st := store.Prefix("default_pg", hash)
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var all sync.WaitGroup
	begin := func(r int) {
		all.Go(func() {
			_, err := pg.New(ctx, st, r, 3, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
			if !errors.Is(err, pg.ErrDuplicateRank) {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	begin(0)
	require.NoError(t, st.Wait(ctx, "c10d-go/meet/last")) // rank 0 waits: one that comes when both are gone knows of none
	begin(1)
	begin(1)
	all.Wait()
}

func TestWorldsDiffer(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var all sync.WaitGroup
	for r, size := range []int{2, 3} {
		all.Go(func() {
			_, err := pg.New(ctx, st, r, size, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
			var e *pg.MeetingError
			if !errors.Is(err, pg.ErrSizeMismatch) || !errors.As(err, &e) {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	all.Wait()
}

func TestStaleKeys(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	for r, key := range []string{"0//cpu//0/0", "0/0/rank_1"} {
		require.NoError(t, st.Set(t.Context(), key, []byte("of PyTorch")))
		_, err := pg.New(t.Context(), st, r, 2, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
		require.ErrorIs(t, err, pg.ErrStaleKeys)
		require.ErrorContains(t, err, "use another prefix or a new store")
	}
}

// TestListsDiffer: every rank that waits in NewGroup learns that the lists differ,
// whoever came first.
func TestListsDiffer(t *testing.T) {
	const size = 3
	for name, lists := range map[string][size][]int{
		"a member less":    {{0, 1, 2}, {0, 1}, {0, 1, 2}},
		"another one":      {{0, 1}, {1, 2}, {0, 1}},
		"each another one": {{0, 1}, {1, 2}, {0, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
			defer cancel()
			var mu sync.Mutex
			told := 0
			var all sync.WaitGroup
			for r := range size {
				all.Go(func() {
					g, err := pg.New(ctx, st, r, size, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
					if err != nil {
						t.Error(err)
						return
					}
					defer g.Close()
					sub, err := g.NewGroup(ctx, lists[r])
					switch {
					case err == nil && sub.IsMember():
						t.Errorf("rank %d has a group of %v", r, sub.Ranks())
					case err != nil && !errors.Is(err, pg.ErrGroupMismatch):
						t.Errorf("rank %d: %v", r, err)
					case err != nil:
						mu.Lock()
						told++
						mu.Unlock()
					}
				})
			}
			all.Wait()
			require.GreaterOrEqual(t, told, 2)
		})
	}
}

// TestSubgroupsGivenUp: a rank that gives up before its own sub-group tells the other members, and no others.
func TestSubgroupsGivenUp(t *testing.T) {
	const size = 4
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	errs := make([]error, size)
	var all sync.WaitGroup
	for r := range size {
		all.Go(func() {
			defer must.Catch(&errs[r])
			g := must.Get(pg.New(ctx, st, r, size, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}))
			defer g.Close()
			ctx, stop := context.WithCancel(ctx)
			defer stop()
			if r == 2 {
				stop()
			}
			must.Get(g.NewSubgroups(ctx, 2))
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs[0], errs[1]))
	require.ErrorIs(t, errs[2], context.Canceled)
	require.ErrorContains(t, errs[3], "context canceled")
	require.NotErrorIs(t, errs[3], context.DeadlineExceeded)
}

// A group that could not be made can be made later, under the same name.
func TestMakeAGroupAgain(t *testing.T) {
	const size = 2
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var all sync.WaitGroup
	for r := range size {
		all.Go(func() {
			g, err := pg.New(ctx, st, r, size, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			first, stop := context.WithCancel(ctx)
			defer stop()
			if r == 0 {
				stop()
			}
			o := pg.GroupOptions{Local: true}
			if _, err := g.NewGroup(first, []int{0, 1}, o); err == nil {
				t.Errorf("rank %d has made a group with a rank that gave up", r)
			}
			if _, err := g.NewGroup(ctx, []int{0, 1}, o); err != nil {
				t.Errorf("rank %d, again: %v", r, err)
			}
		})
	}
	all.Wait()
}

// TestAJobStartsAmongStrangers: more silent connections than the process of rank 0 has descriptors
// do not keep a rank out.
func TestAJobStartsAmongStrangers(t *testing.T) {
	self := must.Get(os.Executable())
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("sets a limit with sh: ", err)
	}
	addr := freeport.Loopback(t)
	host, port, _ := net.SplitHostPort(addr)
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	start := func(rank int, command string, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, command, args...)
		cmd.Env = append(os.Environ(), jobVariable+"=1", "WORLD_SIZE=2", "MASTER_ADDR="+host, "MASTER_PORT="+port, "RANK="+strconv.Itoa(rank))
		cmd.WaitDelay = time.Second
		return cmd
	}
	zero := start(0, shell, "-c", `ulimit -n 200 && exec "$0" -test.run='^TestRank$' -test.count=1`, self)
	var text bytes.Buffer
	zero.Stdout, zero.Stderr = &text, &text
	require.NoError(t, zero.Start())
	var strangers []net.Conn
	defer func() {
		for _, c := range strangers {
			c.Close()
		}
	}()
	for len(strangers) < 600 && ctx.Err() == nil {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			time.Sleep(time.Millisecond) // rank 0 does not listen yet
			continue
		}
		strangers = append(strangers, c)
	}
	out, err := start(1, self, "-test.run=^TestRank$", "-test.count=1").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, zero.Wait(), "%s", &text)
}
