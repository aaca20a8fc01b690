//go:build unix

package agent

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/must"
)

// elasticJob is a job of shells whose group has been made. A rank that is started again joins: it writes an epoch.
func elasticJob(n int, sizes, script string) (Job, *[]string) {
	return unmetJob(n, sizes, `[ -n "$C10D_JOIN" ] || meets
`+script)
}

// unmetJob is a job of shells. They make a group when they call meets.
func unmetJob(n int, sizes, script string) (Job, *[]string) {
	j := sh(n, `
meets() { echo "{\"epoch\":0,\"id\":$RANK,\"ids\":[0,1]}" > $C10D_EPOCH_FILE.new; mv $C10D_EPOCH_FILE.new $C10D_EPOCH_FILE; }
joins() { echo "{\"epoch\":$1,\"id\":$2,\"ids\":[$3],\"left\":[{\"id\":$4,\"why\":\"it died\"}]}" > $C10D_EPOCH_FILE.new; mv $C10D_EPOCH_FILE.new $C10D_EPOCH_FILE; }
await() { until [ -e $C10D_SCRATCH_DIR/$1 ]; do sleep 0.02; done; }
`+script)
	fmt.Sscanf(sizes, "%d:%d", &j.Least, &j.Most)
	j.MaxRestarts = 3
	j.Grace = 10 * time.Second
	var mu sync.Mutex
	said := new([]string)
	j.Logf = func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		*said = append(*said, fmt.Sprintf(format, args...))
	}
	return j, said
}

// shows makes j create a file, whose name it returns, when it says something that begins so. The ranks can wait for it.
func shows(t *testing.T, j *Job, begins string) (file string) {
	file = filepath.Join(t.TempDir(), "shown")
	said := j.Logf
	j.Logf = func(format string, args ...any) {
		said(format, args...)
		if strings.HasPrefix(fmt.Sprintf(format, args...), begins) {
			assert.NoError(t, os.WriteFile(file, nil, 0o644))
		}
	}
	return file
}

// TestElasticRestart: one rank dies and is started again. The other one goes on.
func TestElasticRestart(t *testing.T) {
	j, said := elasticJob(2, "1:2", `
echo "$RANK of $WORLD_SIZE, elastic $C10D_ELASTIC, joins '$C10D_JOIN', restart $TORCHELASTIC_RESTART_COUNT"
case $RANK$C10D_JOIN in
0) await again; joins 2 0 0,2 1 ;;
1) exit 7 ;;
11) joins 2 2 0,2 1; touch $C10D_SCRATCH_DIR/again ;;
esac
until [ -e $SHOWN ]; do sleep 0.02; done`)
	j.Env = append(os.Environ(), "SHOWN="+shows(t, &j, "epoch 2: "))
	s, out, errs := run(t, j)
	require.True(t, s.OK, "%s", errs)
	require.Equal(t, 1, s.Restarts)
	require.Zero(t, s.ExitCode)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.ElementsMatch(t, []string{
		"[rank0] 0 of 2, elastic 1:2, joins '', restart 0", "[rank1] 1 of 2, elastic 1:2, joins '', restart 0", "[rank1] 1 of 2, elastic 1:2, joins '1', restart 0",
	}, lines)
	require.Contains(t, *said, "rank 1 failed (exit code 7): it is started again after 100ms if the job goes on")
	require.Contains(t, *said, "rank 1: restart 1 of 3")
	require.Contains(t, *said, "epoch 2: 2 ranks, members 0, 2; 1 left (it died), 2 came (rank 1 of this launcher)")
	require.Len(t, s.Others, 1)
}

// TestElasticTooFew: the job fails when fewer ranks than the least are left, and names the first.
func TestElasticTooFew(t *testing.T) {
	j, said := elasticJob(3, "2:3", `
case $RANK in
0) trap 'exit 0' TERM; while :; do sleep 0.05; done ;;
1) exit 7 ;;
2) until [ -e $SHOWN ]; do sleep 0.02; done; exit 8 ;;
esac`)
	j.Env = append(os.Environ(), "SHOWN="+shows(t, &j, "rank 1 failed"))
	j.MaxRestarts = 0
	s, _, _ := run(t, j)
	require.False(t, s.OK)
	require.Equal(t, 1, s.First.Rank)
	require.Equal(t, 7, s.ExitCode)
	require.Contains(t, *said, "rank 1 failed (exit code 7): it is not started again, because this node has had 0 restarts")
}

// TestElasticNobodyIsLeft: all members fail. Ranks that are started again have no group to join. Only the restarts
// that happen are announced and counted.
func TestElasticNobodyIsLeft(t *testing.T) {
	j, said := elasticJob(2, "1:2", `
echo up
[ -n "$C10D_JOIN" ] && exec sleep 600
[ $RANK = 1 ] && sleep 0.5
exit 3`)
	s, out, _ := run(t, j)
	require.False(t, s.OK)
	require.Equal(t, 3, s.ExitCode)
	require.LessOrEqual(t, strings.Count(out, "up")-2, s.Restarts) // one may be ended before it says so
	require.Equal(t, s.Restarts, strings.Count(strings.Join(*said, "\n"), ": restart "), "%q", *said)
}

// TestElasticBeforeTheGroup: a rank that fails before the group has been made is started again as it was the first
// time, because the others still wait for it.
func TestElasticBeforeTheGroup(t *testing.T) {
	j, said := unmetJob(2, "1:2", `
echo "$RANK joins '$C10D_JOIN'"
if [ $RANK = 1 ] && ! [ -e $C10D_SCRATCH_DIR/again ]; then touch $C10D_SCRATCH_DIR/again; exit 3; fi
[ $RANK = 1 ] && touch $C10D_SCRATCH_DIR/here
await here; meets`)
	s, out, errs := run(t, j)
	require.True(t, s.OK, "%s", errs)
	require.Equal(t, 3, strings.Count(out, "joins ''"), out)
	require.Contains(t, *said, "rank 1: restart 1 of 3")
}

// TestElasticNoGroup: a rank has ended before there was a group, and the others fail. That is no success, and nobody is
// started again for it.
func TestElasticNoGroup(t *testing.T) {
	for name, first := range map[string]string{"with 0": "exit 0", "failed too often": "exit 5"} {
		t.Run(name, func(t *testing.T) {
			j, said := unmetJob(2, "1:2", `
[ $RANK = 1 ] && { touch $C10D_SCRATCH_DIR/gone; `+first+`; }
await gone
sleep 1
exit 3`)
			j.MaxRestarts = 0
			s, _, errs := run(t, j)
			require.False(t, s.OK, "%s", errs)
			require.NotContains(t, strings.Join(*said, "\n"), ": restart ")
		})
	}
}

// TestElasticWaitsForNobody: the job is complete while a rank still waits to join.
func TestElasticWaitsForNobody(t *testing.T) {
	j, _ := elasticJob(2, "1:2", `
[ -n "$C10D_JOIN" ] && touch $C10D_SCRATCH_DIR/again && exec sleep 600
[ $RANK = 1 ] && exit 3
await again`)
	s, _, errs := run(t, j)
	require.True(t, s.OK, "%s", errs)
}

// TestElasticWaitsForNobodyStubborn: a rank that still waits to join does not take the SIGTERM.
func TestElasticWaitsForNobodyStubborn(t *testing.T) {
	j, _ := elasticJob(2, "1:2", `
[ -n "$C10D_JOIN" ] && { trap '' TERM; touch $C10D_SCRATCH_DIR/again; while :; do sleep 0.05; done; }
[ $RANK = 1 ] && exit 3
await again`)
	j.Grace = 200 * time.Millisecond
	s, _, errs := run(t, j)
	require.True(t, s.OK, "%s", errs)
}

// TestElasticCrashes: a rank that fails at once is started again with a pause, and not for ever.
func TestElasticCrashes(t *testing.T) {
	j, said := elasticJob(2, "1:2", `
[ $RANK = 1 ] && exit 3
until [ -e $SHOWN ]; do sleep 0.02; done`)
	j.MaxRestarts = 2
	j.Env = append(os.Environ(), "SHOWN="+shows(t, &j, "rank 1 failed (exit code 3): it is not started again"))
	s, _, errs := run(t, j)
	require.True(t, s.OK, "%s", errs)
	require.Equal(t, 2, s.Restarts)
	require.Equal(t, []string{
		"rank 1 failed (exit code 3): it is started again after 100ms if the job goes on", "rank 1: restart 1 of 2",
		"rank 1 failed (exit code 3): it is started again after 200ms if the job goes on", "rank 1: restart 2 of 2",
		"rank 1 failed (exit code 3): it is not started again, because this node has had 2 restarts",
	}, *said)
}

// TestElasticSignalOnAllNodes: node 1 is gone before the ranks of node 0 have ended. The job ends with the code of the
// signal, as others do. Ranks that leave with their node do not count as finished.
func TestElasticSignalOnAllNodes(t *testing.T) {
	const dies, ends = "trap - INT; kill -INT $$", "exit 0"
	for name, c := range map[string]struct {
		trap         [2]string // what the rank of each node does
		node0, node1 int
	}{
		"die":        {[2]string{dies, dies}, 130, 130},
		"end":        {[2]string{ends, ends}, 130, 0},
		"die or end": {[2]string{ends, dies}, 130, 130},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := func(name string) string { return filepath.Join(dir, name) }
			_, port, err := net.SplitHostPort(freeport.Loopback(t))
			require.NoError(t, err)
			lost := make(chan struct{})
			var codes [2]chan int
			var signals [2]chan os.Signal
			for n := range codes {
				codes[n], signals[n] = make(chan int, 1), make(chan os.Signal, 1)
				j, _ := elasticJob(1, "2:2", fmt.Sprintf(`
trap 'until [ -e %[1]s/go%[2]d ]; do sleep 0.02; done; %[3]s' INT
touch %[1]s/up%[2]d
while :; do sleep 0.05; done`, dir, n, c.trap[n]))
				j.Nodes, j.NodeRank, j.MasterAddr, j.Signals = 2, n, "127.0.0.1", signals[n]
				j.MasterPort = must.Get(strconv.Atoi(port))
				if n == 0 {
					j.Logf = func(format string, args ...any) {
						if strings.Contains(format, "has ended, and its ranks with it") {
							close(lost)
						}
					}
				}
				go func() {
					s, err := Run(t.Context(), j)
					assert.NoError(t, err)
					codes[n] <- s.ExitCode
				}()
			}
			for n := range signals {
				require.Eventually(t, func() bool { _, err := os.Stat(file(fmt.Sprint("up", n))); return err == nil }, time.Minute, 5*time.Millisecond)
				signals[n] <- os.Interrupt
			}
			require.NoError(t, os.WriteFile(file("go1"), nil, 0o644))
			require.Equal(t, c.node1, <-codes[1])
			<-lost
			require.NoError(t, os.WriteFile(file("go0"), nil, 0o644))
			require.Equal(t, c.node0, <-codes[0])
		})
	}
}

// TestElasticLauncherIsStartedAgain: the launcher of node 1 ends, and its rank with it. Another one takes its place, and its
// rank joins.
func TestElasticLauncherIsStartedAgain(t *testing.T) {
	dir := t.TempDir()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	launcher := func(n int, signals chan os.Signal) (*Summary, []string, error) {
		j, said := elasticJob(1, "1:2", fmt.Sprintf(`
until_there() { until [ -e %[1]s/$1 ]; do sleep 0.02; done; }
case $RANK$C10D_JOIN in
0) until_there again; joins 2 0 0,2 1; touch %[1]s/shown ;;
1) touch %[1]s/up; while :; do sleep 0.05; done ;;
11) joins 2 2 0,2 1; touch %[1]s/again; until_there shown ;;
esac`, dir))
		j.Nodes, j.NodeRank, j.MasterAddr, j.Signals = 2, n, "127.0.0.1", signals
		j.MasterPort = must.Get(strconv.Atoi(port))
		s, err := Run(t.Context(), j)
		return s, *said, err
	}
	var zero sync.WaitGroup
	zero.Go(func() {
		s, said, err := launcher(0, nil)
		if assert.NoError(t, err) {
			assert.True(t, s.OK)
			assert.Contains(t, said, "the launcher of node 1 has been started again")
		}
	})
	signals := make(chan os.Signal, 1)
	var one sync.WaitGroup
	one.Go(func() {
		_, _, err := launcher(1, signals)
		assert.NoError(t, err)
	})
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(dir, "up")); return err == nil }, time.Minute, 5*time.Millisecond)
	_, _, err = launcher(1, nil)
	require.ErrorContains(t, err, "node 1 has a launcher already")
	signals <- os.Interrupt
	one.Wait()
	for {
		s, said, err := launcher(1, nil)
		if err != nil && (strings.Contains(err.Error(), "whose group has been made") || strings.Contains(err.Error(), "node 1 has a launcher already")) {
			continue // the other launcher does not know yet that this one has ended
		}
		require.NoError(t, err)
		require.True(t, s.OK)
		require.Contains(t, said, "epoch 2: 2 ranks, members 0, 2; 1 left (it died), 2 came (rank 1 of this launcher)")
		break
	}
	zero.Wait()
}

// TestElasticNamesTheRankThatCame: another rank's epoch is read after the file of the process that
// joined, which has changed meanwhile.
func TestElasticNamesTheRankThatCame(t *testing.T) {
	dir := t.TempDir()
	var said []string
	e := &elastic{attempt: &attempt{agent: &agent{Job: Job{Logf: func(format string, args ...any) {
		said = append(said, fmt.Sprintf(format, args...))
	}}}}, epoch: launch.Epoch{IDs: []int{0, 1}}}
	for local, name := range []string{"joins", "stays"} {
		e.slots = append(e.slots, &slot{local: local, id: -local - 1, live: true, rank: &rank{epochFile: filepath.Join(dir, name)}})
	}
	stays := e.slots[1].rank.epochFile
	defer func() { readEpoch = launch.ReadEpoch }()
	readEpoch = func(path string) (launch.Epoch, error) {
		if path == stays {
			require.NoError(t, launch.WriteEpoch(e.slots[0].rank.epochFile, launch.Epoch{ID: 2}))
			return launch.Epoch{Epoch: 2, ID: 1, IDs: []int{1, 2}, Left: []launch.Absent{{ID: 0, Why: "it died"}}}, nil
		}
		return launch.ReadEpoch(path)
	}
	e.look()
	require.Equal(t, []string{"epoch 2: 2 ranks, members 1, 2; 0 left (it died), 2 came (rank 0 of this launcher)"}, said)
	require.False(t, e.slots[0].member)
}

// TestElasticRestartsNoneInVain: a rank is not started again once a rank of another node has ended before there was a
// group. Afterwards it is: here there is no such program.
func TestElasticRestartsNoneInVain(t *testing.T) {
	for met, want := range map[bool]int{false: 0, true: 1} {
		var said []string
		logf := func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }
		a := &agent{Job: Job{Command: []string{"./none"}, Logf: logf}, dir: t.TempDir(), size: 2, rankSecrets: make([][]string, 1)}
		e := &elastic{attempt: &attempt{agent: a, ended: true}, met: met, awaited: 1}
		s := &slot{rank: &rank{epochFile: filepath.Join(a.dir, "none")}, live: true, awaited: true}
		e.slots = []*slot{s}
		e.restart(s)
		require.False(t, s.live)
		require.Zero(t, e.awaited)
		require.Len(t, said, want, said)
	}
}
