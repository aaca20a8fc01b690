package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/meet"
)

// memberList is what the first rank that makes a group writes about it.
type memberList struct {
	By    int   `json:"by"`
	Ranks []int `json:"ranks"`
}

func listKey(group string) string { return "c10d-go/lists/" + group }

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
	err = fmt.Errorf("pg: group %q: %w: rank %d calls it with %v, rank %d with %v", s.name, ErrGroupMismatch, first.By, first.Ranks, w.rank, s.ranks)
	meet.Tell(noticeStore(w.store, s.key), meet.Fault{Rank: w.rank, By: w.rank, Kind: kindLists, Text: err.Error()})
	return err
}
