package script_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
)

// python is Debian's, whose torch is 1.13.1.
const python = "/usr/bin/python3"

func needTorch(t *testing.T) {
	t.Helper()
	if err := exec.Command(python, "-c", "import torch.distributed").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch.distributed': %v", python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch.distributed': %v", python, err)
	}
}

// mixed runs a script with PyTorch on some ranks and this library on the
// others, which compare their collectives first if detail is set. Rank odd runs
// another script if that is not empty.
func mixed(t *testing.T, size int, torch map[int]bool, text string, detail bool, odd int, oddText string) [][]script.Result {
	t.Helper()
	if detail {
		t.Setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
	}
	dir := t.TempDir()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	got, errs := make([][]script.Result, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		text := text
		if r == odd && oddText != "" {
			text = oddText
		}
		file := filepath.Join(dir, strconv.Itoa(r))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
		wg.Go(func() {
			if torch[r] {
				got[r], errs[r] = torchRank(t, file, r, size, port)
				return
			}
			lines, err := script.Parse(strings.NewReader(text), size)
			if err != nil {
				errs[r] = err
				return
			}
			g, err := pg.Init(t.Context(), fmt.Sprintf("tcp://127.0.0.1:%s?rank=%d&world_size=%d", port, r, size),
				pg.InitOptions{Options: pg.Options{Timeout: patience}})
			if err != nil {
				errs[r] = err
				return
			}
			defer g.Close()
			errs[r] = script.Run(t.Context(), g, lines, func(x script.Result) { got[r] = append(got[r], x) })
		})
	}
	wg.Wait()
	for r, err := range errs {
		require.NoError(t, err, "rank %d", r)
	}
	return got
}

func torchRank(t *testing.T, file string, rank, size int, port string) ([]script.Result, error) {
	cmd := exec.CommandContext(t.Context(), python, "../../interop/rank.py", file)
	cmd.Env = append(os.Environ(), "RANK="+strconv.Itoa(rank), "WORLD_SIZE="+strconv.Itoa(size),
		"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "GLOO_SOCKET_IFNAME=lo",
		fmt.Sprint("SCRIPT_TIMEOUT=", patience.Seconds()))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, stderr.String())
	}
	var results []script.Result
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
		var x script.Result
		if err := json.Unmarshal(sc.Bytes(), &x); err != nil {
			return nil, fmt.Errorf("%w in %q", err, sc.Text())
		}
		results = append(results, x)
	}
	return results, nil
}

// TestWithPyTorch puts this library's ranks and PyTorch 1.13's into one group,
// in every place, with the store on either side, and wants the bits of a group
// without PyTorch.
func TestWithPyTorch(t *testing.T) {
	needTorch(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	const text = `
{"op":"all_reduce","shape":[1]}
{"op":"all_reduce","shape":[1000003],"fill":"frac","seed":3}
{"op":"all_reduce","dtype":"float16","shape":[999],"fill":"frac","reduce":"sum"}
{"op":"all_reduce","dtype":"int64","shape":[3,5],"reduce":"product"}
{"op":"all_reduce","dtype":"uint8","shape":[7],"reduce":"bxor"}
{"op":"all_reduce","dtype":"float64","shape":[0]}
{"op":"all_reduce","dtype":"int8","shape":[31],"reduce":"max"}
{"op":"all_reduce_coalesced","shapes":[[3],[4,5]],"fill":"frac"}
{"op":"reduce","shape":[1001],"fill":"frac","root":1}
{"op":"broadcast","shape":[3,5],"root":1,"fill":"frac"}
{"op":"broadcast","dtype":"int32","shape":[0]}
{"op":"all_gather","dtype":"float64","shape":[2,3],"fill":"frac"}
{"op":"gather","shape":[7],"root":1}
{"op":"scatter","shape":[7],"root":0}
{"op":"all_to_all_single","shape":[4]}
{"op":"send_recv","shape":[100000],"src":0,"dst":1,"tag":4}
{"op":"send_recv","shape":[3],"src":1,"dst":0}
{"op":"recv_any","shape":[5],"src":1,"dst":0,"tag":5}
{"op":"recv_any","shape":[5],"src":0,"dst":1,"tag":6}
{"op":"new_group","ranks":[0,1],"name":"two"}
{"op":"all_reduce","shape":[17],"fill":"frac","group":"two"}
{"op":"barrier"}
`
	for _, tc := range []struct {
		size  int
		torch []int
	}{{2, []int{0}}, {2, []int{1}}, {3, []int{0, 2}}, {3, []int{1}}} {
		t.Run(fmt.Sprintf("PyTorch on %v of %d", tc.torch, tc.size), func(t *testing.T) {
			torch := map[int]bool{}
			for _, r := range tc.torch {
				torch[r] = true
			}
			want := run(t, tc.size, text)
			for _, detail := range []bool{false, true} {
				got := mixed(t, tc.size, torch, text, detail, 0, "")
				for r := range want {
					require.Equal(t, want[r], got[r], "rank %d, DETAIL %v", r, detail)
				}
			}
		})
	}
}

// TestMismatchBesidePyTorch lets one rank call something else under
// TORCH_DISTRIBUTED_DEBUG=DETAIL: it and the others are told, and go on.
func TestMismatchBesidePyTorch(t *testing.T) {
	needTorch(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	const usual = `
{"op":"all_reduce","shape":[5]}
{"op":"all_reduce","shape":[5]}
{"op":"all_reduce","shape":[5]}
`
	const other = `
{"op":"all_reduce","shape":[5],"dtype":"int32"}
{"op":"barrier"}
{"op":"all_reduce","shape":[5]}
`
	for _, odd := range []int{0, 1} {
		t.Run(fmt.Sprintf("on rank %d", odd), func(t *testing.T) {
			got := mixed(t, 2, map[int]bool{1: true}, usual, true, odd, other) // Go on 0
			own, theirs := "all_reduce of int32 [5] on cpu", "all_reduce of float32 [5] on cpu"
			short, long := "barrier", "an operation on a tensor of 1 dimension"
			if odd == 1 {
				own, theirs = theirs, own
				short, long = theirs[:10]+" of float32 [5] on cpu", "an operation whose tensors are not compared"
			}
			require.Contains(t, got[0][0].Error, fmt.Sprintf("rank 0 of group %q calls %s, but rank 1 calls %s", "0", own, theirs))
			require.Contains(t, got[0][1].Error, fmt.Sprintf("rank 0 of group %q calls %s, but rank 1 calls %s", "0", short, long))
			for i := range 2 {
				require.Contains(t, got[1][i].Error, "Detected mismatch between collectives on ranks. Rank 1 is running")
			}
			require.Equal(t, run(t, 2, usual)[0][2].SHA256, got[0][2].SHA256)
			require.Equal(t, got[0][2].SHA256, got[1][2].SHA256)
		})
	}
}
