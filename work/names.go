package work

import (
	"context"
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
	return "rank " + strconv.Itoa(rank) + n.global([]int{rank})
}

// global returns " (global rank 3)" or " (global ranks 3 and 5)", and "" if the ranks are not in the group.
func (n *Names) global(ranks []int) string {
	if n == nil || n.GlobalRanks == nil {
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
		return " (global ranks " + strings.Join(all[:last], ", ") + " and " + all[last] + ")"
	}
	return " (global rank " + all[0] + ")"
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

// said returns what an error's cause says. The program's own words are left alone if it has aborted or cancelled the
// operation or panicked: nobody knows which ranks these mean.
func (n *Names) said(group string, err error) string {
	text, words := err.Error(), ""
	if errors.Is(err, ErrAborted) || errors.Is(err, ErrCanceled) || errors.Is(err, ErrPanicked) {
		at := programsWords(text)
		text, words = text[:at], text[at:]
	}
	return n.Say(group, text) + words
}

// programsWords returns where the program's words begin in "step 1 of 2: rank 2 aborted the group: words", len(text) if
// there are none.
func programsWords(text string) int {
	for i := range text {
		for _, word := range []string{"aborted", "cancelled", "panicked", "panic"} {
			if !wordAt(text, i, word) {
				continue
			}
			before, words, found := strings.Cut(text[i:], ":")
			if found && strings.HasPrefix(words, " ") {
				return i + len(before) + len(": ")
			}
		}
	}
	return len(text)
}

// wordAt reports whether words stand at i in text, with no letter or digit before and behind them.
func wordAt(text string, i int, words string) bool {
	return (i == 0 || !isWord(text[i-1])) && strings.HasPrefix(text[i:], words) &&
		(i+len(words) == len(text) || !isWord(text[i+len(words)]) || words[len(words)-1] == ' ')
}

func isWord(b byte) bool {
	return '0' <= b && b <= '9' || 'A' <= b && b <= 'Z' || 'a' <= b && b <= 'z' || b == '_'
}

// Say returns a text of the group's backend with the global rank behind each of the group's ranks. It leaves alone what
// an error of another group has said, quoted texts, and the cause that the program gave a context.
func (n *Names) Say(group, text string) string {
	if n == nil || n.GlobalRanks == nil {
		return text
	}
	end := ownEnd(group, text)
	var b strings.Builder
	from := 0
	for i := 0; i < end; {
		skip, ranks := ranksAt(text[:end], i)
		to := i + skip
		if len(ranks) > 0 && !otherRanks(text[to:]) {
			before := text[:i]
			if !strings.HasSuffix(before, "global ") && !strings.HasSuffix(before, "[") {
				b.WriteString(text[from:to])
				b.WriteString(n.global(ranks))
				from = to
			}
		}
		i = max(to, i+1)
	}
	b.WriteString(text[from:])
	return b.String()
}

// ownEnd returns where an error of another group begins in a text, len(text) if none does.
func ownEnd(group, text string) int {
	end := len(text)
	if i := strings.Index(text, "work: "); i >= 0 {
		end = i
	}
	for i := range text[:end] {
		if wordAt(text, i, "group ") {
			quoted := text[i+len("group "):]
			n := quotedEnd(quoted)
			if name, err := strconv.Unquote(quoted[:n]); n > 0 && (err != nil || name != group) {
				return i
			}
		}
	}
	return end
}

// ranksAt looks for words such as "rank 2", "ranks 1, 2 and 5", "link between 1 and 2" and "these came: 1" at i. It
// returns how many bytes to go on by, and the ranks.
func ranksAt(text string, i int) (skip int, ranks []int) {
	if n := quotedEnd(text[i:]); n > 0 {
		return n, nil
	}
	for _, words := range []string{"context deadline exceeded: ", "context canceled: "} {
		if wordAt(text, i, words) {
			cause, _, _ := strings.Cut(text[i:], ";")
			return len(cause), nil
		}
	}
	for _, words := range []string{"rank ", "ranks ", "Rank ", "Ranks ", "link between ", "these came: "} {
		if wordAt(text, i, words) {
			n, ranks := rankList(text[i+len(words):])
			return len(words) + n, ranks
		}
	}
	return 0, nil
}

// quotedEnd returns the length of the text in quotes with which text begins, 0 if there is none.
func quotedEnd(text string) int {
	for i := 1; i < len(text) && text[0] == '"'; i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return 0
}

// rankList reads "1", "1, 2" or "1, 2 and 5". In "1, 2 and 5 more" the last number is no rank.
func rankList(text string) (end int, ranks []int) {
	before := 0
	for at := 0; ; {
		digits := 0
		for at+digits < len(text) && '0' <= text[at+digits] && text[at+digits] <= '9' {
			digits++
		}
		if digits == 0 || at+digits < len(text) && isWord(text[at+digits]) {
			return end, ranks
		}
		r, err := strconv.Atoi(text[at : at+digits])
		if err != nil {
			r = -1
		}
		last := at > 0 && text[at-2] == 'd' // of " and "
		before, end, ranks = end, at+digits, append(ranks, r)
		switch rest := text[end:]; {
		case last && strings.HasPrefix(rest, " more"):
			return before, ranks[:len(ranks)-1]
		case strings.HasPrefix(rest, " more"):
			return end, nil
		case !last && strings.HasPrefix(rest, ", "):
			at = end + len(", ")
		case !last && strings.HasPrefix(rest, " and "):
			at = end + len(" and ")
		default:
			return end, ranks
		}
	}
}

// otherRanks reports whether a text after numbers says that they are no ranks of the group, or names them already.
func otherRanks(text string) bool {
	if len(text) > 1 && text[0] == '-' && '0' <= text[1] && text[1] <= '9' || strings.HasPrefix(text, " (global rank") {
		return true
	}
	of, is := strings.CutPrefix(text, " of ")
	return is && slices.ContainsFunc([]string{"group", "the default group", "a job", "the job", "a world", "the world"}, func(whose string) bool {
		return wordAt(of, 0, whose)
	})
}

// Logger returns a logger whose lines name a group and this rank. Each rank of the group in a line has its
// global rank behind it, as Say has it. A nil l means slog.Default().
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
			l = slog.New(&namer{l.Handler(), group, n})
		}
	}
	return l.With(args...)
}

// namer is a handler that names ranks.
type namer struct {
	slog.Handler
	group string
	names *Names
}

func (n *namer) Handle(ctx context.Context, r slog.Record) error {
	said := slog.NewRecord(r.Time, r.Level, n.names.Say(n.group, r.Message), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		if a.Value.Kind() == slog.KindString {
			a.Value = slog.StringValue(n.names.Say(n.group, a.Value.String()))
		}
		said.AddAttrs(a)
		return true
	})
	return n.Handler.Handle(ctx, said)
}

func (n *namer) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &namer{n.Handler.WithAttrs(attrs), n.group, n.names}
}

func (n *namer) WithGroup(name string) slog.Handler {
	return &namer{n.Handler.WithGroup(name), n.group, n.names}
}
