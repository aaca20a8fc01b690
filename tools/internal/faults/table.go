package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Load reads a file of records, one JSON object a line.
func Load(file string) (all []Record, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		var x Record
		if err := json.Unmarshal(line, &x); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, x)
	}
	return all, nil
}

// Table returns a Markdown table of records. A row is a fault, a column a wire. A cell says how many
// ranks named the culprit, of how many under all operations, and after how long: the median operation
// and the slowest. Then it says the same of the all_reduce of the group of the rest.
func Table(records []Record) string {
	var b strings.Builder
	b.WriteString("| fault |")
	wires := slices.DeleteFunc(slices.Clone(Wires), func(w Wire) bool {
		return !slices.ContainsFunc(records, func(x Record) bool { return x.Wire == w })
	})
	for _, w := range wires {
		fmt.Fprintf(&b, " %s |", w)
	}
	b.WriteString("\n|" + strings.Repeat(" --- |", len(wires)+1) + "\n")
	for _, f := range faultsOf(records) {
		fmt.Fprintf(&b, "| %s |", f)
		for _, w := range wires {
			fmt.Fprintf(&b, " %s |", cell(f, of(records, func(x Record) bool { return x.Fault == f && x.Wire == w })))
		}
		b.WriteString("\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// SaysTable returns a table of what a rank says in an all_reduce, for each fault: here and in
// PyTorch.
func SaysTable(records []Record) string {
	var b strings.Builder
	b.WriteString("| fault | native TCP | PyTorch gloo |\n| --- | --- | --- |\n")
	for _, f := range faultsOf(records) {
		fmt.Fprintf(&b, "| %s |", f)
		for _, w := range []Wire{TCP, Torch} {
			s := ""
			for _, x := range of(records, func(x Record) bool { return x.Fault == f && x.Wire == w && x.Op == Operations[0] }) {
				if s = oneLine(x.Says); s != "" {
					s = "`" + s + "`"
				}
			}
			fmt.Fprintf(&b, " %s |", s)
		}
		b.WriteString("\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// faultsOf returns the faults of records, in the order of the table.
func faultsOf(records []Record) []Fault {
	return slices.DeleteFunc(slices.Clone(Faults), func(f Fault) bool {
		return !slices.ContainsFunc(records, func(x Record) bool { return x.Fault == f })
	})
}

func of(records []Record, is func(Record) bool) []Record {
	return slices.DeleteFunc(slices.Clone(records), func(x Record) bool { return !is(x) })
}

// cell summarizes the operations of one fault on one wire.
func cell(f Fault, records []Record) string {
	if len(records) == 0 {
		return ""
	}
	named, all, back, rest := 0, 0, 0, 0
	var seconds, until []float64
	for _, x := range records {
		named, all = named+x.Named, all+x.Survivors
		back, rest = back+x.Back, rest+x.Rest
		seconds = append(seconds, x.Seconds)
		if x.Back > 0 {
			until = append(until, x.BackSeconds)
		}
	}
	text := fmt.Sprintf("%d of %d", named, all)
	if f != Store {
		text += middle(seconds)
	}
	switch {
	case rest > 0 && back == rest:
		text += "; back " + strings.TrimPrefix(middle(until), ", ")
	case rest > 0:
		text += fmt.Sprintf("; back %d of %d%s", back, rest, middle(until))
	}
	return text
}

// middle writes the median and the longest of some times in seconds.
func middle(seconds []float64) string {
	if len(seconds) == 0 {
		return ""
	}
	slices.Sort(seconds)
	var all []string
	for _, s := range []float64{seconds[len(seconds)/2], seconds[len(seconds)-1]} {
		d, unit := time.Duration(s*float64(time.Second)), 100*time.Millisecond
		if d < time.Second {
			unit = time.Millisecond
		}
		all = append(all, max(d.Round(unit), unit).String())
	}
	return ", " + strings.Join(slices.Compact(all), " to ")
}

// oneLine returns a text as a cell of a table can have it.
func oneLine(s string) string {
	return strings.NewReplacer("\n", "; ", "|", "/", "`", "'").Replace(s)
}
