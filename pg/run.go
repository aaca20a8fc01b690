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
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

// origin is what Init knows of a job beyond its store.
type origin struct {
	job     string      // the launcher's name for it, "" if there is none
	attempt int         // how often the launcher has restarted it
	agents  store.Store // of the launcher, with keys of all attempts; nil if there is none
	tls     *tls.Config // for backends that have none of their own; nil is none

	// hosted is the rank that hosts the store, -1 if none does.
	hosted int

	// seen describes a missing rank; may be nil.
	seen func(ctx context.Context, rank int) string

	// ended is meet.Config.Ended.
	ended func(ctx context.Context) (rank int, how string, err error)
}

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
// known if the ranks do not meet in st. The run's notice is nil if PyTorch ranks may take part. If they do take part,
// keys is where they have theirs, and the run has no ID.
func findRun(ctx context.Context, st store.Store, o *Options, rank, size int, from origin) (keys store.Store, run meet.Run, known bool, err error) {
	devices, err := backend.ParseDevices(o.Backend)
	if err != nil {
		return nil, run, false, fmt.Errorf("pg: %w", err)
	}
	if o.apart(devices) {
		return st, run, false, nil
	}
	if o.PyTorch {
		return st, run, true, nil
	}
	run = meet.Run{ID: meet.NewID()}
	if size > 1 {
		if run, err = meetAll(ctx, st, devices, *o, rank, size, from); err != nil {
			if errors.Is(err, context.DeadlineExceeded) && !slices.ContainsFunc(devices, func(d backend.DeviceBackend) bool { return d.Backend != "nccl" }) {
				err = fmt.Errorf("%w; if other ranks are PyTorch's, set Options.PyTorch, because they write nothing before they need each other", err)
			}
			return nil, run, false, fmt.Errorf("pg: group %q: %w", o.Name, err)
		}
	}
	if run.ID != "" {
		return inRun(run.ID, st), run, true, nil
	}
	return cmp.Or(run.Store, st), run, true, nil
}

// meetAll waits for the ranks of the default group. PyTorch's ranks show themselves by
// the first key of the rendezvous of its Gloo.
func meetAll(ctx context.Context, st store.Store, devices []backend.DeviceBackend, o Options, rank, size int, from origin) (meet.Run, error) {
	made := make(map[string]bool)
	var prefixes []string // of each backend that newGroup makes
	var ids []string      // that rank 0 of a group that is connected at once writes for NCCL
	for _, d := range devices {
		if !made[d.Backend] {
			made[d.Backend] = true
			prefixes = append(prefixes, o.Name+"//"+d.Device.String()+"//0/")
			if d.Backend == "nccl" {
				ids = append(ids, o.Name+"//"+d.Device.String()+"//0")
			}
		}
	}
	call := meet.New(meet.Config{
		Store: st, Name: o.Name, Rank: rank, Size: size, Job: from.job, Ended: from.ended,
		Notices: func(id string) store.Store { return noticeStore(inRun(id, st), o.Name) },
		Foreign: []meet.Foreign{
			{Store: st, Keys: func(r int) []string {
				var keys []string
				if r == 0 {
					keys = slices.Clone(ids)
				}
				for _, p := range prefixes {
					keys = append(keys, p+strconv.Itoa(r))
				}
				return keys
			}},
			{Store: torch1Keys(st, from), Keys: func(r int) []string { return []string{torch1Came(o.Name, r)} }},
		},
	})
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	r := &roll{call: call, group: o.Name, rank: rank, seen: from.seen}
	stop := waiting.Start(ctx, o.Logger, r.report)
	run, err := call.Meet(ctx)
	stop()
	return run, r.describe(err)
}
