package tcp

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

const python = "/usr/bin/python3"

var torchVersion = sync.OnceValues(func() (string, error) {
	out, err := exec.Command(python, "-c", "import torch; print(torch.__version__)").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return strings.TrimSpace(string(out)), nil
})

// torch skips the test where there is no PyTorch, and returns the dialect of
// the one there is.
func torch(t *testing.T) store.Dialect {
	t.Helper()
	version, err := torchVersion()
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "no PyTorch at %s", python)
		}
		t.Skipf("no PyTorch at %s (%v); Debian's package is python3-torch", python, err)
	}
	t.Log("PyTorch", version)
	if strings.HasPrefix(version, "1.") || strings.HasPrefix(version, "2.0") {
		return store.DialectV1
	}
	return store.DialectV2
}

// torchServers returns a function that starts a TCPStore server of PyTorch and
// returns its address.
func torchServers(t *testing.T) func() string {
	cmd := exec.Command(python, "testdata/servers.py")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	r := bufio.NewReader(out)
	return func() string {
		_, err := io.WriteString(in, "one more\n")
		require.NoError(t, err)
		port, err := r.ReadString('\n')
		require.NoError(t, err)
		return net.JoinHostPort("127.0.0.1", strings.TrimSpace(port))
	}
}

// Our client against PyTorch's server, found out and told.
func TestTorchServer(t *testing.T) {
	d := torch(t)
	no := []storetest.Feature{storetest.CompareSetWakes, storetest.Wills}
	if d == store.DialectV1 {
		no = append(no, v1Lacks...)
	}
	start := torchServers(t)
	for name, opts := range map[string]Options{"auto": {}, "told": {Dialect: d}} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, storetest.Config{
				New: func(t *testing.T) store.Store {
					s := join(t, start(), opts)
					require.Equal(t, d, s.Dialect())
					return s
				},
				No: no,
			})
		})
	}
	t.Run("workers", func(t *testing.T) {
		s := join(t, start(), Options{WorldSize: 3})
		n, err := s.NumKeys(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
	})
}

// PyTorch's client against our server.
func TestTorchClient(t *testing.T) {
	torch(t)
	host := join(t, local, Options{Server: true})
	require.NoError(t, host.Set(t.Context(), "from go", []byte("\x00\xff")))
	_, err := host.Delete(t.Context(), "from go") // the script counts keys
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(host.Addr())
	require.NoError(t, err)

	cmd := exec.Command(python, "testdata/client.py", port)
	done := go1(func() error {
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w:\n%s", err, out)
		}
		return err
	})
	got := go1(func() error {
		v, err := host.Get(t.Context(), "from python")
		if err == nil && string(v) != "é" {
			err = fmt.Errorf("got %q", v)
		}
		if err == nil {
			err = host.Set(t.Context(), "from go", []byte("\x00\xff"))
		}
		return err
	})
	if err := await(t, done); err != nil {
		require.NoError(t, host.Close())
		<-got
		require.NoError(t, err)
	}
	require.NoError(t, await(t, got))
	until(t, func() bool { return host.Server().Stats().Waiting == 0 && host.Server().Stats().Refused == 0 })
}

// A process group of Python ranks whose store is ours.
func TestTorchGroup(t *testing.T) {
	torch(t)
	for name, barrier := range map[string]string{"plain": "0", "with barrier": "1"} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, ServerOptions{})
			_, port, err := net.SplitHostPort(server.Addr().String())
			require.NoError(t, err)
			var ranks []<-chan error
			for rank := range 2 {
				cmd := exec.CommandContext(t.Context(), python, "testdata/group.py")
				cmd.Env = append(os.Environ(), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, fmt.Sprint("RANK=", rank),
					"WORLD_SIZE=2", "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0",
					"TORCH_DIST_INIT_BARRIER="+barrier, "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
				ranks = append(ranks, go1(func() error {
					out, err := cmd.CombinedOutput()
					if err == nil && !strings.Contains(string(out), fmt.Sprintf("rank %d sum 6.0", rank)) {
						err = fmt.Errorf("no result")
					}
					if err != nil {
						err = fmt.Errorf("rank %d: %w:\n%s", rank, err, out)
					}
					return err
				}))
			}
			for _, r := range ranks {
				require.NoError(t, await(t, r))
			}
			require.Zero(t, server.Stats().Refused)
			require.Greater(t, server.Stats().Keys, 4)
		})
	}
}

// PyTorch's clients stay while strangers come and go, however long they are silent. Those up to 2.0
// have a second connection, which never speaks.
func TestTorchSilentClient(t *testing.T) {
	torch(t)
	server := serve(t, ServerOptions{MaxClients: 8})
	_, port, err := net.SplitHostPort(server.Addr().String())
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), python, "testdata/silent.py", port)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	require.Equal(t, "silent", lines.Text())
	// SET has no reply: the server may still have to read it, and until then the client is a stranger.
	require.Eventually(t, func() bool { return server.Stats().Keys > 0 }, 20*time.Second, time.Millisecond)
	before := server.Stats().Clients
	var strangers []*raw
	for range 20 {
		strangers = append(strangers, dialRaw(t, server.Addr().String()))
	}
	for _, c := range strangers[:20-(8-before)] {
		c.closed()
	}
	require.Equal(t, 8, server.Stats().Clients)
	_, err = io.WriteString(in, "go on\n")
	require.NoError(t, err)
	require.True(t, lines.Scan())
	require.Equal(t, "done", lines.Text())
	require.NoError(t, cmd.Wait())
}
