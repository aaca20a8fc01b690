package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
)

const (
	// elasticLook is the time between two looks at the epochs and at the other nodes.
	elasticLook = 100 * time.Millisecond

	// sameFailure is the longest time between failures that have one cause.
	sameFailure = 10 * time.Second
)

// elastic is the attempt of an elastic job. A rank that fails is started again, and the others go on.
//
// Every agent publishes how its ranks do. Node 0 decides when the job is over: when no rank is left,
// or too few, or no member that others could join.
type elastic struct {
	*attempt
	exits    chan<- exit
	slots    []*slot // by local rank
	again    chan *slot
	looks    *time.Ticker
	restarts int // that have begun
	awaited  int // restarts that have not

	epoch     launch.Epoch // the latest that was shown
	published string
	met       bool         // the group has been made: ranks that are started again join it
	metTold   bool         // the other nodes know it
	finishing bool         // a rank has ended with 0: no rank is started again
	lost      map[int]bool // the nodes whose launchers have ended
}

// slot is a place for a rank. It has one process after the other.
type slot struct {
	local     int
	rank      *rank
	started   time.Time
	member    bool          // the process is in the group, or makes it
	live      bool          // there is a process, or will be
	awaited   bool          // there will be one
	pause     time.Duration // before its last restart
	finished  bool          // with 0
	dismissed time.Time     // when it was told to end, because it waited to join a group that has finished
	last      *Failure
	id        int // the process's number as a member; -1: not known yet
	epoch     launch.Epoch
}

// progress is what an agent publishes.
type progress struct {
	Live     int       `json:"live"`    // ranks that run, or are about to be started again
	Members  int       `json:"members"` // those of them that are in the group
	Finished int       `json:"finished"`
	Failures []Failure `json:"failures,omitempty"` // the latest of each rank, and ends with 0 before there was a group
}

func (t *attempt) newElastic(exits chan<- exit) *elastic {
	e := &elastic{attempt: t, exits: exits, again: make(chan *slot, t.Procs), looks: time.NewTicker(elasticLook), lost: make(map[int]bool)}
	e.met, e.metTold = t.late, t.late
	for r := range t.size {
		e.epoch.IDs = append(e.epoch.IDs, r)
	}
	for local, r := range t.ranks {
		e.slots = append(e.slots, &slot{local: local, rank: r, started: time.Now(), member: !t.late, live: true, id: r.rank})
		if t.late {
			e.slots[local].id = -1
		}
	}
	return e
}

func (e *elastic) progressKey(node int) string { return e.key + "progress/" + strconv.Itoa(node) }
func (e *elastic) finishingKey() string        { return e.key + "finishing" }

// metKey is there when the group has been made. An elastic job has one attempt.
const metKey = "met"

// exited handles the end of a rank.
func (e *elastic) exited(x exit) {
	e.look()
	f, s := e.failure(x), e.slots[x.rank.local]
	e.ranks = slices.DeleteFunc(e.ranks, func(r *rank) bool { return r == x.rank })
	s.live = false
	switch {
	case x.code == 0:
		if s.finished = !e.leaving(); !e.met {
			s.last = &f // others may fail because of it
		}
		e.tellEnded(f.Rank, f.ended())
		return
	case !s.dismissed.IsZero():
		return
	case e.told:
		e.tellEnded(f.Rank, f.ended())
		if !slices.Contains(e.sent, f.Signal) {
			e.failed = append(e.failed, f)
		}
		switch {
		case e.over:
		case e.leaving():
			e.end.First = &f
		default:
			e.declare(e.endKey(), ending{First: &f})
		}
		return
	}
	s.last = &f
	e.failed = append(e.failed, f)
	switch {
	case e.finishing:
		e.Logf("rank %d failed (%s)", f.Rank, f.how())
		e.tellEnded(f.Rank, f.ended())
	case e.ended && !e.met:
		e.Logf("rank %d failed (%s): it is not started again, because the group cannot be made without the ranks that have ended", f.Rank, f.how())
	case e.restarts+e.awaited >= e.MaxRestarts:
		e.Logf("rank %d failed (%s): it is not started again, because this node has had %d restarts", f.Rank, f.how(), e.MaxRestarts)
		e.tellEnded(f.Rank, f.ended())
	default:
		s.pause = nextPause(s.pause, time.Since(s.started))
		e.Logf("rank %d failed (%s): it is started again after %v if the job goes on", f.Rank, f.how(), s.pause)
		s.live, s.awaited, s.member = true, true, !e.met
		e.awaited++
		time.AfterFunc(s.pause, func() { e.again <- s })
	}
}

// leaving reports whether a signal ends the ranks of this node, and the others go on. Without node 0
// they cannot.
func (e *elastic) leaving() bool { return e.signal != nil && e.NodeRank > 0 }

// stays drops the restart that a slot awaits.
func (e *elastic) stays(s *slot) {
	s.live, s.awaited = false, false
	e.awaited--
	if s.last != nil {
		e.tellEnded(s.last.Rank, s.last.ended())
	}
}

// final reports whether no rank is started again: the job ends, or its group cannot be made.
func (e *elastic) final() bool { return e.over || e.told || e.finishing || e.ended && !e.met }

// restart starts the rank of a slot again.
func (e *elastic) restart(s *slot) {
	if !s.awaited {
		return
	}
	if e.look(); e.final() {
		e.stays(s)
		return
	}
	r, err := e.start(s.local, 0, e.restarts+1, e.met, e.addr, e.exits)
	if err != nil {
		e.Logf("rank %d cannot be started again: %v", e.base+s.local, err)
		e.stays(s)
		return
	}
	s.awaited = false
	e.awaited--
	e.restarts++
	e.Logf("rank %d: restart %d of %d", e.base+s.local, e.restarts, e.MaxRestarts)
	s.rank, s.started, s.id, s.epoch, s.member = r, time.Now(), -1, launch.Epoch{}, !e.met
	e.ranks = append(e.ranks, r)
}

// readEpoch is replaced by tests.
var readEpoch = launch.ReadEpoch

// look looks at what the ranks and the other nodes do.
func (e *elastic) look() {
	latest := e.epoch
	for _, s := range e.slots {
		now, err := readEpoch(s.rank.epochFile)
		if err != nil {
			continue // nothing yet
		}
		e.met = e.met || len(now.IDs) > 0
		if !s.live || s.awaited {
			continue
		}
		s.id = now.ID
		if now.Epoch <= s.epoch.Epoch {
			continue
		}
		s.epoch, s.member = now, true
		if now.Epoch > latest.Epoch || now.Epoch == latest.Epoch && len(now.Left) > len(latest.Left) {
			latest = now
		}
	}
	if latest.Epoch > e.epoch.Epoch {
		e.learn()
		e.show(latest)
		e.epoch = latest
	}
}

// learn reads the numbers of processes that have joined. One that is in an epoch wrote its number before
// any rank wrote that epoch, but perhaps after look had read its file.
func (e *elastic) learn() {
	for _, s := range e.slots {
		if s.live && !s.awaited && s.id < 0 {
			if now, err := readEpoch(s.rank.epochFile); err == nil {
				s.id = now.ID
			}
		}
	}
}

// show logs the members of an epoch, and what has changed.
func (e *elastic) show(now launch.Epoch) {
	var changes []string
	for _, id := range e.epoch.IDs {
		if slices.Contains(now.IDs, id) {
			continue
		}
		text := fmt.Sprintf("%d left", id)
		for _, a := range now.Left {
			if a.ID == id {
				text += " (" + a.Why + ")"
			}
		}
		changes = append(changes, text)
	}
	for _, id := range now.IDs {
		if !slices.Contains(e.epoch.IDs, id) {
			text := fmt.Sprintf("%d came", id)
			for _, s := range e.slots {
				if s.id == id {
					text += fmt.Sprintf(" (rank %d of this launcher)", e.base+s.local)
				}
			}
			changes = append(changes, text)
		}
	}
	if len(changes) == 0 {
		changes = []string{"the same as before"}
	}
	e.Logf("epoch %d: %d ranks, members %s; %s", now.Epoch, len(now.IDs), rankList(now.IDs), strings.Join(changes, ", "))
}

// tick publishes the state of this node. Node 0 looks at all of them.
func (e *elastic) tick() {
	e.look()
	p := progress{}
	for _, s := range e.slots {
		switch {
		case s.live:
			p.Live++
			if s.member {
				p.Members++
			}
		case s.finished:
			p.Finished++
		}
		if s.last != nil {
			p.Failures = append(p.Failures, *s.last)
		}
	}
	ctx, cancel := context.WithTimeout(e.watching, storeWait)
	defer cancel()
	text, err := json.Marshal(p)
	if err == nil && string(text) != e.published {
		if err = e.nodes.Set(ctx, e.progressKey(e.NodeRank), text); err == nil {
			e.published = string(text)
		}
	}
	if err == nil && e.NodeRank == 0 && !e.over {
		err = e.judge(ctx)
	}
	if err == nil && !e.finishing {
		e.finishing, err = e.nodes.Check(ctx, e.finishingKey())
	}
	if err == nil && !e.metTold {
		if e.metTold, err = e.nodes.Check(ctx, metKey); err == nil && e.met && !e.metTold {
			err = e.nodes.Set(ctx, metKey, nil)
		}
		e.met = e.met || e.metTold
	}
	if err == nil && !e.ended {
		e.ended, err = e.nodes.Check(ctx, e.endedKey())
	}
	if err != nil {
		return // awaitEnd says that node 0 is gone
	}
	for _, s := range e.slots {
		if s.awaited && e.final() {
			e.stays(s)
		}
	}
	if e.finishing {
		for _, s := range e.slots {
			switch waits := s.live && !s.member; {
			case waits && s.dismissed.IsZero():
				s.dismissed = time.Now()
				s.rank.signal(syscall.SIGTERM)
			case waits && time.Since(s.dismissed) > e.Grace:
				s.rank.signal(syscall.SIGKILL)
			}
		}
	}
}

// lostNode reports whether a node's agent has ended, and no other one has taken its place.
func (e *elastic) lostNode(ctx context.Context, n int) (bool, error) {
	gone, err := e.nodes.Check(ctx, e.gone[n])
	if !gone || err != nil {
		return gone, err
	}
	text, err := e.nodes.Get(ctx, nodeKey(n))
	if err != nil {
		return true, err
	}
	var now node
	if err := json.Unmarshal(text, &now); err != nil {
		return true, fmt.Errorf("node %d: %w", n, err)
	}
	if now.Gone == e.gone[n] {
		return true, nil
	}
	e.gone[n], e.lost[n] = now.Gone, false
	e.Logf("the launcher of node %d has been started again", n)
	return e.nodes.Check(ctx, now.Gone)
}

// judge declares the end of the job when it has come. Node 0 calls it.
func (e *elastic) judge(ctx context.Context) error {
	var sum progress
	for n := range e.Nodes {
		has, err := e.nodes.Check(ctx, e.progressKey(n))
		if err != nil {
			return err
		}
		gone, err := e.lostNode(ctx, n)
		if err != nil || !has && !gone {
			return err // its ranks have not been started
		}
		var p progress
		if has {
			text, err := e.nodes.Get(ctx, e.progressKey(n))
			if err == nil {
				err = json.Unmarshal(text, &p)
			}
			if err != nil {
				return fmt.Errorf("node %d: %w", n, err)
			}
		}
		if gone {
			if ended, err := e.nodes.Check(ctx, e.endKey()); ended || err != nil {
				return err // it has left because the job is over
			}
			if !e.lost[n] {
				e.lost[n] = true
				e.Logf("the launcher of node %d has ended, and its ranks with it", n)
				first := 0
				for _, procs := range e.procs[:n] {
					first += procs
				}
				e.tellEnded(first, fmt.Sprintf("rank %d has ended with the launcher of node %d", first, n))
			}
			p.Live, p.Members = 0, 0
		}
		sum.Live, sum.Members, sum.Finished = sum.Live+p.Live, sum.Members+p.Members, sum.Finished+p.Finished
		sum.Failures = append(sum.Failures, p.Failures...)
	}
	switch {
	case sum.Finished > 0 && !e.finishing:
		return e.nodes.Set(ctx, e.finishingKey(), nil)
	case e.signal != nil && e.live() > 0: // the job ends as these ranks do
	case sum.Live == 0 && sum.Finished >= e.Least && (e.met || !slices.ContainsFunc(sum.Failures, func(f Failure) bool { return f.failed() })):
		e.declare(e.endKey(), ending{OK: true})
	case sum.Finished == 0 && (sum.Live < e.Least || sum.Members == 0) || sum.Live == 0:
		e.declare(e.endKey(), e.blame(sum.Failures))
	}
	return nil
}

// blame is the ending of a job that has too few ranks: it names the rank at fault among those that
// failed last.
func (e *elastic) blame(all []Failure) ending {
	var last time.Time
	for _, f := range all {
		if f.Time.After(last) {
			last = f.Time
		}
	}
	all = slices.DeleteFunc(all, func(f Failure) bool { return f.failed() && last.Sub(f.Time) > sameFailure })
	end := ending{First: judge(all, e.size), Code: 1}
	if end.First == nil {
		end.First = &Failure{Rank: -1, ExitCode: 1, Host: e.host, Time: time.Now(), Message: "the launchers of other nodes are gone, and too few ranks are left"}
		if e.signal != nil {
			end.First.ExitCode, end.First.Message = signalCode(e.signal), "a signal ended the launcher, and too few ranks have ended with 0"
		}
	}
	return end
}
