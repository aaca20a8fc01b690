package work

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
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

var (
	// ranksInText finds "rank 2", "ranks 1, 2 and 5", "link between 1 and 2", and "these came: 1". Without numbers it finds
	// other people's words: in quotes, and the cause that the program gave a context.
	ranksInText = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|\bcontext (?:deadline exceeded|canceled): [^;]*|(?:\b[Rr]anks?|\blink between|\bthese came:) (\d+(?:, \d+)*(?: and \d+)?)\b`)

	// groupInText finds the name of a group.
	groupInText = regexp.MustCompile(`\bgroup ("(?:[^"\\]|\\.)*")`)

	// otherRanks come after numbers that are no ranks of the group, or that have been named already.
	otherRanks = regexp.MustCompile(`^(?:-\d| \(global rank| of (?:the default )?group\b| of (?:a|the) (?:job|world)\b)`)

	// wordsBegin finds the end of "step 1 of 2: rank 2 aborted the group: ", which the program's words follow.
	wordsBegin = regexp.MustCompile(`\b(?:aborted|cancelled|panicked|panic)\b[^:]*: `)

	rankNumbers = regexp.MustCompile(`\d+`)
)

// said returns what an error's cause says. The program's own words are left alone if it has aborted or cancelled the
// operation or panicked: nobody knows which ranks these mean.
func (n *Names) said(group string, err error) string {
	text, words := err.Error(), ""
	if errors.Is(err, ErrAborted) || errors.Is(err, ErrCanceled) || errors.Is(err, ErrPanicked) {
		if at := wordsBegin.FindStringIndex(text); at != nil {
			text, words = text[:at[1]], text[at[1]:]
		}
	}
	return n.Say(group, text) + words
}

// Say returns a text of the group's backend with the global rank behind each of the group's ranks. It leaves alone what
// an error of another group has said.
func (n *Names) Say(group, text string) string {
	if n == nil || n.GlobalRanks == nil {
		return text
	}
	end := len(text)
	if i := strings.Index(text, "work: "); i >= 0 {
		end = i
	}
	for _, at := range groupInText.FindAllStringSubmatchIndex(text, -1) {
		if name, err := strconv.Unquote(text[at[2]:at[3]]); err != nil || name != group {
			end = min(end, at[0])
			break
		}
	}
	var b strings.Builder
	from := 0
	for _, at := range ranksInText.FindAllStringSubmatchIndex(text[:end], -1) {
		if at[2] < 0 {
			continue
		}
		list, to := text[at[2]:at[3]], at[1]
		if strings.HasPrefix(text[to:], " more") { // "ranks 1, 2 and 5 more"
			list = list[:max(strings.LastIndex(list, " and "), 0)]
			to = at[2] + len(list)
		}
		before := text[:at[0]]
		if otherRanks.MatchString(text[to:]) || strings.HasSuffix(before, "global ") || strings.HasSuffix(before, "[") {
			continue
		}
		var ranks []int
		for _, digits := range rankNumbers.FindAllString(list, -1) {
			r, err := strconv.Atoi(digits)
			if err != nil {
				r = -1
			}
			ranks = append(ranks, r)
		}
		if len(ranks) == 0 {
			continue
		}
		b.WriteString(text[from:to])
		b.WriteString(n.global(ranks))
		from = to
	}
	b.WriteString(text[from:])
	return b.String()
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
