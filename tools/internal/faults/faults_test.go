package faults

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/netns"
)

// TestMain lets the test binary be a rank and a store of its own tests.
func TestMain(m *testing.M) {
	if ok, err := Role(); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestCases runs one case of each wire, and random ones. On a machine that does not permit networks
// the test is skipped. "tools faults" runs all cases.
func TestCases(t *testing.T) {
	for program, from := range netns.Programs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s command (Debian: %s)", program, from)
		}
	}
	lab, err := NewLab("t", MostHosts)
	if err != nil {
		t.Skipf("network namespaces are not permitted here: %v", err)
	}
	defer lab.Close()
	const size = 3
	cases := []Case{
		{Fault: Kill, Wire: Memory, Op: "all_reduce", Victim: 2},
		{Fault: Store, Wire: TCP, Op: "send_recv"},
		{Fault: Panic, Wire: Gloo, Op: monitored, Victim: 1},
		{Fault: Cancel, Wire: TCP, Op: "all_reduce", Victim: 1},
	}
	for i := range cases {
		c := &cases[i]
		c.Hosts, c.After, c.GoOn = hosts(c.Wire, size), 50*time.Millisecond, c.Fault != Store
		if c.Op != monitored {
			c.Lines = tableScript(c.Op, size, 1<<10)
		}
	}
	for _, w := range []Wire{Memory, TCP, Gloo} {
		for seed := uint64(1); ; seed++ {
			if c := Random(w, seed); c.Fault == Exit || c.Fault == Cancel {
				cases = append(cases, c)
				break
			}
		}
	}
	for _, c := range cases {
		t.Run(c.String(), func(t *testing.T) {
			x := must.Get(lab.Run(t.Context(), c))
			require.Empty(t, x.Problems())
			require.Equal(t, x.Survivors, x.Named)
			if c.GoOn {
				require.Equal(t, x.Survivors, x.Back)
			}
			if c.Fault == Cancel && c.Op == "all_reduce" {
				require.Contains(t, x.Says, errCancel.Error())
			}
		})
	}
}

// TestRandomIsRepeatable: a seed says all of a case.
func TestRandomIsRepeatable(t *testing.T) {
	for seed := range uint64(200) {
		for _, w := range []Wire{Memory, TCP, Gloo} {
			c := Random(w, seed)
			require.Equal(t, c, Random(w, seed))
			require.NotEmpty(t, c.Culprits())
		}
	}
}

// TestTable is the tables of two records.
func TestTable(t *testing.T) {
	all := []Record{
		{Fault: Kill, Wire: TCP, Op: "all_reduce", Survivors: 2, Named: 2, Seconds: 0.0213, Says: "rank 1 died\n| at once", Rest: 2, Back: 2, BackSeconds: 0.0531},
		{Fault: Kill, Wire: TCP, Op: "barrier", Survivors: 2, Named: 1, Seconds: 1.26, Rest: 2, Back: 1, BackSeconds: 2.02},
		{Fault: Stop, Wire: TCP, Op: "barrier", Survivors: 2, Named: 2, Seconds: 1, Rest: 2, Back: 2, BackSeconds: 1.5},
		{Fault: Store, Wire: Torch, Op: "all_reduce", Survivors: 3, Named: 3},
	}
	require.Equal(t, `| fault | native TCP | PyTorch gloo |
| --- | --- | --- |
| SIGKILL | 3 of 4, 1.3s; back 3 of 4, 2s |  |
| SIGSTOP | 2 of 2, 1s; back 1.5s |  |
| store dead |  | 3 of 3 |`, Table(all))
	require.Equal(t, "| fault | native TCP | PyTorch gloo |\n| --- | --- | --- |\n| SIGKILL | `rank 1 died; / at once` |  |\n| SIGSTOP |  |  |\n| store dead |  |  |", SaysTable(all))
}
