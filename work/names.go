package work

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
)

// Names are what errors and log lines call a group and its ranks, beside the group's name and the ranks' numbers in it.
// Nil adds nothing, as for the default group.
type Names struct {
	Description string // of the group, by the program that made it
	GlobalRanks []int  // rank i of the group is this rank of the default group; nil for the default group
}

// Group names a group: group "1" (evaluation).
func (n *Names) Group(name string) string {
	if n == nil || n.Description == "" {
		return fmt.Sprintf("group %q", name)
	}
	return fmt.Sprintf("group %q (%s)", name, n.Description)
}

// Rank names a rank: rank 2 (global rank 3).
func (n *Names) Rank(rank int) string {
	return "rank " + strconv.Itoa(rank) + n.Global(rank)
}

// Global returns " (global rank 3)" or " (global ranks 3 and 5)" for ranks of the group. It returns "" for the default
// group, and if a rank is not in the group.
func (n *Names) Global(ranks ...int) string {
	if all := n.global(ranks); all != "" {
		return " (" + all + ")"
	}
	return ""
}

func (n *Names) global(ranks []int) string {
	if n == nil || n.GlobalRanks == nil || len(ranks) == 0 {
		return ""
	}
	var all []string
	for _, r := range ranks {
		if r < 0 || r >= len(n.GlobalRanks) {
			return ""
		}
		all = append(all, strconv.Itoa(n.GlobalRanks[r]))
	}
	if last := len(all) - 1; last > 0 {
		return "global ranks " + strings.Join(all[:last], ", ") + " and " + all[last]
	}
	return "global rank " + all[0]
}

// culprits returns the global ranks of those at fault for an error: " (rank 2 is global rank 3)".
func (n *Names) culprits(e *Error) string {
	var link *LinkError
	switch {
	case errors.As(e.Err, &link):
		if global := n.global(link.Ranks[:]); global != "" {
			return fmt.Sprintf(" (ranks %d and %d are %s)", link.Ranks[0], link.Ranks[1], global)
		}
	case e.Peer != e.Rank:
		if global := n.global([]int{e.Peer}); global != "" {
			return fmt.Sprintf(" (rank %d is %s)", e.Peer, global)
		}
	}
	return ""
}

// Of are the names of a group of some members, which a backend makes for itself.
func (n *Names) Of(members []int) *Names {
	part := &Names{GlobalRanks: slices.Clone(members)}
	if n != nil {
		part.Description = n.Description
		for i, r := range members {
			if n.GlobalRanks != nil {
				part.GlobalRanks[i] = n.GlobalRanks[r]
			}
		}
	}
	return part
}

// fewRanks is up to how many ranks a line of the log lists those of its group.
const fewRanks = 16

// Logger returns a logger whose lines name a group and this rank, and the global ranks of a small group. A nil l means
// slog.Default().
func (n *Names) Logger(l *slog.Logger, group string, rank int) *slog.Logger {
	if l == nil {
		l = slog.Default()
	}
	args := []any{"group", group, "rank", rank}
	if n != nil {
		if n.Description != "" {
			args = append(args, "description", n.Description)
		}
		if rank >= 0 && rank < len(n.GlobalRanks) {
			args = append(args, "global_rank", n.GlobalRanks[rank])
			if len(n.GlobalRanks) <= fewRanks {
				args = append(args, "global_ranks", n.GlobalRanks)
			}
		}
	}
	return l.With(args...)
}
