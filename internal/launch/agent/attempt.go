package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/store/tcp"
)

// attempt is one run of all ranks of this node.
//
// After the first failure on any node every agent waits for further ranks to end (see
// othersAwaited). Then it ends its ranks and reports their states. Node 0 judges the
// reports and declares the ending.
type attempt struct {
	*agent
	key    string // of what the agents store for this attempt
	addr   string // of the ranks' store
	ranks  []*rank
	states map[*rank]Failure // of the ranks that have ended
	failed []Failure         // those that failed and that no signal of the agent ended, in order
	end    ending

	told         bool     // the ranks were told to end
	over         bool     // the attempt has its ending
	ended        bool     // the ranks' store says which rank has ended
	failing      bool     // a rank of this node failed
	reported     bool     // to node 0
	sent         []string // signals of the agent
	grace        <-chan time.Time
	killDeadline <-chan time.Time

	look        *time.Ticker // nil if no rank of any node has failed
	failedSince time.Time    // since when
	culprit     int          // the rank that another node's failed rank names; -1 if none

	elastic *elastic // nil if a failure ends the attempt

	watching context.Context
	watchers sync.WaitGroup
	ends     chan ending
	alarms   chan alarm
}

// alarm tells the other nodes that a rank has failed.
type alarm struct {
	Peer int `json:"peer"` // the rank that it names; -1 if none
}

// attempt runs the ranks once, after a pause. The failures are this node's, in order.
// again counts the ranks of an elastic job that were started again.
func (a *agent) attempt(ctx context.Context, restarts int, pause time.Duration) (end ending, failures []Failure, again int, err error) {
	t := &attempt{
		agent: a, key: "attempt/" + strconv.Itoa(restarts) + "/", culprit: -1,
		states: make(map[*rank]Failure), ends: make(chan ending, 1), alarms: make(chan alarm, 1),
	}
	var closeStore func()
	t.addr, closeStore, err = t.rankStore(ctx, pause)
	switch {
	case a.signal != nil:
		end.Last, end.First = true, &Failure{
			Rank: a.base, Host: a.host, ExitCode: signalCode(a.signal), Signal: signalName(a.signal), Time: time.Now(),
		}
		a.declare(t.endKey(), end)
		if a.NodeRank == 0 {
			_ = a.nodes.Set(ctx, t.storeKey(), nil) // the other nodes wait for it
		}
		return end, nil, 0, nil
	case err != nil && a.NodeRank > 0:
		return end, nil, 0, fmt.Errorf("the agent of node 0 is gone, or cannot be reached: %w", err)
	case err != nil:
		return end, nil, 0, err
	case t.addr == "":
		text, err := a.nodes.Get(ctx, t.endKey())
		if err == nil {
			err = json.Unmarshal(text, &end)
		}
		return end, nil, 0, err
	}
	defer closeStore()

	watching, stopWatching := context.WithCancel(context.Background())
	t.watching = watching
	defer t.watchers.Wait()
	defer stopWatching()
	t.watchers.Go(t.awaitEnd)
	if a.Nodes > 1 {
		t.watchers.Go(t.awaitAlarm)
	}
	if a.NodeRank == 0 && a.Most == 0 {
		for n := 1; n < a.Nodes; n++ {
			t.watchers.Go(func() { t.awaitGone(n) })
		}
	}

	exits := make(chan exit, a.Procs)
	var startErr error
	for local := range a.Procs {
		r, err := a.start(local, restarts, 0, a.late, t.addr, exits)
		if err != nil {
			startErr = err
			break
		}
		t.ranks = append(t.ranks, r)
	}
	if startErr != nil {
		t.failing = true
		t.terminate(syscall.SIGKILL)
		a.declare(t.endKey(), ending{Last: true, First: &Failure{
			Rank: a.base + len(t.ranks), LocalRank: len(t.ranks), Host: a.host, ExitCode: 127, Time: time.Now(),
			Error: startErr.Error(), Stderr: []string{startErr.Error()},
		}})
	}
	if a.Most > 0 && startErr == nil {
		t.elastic = t.newElastic(exits)
		defer t.elastic.looks.Stop()
	}
	if err := t.run(ctx, exits); err != nil {
		return t.end, nil, 0, err
	}
	t.complete()
	if t.elastic != nil {
		again = t.elastic.restarts
	}
	return t.end, t.failed, again, startErr
}

func (t *attempt) storeKey() string { return t.key + "store" }
func (t *attempt) endKey() string   { return t.key + "end" }
func (t *attempt) lastKey() string  { return t.key + "last" }
func (t *attempt) doneKey() string  { return t.key + "done" }
func (t *attempt) alarmKey() string { return t.key + "alarm" }
func (t *attempt) endedKey() string { return t.key + "ended" }

func (t *attempt) reportKey(node int) string { return t.key + "report/" + strconv.Itoa(node) }

// rankStore makes the store that the ranks meet in. Node 0 does so after the pause; the other nodes wait for it. A signal
// on any node ends the pause, and the attempt before it has begun: then addr is "".
func (t *attempt) rankStore(ctx context.Context, pause time.Duration) (addr string, done func(), err error) {
	ctx, stop := t.untilSignal(ctx)
	defer stop()
	if t.NodeRank > 0 {
		v, err := t.nodes.Get(ctx, t.storeKey())
		return string(v), func() {}, err
	}
	if pause > 0 {
		waits, cancel := context.WithTimeout(ctx, pause)
		_ = t.nodes.Wait(waits, t.endKey())
		cancel()
	}
	over, err := t.nodes.Check(ctx, t.endKey())
	if over || err != nil {
		return "", nil, errors.Join(err, t.nodes.Set(ctx, t.storeKey(), nil))
	}
	port := 0
	if t.Nodes == 1 {
		port = t.MasterPort
	}
	listen := launch.ListenAddr(net.JoinHostPort(t.MasterAddr, strconv.Itoa(port)))
	server, err := tcp.Listen(ctx, listen, tcp.ServerOptions{World: max(t.size, t.Most), TLS: t.tls, Job: t.jobName()})
	if err != nil {
		return "", nil, err
	}
	_, p, _ := net.SplitHostPort(server.Addr().String())
	addr = net.JoinHostPort(t.MasterAddr, p)
	if err := t.nodes.Set(ctx, t.storeKey(), []byte(addr)); err != nil {
		server.Close()
		return "", nil, err
	}
	return addr, func() { server.Close() }, nil
}

// live returns the number of ranks that have not ended.
func (t *attempt) live() int { return len(t.ranks) - len(t.states) }

// run waits until all ranks have ended and the attempt has its ending.
func (t *attempt) run(ctx context.Context, exits <-chan exit) error {
	canceled := ctx.Done()
	defer func() {
		if t.look != nil {
			t.look.Stop()
		}
	}()
	var looks <-chan time.Time
	var again <-chan *slot
	if t.elastic != nil {
		looks, again = t.elastic.looks.C, t.elastic.again
	}
	ended := t.exited
	if t.elastic != nil {
		ended = t.elastic.exited
	}
	for t.live() > 0 || !t.over {
		var look <-chan time.Time
		if t.look != nil && !t.reported {
			look = t.look.C
		}
		select {
		case x := <-exits:
			ended(x)
		case <-looks:
			t.elastic.tick()
		case s := <-again:
			t.elastic.restart(s)
		case e := <-t.ends:
			t.end, t.over = e, true
			if t.live() > 0 && !t.told {
				t.terminate(syscall.SIGTERM)
			}
		case m := <-t.alarms:
			t.culprit = m.Peer
			t.awaitOthers()
		case <-look:
		case sig := <-t.Signals:
			for more := true; more; { // ranks that have ended by now
				select {
				case x := <-exits:
					ended(x)
				default:
					more = false
				}
			}
			if t.abandons(sig) {
				return nil
			}
			if t.signal == nil {
				t.signal = sig
				t.lastAttempt()
				t.Logf("%s: passed on to the ranks", signalName(sig))
				s, _ := sig.(syscall.Signal)
				t.terminate(s)
			} else {
				t.Logf("%s again: killing the ranks", signalName(sig))
				t.terminate(syscall.SIGKILL)
			}
		case <-canceled:
			canceled = nil
			t.lastAttempt()
			t.terminate(syscall.SIGTERM)
		case <-t.grace:
			if t.grace = nil; t.elastic == nil && t.signal != nil && t.abandons(t.signal) {
				return nil // the last rank may have ended by itself while the signal came
			}
			if t.live() > 0 {
				t.Logf("killing the ranks that are left after %v", t.Grace)
				t.terminate(syscall.SIGKILL)
			}
		case <-t.killDeadline:
			if t.killDeadline = nil; t.live() == 0 {
				continue // the other nodes' ranks are awaited
			}
			return fmt.Errorf("%d of %d ranks did not end %v after SIGKILL", t.live(), len(t.ranks), killWait)
		}
		if t.look != nil && !t.reported && (t.told || t.othersAwaited(time.Now())) {
			t.report()
		}
		if t.elastic != nil && t.elastic.leaving() && t.live() == 0 && !t.over {
			t.end.OK = t.end.First == nil
			return nil
		}
	}
	return nil
}

// abandons ends the attempt of this node because of a signal. It does so only if all its ranks have ended with 0, and the job
// goes on at other nodes.
func (t *attempt) abandons(sig os.Signal) bool {
	if t.Nodes == 1 || t.over || t.live() > 0 || t.failing {
		return false
	}
	t.Logf("%s: not waiting for the other nodes", signalName(sig))
	t.signal = sig
	t.end = ending{First: &Failure{Rank: -1, ExitCode: signalCode(sig), Host: t.host, Time: time.Now(), Message: "a signal ended the launcher"}, Last: true}
	if t.NodeRank == 0 { // the others need its store
		t.declare(t.endKey(), t.end)
	}
	return true
}

// terminate sends a signal to the ranks. After SIGKILL it does nothing.
func (t *attempt) terminate(sig syscall.Signal) {
	if t.killDeadline != nil {
		return
	}
	each := func(sig syscall.Signal) {
		for _, r := range t.ranks {
			r.signal(sig)
		}
	}
	t.told = true
	t.sent = append(t.sent, signalName(sig), signalName(syscall.SIGKILL))
	if sig == syscall.SIGKILL || t.Grace < 0 {
		each(syscall.SIGKILL)
		t.killDeadline = time.After(killWait)
	} else if each(sig); t.grace == nil {
		t.grace = time.After(t.Grace)
	}
}

// exited handles the end of a rank.
func (t *attempt) exited(x exit) {
	f := t.failure(x)
	t.states[x.rank] = f
	if x.code == 0 {
		t.tellEnded(f.Rank, f.ended())
		if t.live() == 0 && !t.failing && !t.over {
			t.done(t.doneKey(), t.endKey())
		}
		return
	}
	t.failing = true
	if !t.told || !slices.Contains(t.sent, f.Signal) {
		t.failed = append(t.failed, f)
	}
	switch {
	case t.over || t.reported:
	case t.told: // a signal of the user ended the ranks: no rank is at fault
		t.declare(t.endKey(), ending{First: &f, Last: true})
	default:
		if t.look == nil && t.Nodes > 1 {
			t.alarm(alarm{Peer: f.blames(t.size)})
		}
		t.awaitOthers()
	}
}

// tellEnded tells the ranks that one has ended for good. Those that wait for it in pg.Init fail; all others do not look.
// The first such rank is enough.
func (t *attempt) tellEnded(rank int, how string) {
	if t.ended || t.size == 1 {
		return
	}
	t.ended = true
	text, err := json.Marshal(launch.Ended{Rank: rank, Size: t.size, How: how})
	if err != nil {
		panic(err) // numbers and strings
	}
	t.watchers.Go(func() {
		ctx, cancel := context.WithTimeout(t.watching, storeWait)
		defer cancel()
		// When the job is over, the stores are gone, and nobody waits.
		if t.nodes.Set(ctx, t.endedKey(), nil) != nil {
			return
		}
		st, err := tcp.New(ctx, t.addr, tcp.Options{TLS: t.tls, Job: t.jobName(), Timeout: storeWait})
		if err != nil {
			return
		}
		defer st.Close()
		_, _ = st.CompareSet(ctx, launch.EndedKey, nil, text)
	})
}

// awaitOthers begins to wait for the ends of other ranks.
func (t *attempt) awaitOthers() {
	if t.look == nil {
		t.failedSince = time.Now()
		t.look = time.NewTicker(lookEvery)
	}
}

// othersAwaited reports whether the agent has waited long enough for other ranks to end.
func (t *attempt) othersAwaited(now time.Time) bool {
	if t.live() == 0 {
		return true
	}
	waited := now.Sub(t.failedSince)
	if waited < waitForOthers {
		return false
	}
	named := []int{t.culprit}
	for i := range t.failed {
		named = append(named, t.failed[i].blames(t.size))
	}
	limit := waitForOthers
	for _, r := range t.ranks {
		if _, ended := t.states[r]; ended {
			continue
		}
		silent := now.Sub(r.lines.lastWrote())
		crashing := silent < waitWhileWriting && r.lines.crashed() != nil
		if silent < silentFor {
			limit = max(limit, waitWhileWriting)
		}
		if (crashing || slices.Contains(named, r.rank)) && !isStopped(r.cmd.Process.Pid) {
			limit = waitForNamed
		}
	}
	return waited >= limit
}

// report tells node 0 the states of this node's ranks, and ends them.
func (t *attempt) report() {
	t.reported = true
	var all []Failure
	for i, r := range t.ranks {
		f, ended := t.states[r]
		if !ended {
			f = t.stateOf(r)
		}
		if t.Nodes > 1 && i >= detailedRanks {
			f.Message, f.Crash, f.Stderr = "", nil, nil
		}
		all = append(all, f)
	}
	if !t.told {
		t.terminate(syscall.SIGTERM)
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	text, err := json.Marshal(all)
	if err == nil {
		err = t.nodes.Set(ctx, t.reportKey(t.NodeRank), text)
	}
	if err != nil {
		t.Logf("reporting to node 0: %v", err)
	}
	if t.NodeRank == 0 {
		t.watchers.Go(t.decide)
	}
}

// detailedRanks is the number of ranks whose output a node tells the other nodes.
const detailedRanks = 64

// decide judges the reports of all nodes.
func (t *attempt) decide() {
	ctx, cancel := context.WithTimeout(t.watching, reportWait)
	defer cancel()
	var all []Failure
	for n := range t.Nodes {
		var some []Failure
		text, err := t.nodes.Get(ctx, t.reportKey(n))
		if err == nil {
			err = json.Unmarshal(text, &some)
		}
		if err != nil && t.watching.Err() == nil {
			t.Logf("node %d has not reported on its ranks: %v", n, err)
		}
		all = append(all, some...)
	}
	e := ending{First: judge(all, t.size)}
	if e.First == nil {
		e.First = &Failure{
			Rank: -1, ExitCode: 1, Host: t.host, Time: time.Now(), Message: "a rank failed on a node that has not reported which",
		}
	}
	var first time.Time
	for _, f := range all {
		if f.failed() && (e.Code == 0 || f.Time.Before(first)) {
			e.Code, first = f.ExitCode, f.Time
		}
	}
	last, cancelLast := context.WithTimeout(context.Background(), storeWait)
	defer cancelLast()
	e.Last, _ = t.nodes.Check(last, t.lastKey())
	t.declare(t.endKey(), e)
}

// lastAttempt tells node 0 that a signal has come: no attempt follows.
func (t *attempt) lastAttempt() {
	if t.Nodes == 1 || t.Most > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewell) // the ranks wait for the signal
	defer cancel()
	_ = t.nodes.Set(ctx, t.lastKey(), nil) // awaitEnd says that node 0 is gone
}

// alarm tells the other nodes that a rank has failed.
func (t *attempt) alarm(m alarm) {
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	text, err := json.Marshal(m)
	if err == nil {
		_, err = t.nodes.CompareSet(ctx, t.alarmKey(), nil, text)
	}
	if err != nil {
		t.Logf("telling the other nodes: %v", err)
	}
}

func (t *attempt) awaitAlarm() {
	text, err := t.nodes.Get(t.watching, t.alarmKey())
	if err != nil {
		return // awaitEnd says so
	}
	m := alarm{Peer: -1}
	if err := json.Unmarshal(text, &m); err != nil {
		t.Logf("another node's alarm: %v", err)
	}
	t.alarms <- m
}

// awaitGone ends the attempt when the agent of a node is gone whose ranks have not all succeeded.
func (t *attempt) awaitGone(node int) {
	if _, err := t.nodes.Get(t.watching, t.gone[node]); err != nil {
		return // awaitEnd says so
	}
	if done, err := t.nodes.Check(t.watching, nodeDoneKey(t.doneKey(), node)); done || err != nil {
		return
	}
	t.declare(t.endKey(), ending{First: &Failure{
		Rank: -1, ExitCode: 1, Host: t.host, Time: time.Now(), Message: fmt.Sprintf("the agent of node %d has ended, and its ranks with it", node),
	}})
}

func (t *attempt) awaitEnd() {
	text, err := t.nodes.Get(t.watching, t.endKey())
	var e ending
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		e = ending{First: &Failure{
			Rank: -1, ExitCode: 1, Host: t.MasterAddr, Time: time.Now(),
			Message: "the agent of node 0 is gone, or cannot be reached", Stderr: []string{err.Error()},
		}}
	}
	t.ends <- e
}

// complete adds the full output of the rank at fault, if it ran on this node. The rank may
// have written after the ending was declared.
func (t *attempt) complete() {
	first := t.end.First
	if first == nil {
		return
	}
	for r, f := range t.states {
		if r.rank != first.Rank {
			continue
		}
		f.NamedBy, f.Said = first.NamedBy, first.Said
		if first.State != "" {
			f.State, f.ExitCode, f.Signal, f.Time = first.State, 0, "", first.Time
			f.Stderr, f.Crash = r.lines.lastLines(), r.lines.crashed()
		}
		*first = f
		return
	}
}
