package agent

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// dying is the store of an agent that dies before it is counted.
type dying struct{ store.Store }

func (dying) Add(context.Context, string, int64) (int64, error) { return 0, errors.New("dead") }

// TestDoneOrder: a node that is not counted is not marked either, so that node 0 does not wait for it.
func TestDoneOrder(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	a := &agent{Job: Job{Nodes: 2, NodeRank: 1}, nodes: dying{st}}
	a.done("done", "end")
	require.False(t, must.Get(st.Check(t.Context(), nodeDoneKey("done", 1))))
}

// TestSignalAfterTheLastRank: a signal that comes once the last rank of a node has ended, or while it ends, ends the wait
// for the other nodes.
func TestSignalAfterTheLastRank(t *testing.T) {
	for name, signalled := range map[string]bool{"the end is known": false, "the signal was passed on": true} {
		t.Run(name, func(t *testing.T) {
			for range 20 { // the signal and the end of the rank are taken in any order
				st := store.NewHash()
				defer st.Close()
				signals, exits := make(chan os.Signal, 1), make(chan exit, 1)
				a := &agent{Job: Job{Nodes: 2, NodeRank: 1, Procs: 1, Signals: signals, Logf: t.Logf, Grace: time.Millisecond}, nodes: st}
				r := &rank{cmd: &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}}, reaped: true}
				x := &attempt{agent: a, ranks: []*rank{r}, states: make(map[*rank]Failure), ended: true, ends: make(chan ending), alarms: make(chan alarm)}
				if signalled {
					a.signal = syscall.SIGINT
					x.terminate(syscall.SIGINT)
				} else {
					signals <- syscall.SIGINT
				}
				exits <- exit{rank: r}
				require.NoError(t, x.run(t.Context(), exits))
				require.Equal(t, signalCode(syscall.SIGINT), x.end.code())
			}
		})
	}
}

// TestSignalAfterTheEnd: a signal does not hide why the job has ended, on another node.
func TestSignalAfterTheEnd(t *testing.T) {
	for range 20 { // the signal and the end of the rank are taken in any order
		signals, exits := make(chan os.Signal, 1), make(chan exit, 1)
		a := &agent{Job: Job{Nodes: 2, NodeRank: 1, Procs: 1, Signals: signals, Logf: t.Logf, Grace: time.Minute}, nodes: store.NewHash()}
		r := &rank{cmd: &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}}, reaped: true}
		end := ending{First: &Failure{Rank: 0, ExitCode: 3}}
		x := &attempt{agent: a, ranks: []*rank{r}, states: make(map[*rank]Failure), ended: true, end: end, over: true}
		x.terminate(syscall.SIGTERM)
		signals <- syscall.SIGINT
		exits <- exit{rank: r}
		require.NoError(t, x.run(t.Context(), exits))
		require.Equal(t, end, x.end)
	}
}
