package pg

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/notice"
	"github.com/c10d-go/c10d/internal/rollcall"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

// origin is what Init knows of a job beyond its store.
type origin struct {
	job     string      // the launcher's name for it, "" if there is none
	attempt int         // how often the launcher has restarted it
	v1      store.Store // where ranks of PyTorch up to 2.0 have their keys; nil if in the same place as others
	tls     *tls.Config // for backends that have none of their own; nil is none

	// hosts says that this process hosts the store, which therefore has nothing of an earlier run.
	hosts bool

	// hosted is the rank that hosts the store, -1 if none does.
	hosted int

	// seen describes a missing rank; may be nil.
	seen func(ctx context.Context, rank int) (what string, waits bool)

	// ended is rollcall.Config.Ended.
	ended func(ctx context.Context) (rank int, how string, ok bool, err error)
}

// MeetingError says why the ranks of a job did not meet in the store. It unwraps to the cause:
// the error of a context or a store, or one of the Err variables below.
type MeetingError = rollcall.Error

var (
	// ErrStale is matched by the error of a rank that finds PyTorch's keys of an
	// earlier run in the store.
	ErrStale = rollcall.ErrStale

	// ErrTwice is matched by the errors of two processes that were started as the same rank.
	ErrTwice = rollcall.ErrTwice

	// ErrDiffer is matched by the errors of ranks that were started with different sizes, or that
	// rank 0 no longer waits for.
	ErrDiffer = rollcall.ErrDiffer
)

// elsewhere is implemented by options of a backend whose ranks may find each other
// without the store.
type elsewhere interface{ MeetsElsewhere() bool }

// apart reports whether no backend needs the store for its ranks to meet.
func (o *Options) apart(devices []backend.DeviceBackend) bool {
	for _, d := range devices {
		if e, ok := o.specific(d.Backend).(elsewhere); !ok || !e.MeetsElsewhere() {
			return false
		}
	}
	return true
}

// findRun finds out in st which run this is. It returns the store for the run's keys, and false as
// known if the ranks do not meet in st. The notice n belongs to the group and calls stop when another
// rank fails. It is nil if PyTorch ranks may take part. If they do take part, keys is st or from.v1,
// the run has no ID, and o gets their generation.
func findRun(ctx context.Context, stop context.CancelCauseFunc, st store.Store, o *Options, rank, size int, from origin) (keys store.Store, run rollcall.Run, known bool, n *notice.Notice, err error) {
	given := o.Dialect
	if given == store.DialectUnknown && store.DialectOf(st) == store.DialectV1 {
		given = store.DialectV1 // a server of PyTorch up to 2.0 serves no others
	}
	o.Dialect = cmp.Or(given, store.DialectV2)
	v1 := from.v1
	if v1 == nil {
		v1 = st
	}
	own := st
	if given == store.DialectV1 {
		own = v1
	}
	devices, err := backend.ParseDevices(o.Backend)
	if err != nil {
		return nil, run, false, nil, fmt.Errorf("pg: %w", err)
	}
	if o.apart(devices) {
		return own, run, false, nil, nil
	}
	inRun := func(id string) store.Store { return store.Prefix("c10d-go/run/"+id, own) }
	run = rollcall.Run{ID: rollcall.NewID()}
	if size > 1 {
		known := func(ctx context.Context, id string) (err error) {
			n, err = notice.Join(ctx, notice.Config{Store: noticeStore(inRun(id), o.Name), Rank: rank, Ranks: allRanks(size)}, stop)
			return err
		}
		run, err = rollCall(ctx, st, v1, devices, *o, rank, size, from, known)
		if err != nil {
			if n != nil {
				nameStopped(n, err)
				err = tell(ctx, n, allRanks(size), rank, err)
				n.Close()
			}
			return nil, run, false, nil, fmt.Errorf("pg: group %q: %w", o.Name, err)
		}
	}
	if n != nil && run.ID == "" {
		n.Close()
		n = nil
	}
	switch {
	case run.ID != "":
		return inRun(run.ID), run, true, n, nil
	case given != store.DialectUnknown && given != run.Dialect:
		return nil, run, false, nil, fmt.Errorf("pg: group %q: a rank of PyTorch %v is in the job, and Options.Dialect, or the store, says %v", o.Name, run.Dialect, given)
	}
	o.Dialect = run.Dialect
	if run.Dialect == store.DialectV1 {
		return v1, run, true, nil, nil
	}
	return st, run, true, nil, nil
}

// nameStopped adds to a timeout of the roll call the ranks that came and no longer answer.
func nameStopped(n *notice.Notice, err error) {
	var e *rollcall.Error
	if !errors.As(err, &e) || !e.Timeout() || errors.As(err, new(*notice.Fault)) {
		return
	}
	e.Stopped = nil
	silent := n.Silent(append([]int{0}, e.Missing...)) // all wait for rank 0 in the end
	if slices.Contains(silent, 0) {
		e.Seen = nil
		e.Missing = slices.DeleteFunc(e.Missing, func(r int) bool { return slices.Contains(e.Unanswered, r) })
	}
	for _, r := range silent {
		if slices.Contains(e.Unanswered, r) && !slices.Contains(e.Missing, r) {
			continue // it cannot answer: it waits for rank 0
		}
		if !slices.Contains(e.Missing, r) {
			e.Stopped = append(e.Stopped, r)
		}
	}
}

// rollCall calls the ranks of the default group. known is Config.Known. PyTorch's ranks show themselves by
// the first key of the rendezvous of its Gloo.
func rollCall(ctx context.Context, st, v1 store.Store, devices []backend.DeviceBackend, o Options, rank, size int, from origin, known func(context.Context, string) error) (rollcall.Run, error) {
	made := make(map[string]bool)
	var prefixes []string // of each backend that newGroup makes
	for _, d := range devices {
		if !made[d.Backend] {
			made[d.Backend] = true
			prefixes = append(prefixes, o.Name+"//"+d.Device.String()+"//0/")
		}
	}
	call := rollcall.New(rollcall.Config{
		Store: st, Name: o.Name, Rank: rank, Size: size, Job: from.job, Fresh: from.hosts, Known: known, Ended: from.ended,
		Foreign: []rollcall.Foreign{
			{Dialect: store.DialectV2, Store: st, Keys: func(r int) []string {
				var keys []string
				for _, p := range prefixes {
					keys = append(keys, p+strconv.Itoa(r))
				}
				return keys
			}},
			{Dialect: store.DialectV1, Store: v1, Keys: func(r int) []string {
				return []string{o.Name + "/0/rank_" + strconv.Itoa(r)}
			}},
		},
	})
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	r := &roll{call: call, store: st, group: o.Name, rank: rank, seen: from.seen}
	stop := waiting.Start(ctx, o.Logger, r.report)
	run, err := call.Meet(ctx)
	stop()
	return run, r.blame(err)
}
