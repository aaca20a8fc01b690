package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/work"
)

// asProgram makes the test binary the program itself, so that the tests run
// what users run, launcher and ranks.
const asProgram = "C10D_DEMO_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// limit is far more than any of these runs takes; it turns a hang into a failure.
const limit = 5 * time.Minute

func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// demo runs the program and returns its report.
func demo(t *testing.T, args ...string) report {
	t.Helper()
	cmd := program(t, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(t, cmd.Run(), "%s", &stderr)
	return parseReport(t, stdout.Bytes())
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

// failing runs the program, which must fail, and returns what it says.
func failing(t *testing.T, args ...string) string {
	t.Helper()
	cmd := program(t, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Run(), &exit)
	require.Empty(t, stdout.String())
	return stderr.String()
}

// TestDemo is the whole demo on a short schedule, with a number of ranks that
// does not divide the batch.
func TestDemo(t *testing.T) {
	picture := filepath.Join(t.TempDir(), "loss.svg")
	r := demo(t, "-nproc", "3", "-epochs", "8", "-compare", "-plot", picture)
	require.Equal(t, 3, r.Ranks)
	require.True(t, r.ParamsIdentical)
	require.Greater(t, r.Accuracy, 0.93)
	require.Less(t, r.Loss, 0.2)
	require.Equal(t, 64*128+128+128*64+64+64*10+10, r.Params)
	require.Equal(t, 2, r.Buckets)
	require.Equal(t, []string{"digits", "gloo", "tcp"}, []string{r.Data, r.Backend, r.Store})
	require.Positive(t, r.Seconds)
	require.Positive(t, r.ImagesPerSecond)
	require.LessOrEqual(t, r.Compare.Relative, compareTolerance)
	require.Positive(t, r.Compare.Relative, "three ranks cannot add up in the order of one")
	require.InDelta(t, r.Accuracy, r.Compare.Accuracy, 1./359)
	b, err := os.ReadFile(picture)
	require.NoError(t, err)
	require.Contains(t, string(b), "digits, MLP 64-128-64-10, 3 ranks, global batch 64")
}

// TestOneRank: a group of one computes the very bits of a process without a group.
func TestOneRank(t *testing.T) {
	r := demo(t, "-nproc", "1", "-epochs", "2", "-compare")
	require.True(t, r.ParamsIdentical)
	require.Zero(t, r.Compare.MaxAbs)
}

// TestStores: whatever store the ranks meet in, they compute the same bits.
func TestStores(t *testing.T) {
	want := demo(t, "-nproc", "2", "-epochs", "1", "-store", "tcp").ParamsSHA256
	t.Run("file", func(t *testing.T) {
		r := demo(t, "-nproc", "2", "-epochs", "1", "-store", "file")
		require.Equal(t, "file", r.Store)
		require.Equal(t, want, r.ParamsSHA256)
	})
	t.Run("redis", func(t *testing.T) {
		r := demo(t, "-nproc", "2", "-epochs", "1", "-store", "redis", "-redis-url", startRedis(t))
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

// TestResume: two epochs, an end, and two more are the same bits as four epochs.
func TestResume(t *testing.T) {
	file := filepath.Join(t.TempDir(), "state")
	whole := demo(t, "-nproc", "2", "-epochs", "4")
	first := demo(t, "-nproc", "2", "-epochs", "2", "-checkpoint", file)
	require.NotEqual(t, whole.ParamsSHA256, first.ParamsSHA256)
	resumed := demo(t, "-nproc", "2", "-epochs", "4", "-checkpoint", file, "-resume")
	require.Equal(t, whole.ParamsSHA256, resumed.ParamsSHA256)
	require.Equal(t, []float64{whole.Accuracy, whole.Loss, whole.HeldOutLoss}, []float64{resumed.Accuracy, resumed.Loss, resumed.HeldOutLoss})

	t.Run("refused", func(t *testing.T) {
		args := []string{"-nproc", "2", "-checkpoint", file, "-resume"}
		for _, c := range []struct{ add, want string }{
			{"-epochs=4", "is after epoch 4; -epochs 4 leaves nothing to do"},
			{"-hidden=32", "-hidden: layers is [64 128 64 10] there and [64 32 10] here"},
			{"-batch=32", "-batch is 64 there and 32 here"},
			{"-seed=2", "-seed is 1 there and 2 here"},
			{"-checkpoint=" + file + ".none", "no such file"},
		} {
			says := failing(t, append(args, c.add)...)
			require.Contains(t, says, c.want)
			require.Contains(t, says, "[rank 1] ddp: rank 0 could not resume")
			require.Contains(t, says, "ddp: rank 0: exit status 1 (of 2 ranks)", "the rank at fault")
		}
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		b[len(b)/2] ^= 1
		require.NoError(t, os.WriteFile(file, b, 0o644))
		require.Contains(t, failing(t, args...), "the checksum does not fit")
	})
}

// TestCompareSees makes sure that the tolerance of -compare is not one that
// anything passes: a training in which one gradient of hundreds is too small by
// the share of one image does not.
func TestCompareSees(t *testing.T) {
	c, err := parseFlags([]string{"-epochs", "4"}, io.Discard)
	require.NoError(t, err)
	data, err := dataset.Digits()
	require.NoError(t, err)
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
			_, err := got.epoch(t.Context(), e, func(float64, int) {})
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
	c, err := parseFlags([]string{"-hidden", "10,20", "-nproc", "2"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []int{10, 20}, c.hidden)
	c, err = parseFlags([]string{"-hidden", ""}, io.Discard)
	require.NoError(t, err)
	require.Empty(t, c.hidden)
	for _, bad := range []string{
		"-nproc=-1", "-nproc=100000", "-store=etcd", "-epochs=0", "-batch=0", "-bucket=0", "-timeout=0s",
		"-device=gpu", "-check", "-work=host", "-work=gpu", "-resume", "-plot=x.pdf", "-hidden=3,x", "-hidden=-3", "more",
	} {
		_, err := parseFlags([]string{bad}, io.Discard)
		require.Error(t, err, bad)
	}
	_, err = parseFlags([]string{"-device=sim", "-backend=cpu:gloo"}, io.Discard)
	require.EqualError(t, err, `ddp: -backend "cpu:gloo": with -device sim it is the one for CPU tensors, a name alone`)
}

// TestExitCode: who failed because of another rank says so.
func TestExitCode(t *testing.T) {
	died := &work.Error{Peer: 2, Err: work.ErrPeerDied}
	own := &work.Error{Peer: -1, Err: errors.New("no room")}
	for _, c := range []struct {
		err  error
		want int
	}{
		{errDiffer, exitFailed},
		{own, exitFailed},
		{fmt.Errorf("ddp: %w", died), exitPeer},
		{&work.Error{Peer: -1, Err: fmt.Errorf("the group has failed: %w", own)}, exitFailed},
		{fmt.Errorf("ddp: %w", errOtherRank), exitPeer},
	} {
		require.Equal(t, c.want, exitCode(c.err), "%v", c.err)
	}
}

func TestRankWithoutLauncher(t *testing.T) {
	for _, name := range []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} {
		t.Setenv(name, "")
	}
	said := failing(t)
	require.Contains(t, said, "RANK")
	require.Contains(t, said, "or have this program start 4 ranks here: -nproc 4")
}

func TestDiverged(t *testing.T) {
	require.Contains(t, failing(t, "-nproc", "1", "-epochs", "2", "-lr", "1e38"), "the training diverged")
}

func TestProgress(t *testing.T) { synctest.Test(t, testProgress) }

func testProgress(t *testing.T) {
	var out bytes.Buffer
	columns := 0
	p := &progress{
		out: &out, epochs: 20, images: 1000, size: 4, begun: time.Now().Add(-10 * time.Second), accuracy: -1,
		terminal: func() (int, bool) { return columns, columns > 0 },
	}
	p.step(25*0.5, 25)
	require.Empty(t, out.String(), "nothing between epochs where there is no terminal")
	p.done = 2500 // of 5000 for this rank
	p.epoch(&history{Train: []float64{0.25}, Accuracy: []float64{0.95}})
	require.Equal(t, "epoch  1/20  loss 0.2500  held-out accuracy 95.00%    1000 images/s  ETA 0:10\n", out.String())

	for _, columns = range []int{minColumns, 60, 100, 300} {
		bar := p.bar(columns, p.begun.Add(10*time.Second))
		require.Less(t, len([]rune(bar)), columns)
		require.True(t, strings.HasPrefix(bar, "epoch 11/20 ━"), bar)
		require.Contains(t, bar, " 50%  loss 0.5000")
	}
	require.Contains(t, p.bar(100, p.begun.Add(10*time.Second)), "accuracy 95.0%  1000 images/s  ETA 0:10")
	out.Reset()
	columns = 80
	p.end()
	require.Regexp(t, "^\repoch .*\x1b\\[K\n$", out.String())
}
