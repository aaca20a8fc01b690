//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/torchtest"
)

// torchrunPy is torchrun. For rank 0's store of each attempt it takes the next port of its first argument: one that
// the system gives away may be another process's when the rank has imported PyTorch.
const torchrunPy = `
import sys
from torch.distributed.elastic.agent.server import api
from torch.distributed.run import main

class Socket:
    ports = iter(sys.argv.pop(1).split(","))
    def getsockname(self): return "127.0.0.1", int(next(self.ports))
    def close(self): pass

api._get_socket_with_port = Socket
main()`

// ownStore are torchrun's flags for a store of its own. That of --standalone has the same port in all jobs, so a
// second job on the host uses the store of the first, until that ends.
const ownStore = "--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:0 --rdzv_conf=is_host=1"

// torchrun runs three ranks, "c10d rank" on those of goRanks and PyTorch on the
// others. In the first attempt the Go ranks get another script: "bad", whose
// second line they refuse, or "missing", which is not there.
func torchrun(t *testing.T, goRanks, first string, flags ...string) (stdout, stderr string, err error) {
	t.Helper()
	self := must.Get(os.Executable())
	rankPy := must.Get(filepath.Abs("../../interop/rank.py"))
	dir := t.TempDir()
	for name, text := range map[string]string{
		"good": `{"op":"all_reduce","shape":[1001],"fill":"frac"}
{"op":"broadcast","shape":[3,5],"root":1}
{"op":"barrier"}
`,
		"bad": `{"op":"all_reduce","shape":[1001],"fill":"frac"}
{"op":"levitate"}
`,
		"wrapper": fmt.Sprintf(`#!/bin/sh
case %q in
*$RANK*) ;;
*) exec %s %s %s/good ;;
esac
script=good
[ "$TORCHELASTIC_RESTART_COUNT" -gt 0 ] || script=%s
C10D_TEST=torchrun exec %s rank -timeout %v -script %s/$script
`, goRanks, torchtest.Interpreter(t), rankPy, dir, first, self, patience, dir),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	var ports []string
	for range 2 {
		_, port, err := net.SplitHostPort(freeport.Loopback(t))
		require.NoError(t, err)
		ports = append(ports, port)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := torchtest.Command(ctx, t, append([]string{
		"-c", torchrunPy, strings.Join(ports, ","), "--nproc_per_node=3", "--no_python", "--monitor_interval=0.2",
		// The defaults, "0", of PyTorch 1.13 do not work with Python 3.11, whose
		// flags leave out 0 when iterated. Rank 9 is none of ours.
		"--redirects=9:1", "--tee=9:1",
	}, append(flags, filepath.Join(dir, "wrapper"))...)...)
	cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", "RANK=",
		fmt.Sprint("SCRIPT_TIMEOUT=", patience.Seconds()))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its ranks, too
	cmd.WaitDelay = patience
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	require.NoError(t, ctx.Err(), errs.String())
	return out.String(), errs.String(), err
}

// TestTorchrun has torchrun start Python and Go ranks. In the first attempt the
// Go ranks fail; in the second, all must find each other again, with whatever
// the first one left in the store.
func TestTorchrun(t *testing.T) {
	t.Parallel()
	torchtest.Need(t)
	for _, c := range []struct{ name, goRanks, flags string }{
		// The store is the agent's. PyTorch up to 2.0 keeps it over restarts.
		{"agent's store, Go first", "01", "--master_addr=127.0.0.1 --master_port=PORT"},
		// The store is rank 0's.
		{"rank 0's store, Python first", "1", ownStore},
		{"rank 0's store, Go first", "02", ownStore},
		{"agent's store, Python first", "12", "--master_addr=127.0.0.1 --master_port=PORT"},
	}[:testsize.Of(1, 2, 4)] {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, port, err := net.SplitHostPort(freeport.Loopback(t))
			require.NoError(t, err)

			flags := append(strings.Fields(strings.ReplaceAll(c.flags, "PORT", port)), "--max_restarts=1")
			out, errs, err := torchrun(t, c.goRanks, "bad", flags...)
			require.NoError(t, err, errs)
			require.Contains(t, errs, `unknown op "levitate"`, "the first attempt was to fail")

			digests := make([]map[int]string, 3)
			for in := json.NewDecoder(strings.NewReader(out)); in.More(); {
				var r script.Result
				require.NoError(t, in.Decode(&r), out)
				if digests[r.I] == nil {
					digests[r.I] = make(map[int]string)
				}
				if r.Error == "" {
					digests[r.I][r.Rank] = r.SHA256
				}
			}
			for i, ranks := range digests {
				require.Len(t, ranks, 3, "line %d of\n%s", i, out)
				require.Equal(t, ranks[0], ranks[1], "line %d of\n%s", i, out)
				require.Equal(t, ranks[0], ranks[2], "line %d of\n%s", i, out)
			}
			require.NotEmpty(t, digests[0][0])
		})
	}
}

// TestTorchrunReport wants a Go rank's error in torchrun's report, and its time.
// The Go rank fails before it joins, so that no other can fail sooner.
func TestTorchrunReport(t *testing.T) {
	t.Parallel()
	torchtest.Need(t)
	before := time.Now().Truncate(time.Second)
	_, errs, err := torchrun(t, "1", "missing", strings.Fields(ownStore)...)
	require.Error(t, err)
	_, report, found := strings.Cut(errs, "Root Cause (first observed failure):")
	require.True(t, found, errs)
	require.Contains(t, report, "missing: no such file or directory")
	require.Contains(t, report, "rank      : 1 ")
	_, at, _ := strings.Cut(report, "time      : ")
	at, _, _ = strings.Cut(at, "\n")
	when := must.Get(time.ParseInLocation("2006-01-02_15:04:05", at, time.Local))
	require.WithinRange(t, when, before, time.Now())
}
