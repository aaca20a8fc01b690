package pg

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/c10d-go/c10d/internal/rollcall"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store/tcp"
)

// failed writes to Options.Logger, if there is one, that a group could not be made.
func (o *Options) failed(group string, rank, size int, err error) {
	if o.Logger != nil {
		o.Logger.Error("c10d: process group failed", "group", group, "rank", rank, "size", size, "err", err)
	}
}

// lastSeen says what is known of a rank that has not come to the meeting of g, by its rank in g.
func (g *ProcessGroup) lastSeen(ctx context.Context, rank int) (what string, waits bool) {
	w := g.world
	if w.root != nil {
		global := ""
		if g.ranks[rank] != rank {
			global = fmt.Sprintf("rank %d of the default group; ", g.ranks[rank])
		}
		return global + "it has not made this group: all ranks have to make the same groups in the same order", false
	}
	if w.seen == nil {
		return "", false
	}
	return w.seen(ctx, rank)
}

// rollReport says which ranks have not come to the roll call of the default group.
func rollReport(call *rollcall.Call, group string, rank int, seen func(context.Context, int) (string, bool)) waiting.Report {
	return func(ctx context.Context) (string, []slog.Attr) {
		var ranks, busy []int
		var each []string
		for _, r := range call.Missing(ctx) {
			what, waits := "", false
			if seen != nil {
				what, waits = seen(ctx, r)
			}
			if waits { // for one of the others
				busy = append(busy, r)
				continue
			}
			said := fmt.Sprintf("rank %d has not called Init", r)
			if what != "" {
				said += " (" + what + ")"
			}
			ranks, each = append(ranks, r), append(each, said)
		}
		switch {
		case len(ranks) > 0:
		case len(busy) > 0:
			ranks, each = busy, []string{"they wait for others"}
		default:
			return "", nil
		}
		return "waiting for " + waiting.Ranks(ranks) + " to call Init", []slog.Attr{
			slog.String("group", group), slog.Int("rank", rank), slog.String("missing", waiting.Some(each)),
		}
	}
}

// seenIn says whether a rank has joined a TCP store. It knows nothing of ranks that have
// joined without saying who they are, as PyTorch's do.
func (m *meeting) seenIn(st *tcp.Store) func(ctx context.Context, rank int) (what string, waits bool) {
	return func(ctx context.Context, rank int) (what string, waits bool) {
		who, ok, err := st.Worker(ctx, rank)
		if err != nil {
			return "", false
		}
		joined, err := st.Joined(ctx)
		all := err != nil || joined >= int64(m.env.Size)
		switch {
		case ok && rank == 0 && !m.env.AgentStore && !all:
			return "it waits for the others to join the store", true
		case ok:
			return "it has joined the store: " + who, false
		case all:
			return "", false
		}
		return "it has not joined the store", false
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
func (g *ProcessGroup) barrierReport(came func(ctx context.Context) (int64, error), of int64) waiting.Report {
	return func(ctx context.Context) (string, []slog.Attr) {
		n, err := came(ctx)
		if err != nil || n >= of {
			return "", nil
		}
		return "waiting in the store barrier of group " + strconv.Quote(g.name) + ": " + strconv.FormatInt(n, 10) + " of " +
			strconv.FormatInt(of, 10) + " ranks have come", []slog.Attr{slog.Int("rank", g.world.rank)}
	}
}
