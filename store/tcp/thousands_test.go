package tcp

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/testsize"
)

// race says that the test runs under the race detector.
var race bool

// clientsEnv makes the test binary the client half of that test, as one
// process has not the descriptors for both: "address count".
const clientsEnv = "C10D_TCP_TEST_CLIENTS"

// The server holds thousands of clients of both dialects, releases them all
// with one key, and some turning bad loses nothing of the good ones.
func TestThousandsOfClients(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens thousands of sockets")
	}
	most := testsize.Of(2000, 2000, 10_000)
	clients := min(most, openfiles.Limit()-200) / 5 * 5 // every fifth turns bad
	if clients < most {
		t.Logf("%d clients, as the process may have %d descriptors only", clients, openfiles.Limit())
	}
	server := serve(t, ServerOptions{MaxClients: clients + 1})
	good := join(t, server.Addr().String(), Options{})
	for i := range 100 {
		require.NoError(t, good.Set(t.Context(), fmt.Sprint("mine ", i), fmt.Append(nil, i)))
	}

	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", clientsEnv, server.Addr(), clients))
	cmd.Stderr = os.Stderr
	in := must.Get(cmd.StdinPipe())
	out := must.Get(cmd.StdoutPipe())
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	require.NoError(t, cmd.Start())
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	lines := bufio.NewScanner(out)
	says := func(want string) {
		t.Helper()
		require.True(t, lines.Scan(), "the clients ended, before %q", want)
		require.Equal(t, want, lines.Text())
		t.Logf("%d clients %s after %v", clients, want, time.Since(start))
		start = time.Now()
	}

	says("joined")
	n := must.Get(good.Add(t.Context(), "clients", 0))
	require.EqualValues(t, clients, n)
	says("wait")
	runtime.GC()
	runtime.ReadMemStats(&after)
	t.Logf("the server holds %d bytes for each", (after.HeapAlloc+after.StackInuse-before.HeapAlloc-before.StackInuse)/uint64(clients))
	require.Equal(t, clients+1, server.Stats().Clients)

	start = time.Now()
	require.NoError(t, good.Set(t.Context(), "go", []byte("value")))
	t.Logf("the set took %v", time.Since(start))
	says("released")

	io.WriteString(in, "misbehave\n")
	says("misbehaved")
	until(t, func() bool { return server.Stats().Clients == clients-clients/5+1 })
	require.EqualValues(t, clients/5, server.Stats().Refused)
	for i := range 100 {
		require.Equal(t, strconv.Itoa(i), string(must.Get(good.Get(t.Context(), fmt.Sprint("mine ", i)))))
	}
	io.WriteString(in, "read\n")
	says("read")
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
	until(t, func() bool { return server.Stats().Clients == 1 })
	works(t, good)
}

// manyClients is the other process.
func manyClients(args string) (err error) {
	defer must.Catch(&err)
	var addr string
	var count int
	must.Get(fmt.Sscan(args, &addr, &count))
	in := bufio.NewReader(os.Stdin)
	type client struct {
		net.Conn
		dialect *dialect
	}
	send := func(c client, reqs ...*request) error {
		var b []byte
		for _, r := range reqs {
			var err error
			if b, err = r.append(b, c.dialect); err != nil {
				return err
			}
		}
		return must.Err(c.Write(b))
	}
	expect := func(c client, want string) error {
		c.SetReadDeadline(time.Now().Add(patience))
		b := make([]byte, len(want))
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
		if want != string(b) {
			return fmt.Errorf("got %q, want %q", b, want)
		}
		return nil
	}

	clients := make([]client, count)
	for i := range clients {
		conn := must.Get(net.Dial("tcp", addr))
		c := client{conn, []*dialect{v1d, v2d}[i%2]}
		clients[i] = c
		if c.dialect == v2d {
			conn.Write(opening)
		}
		must.Do(send(c, number(qAdd, "clients", 1)))
	}
	for i, c := range clients {
		c.SetReadDeadline(time.Now().Add(patience))
		b := make([]byte, 8)
		if _, err := io.ReadFull(c, b); err != nil {
			return fmt.Errorf("client %d: %w", i, err)
		}
	}
	fmt.Println("joined")
	for _, c := range clients {
		// The first of the two keys is there, and its answer says that the
		// wait for the second has been read by the time the next comes.
		must.Do(send(c, waitFor("clients")))
		must.Do(expect(c, "\x00"))
		must.Do(send(c, waitFor("go")))
	}
	fmt.Println("wait")
	for i, c := range clients {
		if err := expect(c, "\x00"); err != nil {
			return fmt.Errorf("client %d: %w", i, err)
		}
	}
	fmt.Println("released")
	in.ReadString('\n')

	bad := []string{ // in either dialect
		"\xff", "GET / HTTP/1.0\r\n\r\n", strings.Repeat("\x09", 100), "\x01" + strings.Repeat("\xff", 8),
		"\x05\x01\x00\x00\x00\x00\x00\x00\x80", "\x05" + strings.Repeat("\x7f", 1000),
	}
	for i, c := range clients {
		if i%5 == 0 {
			c.Write([]byte(bad[i/5%len(bad)]))
			c.SetReadDeadline(time.Now().Add(patience))
			if b, err := io.ReadAll(c); len(b) > 0 || err != nil && !disconnected(err) {
				return fmt.Errorf("client %d: answered with % x, %w", i, b, err)
			}
		}
	}
	fmt.Println("misbehaved")
	in.ReadString('\n')
	for i, c := range clients {
		if i%5 == 0 {
			continue
		}
		must.Do(send(c, keyed(qGet, "go")))
		if err := expect(c, string(cat("value"))); err != nil {
			return fmt.Errorf("client %d: %w", i, err)
		}
	}
	fmt.Println("read")
	in.ReadString('\n')
	return nil
}
