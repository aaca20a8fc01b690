package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestShort compares .ci/run with the tests that call testing.Short. It runs them with -short under the race
// detector, and must run them in full without it. A test that is skipped says so with "-short: ", which .ci/run allows.
// Helpers that draw fewer seeds with -short are no tests.
func TestShort(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("needs bash")
	}
	// The step's command, with tests as a function that prints its arguments, one a line.
	cmd := exec.Command("bash", "-c", `set -eu; tests() { printf '%s\n' "$@"; }; eval "$(sed -n '/^long=/,/^$/p' .ci/run)"`)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)-run='(.*)'\nPACKAGES=(.*)\n`).FindStringSubmatch(string(out))
	if m == nil {
		t.Fatalf("the step of long tests in .ci/run has another form: %s", out)
	}
	long, packages, n := regexp.MustCompile(m[1]), strings.Fields(m[2]), 0
	files(t, func(name string) {
		if !strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "interop/") { // .ci/run has make interop
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		for _, d := range parsed.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") || !callsShort(f) {
				continue
			}
			n++
			for _, reason := range skipped(f) {
				if !strings.HasPrefix(reason, `"-short: `) {
					t.Errorf("%s of %s is skipped with %s: let the text begin with -short:", f.Name.Name, name, reason)
				}
			}
			if dir := "./" + filepath.ToSlash(filepath.Dir(name)); !long.MatchString(f.Name.Name) || !slices.Contains(packages, dir) {
				t.Errorf("%s of %s calls testing.Short: add both to the long tests in .ci/run", f.Name.Name, dir)
			}
		}
	})
	if n < 10 {
		t.Errorf("%d tests call testing.Short", n)
	}
}

// skipped returns with which texts f skips a test if testing.Short holds.
func skipped(f *ast.FuncDecl) (reasons []string) {
	ast.Inspect(f, func(n ast.Node) bool {
		branch, ok := n.(*ast.IfStmt)
		if !ok || !callsShort(branch.Cond) {
			return true
		}
		ast.Inspect(branch.Body, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && len(call.Args) > 0 {
				s, method := call.Fun.(*ast.SelectorExpr)
				if text, ok := call.Args[0].(*ast.BasicLit); ok && method && strings.HasPrefix(s.Sel.Name, "Skip") {
					reasons = append(reasons, text.Value)
				}
			}
			return true
		})
		return true
	})
	return reasons
}

// callsShort reports whether a piece of a program calls testing.Short itself.
func callsShort(f ast.Node) bool {
	found := false
	ast.Inspect(f, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "Short" {
			x, ok := s.X.(*ast.Ident)
			found = found || ok && x.Name == "testing"
		}
		return !found
	})
	return found
}
