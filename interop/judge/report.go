package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// summary prints what a reader has to know, and returns whether all is as expected.
func (x *Outcome) summary(w io.Writer) bool {
	for _, s := range x.Speed {
		fmt.Fprintln(w, s)
	}
	if len(x.Cases) == 0 {
		return true
	}
	ok := true
	for _, c := range x.Cases {
		switch {
		case c.Verdict == Failed:
			ok = false
			fmt.Fprintf(w, "FAILED %s, %s\n", c.Name, c.Wire)
			for _, t := range slices.Compact(c.Texts) {
				fmt.Fprintf(w, "\twant %q\n\tgot  %q\n", t.Want, t.Got)
			}
			for _, line := range brief(c.Text) {
				fmt.Fprintf(w, "\t%s\n", line)
			}
		case c.Again:
			fmt.Fprintf(w, "passed at the second try: %s, %s\n", c.Name, c.Wire)
		case c.Verdict == Passed && c.Reason != "":
			fmt.Fprintf(w, "passed although it is listed: %s, %s\n", c.Name, c.Wire)
		}
	}
	fmt.Fprintf(w, "\nPyTorch %s, %.0f s\n", x.Label, x.Seconds)
	for _, s := range x.suites() {
		for _, wire := range wireNames() {
			if n := x.count(s, wire); n != (counts{}) {
				fmt.Fprintf(w, "%-32s %-12s %s\n", s, wire, n)
			}
		}
	}
	if len(x.Absent) > 0 {
		fmt.Fprintf(w, "not in this PyTorch: %s\n", strings.Join(x.Absent, ", "))
	}
	return ok
}

// brief returns the errors of a text of tracebacks, each once. The outcome has all of it.
func brief(text string) (lines []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if (strings.Contains(line, "Error") || !strings.HasPrefix(text, "Traceback")) && !slices.Contains(lines, line) && len(lines) < 10 {
			lines = append(lines, line)
		}
	}
	return lines
}

// counts are cases by their verdict.
type counts struct{ passed, expected, both, failed int }

func (n counts) String() string {
	s := fmt.Sprintf("%d passed", n.passed)
	for _, p := range []struct {
		n    int
		what string
	}{{n.expected, "expected"}, {n.both, "as with gloo"}, {n.failed, "FAILED"}} {
		if p.n > 0 {
			s += fmt.Sprintf(", %d %s", p.n, p.what)
		}
	}
	return s
}

// cell returns the counts for a table.
func (n counts) cell() string {
	switch {
	case n == (counts{}):
		return ""
	case n.failed > 0:
		return n.String() + " "
	}
	return fmt.Sprintf("%d/%d/%d ", n.passed, n.expected, n.both)
}

func (x *Outcome) count(suite, wire string) (n counts) {
	for _, c := range x.Cases {
		if c.Wire != wire || !strings.HasPrefix(c.Name, suite+".") {
			continue
		}
		switch c.Verdict {
		case Passed:
			n.passed++
		case Expected:
			n.expected++
		case Both:
			n.both++
		case Failed:
			n.failed++
		}
	}
	return n
}

func (x *Outcome) suites() []string {
	all := map[string]bool{}
	for _, c := range x.Cases {
		s, _, _ := strings.Cut(c.Name, ".")
		all[s] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// markdown returns tables of runs: cases by suite, reasons, times.
func markdown(all []*Outcome) string {
	var b strings.Builder
	b.WriteString("Cases that pass, that are on the list, and that fail with gloo too:\n\n")
	fmt.Fprintf(&b, "| PyTorch | tests | %s |\n|---|---|%s\n", strings.Join(wireNames(), " | "), strings.Repeat("---|", len(wires)))
	why := map[string]int{} // reasons, with the number of cases
	for _, x := range all {
		for _, s := range x.suites() {
			fmt.Fprintf(&b, "| %s | `%s` |", x.Label, s)
			for _, wire := range wireNames() {
				fmt.Fprintf(&b, " %s|", x.count(s, wire).cell())
			}
			b.WriteString("\n")
		}
		seen := map[string]bool{}
		for _, c := range x.Cases {
			if c.Verdict == Expected && !seen[c.Name+c.Reason] {
				seen[c.Name+c.Reason] = true
				why[c.Reason]++
			}
		}
	}
	if len(why) > 0 {
		b.WriteString("\nExpected:\n\n")
		for _, r := range slices.SortedFunc(maps.Keys(why), func(a, c string) int { return why[c] - why[a] }) {
			fmt.Fprintf(&b, "* %d: %s.\n", why[r], r)
		}
	}
	for _, x := range all {
		if len(x.Speed) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n| all_reduce, PyTorch %s | gloo | this library |\n|---|---|---|\n", x.Label)
		for _, s := range x.Speed {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", s.size(), micros(s.Gloo), micros(s.Go))
		}
	}
	return b.String()
}
