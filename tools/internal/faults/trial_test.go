package faults

import (
	"cmp"
	"flag"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

var trials = flag.Int("faults.trials", 1, "`n` trials on each wire")

// TestTrials runs jobs that go on after several faults. "tools faults -trials 300" runs more.
func TestTrials(t *testing.T) {
	if _, err := exec.LookPath("kill"); err != nil || runtime.GOOS == "windows" {
		t.Skip("signals of Unix are needed")
	}
	stores := map[Wire]StoreKind{Memory: TCPStore, TCP: RedisStore, Gloo: FileStore}
	if _, err := exec.LookPath("redis-server"); err != nil {
		stores[TCP] = TCPStore
	}
	for w, s := range stores {
		for seed := range uint64(*trials) {
			trial := RandomTrial(w, s, seed)
			t.Run(trial.String(), func(t *testing.T) {
				t.Parallel()
				x := must.Get(trial.Run(t.Context()))
				require.Empty(t, x.Problems)
				t.Logf("%d epochs", x.Epochs)
			})
		}
	}
}

// TestChanged: a Reconfigure may take longer while a fault comes, or a process stands still.
func TestChanged(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	faults, silences := []span{{at(10), at(11)}}, []span{{at(20), at(40)}}
	for _, c := range []struct {
		from, to int
		during   During
		long     bool
	}{
		{0, 2, Undisturbed, false},
		{0, 5, Undisturbed, true},
		{5, 15, FaultCame, false},
		{21, 32, Silence, false},
		{30, 45, Silence, true},
	} {
		x := &trial{Trial: &Trial{Within: 2 * time.Second}, out: &Outcome{Store: FileStore}}
		x.changed(&trialRank{}, &Change{Begun: at(c.from), Ended: at(c.to)}, faults, silences)
		require.Equal(t, c.during, x.out.Changes[0].During)
		require.Equal(t, c.long, len(x.out.Problems) > 0, "%+v", c)
		require.Contains(t, ChangesTable([]*Outcome{x.out}), "| file | "+cmp.Or(string(c.during), "nothing")+" | 1 |")
	}
}

// TestRandomTrialIsRepeatable: a seed says all of a trial.
func TestRandomTrialIsRepeatable(t *testing.T) {
	for seed := range uint64(200) {
		a, b := RandomTrial(TCP, FileStore, seed), RandomTrial(TCP, FileStore, seed)
		require.Equal(t, a, b)
		require.NotEmpty(t, a.Events)
	}
}
