package pg

import (
	"cmp"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/membership"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// world is what the groups of one New share: the job's store and the counter that names groups.
// Nothing is global to the process, so several ranks can share one.
type world struct {
	store   store.Store
	rank    int
	size    int
	options Options
	origin
	root  *ProcessGroup
	owned store.Store // closed with root; nil if the caller's
	left  func()      // called before that, to say that this rank joins the store no more; may be nil

	// compares says that lists of ranks are compared in the store, which then has
	// nothing of other runs.
	compares bool

	ours    bool            // all ranks are of this library
	apart   bool            // ranks do not meet in the store
	run     string          // its name, "" if it has none
	number  int             // of the epoch
	ids     []membership.ID // the members' numbers, by rank; nil in the first epoch, where they are the ranks
	begun   []string        // the keys in begunIn that the meeting has left
	begunIn store.Store

	// tells says that ranks that make a group tell each other why they cannot: all are of this
	// library.
	tells bool

	mu     sync.Mutex
	next   int // number of the next group, counted on every rank alike
	groups []*ProcessGroup
	closed bool           // root is
	made   map[string]int // how often each local name was given

	making sync.WaitGroup // calls that make groups; none begins once closed is set

	over context.Context // ends when root is closed or has another epoch
	end  context.CancelCauseFunc

	faults   sync.Mutex
	suspects []int // ranks that operations blamed for their failure
	cause    error // the first such error
	failed   error // for Abort of the default group: the same, or why a group could not be made
	link     bool  // a link was blamed
	unsure   bool  // one of the suspects may live
}

// alone reports whether no PyTorch rank can take part.
func (w *world) alone() bool { return w.ours || w.apart }

// leave forgets g and returns the groups to be closed with it, newest first.
func (w *world) leave(g *ProcessGroup) []*ProcessGroup {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups = slices.DeleteFunc(w.groups, func(x *ProcessGroup) bool { return x == g })
	if g != w.root {
		return nil
	}
	w.closed = true
	w.end(ErrClosed)
	subs := w.groups
	w.groups = nil
	slices.Reverse(subs)
	return subs
}

// below returns the groups made from g: all others if it is the default group.
func (w *world) below(g *ProcessGroup) []*ProcessGroup {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g != w.root {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(w.groups), func(x *ProcessGroup) bool { return x == g })
}

// find returns the group of a name, nil if this rank has none.
func (w *world) find(name string) *epoch {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.groups {
		if e := g.now(); e.name == name {
			return e
		}
	}
	return nil
}

type groupSpec struct {
	name     string
	key      string // its name in the store, if that is another one
	desc     string
	ranks    []int // global ranks in group order
	backend  string
	timeout  time.Duration
	prefixes []string      // of the groups around it, outermost first
	local    bool          // only members take part in making it
	lists    [][]int       // of the groups that one call makes, this one first
	compared bool          // this group is in lists of an earlier one
	split    bool          // made by Split or SplitRanks
	of       *epoch        // the group that is split
	part     []int         // ranks in it
	counted  int           // how many groups the counter has named, this one included
	notice   *meet.Notice  // begun already, of the default group
	handle   *ProcessGroup // gets a new epoch; nil for a new group
}

// newGroup makes a group as PyTorch's _new_process_group_helper does, with the
// same keys: a PyTorch rank may be on the other side.
func (w *world) newGroup(ctx context.Context, s groupSpec) (*ProcessGroup, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(w.over, func() { stop(context.Cause(w.over)) })()
	g, err := w.whileOpen(s.name, func() (*ProcessGroup, error) {
		g, err := w.tellOthers(ctx, s)
		if err != nil {
			err = public(w.sayHost(w.store, w.rank, err))
		}
		return g, err
	})
	if err != nil {
		w.options.failed(s.name, slices.Index(s.ranks, w.rank), len(s.ranks), w.names(s), err)
	}
	return g, err
}

// names are what errors and log lines call a group and its ranks.
func (w *world) names(s groupSpec) *work.Names {
	switch {
	case w.root != nil:
		return &work.Names{Description: s.desc, GlobalRanks: slices.Clone(s.ranks)}
	case s.desc != "":
		return &work.Names{Description: s.desc}
	}
	return nil
}

// whileOpen calls f, and Close of the default group waits until it returns: f may have to tell other ranks through
// the store.
func (w *world) whileOpen(name string, f func() (*ProcessGroup, error)) (*ProcessGroup, error) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil, fmt.Errorf("pg: group %q: %w", name, context.Cause(w.over))
	}
	w.making.Add(1)
	w.mu.Unlock()
	defer w.making.Done()
	return f()
}

func (w *world) makeGroup(ctx context.Context, s groupSpec, n *meet.Notice) (*ProcessGroup, error) {
	devices, err := backend.ParseDevices(s.backend)
	if err != nil {
		return nil, fmt.Errorf("pg: %w", err)
	}
	s.key = cmp.Or(s.key, s.name)
	torch1 := store.IsTorch1(w.store)
	st, within := w.store, ""
	if !torch1 {
		for _, p := range append(slices.Clone(s.prefixes), s.key) {
			st = store.Prefix(p+"/", st)
			within += p + "//"
		}
	} else {
		st, within = store.Prefix(s.key, st), s.key+"/"
	}
	g := &epoch{
		world: w, name: s.name, key: s.key, within: within, ranks: s.ranks, size: len(s.ranks),
		rank: slices.Index(s.ranks, w.rank), timeout: s.timeout, store: st, devices: devices,
		backends: make(map[tensor.DeviceType]backend.Backend), split: s.split, names: w.names(s),
	}
	if n != nil {
		g.meeting = n
		defer func() { g.meeting = nil }()
	}
	if s.compared && ctx.Err() != nil { // without a request
		err = fmt.Errorf("pg: group %q: %w", s.name, ctx.Err())
	} else if !s.compared && w.compares && w.root != nil {
		err = w.compareLists(ctx, s)
	}
	if err != nil {
		return nil, err
	}
	of, part := s.of, s.part
	if of == nil && w.root != nil && (!s.local || len(s.ranks) == w.size) {
		of, part = w.root.now(), s.ranks
	}
	if g.rank >= 0 {
		if err := g.connect(ctx, of, part); err != nil {
			return nil, err
		}
	} else if !s.local {
		if err := of.standAside(ctx, devices, s.ranks); err != nil {
			return nil, fmt.Errorf("pg: group %q of ranks %v, without this one: %w", g.name, g.ranks, err)
		}
	}
	switch {
	case torch1 && !s.local:
		err = w.finishTorch1(ctx, g, s)
	case w.options.InitBarrier && !torch1:
		err = w.initBarrier(ctx, g, s)
	}
	if err != nil {
		g.abort(err)
		return nil, errors.Join(err, g.closeBackends())
	}
	g.tidy(s)
	if g.rank >= 0 {
		g.traced = w.options.Recorder.Join(trace.Member{
			Name: s.name, Description: s.desc, Epoch: w.number, Rank: g.rank, Ranks: slices.Clone(s.ranks),
			Numbers: w.numbers(s.ranks), Timeout: s.timeout,
			Prompt: g.prompt(), Explain: g.explain, Probe: g.probe,
			Run: w.run, Job: w.job, Attempt: w.attempt, Logger: w.options.Logger,
		})
	}
	handle := s.handle
	if handle == nil {
		handle = &ProcessGroup{name: s.name, desc: s.desc, timeout: s.timeout}
		handle.current.Store(g)
	}
	w.mu.Lock()
	if w.root == nil {
		w.root = handle
	}
	closed := w.closed
	if !closed {
		w.groups = append(w.groups, handle)
	}
	w.mu.Unlock()
	if closed {
		err := w.root.open()
		if err == nil {
			err = fmt.Errorf("pg: group %q: the default group has been reconfigured meanwhile", s.name)
		}
		return nil, errors.Join(err, handle.Close())
	}
	handle.current.Store(g)
	if l := w.options.Logger; l != nil && g.rank >= 0 {
		g.names.Logger(l, g.name, g.rank).Info("process group ready", "size", g.size, "devices", fmt.Sprint(devices))
	}
	return handle, nil
}

// connect makes the group's backends. One that serves several devices is made
// once, under its first device's prefix. If all ranks of a group are making this one, of is that group, and part this
// one's ranks in it.
func (g *epoch) connect(ctx context.Context, of *epoch, part []int) error {
	byName := make(map[string]backend.Backend)
	fail := func(err error) error {
		for _, made := range g.distinct {
			made.Abort(err)
			made.Close()
		}
		return &connectError{fmt.Sprintf("pg: %s, %s of %d: %s", g.names.Group(g.name), g.names.Rank(g.rank), g.size, g.names.Say(g.name, err.Error())), err}
	}
	for _, d := range g.devices {
		if b, ok := byName[d.Backend]; ok {
			g.backends[d.Device] = b
			continue
		}
		r, ok := backend.Lookup(d.Backend)
		if !ok {
			return fail(fmt.Errorf("%q: %w", d.Backend, backend.ErrUnknownBackend))
		}
		st := g.tidier.noted(d.Device.String()+"/", g.store, g.within)
		if store.IsTorch1(st) {
			st = g.tidier.noted(g.key, g.world.store, "")
		}
		parent, ranks := of.parent(d), part
		if parent == nil {
			ranks = nil
		}
		b, err := r.New(ctx, backend.Options{
			Store: st, Rank: g.rank, Size: g.size, Timeout: g.timeout, Group: g.name,
			Names: g.names, Device: d.Device, TLS: g.world.tls,
			Specific: g.world.options.specific(d.Backend), Failed: g.noteFailure(),
			Logger: g.world.options.Logger, LastSeen: g.lastSeen, Meeting: g.meeting, Parent: parent, Ranks: ranks, Parts: g.split,
		})
		if err != nil {
			return fail(err)
		}
		if g.world.options.Detail {
			inner := b
			if b, err = g.checked(ctx, inner, d.Device, st); err != nil {
				inner.Abort(err)
				inner.Close()
				return fail(err)
			}
		}
		byName[d.Backend], g.backends[d.Device] = b, b
		g.distinct = append(g.distinct, b)
	}
	g.forCPU = g.backends[tensor.CPU]
	return nil
}

// parent returns the group's backend for a device of a group that is made from it, without the one that checks its
// calls; nil if there is none.
func (g *epoch) parent(d backend.DeviceBackend) backend.Backend {
	if g == nil {
		return nil
	}
	b := unchecked(g.backends[d.Device])
	if b == nil || b.Name() != d.Backend {
		return nil
	}
	return b
}

// standAside is a rank's part in making a group of ranks of g that it is not in.
func (g *epoch) standAside(ctx context.Context, devices []backend.DeviceBackend, ranks []int) error {
	for _, d := range devices {
		if b, ok := g.parent(d).(backend.Splitter); ok && b.Splits() {
			if err := b.Outside(ctx, ranks); err != nil {
				return err
			}
		}
	}
	return nil
}

// connectError is why a group could not be connected, with the names of its ranks.
type connectError struct {
	text string
	err  error
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.err }

// controlBackend runs the control groups of package detail, whatever they
// watch over, as in PyTorch.
const controlBackend = "gloo"

// checked wraps a backend whose store is st, under PyTorch's keys.
func (g *epoch) checked(ctx context.Context, inner backend.Backend, d tensor.DeviceType, st store.Store) (backend.Backend, error) {
	r, ok := backend.Lookup(controlBackend)
	if !ok {
		return nil, fmt.Errorf("detail needs backend %q: %w", controlBackend, backend.ErrUnknownBackend)
	}
	if store.IsTorch1(st) {
		st = g.world.store // beside the group's prefix, not below it
	}
	return detail.New(ctx, inner, r.New, backend.Options{
		Store: st, Rank: g.rank, Size: g.size, Timeout: g.timeout, Group: g.name,
		Names: g.names, Device: d, TLS: g.world.tls,
		Specific: g.world.options.specific(controlBackend), Failed: g.noteFailure(),
		Logger: g.world.options.Logger, LastSeen: g.lastSeen, Meeting: g.meeting,
	})
}

// lastLook bounds the last query of the store, after a timeout, for how many ranks came.
const lastLook = 500 * time.Millisecond

// initBarrier is PyTorch's TORCH_DIST_INIT_BARRIER: a barrier in the store, after the group is
// made.
func (w *world) initBarrier(ctx context.Context, g *epoch, s groupSpec) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	st, within, count := w.store, "", int64(w.size)
	for _, p := range s.prefixes {
		st = store.Prefix(p+"/", st)
		within += p + "//"
	}
	if s.local {
		st, within, count = g.store, g.within, int64(len(s.ranks))
	}
	key := barrierKey(s)
	g.tidier.note(within + key)
	g.tidier.note(within + key + lastWorker)
	if _, err := st.Add(ctx, key, 1); err != nil {
		return err
	}
	n, err := st.Add(ctx, key, 0)
	if err != nil {
		return err
	}
	if n == count {
		if err := st.Set(ctx, key+lastWorker, []byte("1")); err != nil {
			return err
		}
	}
	came := func(ctx context.Context) (int64, error) { return st.Add(ctx, key, 0) }
	defer waiting.Start(ctx, w.options.Logger, g.barrierReport(came, count))()
	if err := st.Wait(ctx, key+lastWorker); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
		defer cancel()
		if now, err := st.Add(ctx, key, 0); err == nil {
			n = now
		}
		return fmt.Errorf("pg: store barrier of %s: %d of %d ranks came: %w", g.names.Group(s.name), n, count, err)
	}
	return nil
}

func barrierKey(s groupSpec) string { return "store_based_barrier_key:" + s.key }

// lastWorker is added to barrierKey.
const lastWorker = ":last_worker"

// GroupOptions are the options of the calls that make groups.
type GroupOptions struct {
	Backend     string        // empty: the default group's
	Timeout     time.Duration // 0 or less: the default group's
	Description string        // free text that errors and logs show
	Local       bool          // NewGroup: only the members call, as with c10d's use_local_synchronization
}

// NewGroup makes a group of ranks. All ranks of the default group call it.
func (g *ProcessGroup) NewGroup(ctx context.Context, ranks []int, opts ...GroupOptions) (*ProcessGroup, error) {
	return g.newListed(ctx, ranks, nil, false, option.Last(opts))
}

// newListed is NewGroup in a call that makes the groups of several lists. The first one compares them all.
func (g *ProcessGroup) newListed(ctx context.Context, ranks []int, lists [][]int, compared bool, o GroupOptions) (*ProcessGroup, error) {
	w := g.now().world
	if g != w.root {
		return nil, fmt.Errorf("pg: NewGroup is for the default group, not for %q; see Split and SplitRanks", g.name)
	}
	ranks = slices.Clone(ranks)
	slices.Sort(ranks)
	if err := checkRanks(ranks, w.size); err != nil {
		return nil, err
	}
	if o.Backend == "" {
		o.Backend = w.options.Backend
	}
	if o.Timeout <= 0 {
		o.Timeout = g.Timeout()
	}
	if err := g.open(); err != nil {
		return nil, err
	}
	if _, err := backend.ParseDevices(o.Backend); err != nil {
		return nil, fmt.Errorf("pg: %w", err)
	}
	s := groupSpec{desc: o.Description, ranks: ranks, backend: o.Backend, timeout: o.Timeout, prefixes: []string{g.now().key}, local: o.Local}
	if !o.Local { // else only members compare their list
		s.lists, s.compared = lists, compared
	}
	w.mu.Lock()
	if o.Local {
		if !slices.Contains(ranks, w.rank) {
			w.mu.Unlock()
			return w.outside(localOutside(ranks), ranks, o)
		}
		s.name = w.named(w.localName(ranks))
		s.key = w.localKey(s.name)
	} else {
		s.name = w.named(strconv.Itoa(w.next))
		w.next++
	}
	s.counted = w.next
	w.mu.Unlock()
	return w.newGroup(ctx, s)
}

// localOutside is the name on a rank that is not in a locally synchronised group: it does not know the members'
// number of groups.
func localOutside(ranks []int) string { return fmt.Sprintf("local:%v", ranks) }

// localName is PyTorch's name of a locally synchronised group: a hash of the
// ranks and of how many groups this rank is in. w.mu is held.
func (w *world) localName(ranks []int) string {
	n := 0
	for _, g := range w.groups {
		if g.IsMember() && !g.now().split {
			n++
		}
	}
	var b strings.Builder
	for _, r := range append(slices.Clone(ranks), n) {
		fmt.Fprintf(&b, "_%d", r)
	}
	sum := sha1.Sum([]byte(b.String()[1:]))
	return hex.EncodeToString(sum[:])
}

// localKey is the name in the store of a locally synchronised group. Ranks that have closed a
// group may give the next one the same name; among ranks of this library the two have different
// keys. w.mu is held.
func (w *world) localKey(name string) string {
	w.made[name]++
	if n := w.made[name]; n > 1 && w.ours {
		return name + "#" + strconv.Itoa(n)
	}
	return name
}

func checkRanks(ranks []int, size int) error {
	if len(ranks) == 0 {
		return errors.New("pg: a group needs at least one rank")
	}
	for i, r := range ranks {
		if r < 0 || r >= size {
			return fmt.Errorf("pg: rank %d is not within a world of %d", r, size)
		}
		if i > 0 && ranks[i-1] == r {
			return fmt.Errorf("pg: rank %d is given twice", r)
		}
	}
	return nil
}

// NewSubgroups cuts the default group into groups of groupSize ranks.
func (g *ProcessGroup) NewSubgroups(ctx context.Context, groupSize int, o ...GroupOptions) (*ProcessGroup, error) {
	if groupSize <= 0 || groupSize > g.now().size || g.now().size%groupSize != 0 {
		return nil, fmt.Errorf("pg: a world of %d does not divide into subgroups of %d", g.now().size, groupSize)
	}
	lists := make([][]int, g.now().size/groupSize)
	for i := range lists {
		for k := range groupSize {
			lists[i] = append(lists[i], i*groupSize+k)
		}
	}
	return g.NewSubgroupsByEnumeration(ctx, lists, o...)
}

// NewSubgroupsByEnumeration is NewGroup for each list, without common ranks.
func (g *ProcessGroup) NewSubgroupsByEnumeration(ctx context.Context, lists [][]int, o ...GroupOptions) (*ProcessGroup, error) {
	if len(lists) == 0 {
		return nil, errors.New("pg: no subgroups given")
	}
	all := slices.Concat(lists...)
	slices.Sort(all)
	if err := checkRanks(all, g.now().size); err != nil {
		return nil, err
	}
	var mine *ProcessGroup
	made := make([]*ProcessGroup, 0, len(lists))
	sorted := make([][]int, len(lists))
	for i, ranks := range lists {
		sorted[i] = slices.Sorted(slices.Values(ranks))
	}
	for i, ranks := range sorted {
		sub, err := g.newListed(ctx, ranks, sorted, i > 0, option.Last(o))
		if err != nil {
			for _, sub := range made {
				err = errors.Join(err, sub.Close())
			}
			return nil, err
		}
		made = append(made, sub)
		if mine == nil || !mine.IsMember() {
			mine = sub
		}
	}
	return mine, nil
}

// Split makes a group for each colour that is not negative, ordered by key, and returns this rank's. Every member calls it.
func (g *ProcessGroup) Split(ctx context.Context, color, key int, o ...GroupOptions) (*ProcessGroup, error) {
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	all := make([]int64, 2*g.now().size)
	own := list(Slice([]int64{int64(color), int64(key)}))
	if err := g.staged(ctx, list(Slice(all)), own, func(out, in []*tensor.Tensor) (*work.Work, error) {
		return g.AllGatherIntoTensor(ctx, out[0], in[0])
	}); err != nil {
		return nil, err
	}
	var members []int
	for r := range g.now().size {
		if color >= 0 && all[2*r] == int64(color) {
			members = append(members, r)
		}
	}
	slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(all[2*a+1], all[2*b+1]) })
	return g.makePart(ctx, members, color, option.Last(o))
}

// SplitRanks makes a group from each list and returns this rank's. Every member calls it with the same lists. In groups that
// their backend splits (nccl.Options.Eager) it is PyTorch's split_group, and PyTorch's ranks may take part.
func (g *ProcessGroup) SplitRanks(ctx context.Context, lists [][]int, o ...GroupOptions) (*ProcessGroup, error) {
	if g.now().rank < 0 {
		return nil, ErrNotMember
	}
	if err := g.open(); err != nil {
		return nil, err
	}
	for i, list := range lists {
		if len(list) == 0 {
			return nil, fmt.Errorf("pg: list %d of the split is empty", i)
		}
	}
	all := slices.Sorted(slices.Values(slices.Concat(lists...)))
	if err := checkRanks(all, g.now().size); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(lists, func(list []int) bool { return slices.Contains(list, g.now().rank) })
	if i < 0 {
		return g.makePart(ctx, nil, i, option.Last(o))
	}
	return g.makePart(ctx, slices.Sorted(slices.Values(lists[i])), i, option.Last(o))
}

// outside returns a group that this rank is not in.
func (w *world) outside(name string, ranks []int, o GroupOptions) (*ProcessGroup, error) {
	return w.whileOpen(name, func() (*ProcessGroup, error) {
		g := &ProcessGroup{name: name, desc: o.Description, timeout: o.Timeout}
		g.current.Store(&epoch{world: w, name: name, rank: -1, ranks: ranks, size: len(ranks), store: store.Prefix(name+"/", w.store)})
		w.mu.Lock()
		defer w.mu.Unlock()
		w.groups = append(w.groups, g)
		return g, nil
	})
}

// makePart makes a group of the members of part i, which are ranks of this group in the new group's
// order. Without members this rank is in no part.
func (g *ProcessGroup) makePart(ctx context.Context, members []int, i int, o GroupOptions) (*ProcessGroup, error) {
	e := g.now()
	n := e.splits.Add(1)
	w, ranks := e.world, make([]int, len(members))
	for k, r := range members {
		ranks[k] = e.ranks[r]
	}
	if o.Backend == "" {
		o.Backend = w.options.Backend
	}
	if o.Timeout <= 0 {
		o.Timeout = g.Timeout()
	}
	devices, err := backend.ParseDevices(o.Backend)
	if err == nil {
		err = e.canSplit(devices)
	}
	if err != nil {
		return nil, fmt.Errorf("pg: %w", err)
	}
	if len(members) == 0 {
		return w.inNoPart(ctx, e, fmt.Sprintf("%s:split:%d:none", e.name, n), devices, o)
	}
	return w.newGroup(ctx, groupSpec{
		name: fmt.Sprintf("%s:split:%d:%d", e.name, n, i), key: fmt.Sprintf("%s:split:%d:%d", e.key, n, i), desc: o.Description, ranks: ranks, backend: o.Backend,
		timeout: o.Timeout, prefixes: []string{w.root.now().key}, local: true, split: true, of: e, part: members,
	})
}

// canSplit returns why a group with PyTorch's ranks cannot be split into parts that have backends for these devices.
func (g *epoch) canSplit(devices []backend.DeviceBackend) error {
	if g.world.alone() {
		return nil
	}
	splits, other := "", ""
	for _, d := range devices {
		if b, ok := g.parent(d).(backend.Splitter); ok && b.Splits() {
			splits = d.Backend
		} else {
			other = d.Backend
		}
	}
	if splits == "" || other == "" {
		return nil
	}
	return fmt.Errorf("%w: group %q has PyTorch's ranks, and backend %s splits it: which keys they have for its parts of backend %s is not known; "+
		"NewGroup makes the groups one by one", errors.ErrUnsupported, g.name, splits, other)
}

// inNoPart returns the group of a rank that a split leaves out.
func (w *world) inNoPart(ctx context.Context, of *epoch, name string, devices []backend.DeviceBackend, o GroupOptions) (*ProcessGroup, error) {
	return w.whileOpen(name, func() (*ProcessGroup, error) {
		if err := of.standAside(ctx, devices, nil); err != nil {
			return nil, fmt.Errorf("pg: split of group %q, in no part: %w", of.name, err)
		}
		return w.outside(name, nil, o)
	})
}
