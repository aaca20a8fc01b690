// Package leaveout shows that the checks of a package are necessary: without any one of them a test fails.
//
// A check is the condition of an if or of a case, and each operand of && and || in one. To leave it out means that the
// if or the case is never taken, or that the operand decides nothing.
package leaveout

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// change is one check, and the file's text without it.
type change struct {
	name string // its function and its text, as in "weigh: len(expected) > 0"
	file string
	text []byte
}

// Each leaves out one check after the other of these files of the package in the current directory, and runs the package's
// tests with these flags. For each check that no test misses, spared must say why it stays; for no other.
func Each(t *testing.T, flags []string, spared map[string]string, files ...string) {
	var all []change
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		found, err := changes(f, text)
		require.NoError(t, err)
		all = append(all, found...)
	}
	var mu sync.Mutex
	survivors := make(map[string]bool)
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	dir := t.TempDir()
	for i, c := range all {
		group.Go(func() error {
			missed, err := run(t, filepath.Join(dir, fmt.Sprint(i)), c, flags)
			mu.Lock()
			defer mu.Unlock()
			if err == nil && !missed {
				survivors[c.name] = true
				if spared[c.name] == "" {
					t.Errorf("%s: no test misses %s", c.file, c.name)
				}
			}
			return err
		})
	}
	require.NoError(t, group.Wait())
	t.Logf("%d checks, %d of them without a test that misses them", len(all), len(survivors))
	for name := range spared {
		if !survivors[name] {
			t.Errorf("spared, but a test misses it, or it is not there: %s", name)
		}
	}
}

// run reports whether a test fails without a check.
func run(t *testing.T, dir string, c change, flags []string) (missed bool, err error) {
	file, err := filepath.Abs(c.file)
	if err != nil {
		return false, err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {file: filepath.Join(dir, c.file)}})
	if err != nil {
		return false, err
	}
	for name, text := range map[string][]byte{c.file: c.text, "overlay.json": overlay} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return false, err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			return false, err
		}
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "bin")
	if out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", filepath.Join(dir, "overlay.json"), "-o", bin, ".").CombinedOutput(); err != nil {
		return false, fmt.Errorf("without %s: %w: %s", c.name, err, out)
	}
	cmd := exec.CommandContext(t.Context(), bin, append([]string{"-test.short", "-test.failfast", "-test.timeout=2m"}, flags...)...)
	cmd.Env = append(os.Environ(), "C10D_NIGHTLY=")
	return cmd.Run() != nil, t.Context().Err()
}

// changes returns the checks of a file.
func changes(file string, text []byte) (all []change, err error) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, text, 0)
	if err != nil {
		return nil, err
	}
	at := func(p token.Pos) int { return set.Position(p).Offset }
	for _, d := range parsed.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		seen := make(map[string]int)
		leave := func(x ast.Expr, with string) {
			was := text[at(x.Pos()):at(x.End())]
			name := fn.Name.Name + ": " + strings.Join(strings.Fields(string(was)), " ")
			if seen[name]++; seen[name] > 1 {
				name += fmt.Sprintf(" (%d)", seen[name])
			}
			var b bytes.Buffer
			b.Write(text[:at(x.Pos())])
			fmt.Fprintf(&b, "(%s (%s))", with, was)
			b.Write(text[at(x.End()):])
			all = append(all, change{name, file, b.Bytes()})
		}
		var operands func(x ast.Expr)
		operands = func(x ast.Expr) {
			switch x := x.(type) {
			case *ast.ParenExpr:
				operands(x.X)
			case *ast.BinaryExpr:
				with := map[token.Token]string{token.LAND: "true ||", token.LOR: "false &&"}[x.Op]
				if with == "" {
					return
				}
				for _, y := range []ast.Expr{x.X, x.Y} {
					if inner, ok := y.(*ast.BinaryExpr); !ok || inner.Op != x.Op {
						leave(y, with)
					}
					operands(y)
				}
			}
		}
		condition := func(x ast.Expr) {
			leave(x, "false &&")
			operands(x)
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.IfStmt:
				condition(n.Cond)
			case *ast.SwitchStmt:
				if n.Tag != nil {
					return true // a value that is not looked for
				}
				for _, s := range n.Body.List {
					for _, x := range s.(*ast.CaseClause).List {
						condition(x)
					}
				}
			}
			return true
		})
	}
	return all, nil
}
