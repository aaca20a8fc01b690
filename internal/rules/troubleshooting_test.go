package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestTroubleshooting compares docs/troubleshooting.md with the sources. A heading of an entry has the
// unchanging parts of an error's text, with "..." between them. Each part is in a string constant of the
// sources, and all are in the example below the heading, in this order.
func TestTroubleshooting(t *testing.T) {
	const page = "docs/troubleshooting.md"
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		t.Fatal(err)
	}
	var constants []string
	files(t, func(name string) {
		if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, err := strconv.Unquote(lit.Value); err == nil {
					constants = append(constants, s)
				}
			}
			return true
		})
	})
	all := strings.Join(constants, "\x00")

	entry := regexp.MustCompile("(?m)^### `(.+)`\n\n    (.+)\n\nCause: .+\n\nCure: .+$")
	entries := entry.FindAllStringSubmatch(string(text), -1)
	if headings := strings.Count(string(text), "\n### "); len(entries) != headings || headings == 0 {
		t.Errorf("%s has %d headings and %d whole entries: heading, example, cause, cure", page, headings, len(entries))
	}
	for _, e := range entries {
		example := e[2]
		for part := range strings.SplitSeq(e[1], "...") {
			if !strings.Contains(all, part) {
				t.Errorf("%s quotes %q, which is in no Go file", page, part)
			}
			var found bool
			if _, example, found = strings.Cut(example, part); !found {
				t.Errorf("%s: the example of %q lacks %q", page, e[1], part)
			}
		}
	}
}
