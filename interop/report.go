package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/internal/script"
)

// Outcome is the result of a run with one PyTorch.
type Outcome struct {
	Label       string   `json:"label"`
	Torch       string   `json:"torch"`
	Go          string   `json:"go"`
	Seed        uint64   `json:"seed"`
	Seconds     float64  `json:"seconds"`
	Cells       []Cell   `json:"cells"`
	Empty       []Cell   `json:"empty"` // operations that refuse tensors without elements
	Jobs        []Job    `json:"jobs"`
	Skipped     []Job    `json:"skipped"`     // what this machine cannot do
	Unexplained []string `json:"unexplained"` // what makes the run a failure
}

// Cell is an operation with a dtype and an operator.
type Cell struct {
	Op       string `json:"op"`
	DType    string `json:"dtype"`
	Reduce   string `json:"reduce,omitempty"`
	Reason   string `json:"reason,omitempty"` // why it is not compared
	Says     string `json:"says,omitempty"`   // PyTorch's words for that
	Compared int    `json:"compared"`         // results of one rank each
	Differs  int    `json:"differs"`
}

func (c Cell) String() string { return strings.TrimSpace(c.Op + " " + c.DType + " " + c.Reduce) }

// Job is one group of processes.
type Job struct {
	Kind    string  `json:"kind"` // its row in tables; a job of PyTorch ranks alone has none
	Name    string  `json:"name"`
	Size    int     `json:"size"`
	Go      []int   `json:"go"` // the ranks that are Go's
	Lines   int     `json:"lines"`
	Seconds float64 `json:"seconds"`
	Differs int     `json:"differs"`
	Missed  int     `json:"missed,omitempty"` // runs repeated since gloo missed the end of a connection
	Error   string  `json:"error,omitempty"`
}

func (j Job) String() string {
	s := "equal"
	switch {
	case j.Error != "":
		s = j.Error
	case j.Differs > 0:
		s = fmt.Sprintf("%d results differ", j.Differs)
	}
	if j.Missed > 0 {
		s += fmt.Sprintf(", after %d runs in which gloo missed the end of a connection", j.Missed)
	}
	return fmt.Sprintf("%d ranks, %s, %d operations in %.1f s: %s", j.Size, j.Name, j.Lines, j.Seconds, s)
}

func (x *Outcome) unexplained(format string, args ...any) {
	x.Unexplained = append(x.Unexplained, fmt.Sprintf(format, args...))
}

func (x *Outcome) job(j Job) {
	x.Jobs = append(x.Jobs, j)
	if j.Error != "" {
		x.unexplained("%d ranks, %s: %s", j.Size, j.Name, j.Error)
	}
}

// compare compares a job's results with those of PyTorch ranks alone.
func (x *Outcome) compare(r *Job, j job, want, got [][]script.Result) {
	for i, l := range j.lines {
		c := slices.IndexFunc(x.Cells, func(c Cell) bool {
			return c.Op == l.Op && (l.DType == "" || c.DType == l.DType) && (c.Reduce == l.Reduce || l.Reduce == "" && c.Reduce == "sum")
		})
		for rank := range got {
			w, g := want[rank][i], got[rank][i]
			same := g == w
			if !same {
				r.Differs++
				if r.Differs <= 10 {
					x.unexplained("%d ranks, %s, rank %d, %s", j.Size, j.Name, rank, difference(l, w, g))
				}
			}
			if c >= 0 && w.SHA256 != "" {
				x.Cells[c].Compared++
				if !same {
					x.Cells[c].Differs++
				}
			}
		}
	}
}

func difference(l script.Line, want, got script.Result) string {
	line := strings.TrimSpace(string(text([]script.Line{l})))
	if got.Error != "" {
		return fmt.Sprintf("operation %d %s: %s", got.I, line, got.Error)
	}
	return fmt.Sprintf("operation %d %s: digest %.12s, of PyTorch alone %.12s", got.I, line, got.SHA256, want.SHA256)
}

// reasons numbers the reasons of some outcomes in order.
func reasons(all []*Outcome) []string {
	var rs []string
	for _, x := range all {
		for _, c := range slices.Concat(x.Cells, x.Empty) {
			if c.Reason != "" && !slices.Contains(rs, c.Reason) {
				rs = append(rs, c.Reason)
			}
		}
	}
	slices.Sort(rs)
	return rs
}

// verdict describes an operation: equal or not, and the numbers of the reasons for refused parts.
func (x *Outcome) verdict(op string, rs []string) string {
	compared, differs, cells := 0, 0, 0
	var notes []string
	for _, c := range slices.Concat(x.Cells, x.Empty) {
		if c.Op != op {
			continue
		}
		compared += c.Compared
		differs += c.Differs
		if c.Reason == "" {
			cells++
			continue
		}
		if n := fmt.Sprint(slices.Index(rs, c.Reason) + 1); !slices.Contains(notes, n) {
			notes = append(notes, n)
		}
	}
	slices.SortFunc(notes, func(a, b string) int { return len(a)*100 + strings.Compare(a, b) - len(b)*100 })
	note := ""
	if len(notes) > 0 {
		note = " [" + strings.Join(notes, ", ") + "]"
	}
	switch {
	case cells == 0:
		return "no" + note
	case differs > 0:
		return fmt.Sprintf("%d of %d results differ%s", differs, compared, note)
	case compared == 0 && op != "barrier":
		return "not compared" + note
	}
	return "equal" + note
}

func operations() []string {
	return slices.DeleteFunc(script.Ops(), func(op string) bool { return op == "new_group" })
}

// summary prints an outcome for people.
func summary(w io.Writer, x *Outcome) error {
	rs := reasons([]*Outcome{x})
	compared := 0
	for _, c := range x.Cells {
		compared += c.Compared
	}
	fmt.Fprintf(w, "\nPyTorch %s: %d jobs, %d results compared, %.0f s\n\n", x.Torch, len(x.Jobs), compared, x.Seconds)
	for _, op := range operations() {
		fmt.Fprintf(w, "%-24s %s\n", op, x.verdict(op, rs))
	}
	fmt.Fprintln(w)
	for i, r := range rs {
		fmt.Fprintf(w, "[%d] %s\n", i+1, r)
	}
	for _, j := range x.Skipped {
		fmt.Fprintf(w, "\nleft out: %d ranks, %s: %s\n", j.Size, j.Name, j.Error)
	}
	if len(x.Unexplained) > 0 {
		fmt.Fprintf(w, "\nunexplained:\n")
	}
	for _, u := range x.Unexplained {
		fmt.Fprintln(w, u)
	}
	_, err := fmt.Fprintln(w)
	return err
}

// ofKind describes the jobs of one row.
func (x *Outcome) ofKind(kind string) string {
	jobs, bad := 0, 0
	for _, j := range x.Jobs {
		if j.Kind == kind {
			jobs++
			if j.Error != "" || j.Differs > 0 {
				bad++
			}
		}
	}
	switch {
	case jobs == 0 && slices.ContainsFunc(x.Skipped, func(j Job) bool { return j.Kind == kind }):
		return "left out"
	case jobs == 0:
		return "-"
	case bad > 0:
		return fmt.Sprintf("%d of %d jobs failed", bad, jobs)
	}
	return "yes"
}

// markdown prints tables of several outcomes, a column each.
func markdown(w io.Writer, all []*Outcome) error {
	rs := reasons(all)
	head := "|"
	rule := "|---|"
	for _, x := range all {
		head += " PyTorch " + x.Label + " |"
		rule += "---|"
	}
	fmt.Fprintf(w, "| operation %s\n%s\n", head, rule)
	for _, op := range operations() {
		fmt.Fprintf(w, "| `%s` |", op)
		for _, x := range all {
			fmt.Fprintf(w, " %s |", x.verdict(op, rs))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	for i, r := range rs {
		fmt.Fprintf(w, "%d. %s\n", i+1, r)
	}
	fmt.Fprintf(w, "\n| job %s\n%s\n", head, rule)
	var names []string
	for _, x := range all {
		for _, j := range x.Jobs {
			if j.Kind != "" && !slices.Contains(names, j.Kind) {
				names = append(names, j.Kind)
			}
		}
	}
	for _, n := range names {
		fmt.Fprintf(w, "| %s |", n)
		for _, x := range all {
			fmt.Fprintf(w, " %s |", x.ofKind(n))
		}
		fmt.Fprintln(w)
	}
	_, err := fmt.Fprintln(w)
	return err
}
