// Command gotest runs go test, prints what go test prints, and closes with the
// tests that were skipped and why: go test alone says nothing about them, and a
// run without redis-server or PyTorch would look like one with them.
//
//	go run ./internal/gotest [-noskip [-except REGEXP]] [arguments of go test]
//
// With -noskip a skipped test is a failure, unless the reason that it gave
// matches -except.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

func main() {
	args := os.Args[1:]
	noSkip := len(args) > 0 && args[0] == "-noskip"
	var except *regexp.Regexp
	if noSkip {
		args = args[1:]
		if len(args) > 1 && args[0] == "-except" {
			var err error
			if except, err = regexp.Compile(args[1]); err != nil {
				fmt.Fprintln(os.Stderr, "gotest: -except:", err)
				os.Exit(2)
			}
			args = args[2:]
		}
	}
	code, err := run(args, noSkip, except)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
	}
	os.Exit(code)
}

func run(args []string, noSkip bool, except *regexp.Regexp) (int, error) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 1, err
	}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	skips, err := show(os.Stdout, out)
	if err != nil {
		return 1, errors.Join(err, cmd.Wait())
	}
	summarize(os.Stdout, skips)
	var exit *exec.ExitError
	switch err := cmd.Wait(); {
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1), nil
	case err != nil:
		return 1, err
	case noSkip && forbidden(skips, except):
		return 1, errors.New("tests were skipped, which -noskip forbids")
	}
	return 0, nil
}

// forbidden reports whether a test was skipped for a reason that is no exception.
func forbidden(skips []skip, except *regexp.Regexp) bool {
	return slices.ContainsFunc(skips, func(s skip) bool { return except == nil || !except.MatchString(s.reason) })
}

// event is a line of go test -json, see go doc test2json.
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

type skip struct{ pkg, test, reason string }

// show prints the events of r as go test does without -v, and returns the skips.
func show(w io.Writer, r io.Reader) ([]skip, error) {
	var skips []skip
	type test struct{ pkg, name string }
	said := make(map[test][]string)
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(w, "%s", line)
				continue
			}
			t := test{e.Package, e.Test}
			switch {
			case e.Action == "build-output":
				fmt.Fprint(w, e.Output)
			case e.Action == "output" && e.Test != "":
				if !strings.HasPrefix(e.Output, "=== ") {
					said[t] = append(said[t], e.Output)
				}
			case e.Action == "output" && e.Output != "PASS\n":
				fmt.Fprint(w, e.Output)
			case e.Action == "fail" && e.Test != "":
				fmt.Fprint(w, strings.Join(said[t], ""))
				delete(said, t)
			case e.Action == "fail":
				// What is left was said by tests that did not come to an end.
				for t, text := range said {
					if t.pkg == e.Package {
						fmt.Fprint(w, strings.Join(text, ""))
						delete(said, t)
					}
				}
			case e.Action == "skip" && e.Test != "":
				skips = append(skips, skip{e.Package, e.Test, reason(said[t])})
				delete(said, t)
			case e.Action == "pass":
				delete(said, t)
			}
		}
		if err == io.EOF {
			return skips, nil
		}
		if err != nil {
			return skips, err
		}
	}
}

// place is where t.Skip was called, which go test puts before the text.
var place = regexp.MustCompile(`^\s*\w+\.go:\d+: `)

func reason(said []string) string {
	for _, s := range said {
		if place.MatchString(s) {
			return strings.TrimSpace(place.ReplaceAllString(s, ""))
		}
	}
	return "no reason given"
}

// summarize prints one line for each package and reason.
func summarize(w io.Writer, skips []skip) {
	if len(skips) == 0 {
		return
	}
	slices.SortStableFunc(skips, func(a, b skip) int {
		return cmp.Or(cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.reason, b.reason))
	})
	fmt.Fprintf(w, "\nskipped %d tests:\n", len(skips))
	for len(skips) > 0 {
		first := skips[0]
		n := slices.IndexFunc(skips, func(s skip) bool { return s.pkg != first.pkg || s.reason != first.reason })
		if n < 0 {
			n = len(skips)
		}
		names := first.test
		if n > 1 {
			names = fmt.Sprintf("%s and %d more", names, n-1)
		}
		fmt.Fprintf(w, "  %s: %s (%s)\n", first.pkg, first.reason, names)
		skips = skips[n:]
	}
}
