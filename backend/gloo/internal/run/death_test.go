package run_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/work"
)

// Ranks in processes of their own: each is this test binary, started again with a mortal in its
// environment.

const mortalVariable = "C10D_TEST_MORTAL"

// mortal is what a rank is to do.
type mortal struct {
	File    string // of the store
	Host    string
	Rank    int
	Size    int
	Culprit int    // who is to die, while the others are in
	Op      string // this
	Panics  bool   // it dies of a panic, with a deferred Close
}

// lastWords are what it says then.
type lastWords struct {
	Peer  int
	Died  bool
	Error string
}

func init() {
	if text := os.Getenv(mortalVariable); text != "" {
		var m mortal
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if err := m.live(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func (m *mortal) live() error {
	st, err := store.NewFile(m.File, m.Size+1) // and the parent, which does not use it
	if err != nil {
		return err
	}
	defer st.Close()
	ctx := context.Background()
	b, err := gloo.New(ctx, backend.Options{
		Store: st, Rank: m.Rank, Size: m.Size, Timeout: run.GroupTimeout, Specific: gloo.Options{Host: m.Host},
	})
	if err != nil {
		return err
	}
	defer b.Close()
	if err := barrier(b); err != nil {
		return err
	}
	fmt.Println("ready")
	if m.Rank == m.Culprit {
		_, err := io.Copy(io.Discard, os.Stdin) // until it is killed, or the parent is
		if m.Panics {
			var none []int
			none[m.Rank]++
		}
		return err
	}
	x := vec(make([]float32, 50_000)...)
	ops := map[string]func() (*work.Work, error){
		"all_reduce":     func() (*work.Work, error) { return b.AllReduce(ctx, list(x), backend.AllReduceOptions{}) },
		"recv":           func() (*work.Work, error) { return b.Recv(ctx, x, m.Culprit, backend.P2POptions{}) },
		"recv_anysource": func() (*work.Work, error) { return b.RecvAnySource(ctx, x, backend.P2POptions{}) },
		"send":           func() (*work.Work, error) { return b.Send(ctx, x, m.Culprit, backend.P2POptions{}) },
	}
	err = wait(ops[m.Op]())
	if m.Op == "send" && err == nil { // it had gone out
		err = wait(ops["recv"]())
	}
	words := lastWords{Peer: -2, Died: errors.Is(err, work.ErrPeerDied), Error: fmt.Sprint(err)}
	var e *work.Error
	if errors.As(err, &e) {
		words.Peer = e.Peer
	}
	return json.NewEncoder(os.Stdout).Encode(words)
}

// startAgain starts this test program as a process that does what the value of variable says, in JSON. It ends with
// the test. stderr may be nil.
func startAgain(t *testing.T, variable string, what any, stderr io.Writer) (*exec.Cmd, io.WriteCloser, *bufio.Reader) {
	text := must.Get(json.Marshal(what))
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), variable+"="+string(text))
	c.Stderr = stderr
	in := must.Get(c.StdinPipe())
	out := must.Get(c.StdoutPipe())
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		in.Close()
		c.Process.Kill()
		c.Wait()
	})
	return c, in, bufio.NewReader(out)
}

// begin starts ranks in processes of their own. Closing the input of one lets it die.
func begin(t *testing.T, size int, how mortal) (cmds []*exec.Cmd, ins []io.Closer, outs []*bufio.Reader, errs []*bytes.Buffer) {
	how.File, how.Size = t.TempDir()+"/store", size
	for r := range size {
		m := how
		m.Host, m.Rank = "ab"[r/2:r/2+1], r
		stderr := new(bytes.Buffer)
		c, in, out := startAgain(t, mortalVariable, m, stderr)
		cmds, ins, outs, errs = append(cmds, c), append(ins, in), append(outs, out), append(errs, stderr)
	}
	for r, out := range outs {
		line, err := out.ReadString('\n')
		require.NoError(t, err, "rank %d", r)
		require.Equal(t, "ready", strings.TrimSpace(line), "rank %d", r)
	}
	return cmds, ins, outs, errs
}

// said returns what a rank has to say in the end.
func said(t *testing.T, r int, out *bufio.Reader) (words lastWords) {
	line, err := out.ReadString('\n')
	require.NoError(t, err, "rank %d", r)
	require.NoError(t, json.Unmarshal([]byte(line), &words), "rank %d: %s", r, line)
	return words
}

// TestTheDeadRankIsNamed kills one of two ranks on one of two hosts: those on its host and on the other
// name it, whatever they wait in.
func TestTheDeadRankIsNamed(t *testing.T) {
	onLinux(t)
	for _, op := range []string{"all_reduce", "recv", "recv_anysource", "send"} {
		t.Run(op, func(t *testing.T) {
			const size, culprit = 4, 3
			cmds, _, outs, _ := begin(t, size, mortal{Culprit: culprit, Op: op})
			require.NoError(t, cmds[culprit].Process.Kill())
			for r, out := range outs[:culprit] {
				words := said(t, r, out)
				require.True(t, words.Died, "rank %d: %s", r, words.Error)
				require.Equal(t, culprit, words.Peer, "rank %d: %s", r, words.Error)
			}
		})
	}
}

// TestThePanickingRankIsNamed: the program of one rank panics, with the deferred Close that programs
// have. The others say that it left, and it prints its panic.
func TestThePanickingRankIsNamed(t *testing.T) {
	onLinux(t)
	for _, op := range []string{"all_reduce", "recv"} {
		t.Run(op, func(t *testing.T) {
			const size, culprit = 4, 3
			cmds, ins, outs, errs := begin(t, size, mortal{Culprit: culprit, Op: op, Panics: true})
			require.NoError(t, ins[culprit].Close())
			for r, out := range outs[:culprit] {
				words := said(t, r, out)
				require.Equal(t, culprit, words.Peer, "rank %d: %s", r, words.Error)
				require.Contains(t, words.Error, "rank 3 left the group while others needed it")
			}
			require.Error(t, cmds[culprit].Wait())
			require.Contains(t, errs[culprit].String(), "panic: runtime error: index out of range [3] with length 0")
		})
	}
}
