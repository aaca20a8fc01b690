package main

import (
	"flag"
	"fmt"
	"regexp"
	"strings"
)

// didYouMean returns a question that names the word most like the given one, or nothing if none is like it.
func didYouMean(word string, known []string) string {
	best, least := "", len(word)/3+1
	for _, k := range known {
		if d := distance(strings.ToLower(word), strings.ToLower(k)); d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(": did you mean %s?", best)
}

// distance is the number of characters to insert, delete, replace or swap with the next one to make b of a. It
// is 0 if b begins with a.
func distance(a, b string) int {
	if len(a) > 2 && a != b && strings.HasPrefix(b, a) {
		return 0
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			switch {
			case i == 0 || j == 0:
				rows[i][j] = i + j
				continue
			case a[i-1] == b[j-1]:
				rows[i][j] = rows[i-1][j-1]
			default:
				rows[i][j] = 1 + min(rows[i-1][j-1], rows[i-1][j], rows[i][j-1])
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// joined is a flag with its number behind it, as mpirun takes it.
var joined = regexp.MustCompile(`^([a-z])(\d+)$`)

// unknownFlag adds the most similar flag to package flag's error of one that is not defined.
func unknownFlag(err error, flags *flag.FlagSet) string {
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !unknown {
		return err.Error()
	}
	if m := joined.FindStringSubmatch(name); m != nil && flags.Lookup(m[1]) != nil {
		return "no flag -" + name + ": did you mean -" + m[1] + " " + m[2] + "?"
	}
	var known []string
	visible(flags).VisitAll(func(f *flag.Flag) { known = append(known, "-"+f.Name) })
	return "no flag -" + name + didYouMean("-"+name, known)
}
