package pg

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/membership"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// EpochError is in the error of every operation that fails because its group, or an epoch of it,
// has ended. Reconfigure begins the next epoch. Groups with PyTorch ranks have no epochs.
type EpochError struct {
	Epoch    int   // that has ended
	Suspects []int // the ranks of the default group that the fault names, in that epoch
	Err      error // what happened

	// The first Done collectives of this group and epoch are complete on every rank, as far as this
	// rank knows. More may be: View.MinDone says how many. Collectives that need data from all ranks
	// raise Done where collectives run one at a time, as in shared memory. On other wires only
	// Barrier does. Done is 0 if the backend does not count.
	Done uint64
}

func (e *EpochError) Error() string { return e.Err.Error() }

// Unwrap returns what happened.
func (e *EpochError) Unwrap() error { return e.Err }

var (
	// ErrEvicted is matched by the error of Reconfigure on a rank that the next epoch leaves out.
	// Close the group. Join takes part in a later epoch.
	ErrEvicted = membership.ErrEvicted

	// ErrTooFew is matched by the error of Reconfigure if fewer than Min members are there. The
	// group is as before, and Reconfigure may be called again.
	ErrTooFew = membership.ErrTooFew
)

// ReconfigureOptions are the options of Reconfigure. Give all ranks the same.
type ReconfigureOptions struct {
	// Min is the least size of the new epoch; 0 or less means that of c10d run -elastic, or 1.
	Min int

	// Max is the size up to which newcomers are taken in; 0 or less means that of c10d run
	// -elastic, or all of them. Members stay even if they are more.
	Max int

	// Settle is how long a rank that the fault names has to come; 0 or less means 0.5 s.
	Settle time.Duration

	// Patience is how long other ranks have to come, and to connect afterwards; 0 or less means one
	// minute. A rank learns of a fault at its next operation. It also bounds the wait for Min ranks.
	Patience time.Duration
}

// View says who is in an epoch of a group.
type View struct {
	Epoch int

	// IDs are the members' numbers, by rank. A member keeps its number in all epochs. It is the rank
	// in epoch 0; newcomers have larger ones.
	IDs []int

	// Left are the members of the last epoch of this rank that are not in this one.
	Left []Absent

	// Joined are the ranks of members that were not in the last epoch of this rank.
	Joined []int

	// The first MinDone collectives of this rank's last epoch are complete on every member. Those
	// after them, up to MaxDone, are complete on some. Ranks that left are not counted. Both are 0
	// if the backend does not count, as that of CUDA tensors.
	MinDone, MaxDone uint64
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
	working  []membership.ID // members of the last epoch that connected, by rank

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
		m.working, m.id = m.view.IDs, membership.ID(w.rank)
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

// Reconfigure begins the next epoch of the default group, with the ranks that call it. Every rank
// that goes on calls it: after a fault, or between two steps to take in newcomers (see Pending). The
// group then has new connections and perhaps another rank and size, and its operations work again.
// Nothing of the old epoch can arrive in the new one.
//
// The ranks agree through the store. They wait for a rank that the fault names for o.Settle, for
// others for o.Patience. A rank that comes later gets ErrEvicted. If a rank dies meanwhile, the rest
// goes on to the epoch after. Members keep their order; newcomers come after them.
//
// Wait for operations first, and call none meanwhile: those that are open when the new epoch begins
// end with ErrClosed. Results of a collective that failed are undefined. MinDone and MaxDone of the
// View say whether other ranks have completed it.
//
// An operation of this rank may have failed in a group that was made from the default group.
// Reconfigure then ends the epoch on all ranks, so that those in other groups learn of the fault.
//
// Groups that were made from the default group end with their epoch. Their operations return an
// *EpochError. Make them again from the new epoch. After ErrEvicted all groups of this rank do so.
//
// An error leaves the group as it was. Reconfigure may then be called again, except after ErrEvicted.
// It does not work for groups with PyTorch ranks (errors.ErrUnsupported), nor without the store,
// which has to outlive the ranks. A store that rank 0 hosts ends with it: its death ends the group.
func (g *ProcessGroup) Reconfigure(ctx context.Context, o ReconfigureOptions) (View, error) {
	v, err := g.reconfigure(ctx, o)
	if err != nil {
		return View{}, fmt.Errorf("pg: Reconfigure of group %q: %w", g.name, err)
	}
	return v, nil
}

// Shrink is Reconfigure without newcomers. least is Min.
func (g *ProcessGroup) Shrink(ctx context.Context, least int) (View, error) {
	return g.Reconfigure(ctx, ReconfigureOptions{Min: least, Max: 1})
}

// Grow is Reconfigure to take in newcomers, up to a size of most; 0 means all. It fails with
// ErrTooFew if a member is lost meanwhile.
func (g *ProcessGroup) Grow(ctx context.Context, most int) (View, error) {
	return g.Reconfigure(ctx, ReconfigureOptions{Min: g.Size(), Max: most})
}

// Pending returns how many processes wait in Join to be taken into the default group; 0 if it has the
// most ranks that c10d run -elastic permits. It calls the store once, and again for newcomers. Ranks that ask at the same time may get different answers:
// let one rank ask, and broadcast what it gets.
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
			if n, err = membership.Pending(ctx, m.store, m.view); err != nil {
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
	cfg.Done = e.completed()
	e.world.faults.Lock()
	for _, r := range e.world.suspects {
		cfg.Suspects = append(cfg.Suspects, m.working[r])
	}
	if e.world.cause != nil {
		cfg.Cause = e.world.cause.Error()
	}
	e.world.faults.Unlock()
	v, err := m.decide(ctx, cfg)
	var entered View
	if err == nil {
		entered, err = g.enter(ctx, m, cfg, v)
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

// revoke ends the default group on all ranks if one of this rank's groups has failed. It does the same
// if this rank has not started a call in which others may wait.
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
}

func (m *members) config(o ReconfigureOptions) membership.Config {
	given := &m.template.options
	return membership.Config{
		Self: m.id, Min: cmp.Or(max(o.Min, 0), given.least), Max: cmp.Or(max(o.Max, 0), given.most), Settle: o.Settle, Patience: cmp.Or(max(o.Patience, 0), membership.DefaultPatience),
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

// enter connects the ranks of a view. If that fails, it goes on to the next view.
func (g *ProcessGroup) enter(ctx context.Context, m *members, cfg membership.Config, v membership.View) (View, error) {
	for {
		err := g.connectEpoch(ctx, m, v, cfg.Patience)
		if err == nil {
			return m.entered(v), nil
		}
		if ctx.Err() != nil {
			return View{}, fmt.Errorf("epoch %d: %w", v.Epoch, err)
		}
		cfg.Done, cfg.Cause, cfg.Suspects = 0, err.Error(), nil
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

// blamed returns the ranks that the error of a group that could not be made names.
func blamed(err error) []int {
	var f *GroupFault
	var m *MeetingError
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
		if !slices.Contains(m.working, id) {
			view.Joined = append(view.Joined, r)
		}
	}
	for _, a := range m.left {
		view.Left = append(view.Left, Absent{ID: int(a.ID), Rank: slices.Index(m.working, a.ID), Why: a.Why})
	}
	m.working, m.left, m.counted = v.IDs, nil, false
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
		store: store.Prefix(fmt.Sprintf("c10d-go/epoch/%s/%d", g.name, v.Epoch), t.store), rank: slices.Index(v.IDs, m.id), size: len(v.IDs),
		options: t.options, origin: t.origin, next: 1, compares: t.ours, tells: t.ours, ours: t.ours, apart: t.apart, run: t.run,
		begunIn: t.begunIn, number: v.Epoch, ids: v.IDs, made: make(map[string]int),
	}
	w.over, w.end = context.WithCancelCause(context.Background())
	w.hosts, w.seen, w.hosted = false, nil, slices.Index(v.IDs, membership.ID(t.hosted))
	old := g.now()
	_, err := w.newGroup(ctx, groupSpec{
		name: w.named(g.name), desc: g.desc, ranks: allRanks(w.size), backend: w.options.Backend, timeout: g.Timeout(), counted: 1, handle: g,
	})
	if err != nil {
		return err
	}
	g.retired.Go(func() {
		forget, cancel := context.WithTimeout(context.Background(), tidyLimit)
		defer cancel()
		_ = membership.Forget(forget, m.store, v, m.id) // the group works without
	})
	if old != nil {
		w.owned, old.world.owned = old.world.owned, nil
		w.left = old.world.left
		g.retire(old, m.left)
	}
	return nil
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
	w.faults.Lock()
	if w.cause == nil {
		w.cause = errors.New(err.Err.Error())
	}
	for _, r := range e.Suspects {
		if !slices.Contains(w.suspects, r) {
			w.suspects = append(w.suspects, r)
		}
	}
	w.faults.Unlock()
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

// Join makes this process a member of a default group that exists. It returns when the group's ranks
// have taken it in with Reconfigure. Until then it waits, to the deadline of ctx. If ctx has none, it
// waits for Options.Timeout.
//
// st is the store that the ranks gave to New. For groups of Init it is
// store.Prefix("default_pg", st), or call Init with InitOptions.Join. Give Join the same options as
// New on the members.
//
// Members see a process that waits in Pending. Without Options.Elastic, Join does not find the group
// until one of them has called Pending or Reconfigure.
func Join(ctx context.Context, st store.Store, o Options) (*ProcessGroup, error) {
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
	o.Dialect = cmp.Or(o.Dialect, store.DialectV2)
	if _, ends := ctx.Deadline(); !ends {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf(
			"the group has not taken this process in within %v: %w", o.Timeout, context.DeadlineExceeded))
		defer cancel()
	}
	st = heard(st, o.Recorder)
	g := &ProcessGroup{name: o.Name, desc: o.Description, timeout: o.Timeout}
	v, err := g.join(ctx, st, o, from)
	for errors.Is(err, errMoved) && ctx.Err() == nil {
		v, err = g.join(ctx, st, o, from)
	}
	if err == nil {
		m := g.membership
		_, err = g.enter(ctx, m, m.config(ReconfigureOptions{}), v)
	}
	if err != nil {
		g.leave()
		g.retired.Wait()
		if why := context.Cause(ctx); why != nil && !errors.Is(err, why) {
			err = fmt.Errorf("%w: %w", err, why)
		}
		return nil, fmt.Errorf("pg: Join of group %q: %w", g.name, err)
	}
	return g, nil
}

// errMoved ends the wait of a newcomer whose group has been replaced by that of another run.
var errMoved = errors.New("another run has begun in the store")

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
	defer stop(nil)
	go func() {
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
	if err != nil {
		return v, err
	}
	m.working = m.view.IDs
	g.membership = m
	return m.view, nil
}
