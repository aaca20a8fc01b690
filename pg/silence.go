package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/rollcall"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/work"
)

// failed logs that a group could not be made, if there is a Logger.
func (o *Options) failed(group string, rank, size int, names *work.Names, err error) {
	if o.Logger != nil {
		names.Logger(o.Logger, group, rank).Error("c10d: process group failed", "size", size, "err", err)
	}
}

// lastSeen describes a rank that is missing when g is made, by its rank in g.
func (g *epoch) lastSeen(ctx context.Context, rank int) (what string, waits bool) {
	w := g.world
	if w.root != nil {
		return "it has not made this group: all ranks have to make the same groups in the same order", false
	}
	if w.seen == nil {
		return "", false
	}
	return w.seen(ctx, rank)
}

// roll knows which ranks have not come to the roll call of the default group.
type roll struct {
	call  *rollcall.Call
	store store.Store
	group string
	rank  int
	seen  func(ctx context.Context, rank int) (what string, waits bool) // may be nil

	last []int // ranks that were missing when the store could be asked last
}

// missing returns the missing ranks and a description of each. Ranks that wait in the store for
// others are left out, unless only such ranks are missing.
func (r *roll) missing(ctx context.Context) (ranks []int, each []string) {
	if _, err := r.store.Check(ctx, "asked"); err != nil {
		return r.last, nil
	}
	var busy []int
	for _, m := range r.call.Missing(ctx) {
		what, waits := "", false
		if r.seen != nil {
			what, waits = r.seen(ctx, m)
		}
		if waits {
			busy = append(busy, m)
			continue
		}
		said := fmt.Sprintf("rank %d has not called Init", m)
		if what != "" {
			said += " (" + what + ")"
		}
		ranks, each = append(ranks, m), append(each, said)
	}
	if len(ranks) == 0 && len(busy) > 0 {
		ranks, each = busy, []string{"they wait for others"}
	}
	r.last = ranks
	return ranks, each
}

// report is for waiting.Start.
func (r *roll) report(ctx context.Context) (string, []slog.Attr) {
	ranks, each := r.missing(ctx)
	switch {
	case len(ranks) > 0:
	case r.call.Unanswered():
		return "waiting for rank 0, which has called Init, to answer", []slog.Attr{slog.String("group", r.group), slog.Int("rank", r.rank)}
	default:
		return "", nil
	}
	return "waiting for " + waiting.Ranks(ranks) + " to call Init", []slog.Attr{
		slog.String("group", r.group), slog.Int("rank", r.rank), slog.String("missing", waiting.Some(each)),
	}
}

// mostSeen bounds the ranks that an error describes.
const mostSeen = 8

// blame makes the error of a roll call name the same ranks as the log.
func (r *roll) blame(err error) error {
	var e *rollcall.Error
	if errors.As(err, &e) && len(e.Missing) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), lastLook)
		defer cancel()
		if ranks, _ := r.missing(ctx); len(ranks) > 0 {
			e.Missing = ranks
		}
		if r.seen == nil {
			return err
		}
		e.Seen = make([]string, min(len(e.Missing), mostSeen))
		for i := range e.Seen {
			e.Seen[i], _ = r.seen(ctx, e.Missing[i])
		}
	}
	return err
}

// seenIn says whether a rank has joined a TCP store. PyTorch's ranks join without their number,
// so nothing is known of them.
func (m *meeting) seenIn(st *tcp.Store) func(ctx context.Context, rank int) (what string, waits bool) {
	return func(ctx context.Context, rank int) (what string, waits bool) {
		who, ok, err := st.Worker(ctx, rank)
		if err != nil {
			return "", false
		}
		joined, err := st.Joined(ctx)
		all := err != nil || joined >= int64(m.env.Size)
		stranger := ""
		if from, refused, err := st.Refused(ctx); err == nil && refused {
			stranger = "; a process at " + from + " without TLS was refused, and may be this rank"
		}
		switch {
		case ok && rank == 0 && !m.env.AgentStore && !all:
			return "it waits for the others to join the store", true
		case ok:
			return "it has joined the store: " + who, false
		case all:
			return "", false
		}
		return "it has not joined the store" + stranger, false
	}
}

// endedIn asks the launcher's store for a rank of size whose process has ended.
func endedIn(st store.Store, size int) func(ctx context.Context) (rank int, how string, ok bool, err error) {
	return func(ctx context.Context) (rank int, how string, ok bool, err error) {
		if there, err := st.Check(ctx, launch.EndedKey); err != nil || !there {
			return 0, "", false, err
		}
		text, err := st.Get(ctx, launch.EndedKey)
		var e launch.Ended
		if err != nil || json.Unmarshal(text, &e) != nil || e.Size != size {
			return 0, "", false, err
		}
		return e.Rank, e.How, true, nil
	}
}

// hostedBy says who hosts the store of tcp:// and env://.
func (m *meeting) hostedBy() string {
	if m.env.AgentStore {
		return "the launcher"
	}
	return "rank 0"
}

// logger returns o.Logger, or slog.Default(), for lines of this rank.
func (m *meeting) logger(o InitOptions) *slog.Logger {
	l := o.Logger
	if l == nil {
		l = slog.Default()
	}
	return l.With("rank", m.env.Rank)
}

// barrierReport says how many ranks have come to a barrier in the store.
func (g *epoch) barrierReport(came func(ctx context.Context) (int64, error), of int64) waiting.Report {
	return func(ctx context.Context) (string, []slog.Attr) {
		n, err := came(ctx)
		if err != nil || n >= of {
			return "", nil
		}
		return "waiting in the store barrier of " + g.names.Group(g.name) + ": " + strconv.FormatInt(n, 10) + " of " +
			strconv.FormatInt(of, 10) + " ranks have come", []slog.Attr{slog.Int("rank", g.world.rank)}
	}
}
