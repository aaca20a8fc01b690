package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/c10d-go/c10d/internal/meet"
)

// memberLists is what the first rank that makes groups in one call writes about them.
type memberLists struct {
	By    int     `json:"by"`
	Ranks [][]int `json:"ranks"` // of each group
}

func (m memberLists) String() string {
	if len(m.Ranks) == 1 {
		return fmt.Sprintf("rank %d with %v", m.By, m.Ranks[0])
	}
	return fmt.Sprintf("rank %d with %v", m.By, m.Ranks)
}

func listKey(group string) string { return "c10d-go/lists/" + group }

// compareLists compares this rank's lists with those of the first rank that made the groups, and tells all that make one of
// them if they differ. In a job with PyTorch ranks it tells nobody.
func (w *world) compareLists(ctx context.Context, s groupSpec) error {
	mine := memberLists{w.rank, [][]int{s.ranks}}
	if s.lists != nil {
		mine.Ranks = s.lists
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	held, err := w.store.CompareSet(ctx, listKey(s.key), nil, text)
	if err != nil {
		return fmt.Errorf("pg: group %q: %w", s.name, err)
	}
	var first memberLists
	if err := json.Unmarshal(held, &first); err != nil {
		return fmt.Errorf("pg: group %q: the store has a list %.80q: %w", s.name, held, err)
	}
	if slices.EqualFunc(first.Ranks, mine.Ranks, slices.Equal) {
		return nil
	}
	err = fmt.Errorf("pg: group %q: %w: %v, %v", s.name, ErrGroupMismatch, first, mine)
	if !w.tells {
		return err
	}
	fault := meet.Fault{Rank: w.rank, By: w.rank, Kind: kindLists, Text: err.Error()}
	meet.Tell(noticeStore(w.store, s.key), fault)
	for n := s.counted; n < s.counted-1+max(len(first.Ranks), len(mine.Ranks)); n++ {
		meet.Tell(noticeStore(w.store, w.named(strconv.Itoa(n))), fault)
	}
	return err
}

// tellOwn tells the members of this rank's own group, a later one of the same call, that the rank does not come to it.
func (w *world) tellOwn(s groupSpec, err error) {
	at := slices.IndexFunc(s.lists, func(ranks []int) bool { return slices.Equal(ranks, s.ranks) })
	own := slices.IndexFunc(s.lists, func(ranks []int) bool { return slices.Contains(ranks, w.rank) })
	if w.tells && own > at {
		fault := meet.Fault{Rank: w.rank, By: w.rank, Text: err.Error()}
		meet.Tell(noticeStore(w.store, w.named(strconv.Itoa(s.counted-1+own-at))), fault)
	}
}
