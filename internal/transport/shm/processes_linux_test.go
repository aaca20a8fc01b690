package shm_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/stretchr/testify/require"
)

// The ranks of this file are processes: this test binary, started again with
// roleEnv set. A rank prints its address, reads all addresses, joins, and does
// what its role says.
const roleEnv = "C10D_SHM_ROLE"

var roles = map[string]func(g *shm.Group, args []string) error{
	"count": countRank,
	"loop":  loopRank,
	"send":  sendRank,
	"mourn": mournRank,
	"lots":  lotsRank,
	"widow": widowRank,

	"limited": limitedRank,
}

// commands is what the ranks of startRanks are told.
var commands = bufio.NewReader(os.Stdin)

// beRank is TestMain of a rank.
func beRank(role string) int {
	if err := runRank(strings.Fields(role)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runRank(role []string) (err error) {
	defer must.Catch(&err)
	rank := must.Get(strconv.Atoi(role[0]))
	e := must.Get(shm.NewEndpoint())
	fmt.Println(e.Addr())
	line, err := commands.ReadString('\n')
	if err != nil {
		return err
	}
	var o shm.Options
	if s := os.Getenv("C10D_SHM_FROM"); s != "" {
		from := must.Get(strconv.ParseInt(s, 10, 64))
		o = o.From(from)
	}
	switch role[1] {
	case "mourn":
		o = holdReads(o.From(1))
	case "widow":
		o = o.From(-1)
	case "limited":
		if rank == 0 {
			err = limitFiles(1 << 30)
		}
	case "cramped":
		if rank == 0 {
			err = limitFiles(1 << 20)
		}
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g, err := e.Join(ctx, rank, strings.Fields(line), o)
	if role[1] == "cramped" {
		fmt.Println(err)
		return nil
	}
	if err != nil {
		return err
	}
	defer g.Close()
	return roles[role[1]](g, role[2:])
}

type process struct {
	*exec.Cmd
	in   io.Writer
	out  *bufio.Reader
	addr string
}

// startRanks starts processes that have joined one group, or will do so soon.
func startRanks(t testing.TB, n int, role string) []process {
	ps := make([]process, n)
	var addrs []string
	for r := range ps {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", roleEnv, r, role))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		in := must.Get(cmd.StdinPipe())
		out := must.Get(cmd.StdoutPipe())
		require.NoError(t, cmd.Start())
		ps[r] = process{Cmd: cmd, in: in, out: bufio.NewReader(out)}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		line := must.Get(ps[r].out.ReadString('\n'))
		ps[r].addr = strings.TrimSpace(line)
		addrs = append(addrs, ps[r].addr)
		defer func() { fmt.Fprintln(in, strings.Join(addrs, " ")) }()
	}
	return ps
}

var theMesh *shm.Mesh

// meshOf returns the mesh of a process, over one through which no news come.
func meshOf(g *shm.Group) *shm.Mesh {
	if theMesh == nil {
		rest, err := mem.NewFabric().Join("", g.Rank(), g.Size())
		if err != nil {
			panic(err)
		}
		if theMesh, err = shm.NewMesh(g, rest, shm.MeshOptions{Lazy: true}); err != nil {
			panic(err)
		}
	}
	return theMesh
}

// flag waits for one request at a time, by itself or by helping.
type flag struct {
	transport.Request
	ended atomic.Bool
	done  chan struct{}
}

func newFlag() *flag {
	f := &flag{done: make(chan struct{}, 1)}
	f.Owner = f
	return f
}

func (f *flag) Ended(*transport.Request) {
	f.ended.Store(true)
	f.done <- struct{}{}
}

func (f *flag) Finished() bool { return f.ended.Load() }
func (f *flag) Expired() bool  { return false }

func (f *flag) waitPolling(m *shm.Mesh) error {
	if !f.ended.Load() {
		m.PollUntil(f, nil)
	}
	<-f.done
	return f.Err()
}
