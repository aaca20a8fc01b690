package tcp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

// torch skips the test where there is no PyTorch, and returns the dialect of
// the one there is.
func torch(t *testing.T) *dialect {
	t.Helper()
	torchtest.Need(t)
	version := must.Get(torchtest.Command(t.Context(), t, "-c", "import torch; print(torch.__version__)").Output())
	t.Logf("PyTorch %s", version)
	if strings.HasPrefix(string(version), "1.") || strings.HasPrefix(string(version), "2.0") {
		return torch1
	}
	return pytorch
}

// torchServers returns a function that starts a TCPStore server of PyTorch and
// returns its address.
func torchServers(t *testing.T) func() string {
	cmd := torchtest.Command(context.Background(), t, "testdata/servers.py")
	cmd.Stderr = os.Stderr
	in := must.Get(cmd.StdinPipe())
	out := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	r := bufio.NewReader(out)
	return func() string {
		must.Get(io.WriteString(in, "one more\n"))
		return net.JoinHostPort("127.0.0.1", strings.TrimSpace(must.Get(r.ReadString('\n'))))
	}
}

// Our client against PyTorch's server, found out and told.
func TestTorchServer(t *testing.T) {
	t.Parallel()
	d := torch(t)
	no := []storetest.Feature{storetest.CompareSetWakes, storetest.Wills}
	if d == torch1 {
		no = append(no, v1Lacks...)
	}
	start := torchServers(t)
	storetest.Run(t, storetest.Config{
		New: func(t *testing.T) store.Store {
			s := join(t, start(), Options{})
			require.Equal(t, d, s.dialer.dialect)
			return s
		},
		No: no,
	})
	t.Run("told", func(t *testing.T) {
		s := join(t, start(), Options{dialect: d})
		require.NoError(t, s.Set(t.Context(), "k", []byte("v")))
		require.Equal(t, "v", string(must.Get(s.Get(t.Context(), "k"))))
	})
	t.Run("workers", func(t *testing.T) {
		s := join(t, start(), Options{WorldSize: 3})
		require.EqualValues(t, 1, must.Get(s.NumKeys(t.Context())))
	})
}

// PyTorch's client against our server.
func TestTorchClient(t *testing.T) {
	t.Parallel()
	torch(t)
	host := join(t, local, Options{Server: true})
	require.NoError(t, host.Set(t.Context(), "from go", []byte("\x00\xff")))
	_, err := host.Delete(t.Context(), "from go") // the script counts keys
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(host.Addr())
	require.NoError(t, err)

	cmd := torchtest.Command(context.Background(), t, "testdata/client.py", port)
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

// PyTorch's clients stay while strangers come and go, however long they are silent. Those up to 2.0
// have a second connection, which never speaks.
func TestTorchSilentClient(t *testing.T) {
	torch(t)
	server := serve(t, ServerOptions{MaxClients: 8})
	_, port, err := net.SplitHostPort(server.Addr().String())
	require.NoError(t, err)
	cmd := torchtest.Command(t.Context(), t, "testdata/silent.py", port)
	cmd.Stderr = os.Stderr
	in := must.Get(cmd.StdinPipe())
	out := must.Get(cmd.StdoutPipe())
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
	must.Get(io.WriteString(in, "go on\n"))
	require.True(t, lines.Scan())
	require.Equal(t, "done", lines.Text())
	require.NoError(t, cmd.Wait())
}
