package pg

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/membership"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// EpochError says that the group, or an epoch of it, has ended.
type EpochError struct {
	Epoch    int    // that has ended
	Suspects []int  // the ranks of the default group that the fault names, in that epoch
	Err      error  // what happened
	Done     uint64 // the first collectives of this group that this rank knows to be complete everywhere; more may be
}

func (e *EpochError) Error() string { return e.Err.Error() }

// Unwrap returns what happened.
func (e *EpochError) Unwrap() error { return e.Err }

// ReconfigureOptions are the options of Reconfigure. Give all ranks the same.
type ReconfigureOptions struct {
	Min            int           // the least size of the new epoch; 0 or less means that of c10d run -elastic, or 1
	Max            int           // the size up to which newcomers are taken in, 1 for none; 0 or less means that of c10d run -elastic, or all
	SuspectTimeout time.Duration // for ranks that the fault names; 0 or less means 0.5 s, or 0.1 s if they have died or left
	Timeout        time.Duration // for all others, who learn of a fault at their next operation; 0 or less means a minute
}

// View says who is in an epoch of a group.
type View struct {
	Epoch            int
	IDs              []int    // the members' numbers for life, by rank: the rank in epoch 0, larger ones for newcomers
	Left             []Absent // members of this rank's last epoch that are not in this one
	Joined           []int    // ranks of members that were not in this rank's last epoch
	MinDone, MaxDone uint64   // collectives of this rank's last epoch that are complete on all members, and on some; 0 if not counted
}

// Absent is a member that has left a group.
type Absent struct {
	ID   int    // its number
	Rank int    // in the last epoch; -1 if it was not in that
	Why  string // what is known of its end
}

// members is a rank's part in the membership of its default group.
type members struct {
	store    store.Store // of the membership
	template *world      // what the worlds of all epochs have alike; its store is that of the run
	id       membership.ID
	view     membership.View // the last one, which may have failed
	base     membership.View // of the last epoch that connected

	leaders membership.Leaders

	// Since that epoch:
	left    []membership.Absent
	counted bool // done is known
	done    [2]uint64
}

// announcement tells newcomers where the membership of a group is.
type announcement struct {
	Run  string `json:"run,omitempty"`
	Size int    `json:"size"` // in epoch 0
}

// pendingLimit bounds Pending, because programs ask between two steps.
const pendingLimit = 5 * time.Second

// diedSettle is how long Reconfigure waits for ranks whose connections have ended. One that runs has lost all of them, and
// votes at once.
const diedSettle = 100 * time.Millisecond

// linkLimit is how long ranks may take to connect after an operation that a broken link has ended.
const linkLimit = 10 * time.Second

// announceKey is in the store of New, beside all runs.
func announceKey(group string) string { return "c10d-go/elastic/" + group }

func inRun(id string, st store.Store) store.Store {
	if id == "" {
		return st
	}
	return store.Prefix("c10d-go/run/"+id, st)
}

func newMembers(name string, template *world) *members {
	return &members{store: store.Prefix("c10d-go/members/"+name, template.store), template: template}
}

// elastic returns why a group cannot have epochs.
func (w *world) elastic() error {
	if !w.alone() {
		return fmt.Errorf("PyTorch ranks may be in the group, and they cannot change their group: %w", errors.ErrUnsupported)
	}
	return nil
}

// memberships returns this rank's part in the membership. g.reconfiguring is held.
func (g *ProcessGroup) memberships(ctx context.Context) (*members, error) {
	e := g.now()
	if g != e.world.root {
		return nil, errors.New("it was made from the default group: reconfigure that, and make this one again")
	}
	if err := e.world.elastic(); err != nil {
		return nil, err
	}
	if g.membership == nil {
		w := e.world
		m := newMembers(g.name, w)
		m.view = membership.First(w.size)
		m.base, m.id = m.view, membership.ID(w.rank)
		text, err := json.Marshal(announcement{w.run, w.size})
		if err == nil {
			err = w.begunIn.Set(ctx, announceKey(g.name), text)
		}
		if err != nil {
			return nil, m.sayHost(err)
		}
		g.membership = m
	}
	return g.membership, nil
}

// sayHost adds to err which rank hosted the store, if that has ended.
func (m *members) sayHost(err error) error {
	err = m.template.sayHost(m.store, int(m.id), err)
	if errors.As(err, new(*hostLost)) {
		return fmt.Errorf("%w (the store has to outlive the ranks: start them with c10d run, or use Redis)", err)
	}
	return err
}

// Reconfigure begins the next epoch of the default group, with the ranks that call it: after a fault, or to take in
// newcomers. Groups made from it end. An error leaves it as it was. docs/elastic.md has the rules.
func (g *ProcessGroup) Reconfigure(ctx context.Context, o ...ReconfigureOptions) (View, error) {
	v, err := g.reconfigure(ctx, option.Last(o))
	if err != nil {
		return View{}, public(fmt.Errorf("pg: Reconfigure of group %q: %w", g.name, err))
	}
	return v, nil
}

// Pending returns how many processes wait in Join: let one rank ask. It fails if the store does not answer within 5 s.
func (g *ProcessGroup) Pending(ctx context.Context) (int, error) {
	n, err := 0, g.underWay()
	if g.reconfiguring.TryLock() {
		defer g.reconfiguring.Unlock()
		ctx, stop := g.untilRefused(ctx)
		defer stop(nil)
		var m *members
		if m, err = g.memberships(ctx); err == nil {
			if most := m.template.options.most; most > 0 && g.Size() >= most {
				return 0, nil
			}
			limited, cancel := context.WithTimeout(ctx, pendingLimit)
			n, err = membership.Pending(limited, m.store, m.view)
			if err != nil && limited.Err() != nil && ctx.Err() == nil {
				err = fmt.Errorf("the store does not answer: it has stopped, or its host is away: %w", err)
			}
			cancel()
			if err != nil {
				err = m.sayHost(err)
			}
		}
		if r := g.refused.Load(); err != nil && r != nil {
			err = r.why
		}
	}
	if err != nil {
		return 0, fmt.Errorf("pg: Pending of group %q: %w", g.name, err)
	}
	return n, nil
}

func (g *ProcessGroup) reconfigure(ctx context.Context, o ReconfigureOptions) (View, error) {
	if !g.reconfiguring.TryLock() {
		return View{}, g.underWay()
	}
	defer g.reconfiguring.Unlock()
	ctx, stop := g.untilRefused(ctx)
	defer stop(nil)
	if refused := g.refused.Load(); refused != nil {
		return View{}, refused.why
	}
	m, err := g.memberships(ctx)
	if err != nil {
		return View{}, err
	}
	e := g.now()
	g.revoke(e)
	cfg := m.config(o)
	limit := cfg.Patience
	cfg.Done = e.completed()
	e.world.faults.Lock()
	for _, r := range e.world.suspects {
		cfg.Suspects = append(cfg.Suspects, m.base.IDs[r])
	}
	if e.world.cause != nil {
		cfg.Cause = e.world.cause.Error()
	}
	if e.world.link {
		limit = min(limit, linkLimit)
	}
	settle := cfg.Settle
	if settle <= 0 && !e.world.unsure {
		cfg.Settle = diedSettle
	}
	e.world.faults.Unlock()
	v, err := m.decide(ctx, cfg)
	cfg.Settle = settle
	var entered View
	if err == nil {
		entered, err = g.enter(ctx, m, cfg, v, limit)
	}
	if errors.Is(err, ErrEvicted) {
		gone := &EpochError{Epoch: e.world.number, Err: err}
		for _, x := range append(e.world.below(g), g) {
			x.refuse(gone)
		}
	}
	return entered, err
}

// untilRefused returns a context that ends when operations are refused. g.reconfiguring is held.
func (g *ProcessGroup) untilRefused(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, stop := context.WithCancelCause(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stop = stop
	if r := g.refused.Load(); r != nil {
		stop(r.why)
	}
	return ctx, stop
}

// underWay says why a call does not wait for g.reconfiguring: Close and Reconfigure hold it.
func (g *ProcessGroup) underWay() error {
	if r := g.refused.Load(); r != nil {
		return r.why
	}
	return errors.New("Reconfigure is under way already")
}

// note notes why Reconfigure has to end the default group on all ranks. The first reason counts.
func (w *world) note(failed error) {
	w.faults.Lock()
	defer w.faults.Unlock()
	if w.failed == nil {
		w.failed = failed
	}
}

// revoke ends the default group on all ranks if one of this rank's groups has failed, which may be closed by now, or could
// not be made. Ranks without that group wait for this one. It does the same if this rank has not started a call in which
// others may wait.
func (g *ProcessGroup) revoke(e *epoch) {
	for _, x := range append(e.world.below(g), g) {
		for _, b := range x.now().distinct {
			if r, ok := b.(interface{ Revoke() }); ok {
				r.Revoke()
			}
			if f, ok := unchecked(b).(interface{ Err() error }); ok {
				if err := f.Err(); err != nil {
					g.Abort(err)
					return
				}
			}
		}
	}
	e.world.faults.Lock()
	failed := e.world.failed
	e.world.faults.Unlock()
	if failed != nil {
		g.Abort(failed)
	}
}

func (m *members) config(o ReconfigureOptions) membership.Config {
	given := &m.template.options
	return membership.Config{
		Self: m.id, Leaders: &m.leaders, Min: cmp.Or(max(o.Min, 0), given.least), Max: cmp.Or(max(o.Max, 0), given.most),
		Settle: o.SuspectTimeout, Patience: cmp.Or(max(o.Timeout, 0), membership.DefaultPatience),
	}
}

// decide returns the next view with this rank.
func (m *members) decide(ctx context.Context, cfg membership.Config) (membership.View, error) {
	cfg.Base = m.view
	v, err := membership.Decide(ctx, m.store, cfg)
	if v.Epoch > m.view.Epoch {
		m.view = v
		if v.Short == nil {
			m.left = append(m.left, v.Left...)
		}
		if v.Short == nil && !m.counted {
			m.counted, m.done = true, [2]uint64{v.MinDone, v.MaxDone}
		}
	}
	if err != nil {
		return v, m.sayHost(err)
	}
	return v, nil
}

// enter connects the ranks of a view, within limit. If that fails, it goes on to the next view. Of ranks that run and do not
// connect some are left out there.
func (g *ProcessGroup) enter(ctx context.Context, m *members, cfg membership.Config, v membership.View, limit time.Duration) (View, error) {
	for {
		err := g.connectEpoch(ctx, m, v, limit)
		if err == nil {
			return m.entered(v), nil
		}
		if ctx.Err() != nil {
			return View{}, fmt.Errorf("epoch %d: %w", v.Epoch, err)
		}
		cfg.Done, cfg.Cause, cfg.Suspects, cfg.Lacks = 0, err.Error(), nil, nil
		var partial unconnected
		if errors.Is(err, context.DeadlineExceeded) && errors.As(err, &partial) {
			for _, r := range partial.Unconnected() {
				cfg.Lacks = append(cfg.Lacks, v.IDs[r])
			}
		}
		for _, r := range blamed(err) {
			if r >= 0 && r < len(v.IDs) && v.IDs[r] != m.id {
				cfg.Suspects = append(cfg.Suspects, v.IDs[r])
			}
		}
		if v, err = m.decide(ctx, cfg); err != nil {
			return View{}, err
		}
	}
}

// unconnected is an error that knows with which ranks this one could not connect.
type unconnected interface{ Unconnected() []int }

// blamed returns the ranks that the error of a group that could not be made names.
func blamed(err error) []int {
	var f *meet.Fault
	var m *meet.Error
	var w *work.Error
	var c culprit
	switch {
	case errors.As(err, &f):
		return []int{f.Rank}
	case errors.As(err, &m) && len(m.Missing)+len(m.Stopped) > 0:
		return slices.Concat(m.Missing, m.Stopped)
	case errors.As(err, &w):
		return []int{w.Peer}
	case errors.As(err, &c):
		return []int{c.Culprit()}
	}
	return nil
}

// entered returns the view for the program.
func (m *members) entered(v membership.View) View {
	view := View{Epoch: v.Epoch, MinDone: m.done[0], MaxDone: m.done[1]}
	for r, id := range v.IDs {
		view.IDs = append(view.IDs, int(id))
		if !m.base.Has(id) {
			view.Joined = append(view.Joined, r)
		}
	}
	for _, a := range m.left {
		view.Left = append(view.Left, Absent{ID: int(a.ID), Rank: slices.Index(m.base.IDs, a.ID), Why: a.Why})
	}
	m.base, m.left, m.counted = v, nil, false
	e := launch.Epoch{Epoch: v.Epoch, ID: int(m.id), IDs: view.IDs}
	for _, a := range view.Left {
		e.Left = append(e.Left, launch.Absent{ID: a.ID, Why: a.Why})
	}
	tellLauncher(e)
	return view
}

// tellLauncher writes e for the launcher, if there is one that wants to know.
func tellLauncher(e launch.Epoch) {
	if path := os.Getenv(launch.EpochVariable); path != "" {
		_ = launch.WriteEpoch(path, e) // the group works without
	}
}

// connectEpoch makes the world of a view, in which g is the default group.
func (g *ProcessGroup) connectEpoch(ctx context.Context, m *members, v membership.View, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	t := m.template
	w := &world{
		store: store.Prefix(epochPrefix(g.name)+strconv.Itoa(v.Epoch), t.store), rank: slices.Index(v.IDs, m.id), size: len(v.IDs),
		options: t.options, origin: t.origin, next: 1, compares: t.ours, tells: t.ours, ours: t.ours, apart: t.apart, run: t.run,
		begunIn: t.begunIn, number: v.Epoch, ids: v.IDs, made: make(map[string]int),
	}
	w.over, w.end = context.WithCancelCause(context.Background())
	w.seen, w.hosted = nil, slices.Index(v.IDs, membership.ID(t.hosted))
	old := g.now()
	defer m.watchNext(ctx, v, w, w.named(g.name))()
	_, err := w.newGroup(ctx, groupSpec{
		name: w.named(g.name), desc: g.desc, ranks: allRanks(w.size), backend: w.options.Backend, timeout: g.Timeout(), counted: 1, handle: g,
	})
	if err != nil {
		return err
	}
	base, left := m.base, m.left
	g.retired.Go(func() {
		forget, cancel := context.WithTimeout(context.Background(), tidyLimit)
		defer cancel()
		_ = membership.Forget(forget, m.store, base, v, left, m.id) // the group works without
		if w.rank == 0 && (v.Epoch > base.Epoch+1 || len(left) > 0) {
			_ = g.sweep(forget, t.store, v.Epoch)
		}
	})
	if old != nil {
		w.owned, old.world.owned = old.world.owned, nil
		w.left = old.world.left
		g.retire(old, m.left)
	}
	return nil
}

// sweep deletes the keys of earlier epochs: an epoch whose ranks could not connect leaves all, and a rank that died may leave
// some. Why an epoch failed stays, for a rank that has stopped and goes on.
func (g *ProcessGroup) sweep(ctx context.Context, st store.Store, now int) error {
	prefix := epochPrefix(g.name)
	all, err := st.ListKeys(ctx)
	var keys []string
	for _, key := range all {
		var epoch int
		rest, ours := strings.CutPrefix(key, prefix)
		if _, bad := fmt.Sscanf(rest, "%d/", &epoch); ours && bad == nil && epoch < now && !strings.HasSuffix(key, "/first") {
			keys = append(keys, key)
		}
	}
	return errors.Join(err, deleteAll(ctx, st, keys))
}

func epochPrefix(group string) string { return "c10d-go/epoch/" + group + "/" }

// watchNext tells the members that connect if the one after this rank has died since it voted. It may not have left its
// will for that yet. The call that it returns ends the watch.
func (m *members) watchNext(ctx context.Context, v membership.View, w *world, group string) (stop func()) {
	next := (w.rank + 1) % w.size
	if next == w.rank || !w.tells {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if membership.Gone(ctx, m.store, v, v.IDs[next]) == nil {
			meet.Tell(noticeStore(w.store, group), meet.Fault{Rank: next, By: -1, Gone: true, Text: fmt.Sprintf(
				"rank %d (member %d) died, or lost the store, before the group was made", next, v.IDs[next])})
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// numbers returns the numbers of ranks.
func (w *world) numbers(ranks []int) []int {
	all := slices.Clone(ranks)
	if w.ids != nil {
		for i, r := range ranks {
			all[i] = int(w.ids[r])
		}
	}
	return all
}

// named is the name of a group in an epoch. The first epoch has no number, as in PyTorch.
func (w *world) named(name string) string {
	if w.number == 0 {
		return name
	}
	return fmt.Sprintf("%s@%d", name, w.number)
}

// goneOn tells members that left, if they still live, that their group goes on without them. It
// returns nil if none has left.
func goneOn(epoch int, left []membership.Absent) error {
	if len(left) == 0 {
		return nil
	}
	all := make([]string, len(left))
	for i, a := range left {
		all[i] = a.String()
	}
	return fmt.Errorf("the group is in epoch %d now, without %s", epoch, strings.Join(all, "; "))
}

// retire ends an old epoch of g and the groups that were made in it. Members of it have left.
func (g *ProcessGroup) retire(old *epoch, left []membership.Absent) {
	w, gone := old.world, goneOn(g.now().world.number, left)
	if path := blameFile(w.rank, w.size); path != "" {
		os.Remove(path) // the launcher need not know of a failure that the group has survived
	}
	w.mu.Lock()
	w.closed = true
	w.end(&EpochError{Epoch: w.number, Err: errors.New("the default group has been reconfigured meanwhile")})
	subs := slices.DeleteFunc(slices.Clone(w.groups), func(x *ProcessGroup) bool { return x == g })
	w.mu.Unlock()
	var epochs []*epoch
	for _, sub := range subs {
		epochs = append(epochs, sub.now())
		sub.refuse(&EpochError{Epoch: w.number, Err: fmt.Errorf(
			"it was made in epoch %d of the default group, which is in epoch %d now: make it again, with NewGroup or Split", w.number, g.now().world.number)})
	}
	if a := allocatorOf(old.backends[tensor.CPU]); a != nil && old.allocated.Load() {
		g.mu.Lock()
		g.allocators = append(g.allocators, a)
		g.mu.Unlock()
	}
	g.retired.Go(func() {
		for _, e := range append(epochs, old) {
			if gone != nil {
				e.abort(gone) // or a rank that is left out would only hear that this one has left
			}
			e.close() // its operations have returned what there is to say
		}
	})
}

// suspect notes whom an operation blames, and makes its error an *EpochError.
func (g *epoch) suspect(err *work.Error) {
	if errors.As(err.Err, new(*EpochError)) {
		return
	}
	w, e := g.world, &EpochError{Epoch: g.world.number, Err: err.Err, Done: g.completedEverywhere()}
	if err.Peer >= 0 && err.Peer < len(g.ranks) {
		e.Suspects = []int{g.ranks[err.Peer]}
	}
	gone := len(e.Suspects) == 0 || errors.Is(err.Err, work.ErrPeerDied) || errors.Is(err.Err, work.ErrPeerLeft)
	failed := error(err)
	if root := w.root; root != nil && root.now() != nil && root.now().world == w {
		failed = root.now().own(err)
	}
	w.faults.Lock()
	w.link, w.unsure = w.link || errors.As(err.Err, new(*work.LinkError)), w.unsure || !gone
	if w.cause == nil {
		w.cause = errors.New(err.Err.Error())
	}
	for _, r := range e.Suspects {
		if !slices.Contains(w.suspects, r) {
			w.suspects = append(w.suspects, r)
		}
	}
	w.faults.Unlock()
	w.note(failed)
	err.Err = e
}

// completed returns how many collectives this rank has completed, 0 if its backends do not count.
func (g *epoch) completed() (n uint64) {
	for _, b := range g.distinct {
		if c, ok := unchecked(b).(interface{ Completed() uint64 }); ok {
			n += c.Completed()
		}
	}
	return n
}

// completedEverywhere returns how many collectives all ranks are known to have completed.
func (g *epoch) completedEverywhere() (n uint64) {
	for _, b := range g.distinct {
		if c, ok := unchecked(b).(interface{ CompletedEverywhere() uint64 }); ok {
			n += c.CompletedEverywhere()
		}
	}
	return n
}

// stand is for Options.Elastic.
func (g *ProcessGroup) stand(ctx context.Context) error {
	m, err := g.memberships(ctx)
	if err != nil {
		return err
	}
	return membership.Stand(ctx, m.store, 0, m.id)
}

// leave tells the other members that this rank closes its group.
func (g *ProcessGroup) leave() {
	if m := g.membership; m != nil {
		_ = membership.Leave(m.store, m.view.Epoch, m.id) // they find out otherwise
	}
}

// Join makes this process a member of a default group that exists. It waits until Reconfigure has taken it in, to the
// deadline of ctx or for Options.Timeout. st and the options are those that the ranks gave to New.
func Join(ctx context.Context, st store.Store, opts ...Options) (*ProcessGroup, error) {
	o := option.Last(opts)
	return joinWorld(ctx, st, o, origin{hosted: -1})
}

// joinWorld is Join for Init.
func joinWorld(ctx context.Context, st store.Store, o Options, from origin) (*ProcessGroup, error) {
	if st == nil {
		return nil, errors.New("pg: Join needs a store")
	}
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("pg: %w", err)
	}
	o.Name = cmp.Or(o.Name, "0")
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	if _, ends := ctx.Deadline(); !ends {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf(
			"the group has not taken this process in within %v: %w", o.Timeout, context.DeadlineExceeded))
		defer cancel()
	}
	g := &ProcessGroup{name: o.Name, desc: o.Description, timeout: o.Timeout}
	v, err := g.join(ctx, st, o, from)
	for errors.Is(err, errMoved) && ctx.Err() == nil {
		v, err = g.join(ctx, st, o, from)
	}
	if err == nil {
		m := g.membership
		cfg := m.config(ReconfigureOptions{})
		_, err = g.enter(ctx, m, cfg, v, cfg.Patience)
	}
	if err != nil {
		g.leave()
		g.retired.Wait()
		if why := context.Cause(ctx); why != nil && !errors.Is(err, why) {
			err = fmt.Errorf("%w: %w", err, why)
		}
		return nil, public(fmt.Errorf("pg: Join of group %q: %w", g.name, err))
	}
	return g, nil
}

// errMoved ends the wait of a newcomer whose group has been replaced by that of another run.
var errMoved = errors.New("another run has begun in the store")

// nextRun is how long a newcomer waits for another run when its group has no member left.
const nextRun = 5 * time.Second

// rereadPause is how often a newcomer looks whether there is another run.
const rereadPause = time.Second

// join finds the group and waits until it is taken in.
func (g *ProcessGroup) join(ctx context.Context, st store.Store, o Options, from origin) (v membership.View, err error) {
	text, err := st.Get(ctx, announceKey(g.name))
	if errors.Is(err, store.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
		return v, fmt.Errorf("no rank of the group has called Pending or Reconfigure: %w", err)
	}
	if err != nil {
		return v, err
	}
	var a announcement
	if json.Unmarshal(text, &a) != nil || a.Size < 1 || strings.Contains(a.Run, "/") {
		return v, fmt.Errorf("key %q holds %.80q, which no rank writes", announceKey(g.name), text)
	}
	m := newMembers(g.name, &world{
		store: inRun(a.Run, st), options: o, origin: from, ours: a.Run != "", apart: a.Run == "", run: a.Run, begunIn: st,
	})
	waits, stop := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	defer func() {
		stop(nil)
		<-ended // it uses the store, which the caller may close
	}()
	go func() {
		defer close(ended)
		for waits.Err() == nil {
			select {
			case <-waits.Done():
			case <-time.After(rereadPause):
				now, err := st.Get(waits, announceKey(g.name))
				if err == nil && string(now) != string(text) {
					stop(errMoved)
				}
			}
		}
	}()
	m.id, m.view, err = membership.Join(waits, m.store, a.Size, func(id membership.ID) {
		tellLauncher(launch.Epoch{ID: int(id)})
	})
	if errors.Is(err, ErrNoMembers) {
		select { // all processes may have been started again
		case <-waits.Done():
			err = context.Cause(waits)
		case <-time.After(nextRun):
		}
	}
	if err != nil {
		return v, err
	}
	m.base = m.view
	m.base.Epoch-- // its keys of this epoch are to be deleted
	g.membership = m
	return m.view, nil
}
