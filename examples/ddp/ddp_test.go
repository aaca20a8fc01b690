package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
)

// asProgram makes the test binary the program itself. Each rank writes its process id to a
// file in the directory pidsIn, if that is set.
const (
	asProgram = "C10D_DEMO_TEST_MAIN"
	pidsIn    = "C10D_DEMO_TEST_PIDS"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		if dir := os.Getenv(pidsIn); dir != "" {
			if err := os.WriteFile(filepath.Join(dir, os.Getenv("RANK")), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
				panic(err)
			}
		}
		if file := os.Getenv(paced); file != "" {
			pause = untilExists(file)
		}
		main()
		return
	}
	os.Exit(m.Run())
}

// paced names a file. Ranks pause in each step until it exists.
const paced = "C10D_DEMO_TEST_PACED"

func untilExists(file string) func(time.Duration) {
	return func(d time.Duration) {
		if _, err := os.Stat(file); err != nil {
			time.Sleep(d)
		}
	}
}

// limit is far more than any of these runs takes; it turns a hang into a failure.
const limit = 5 * time.Minute

// program is the program without a launcher.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// launch runs n ranks of the program as "c10d run" does.
func launch(t *testing.T, n int, j agent.Job, args ...string) (s *agent.Summary, stdout, stderr string) {
	t.Helper()
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var out, errs bytes.Buffer
	j.Procs, j.Command, j.Env = n, append([]string{self}, args...), append(append(os.Environ(), asProgram+"=1"), j.Env...)
	j.Stdout, j.Stderr = &out, io.MultiWriter(&errs, cmp.Or[io.Writer](j.Stderr, io.Discard))
	s = must.Get(agent.Run(ctx, j))
	return s, out.String(), errs.String()
}

// demo runs n ranks and returns their report.
func demo(t *testing.T, n int, args ...string) report {
	t.Helper()
	s, stdout, stderr := launch(t, n, agent.Job{NoPrefix: true}, args...)
	require.True(t, s.OK, "%s", stderr)
	return parseReport(t, []byte(stdout))
}

func parseReport(t *testing.T, stdout []byte) report {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(string(stdout)), "\n")
	var r report
	d := json.NewDecoder(strings.NewReader(lines[len(lines)-1]))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&r), "%s", stdout)
	return r
}

// failing runs n ranks, which must fail, and returns the launcher's summary and what the
// ranks say.
func failing(t *testing.T, n int, args ...string) (*agent.Summary, string) {
	t.Helper()
	s, stdout, stderr := launch(t, n, agent.Job{}, args...)
	require.False(t, s.OK)
	require.Empty(t, stdout)
	return s, stderr
}

// TestDemo is the whole demo on a short schedule, with a number of ranks that
// does not divide the batch.
func TestDemo(t *testing.T) {
	r := demo(t, 3, "-epochs", "4", "-compare")
	require.Equal(t, 3, r.Ranks)
	require.True(t, r.ParamsIdentical)
	require.Greater(t, r.Accuracy, 0.93)
	require.Less(t, r.Loss, 0.2)
	require.Equal(t, 64*128+128+128*64+64+64*10+10, r.Params)
	require.Equal(t, 2, r.Buckets)
	require.Equal(t, []string{"gloo", "tcp"}, []string{r.Backend, r.Store})
	require.Positive(t, r.Seconds)
	require.Positive(t, r.ImagesPerSecond)
	require.LessOrEqual(t, r.Compare.Relative, compareTolerance)
	require.Positive(t, r.Compare.Relative, "three ranks cannot add up in the order of one")
	require.InDelta(t, r.Accuracy, r.Compare.Accuracy, 1./359)
}

// TestOneRank: a group of one computes the very bits of a process without a group.
func TestOneRank(t *testing.T) {
	r := demo(t, 1, "-epochs", "2", "-compare")
	require.True(t, r.ParamsIdentical)
	require.Zero(t, r.Compare.MaxAbs)
}

// TestStores: whatever store the ranks meet in, they compute the same bits.
func TestStores(t *testing.T) {
	want := demo(t, 2, "-epochs", "1").ParamsSHA256
	t.Run("file", func(t *testing.T) {
		r := demo(t, 2, "-epochs", "1", "-init", "file://"+filepath.ToSlash(filepath.Join(t.TempDir(), "store")))
		require.Equal(t, "file", r.Store)
		require.Equal(t, want, r.ParamsSHA256)
	})
	t.Run("redis", func(t *testing.T) {
		r := demo(t, 2, "-epochs", "1", "-init", startRedis(t))
		require.Equal(t, "redis", r.Store)
		require.Equal(t, want, r.ParamsSHA256)
	})
}

func startRedis(t *testing.T) string {
	server, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatal(err)
		}
		t.Skipf("no redis-server: %v", err)
	}
	addr := freeport.Loopback(t)
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	cmd := exec.Command(server, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, limit, 10*time.Millisecond)
	return "redis://" + addr + "/0"
}

// TestEnvironment starts the ranks as any launcher does: rank 0 hosts the store.
func TestEnvironment(t *testing.T) {
	host, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	var out [2]bytes.Buffer
	var cmds [2]*exec.Cmd
	for rank := range cmds {
		cmd := program(t, "-epochs", "1")
		cmd.Env = append(cmd.Env, "RANK="+strconv.Itoa(rank), "WORLD_SIZE=2", "MASTER_ADDR="+host, "MASTER_PORT="+port)
		cmd.Stdout, cmd.Stderr = &out[rank], os.Stderr
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	for _, cmd := range cmds {
		require.NoError(t, cmd.Wait())
	}
	require.Equal(t, 2, parseReport(t, out[0].Bytes()).Ranks)
	require.Empty(t, out[1].String())
}

// TestResume: an epoch, an end, and another are the same bits as two epochs.
func TestResume(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "state")
	whole := demo(t, 2, "-epochs", "2")
	first := demo(t, 2, "-epochs", "1", "-checkpoint", file)
	require.NotEqual(t, whole.ParamsSHA256, first.ParamsSHA256)
	resumed := demo(t, 2, "-epochs", "2", "-checkpoint", file, "-resume")
	require.Equal(t, whole.ParamsSHA256, resumed.ParamsSHA256)
	require.Equal(t, []float64{whole.Accuracy, whole.Loss, whole.HeldOutLoss}, []float64{resumed.Accuracy, resumed.Loss, resumed.HeldOutLoss})

	t.Run("refused", func(t *testing.T) {
		args := []string{"-checkpoint", file, "-resume"}
		for _, c := range []struct{ add, want string }{
			{"-epochs=2", "is after epoch 2; -epochs 2 leaves nothing to do"},
			{"-hidden=32", "-hidden: layers is [64 128 64 10] there and [64 32 10] here"},
			{"-batch=32", "-batch is 64 there and 32 here"},
			{"-seed=2", "-seed is 1 there and 2 here"},
			{"-checkpoint=" + file + ".none", "no such file"},
		} {
			s, says := failing(t, 2, append(args, c.add)...)
			require.Contains(t, says, c.want)
			require.Contains(t, says, "[rank1] ddp: rank 0 has not read the checkpoint")
			require.Equal(t, 1, s.ExitCode) // both ranks end at once: either may be named first
		}
		b := must.Get(os.ReadFile(file))
		b[len(b)/2] ^= 1
		require.NoError(t, os.WriteFile(file, b, 0o644))
		_, says := failing(t, 2, args...)
		require.Contains(t, says, "the checksum does not fit")
	})
}

// TestCompareSees: a training fails the tolerance of -compare if one gradient of hundreds is
// too small by the share of one image.
func TestCompareSees(t *testing.T) {
	c := must.Get(parseFlags([]string{"-epochs", "2"}, io.Discard))
	data := must.Get(dataset.Digits())
	want, _, err := trainAlone(t.Context(), c, data)
	require.NoError(t, err)
	for _, epoch := range []int{0, c.epochs / 2} {
		got, err := newTrainer(c, data, 0, 1)
		require.NoError(t, err)
		for e := range c.epochs {
			at := -1
			if e == epoch {
				at = 5
			}
			got.reducer = &shrink{t: got, step: at}
			_, err := got.epoch(t.Context(), e)
			require.NoError(t, err)
		}
		d := difference(want.model.Params(), got.model.Params())
		require.Greater(t, d.Relative, 2*compareTolerance, "epoch %d", epoch)
	}
}

// shrink is a reducer that takes the share of one image of 64 out of the
// gradient of a step.
type shrink struct {
	alone
	t    *trainer
	step int
}

func (s *shrink) Finish(context.Context) error {
	if s.step == 0 {
		for _, p := range s.t.model.Params() {
			for i := range p.Grad {
				p.Grad[i] *= 63. / 64
			}
		}
	}
	s.step--
	return nil
}

func TestFlags(t *testing.T) {
	c, err := parseFlags([]string{"-hidden", "10,20"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []int{10, 20}, c.hidden)
	c = must.Get(parseFlags([]string{"-hidden", ""}, io.Discard))
	require.Empty(t, c.hidden)
	for _, bad := range []string{
		"-epochs=0", "-batch=0", "-bucket=0", "-timeout=0s",
		"-device=gpu", "-check", "-work=host", "-work=gpu", "-resume", "-hidden=3,x", "-hidden=-3", "more",
	} {
		_, err := parseFlags([]string{bad}, io.Discard)
		require.Error(t, err, bad)
	}
	// A checkpoint has no state of PowerSGD: a resumed training would have other bits.
	_, err = parseFlags([]string{"-powersgd=1", "-checkpoint=state"}, io.Discard)
	require.ErrorContains(t, err, "does not work with -device, -elastic, -compare and -checkpoint")
	_, err = parseFlags([]string{"-device=sim", "-backend=cpu:gloo"}, io.Discard)
	require.EqualError(t, err, `ddp: -backend "cpu:gloo": with -device sim it must be the name of a backend for CPU tensors`)
}

func TestRankWithoutLauncher(t *testing.T) {
	for _, name := range []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} {
		t.Setenv(name, "")
	}
	said, err := program(t).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "c10d run")
}

func TestDiverged(t *testing.T) {
	_, says := failing(t, 1, "-epochs", "2", "-lr", "1e38")
	require.Contains(t, says, "the training diverged")
}

// TestEnds ends a training that would take hours. After the death of a rank the launcher
// names it. After a signal all ranks end by themselves.
func TestEnds(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc and signals: not promised on this system")
	}
	for _, device := range []string{onCPU, onSim} {
		t.Run(device, func(t *testing.T) {
			t.Parallel()
			args := []string{"-epochs", "1000000", "-device", device}
			pids := t.TempDir()
			s, _, stderr := launch(t, 3, agent.Job{Env: []string{pidsIn + "=" + pids}, Stderr: onEpoch(func() {
				b, err := os.ReadFile(filepath.Join(pids, "2"))
				assert.NoError(t, err)
				pid, err := strconv.Atoi(string(b))
				assert.NoError(t, err)
				p, err := os.FindProcess(pid)
				assert.NoError(t, err)
				assert.NoError(t, p.Kill())
			})}, args...)
			require.NotNil(t, s.First, stderr)
			require.Equal(t, []any{2, "SIGKILL"}, []any{s.First.Rank, s.First.Signal}, stderr)

			signals := make(chan os.Signal, 1)
			s, _, stderr = launch(t, 3, agent.Job{Grace: limit, Signals: signals, Stderr: onEpoch(func() { signals <- os.Interrupt })}, args...)
			require.Equal(t, "SIGINT", s.Signal, stderr)
			for _, f := range append(s.Others, *s.First) {
				require.NotEqual(t, "SIGKILL", f.Signal)
			}
		})
	}
}

// onEpoch calls f when the first epoch is reported.
func onEpoch(f func()) io.Writer { return &trigger{call: sync.OnceFunc(f)} }

type trigger struct{ call func() }

func (w *trigger) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("epoch ")) {
		w.call()
	}
	return len(b), nil
}

func TestProgress(t *testing.T) { synctest.Test(t, testProgress) }

func testProgress(t *testing.T) {
	var out bytes.Buffer
	p := &progress{out: &out, epochs: 20, from: 8, images: 1000, begun: time.Now()}
	time.Sleep(10 * time.Second)
	p.epoch(&history{Train: make([]float64, 10), Accuracy: append(make([]float64, 9), 0.95)})
	require.Equal(t, "epoch 10/20  loss 0.0000  held-out accuracy 95.00%     200 images/s  50s left\n", out.String())
}

// PowerSGD reaches the accuracy of whole gradients with at least 20 times fewer bytes.
func TestPowerSGD(t *testing.T) {
	t.Parallel()
	r := demo(t, 4, "-powersgd", "1")
	require.GreaterOrEqual(t, r.Compression, 20.)
	require.GreaterOrEqual(t, r.Accuracy, 0.96)
	require.True(t, r.ParamsIdentical)
}
