package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// ErrLists is matched by the errors of ranks that called NewGroup or SplitRanks for one group
// with different lists.
var ErrLists = errors.New("ranks called NewGroup or SplitRanks with different lists of ranks")

// memberList is what the first rank that makes a group writes about it.
type memberList struct {
	By    int   `json:"by"`
	Ranks []int `json:"ranks"`
}

// listPatience is how long a rank waits for a new group before it looks in the store for a
// difference that another rank has found. Usually a group is made in milliseconds.
const listPatience = 250 * time.Millisecond

func listKey(group string) string      { return "c10d-go/lists/" + group }
func listFaultKey(group string) string { return listKey(group) + "/fault" }

// compareLists compares this rank's list with that of the first rank that made the
// group, and tells all if they differ.
func (w *world) compareLists(ctx context.Context, s groupSpec) error {
	mine, err := json.Marshal(memberList{w.rank, s.ranks})
	if err != nil {
		return err
	}
	held, err := w.store.CompareSet(ctx, listKey(s.key), nil, mine)
	if err != nil {
		return fmt.Errorf("pg: group %q: %w", s.name, err)
	}
	var first memberList
	if err := json.Unmarshal(held, &first); err != nil {
		return fmt.Errorf("pg: group %q: the store has a list %.80q: %w", s.name, held, err)
	}
	if slices.Equal(first.Ranks, s.ranks) {
		return nil
	}
	differ := fmt.Sprintf("rank %d calls it with %v, rank %d with %v", first.By, first.Ranks, w.rank, s.ranks)
	if err := w.store.Set(ctx, listFaultKey(s.key), []byte(differ)); err != nil {
		return fmt.Errorf("pg: group %q: %w", s.name, err)
	}
	return listsError(s.name, differ)
}

func listsError(group, differ string) error {
	return fmt.Errorf("pg: group %q: %w: %s", group, ErrLists, differ)
}

// watchLists returns a context that ends once a rank has found different lists, for
// that reason. stop ends the watch.
func (w *world) watchLists(ctx context.Context, s groupSpec) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		t := time.NewTimer(listPatience)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if differ, err := w.store.Get(ctx, listFaultKey(s.key)); err == nil {
			cancel(listsError(s.name, string(differ)))
		}
	})
	return ctx, func() {
		cancel(nil)
		watch.Wait()
	}
}

// joinGroup connects the group's members, and ends early if the lists differ.
func (w *world) joinGroup(ctx context.Context, g *epoch, s groupSpec, v1 bool) error {
	if !w.compares || w.root == nil {
		return g.connect(ctx, v1)
	}
	watched, stop := w.watchLists(ctx, s)
	err := g.connect(watched, v1)
	why := context.Cause(watched)
	stop()
	if err != nil && errors.Is(why, ErrLists) {
		return why
	}
	return err
}
