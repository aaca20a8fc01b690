package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/meet"
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
func (g *epoch) lastSeen(ctx context.Context, rank int) string {
	w := g.world
	if w.root != nil {
		return "it has not made this group: all ranks have to make the same groups in the same order"
	}
	if w.seen == nil {
		return ""
	}
	return w.seen(ctx, rank)
}

// roll says which ranks have not come to the meeting of the default group.
type roll struct {
	call  *meet.Call
	group string
	rank  int
	seen  func(ctx context.Context, rank int) string // may be nil

	last []int // ranks that were missing when the store could be asked last
}

// mostSeen bounds the ranks that lines and errors describe.
const mostSeen = 8

// report is for waiting.Start.
func (r *roll) report(ctx context.Context) (string, []slog.Attr) {
	attrs := []slog.Attr{slog.String("group", r.group), slog.Int("rank", r.rank)}
	ranks, answered, err := r.call.Missing(ctx)
	if err != nil {
		ranks, answered = r.last, true
	}
	r.last = ranks
	switch {
	case !answered:
		return "waiting for rank 0, which has called Init, to answer", attrs
	case len(ranks) == 0:
		return "", nil
	}
	each := make([]string, len(ranks))
	seen := r.describeAll(ctx, ranks)
	for i, m := range ranks {
		each[i] = fmt.Sprintf("rank %d has not called Init", m)
		if i < len(seen) && seen[i] != "" {
			each[i] += " (" + seen[i] + ")"
		}
	}
	return "waiting for " + waiting.Ranks(ranks) + " to call Init", append(attrs, slog.String("missing", waiting.Some(each)))
}

// describeAll says what is known of the first of some missing ranks.
func (r *roll) describeAll(ctx context.Context, ranks []int) []string {
	if r.seen == nil {
		return nil
	}
	seen := make([]string, min(len(ranks), mostSeen))
	for i := range seen {
		seen[i] = r.seen(ctx, ranks[i])
	}
	return seen
}

// describe adds to a meeting's error what is known of the missing ranks.
func (r *roll) describe(err error) error {
	var e *meet.Error
	if errors.As(err, &e) && len(e.Missing) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), lastLook)
		defer cancel()
		e.Seen = r.describeAll(ctx, e.Missing)
	}
	return err
}

// seenIn says whether a rank has joined a TCP store. PyTorch's ranks join without their number,
// so nothing is known of them.
func (m *meeting) seenIn(st *tcp.Store) func(ctx context.Context, rank int) string {
	return func(ctx context.Context, rank int) string {
		who, ok, err := st.Worker(ctx, rank)
		if ok {
			return "it has joined the store: " + who
		}
		joined, e := st.Joined(ctx)
		if err != nil || e != nil || joined >= int64(m.env.Size) {
			return ""
		}
		return "it has not joined the store"
	}
}

// endedIn waits until the launcher's store names a rank of size whose process has ended.
func endedIn(st store.Store, size int) func(ctx context.Context) (rank int, how string, err error) {
	return func(ctx context.Context) (rank int, how string, err error) {
		text, err := st.Get(ctx, launch.EndedKey)
		var e launch.Ended
		if err == nil && (json.Unmarshal(text, &e) != nil || e.Size != size) {
			err = fmt.Errorf("key %q holds %.80q, which is about another world", launch.EndedKey, text)
		}
		return e.Rank, e.How, err
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
