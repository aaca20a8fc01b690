package tcp

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

// Ranks in processes of their own: each is this test binary, started again.

const processRank = "C10D_TEST_TCP_RANK"

// order is what a parent tells a rank.
type order struct {
	Addrs []string
	Bytes int
	Times int

	Patience time.Duration // for the ranks to join, patience if 0
}

type report struct {
	Error string
}

func init() {
	if rank := os.Getenv(processRank); rank != "" {
		n, _ := strconv.Atoi(rank)
		err := processMain(n, os.Stdin, os.Stdout)
		if err != nil {
			json.NewEncoder(os.Stdout).Encode(report{Error: err.Error()})
		}
		os.Exit(0)
	}
}

// processMain joins a group and sends messages to the next rank, Times of them,
// while it receives as many; it checks every byte of the last ones.
func processMain(rank int, in io.Reader, out io.Writer) (err error) {
	defer must.Catch(&err)
	e := must.Get(Listen(Options{}))
	fmt.Fprintln(out, e.Addr())
	orders := json.NewDecoder(in)
	var o order
	must.Do(orders.Decode(&o))
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(o.Patience, patience))
	defer cancel()
	m, err := e.Join(ctx, rank, o.Addrs)
	if err != nil {
		return err
	}
	defer m.Close()
	for ; err == nil; err = orders.Decode(&o) {
		must.Do(exchange(m, rank, m.Size(), o))
		must.Do(json.NewEncoder(out).Encode(report{}))
		o = order{}
	}
	return nil
}

func exchange(m *Mesh, rank, size int, o order) error {
	to, from := (rank+1)%size, (rank+size-1)%size
	fill := func(b []byte, rank, i int) {
		for j := range b {
			b[j] = byte(j>>3 + 31*rank + i)
		}
	}
	const depth = 2 // messages under way
	sends, recvs := make([]*transport.Request, depth), make([]*transport.Request, depth)
	for i := range depth {
		sends[i], recvs[i] = req(to, 1, make([]byte, o.Bytes)), req(from, 1, make([]byte, o.Bytes))
		fill(sends[i].Buf, rank, i)
		clear(recvs[i].Buf) // so that its memory is there
	}
	for i := range o.Times + depth {
		s, r := sends[i%depth], recvs[i%depth]
		if i >= depth {
			<-r.Done()
			<-s.Done()
			if err := errors.Join(r.Err(), s.Err()); err != nil {
				return err
			}
		}
		if i < o.Times {
			m.Recv(r)
			m.Send(s)
		}
	}
	want := make([]byte, o.Bytes)
	for i := range min(depth, o.Times) {
		if fill(want, from, i); !bytes.Equal(want, recvs[i].Buf) {
			return fmt.Errorf("a message from rank %d is another", from)
		}
	}
	return nil
}

type processes struct {
	ranks []*process
	addrs []string
}

type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startProcesses starts a rank with each of the commands before it, and joins
// them. Who has started them stops them.
func startProcesses(t testing.TB, commands [][]string) *processes {
	ps := spawnProcesses(t, commands)
	ps.run(t, order{Addrs: ps.addrs, Bytes: 1000, Times: 3})
	return ps
}

// spawnProcesses is startProcesses of ranks that do not join yet.
func spawnProcesses(t testing.TB, commands [][]string) *processes {
	ps := &processes{}
	exe := must.Get(os.Executable())
	for i, c := range commands {
		c = append(c, exe)
		cmd := exec.Command(c[0], c[1:]...)
		cmd.Env = append(os.Environ(), processRank+"="+strconv.Itoa(i))
		cmd.Stderr = os.Stderr
		in := must.Get(cmd.StdinPipe())
		out := must.Get(cmd.StdoutPipe())
		require.NoError(t, cmd.Start())
		ps.ranks = append(ps.ranks, &process{cmd, in, bufio.NewReader(out)})
	}
	for _, r := range ps.ranks {
		line := must.Get(r.out.ReadString('\n'))
		ps.addrs = append(ps.addrs, strings.TrimSpace(line))
	}
	return ps
}

func (ps *processes) stop() {
	for _, r := range ps.ranks {
		r.in.Close()
		r.cmd.Wait()
	}
}

// run gives all ranks an order, and waits until they have carried it out.
func (ps *processes) run(t testing.TB, o order) {
	var wg sync.WaitGroup
	reports := make([]report, len(ps.ranks))
	errs := make([]error, len(ps.ranks))
	for i, r := range ps.ranks {
		wg.Go(func() {
			if errs[i] = json.NewEncoder(r.in).Encode(o); errs[i] != nil {
				return
			}
			var line []byte
			if line, errs[i] = r.out.ReadBytes('\n'); errs[i] == nil {
				errs[i] = json.Unmarshal(line, &reports[i])
			}
		})
	}
	wg.Wait()
	for i, r := range reports {
		require.NoError(t, errs[i], "rank %d", i)
		require.Empty(t, r.Error, "rank %d", i)
	}
}

// A process that is killed is noticed by the others at once, by name.
func TestProcessIsKilled(t *testing.T) {
	ps := startProcesses(t, make([][]string, 3))
	defer ps.stop()
	for _, r := range ps.ranks[:2] {
		require.NoError(t, json.NewEncoder(r.in).Encode(order{Bytes: 1 << 20, Times: 4}))
	}
	require.NoError(t, ps.ranks[2].cmd.Process.Kill())
	for i, r := range ps.ranks[:2] {
		line := must.Get(r.out.ReadBytes('\n'))
		var got report
		require.NoError(t, json.Unmarshal(line, &got))
		require.Contains(t, got.Error, "rank 2 died", "rank %d", i)
	}
}
