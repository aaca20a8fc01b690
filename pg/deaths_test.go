//go:build unix

package pg

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/work"
)

// A full run, on CPUs that do nothing else:
//
//	C10D_NIGHTLY=1 go test ./pg -run TestDeathsWhileMeeting -deaths.within 1s -timeout 1h
var (
	deathsWithin = flag.Duration("deaths.within", 15*time.Second, "`limit` for each survivor to name the dead rank")
	deathsSeed   = flag.Uint64("deaths.seed", 0, "`seed` of TestDeathsWhileMeeting; 0 means a new one")
)

const deathsURL = "C10D_TEST_DEATHS_URL"

// meetingLimit is the ranks' timeout. Only a stopped rank may take as long.
const meetingLimit = 30 * time.Second

// stopLimit is the timeout where a rank is stopped. All ranks must have come by then.
const stopLimit = 12 * time.Second

// survivor is what a rank writes at its end.
type survivor struct {
	Rank    int
	Culprit int // as the error's fields say, -1 if they say none
	Text    string
	Made    bool      // the group was made
	At      time.Time // when the test has read this: clocks of processes may be set
}

func init() {
	if url := os.Getenv(deathsURL); url != "" {
		surviveDeaths(url)
		os.Exit(0)
	}
}

// surviveDeaths is a rank: it makes the default group, calls operations until one fails, and writes how.
func surviveDeaths(url string) {
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(3) // without a word
	}()
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	size, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
	limit, _ := time.ParseDuration(os.Getenv("LIMIT"))
	o := InitOptions{Rank: rank, Size: size, Options: Options{Timeout: limit}}
	s := survivor{Rank: rank}
	ctx := context.Background()
	g, err := initFrom(ctx, url, o, func(name string) string { return "" })
	if err == nil {
		s.Made = true
		for err == nil {
			err = Wait(g.AllReduce(ctx, Slice([]float32{1}), backend.Sum()))
			time.Sleep(time.Millisecond) // leaves the CPUs to the others
		}
	}
	s.Culprit, s.Text = culpritOf(err), err.Error()
	json.NewEncoder(os.Stdout).Encode(s)
	if g != nil {
		g.Close()
	}
}

// culpritOf returns the rank that the fields of err blame.
func culpritOf(err error) int {
	var f *GroupFault
	var w *work.Error
	var m *MeetingError
	var c culprit
	switch {
	case errors.As(err, &f):
		return f.Rank
	case errors.As(err, &w):
		return w.Peer
	case errors.As(err, &c) && c.Culprit() >= 0:
		return c.Culprit()
	case errors.As(err, &m) && len(m.Missing) == 1:
		return m.Missing[0]
	case errors.As(err, &m) && len(m.Stopped) == 1:
		return m.Stopped[0]
	}
	return -1
}

// death is one case of TestDeathsWhileMeeting.
type death struct {
	wire   string
	size   int
	victim int
	late   int           // this rank starts lateBy after the others, -1 for none
	lateBy time.Duration // may be more than after: then it never starts
	after  time.Duration // since the victim came to the store
	how    string        // killed, exits or stopped
	redis  bool          // the store, which notices no death
}

func (d death) String() string {
	where := "tcp"
	if d.redis {
		where = "redis"
	}
	return fmt.Sprintf("%s, wire %s, rank %d of %d %s %v after it came; rank %d comes %v later", where, d.wire, d.victim, d.size, d.how, d.after, d.late, d.lateBy)
}

// unseen says that the store does not notice the death. At the timeout the others cannot tell a rank that came late from one
// that stopped, so all come.
func (d death) unseen() bool { return d.redis || d.how == "stopped" }

func randomDeath(r *rand.Rand) death {
	d := death{
		wire: []string{"native", "tcp", "gloo"}[r.IntN(3)],
		size: 3 + r.IntN(3), late: -1,
		how: []string{"killed", "killed", "exits", "stopped"}[r.IntN(4)], redis: r.IntN(4) == 0,
	}
	d.victim = r.IntN(d.size)
	d.after = time.Duration(r.IntN(60)) * time.Millisecond
	if r.IntN(2) == 0 && !d.unseen() {
		d.after = time.Duration(r.IntN(500)) * time.Millisecond
		d.lateBy = time.Duration(r.IntN(800)) * time.Millisecond
		for d.late = r.IntN(d.size); d.late == d.victim || d.late == 0; {
			d.late = r.IntN(d.size)
		}
	}
	return d
}

// TestDeathsWhileMeeting kills or stops a rank, or ends it without Close, at a random moment after it has come to the store.
// Every other rank that has come by then names it: at once if the store notices, at the timeout if not, and if it
// was stopped. The ranks are processes.
func TestDeathsWhileMeeting(t *testing.T) {
	seed := *deathsSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-deaths.seed %d", seed)
	if !testsize.Long() { // that measures
		t.Parallel()
	}
	r := rand.New(rand.NewPCG(seed, 1))
	var noticed, late []time.Duration
	inMeeting := 0
	var mu sync.Mutex
	n := testsize.Of(6, 6, 300)
	t.Cleanup(func() {
		t.Logf("%d deaths, %d of them before a group was made", n, inMeeting)
		for what, took := range map[string][]time.Duration{"that the store notices": noticed, fmt.Sprintf("that show at the timeout of %v", stopLimit): late} {
			if slices.Sort(took); len(took) > 0 {
				at := func(percent int) time.Duration { return took[(len(took)-1)*percent/100].Round(time.Millisecond) }
				t.Logf("%d deaths %s: the last survivor named the rank after %v in the median, %v in 95 %%, %v in 99 %%, %v at most",
					len(took), what, at(50), at(95), at(99), at(100))
			}
		}
	})
	for i := range n {
		d := randomDeath(r)
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			if !testsize.Long() {
				t.Parallel()
			}
			t.Log(d)
			url := "tcp://" + freeport.Loopback(t)
			if d.redis {
				url = "redis://" + startRedis(t) + "/0?prefix=deaths"
			}
			took, made := d.run(t, url)
			mu.Lock()
			defer mu.Unlock()
			if d.unseen() {
				late = append(late, took)
			} else {
				noticed = append(noticed, took)
			}
			if !made {
				inMeeting++
			}
		})
	}
}

// run returns how long the last survivor took, and whether one had made the group.
func (d death) run(t *testing.T, url string) (took time.Duration, made bool) {
	limit := meetingLimit
	if d.unseen() {
		limit = stopLimit
	}
	exe := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(context.Background(), 2*meetingLimit)
	defer cancel()
	ranks := make([]*exec.Cmd, d.size)
	ends := make([]chan survivor, d.size)
	inputs := make([]io.WriteCloser, d.size)
	var readers sync.WaitGroup
	start := func(rank int) {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), deathsURL+"="+url, "RANK="+strconv.Itoa(rank), "WORLD_SIZE="+strconv.Itoa(d.size),
			"C10D_WIRE="+d.wire, "LIMIT="+limit.String())
		cmd.Stderr = os.Stderr
		out := must.Get(cmd.StdoutPipe())
		inputs[rank] = must.Get(cmd.StdinPipe())
		require.NoError(t, cmd.Start())
		ranks[rank], ends[rank] = cmd, make(chan survivor, 1)
		readers.Go(func() {
			defer close(ends[rank])
			var s survivor
			if json.NewDecoder(bufio.NewReader(out)).Decode(&s) == nil {
				s.At = time.Now()
				ends[rank] <- s
			}
		})
	}
	defer func() {
		for _, cmd := range ranks {
			if cmd != nil {
				cmd.Process.Kill()
			}
		}
		readers.Wait()
		for _, cmd := range ranks {
			if cmd != nil {
				cmd.Wait()
			}
		}
	}()
	for r := range d.size {
		if r != d.late {
			start(r)
		}
	}
	begun := time.Now()
	st := observe(ctx, t, url)
	defer st.Close()
	came := store.Prefix("default_pg/c10d-go/meet/-/0", st)
	require.NoError(t, came.Wait(ctx, "rank/"+strconv.Itoa(d.victim)))
	for r := range d.size {
		if d.unseen() {
			require.NoError(t, came.Wait(ctx, "rank/"+strconv.Itoa(r)))
		}
	}
	moment := time.Now().Add(d.after)
	for d.late >= 0 && time.Until(moment) > 0 {
		if ranks[d.late] == nil && time.Since(begun) > d.lateBy {
			start(d.late)
			break
		}
		time.Sleep(time.Millisecond)
	}
	time.Sleep(time.Until(moment))
	var survivors []int
	for r, cmd := range ranks {
		there := false
		if cmd != nil && r != d.victim {
			there = must.Get(came.Check(ctx, "rank/"+strconv.Itoa(r)))
		}
		if there {
			survivors = append(survivors, r)
		}
	}
	st.Close() // a rank 0 that hosts the store would wait for this client
	died := time.Now()
	switch d.how {
	case "killed":
		require.NoError(t, ranks[d.victim].Process.Signal(syscall.SIGKILL))
	case "stopped":
		require.NoError(t, ranks[d.victim].Process.Signal(syscall.SIGSTOP))
	default:
		require.NoError(t, inputs[d.victim].Close())
	}
	within := *deathsWithin
	if d.unseen() {
		within += stopLimit + 5*time.Second // for the store's calls and the question
	}
	all := make(map[int]survivor)
	for _, r := range survivors {
		select {
		case s, ok := <-ends[r]:
			require.True(t, ok, "rank %d wrote nothing", r)
			took = max(took, s.At.Sub(died))
			made = made || s.Made
			all[r] = s
		case <-time.After(within + meetingLimit):
			require.Fail(t, "no end", "rank %d", r)
		}
	}
	for r, s := range all {
		t.Logf("rank %d after %v, group made: %v: %s", r, s.At.Sub(died).Round(time.Millisecond), s.Made, s.Text)
	}
	for r, s := range all {
		require.Less(t, s.At.Sub(died), within, "rank %d: %s", r, s.Text)
		require.Equal(t, d.victim, s.Culprit, "rank %d: %s", r, s.Text)
		require.True(t, names(s.Text, d.victim), "rank %d: %s", r, s.Text)
	}
	return took, made
}

// names reports whether text has the name of a rank.
func names(text string, rank int) bool {
	words := strings.FieldsFunc(text, func(c rune) bool { return strings.ContainsRune(" :;,()", c) })
	for i, w := range words[:max(len(words)-1, 0)] {
		if w == "rank" && words[i+1] == strconv.Itoa(rank) {
			return true
		}
	}
	return false
}

// observe opens the ranks' store without being a rank.
func observe(ctx context.Context, t *testing.T, url string) store.Store {
	if addr, ok := strings.CutPrefix(url, "tcp://"); ok {
		return must.Get(tcp.New(ctx, addr))
	}
	return must.Get(redis.New(ctx, url))
}
