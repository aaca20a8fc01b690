// Package leaveout shows that the checks of a package are necessary: without any one of them a test fails.
//
// A check is the condition of an if or of a case, and each operand of && and || in one. To leave it out means that the
// if or the case is never taken, or that the operand decides nothing. The tests are built once, with a flag that says which
// check to leave out.
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
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/testsize"
)

// check is one check.
type check struct {
	name string // its function and its text, as in "weigh: len(expected) > 0"
	file string
}

// Each leaves out one check after the other of these files of the package in the current directory, and runs the package's
// tests with these flags. For each check that no test misses, spared must say why it stays; for no other. It takes minutes,
// so only make nightly does it. The package's tests are then not in their long form.
func Each(t *testing.T, flags []string, spared map[string]string, files ...string) {
	t.Helper()
	if !testsize.Long() {
		t.Skip("-short: runs the package's tests once for each check; make nightly does")
	}
	bin, all := build(t, files)
	limit := 10 * time.Minute
	missed := func(number int) bool {
		args := []string{"-test.short", "-test.failfast", "-test.timeout=" + limit.String(), "-leftout=" + strconv.Itoa(number)}
		cmd := exec.CommandContext(t.Context(), bin, append(args, flags...)...)
		cmd.Env = append(os.Environ(), "C10D_NIGHTLY=")
		return cmd.Run() != nil
	}
	begun := time.Now()
	require.False(t, missed(none), "a test fails with all checks")
	limit = max(time.Minute, 5*time.Since(begun)) // without its check, a loop may not end
	var mu sync.Mutex
	survivors := make(map[string]bool)
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, c := range all {
		group.Go(func() error {
			if missed(i) {
				return t.Context().Err()
			}
			mu.Lock()
			defer mu.Unlock()
			survivors[c.name] = true
			if spared[c.name] == "" {
				t.Errorf("%s: no test misses %s", c.file, c.name)
			}
			return nil
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

// none is the number of no check.
const none = -1

// flagged is a file of the package with the flag.
const flagged = `package %s

import "flag"

var leftOutNumber = flag.Int("leftout", %d, "the check to leave out")

func leftOut(n int) bool { return n == *leftOutNumber }
`

// build builds the package's tests, and returns the checks. The place of one is its number.
func build(t *testing.T, files []string) (bin string, all []check) {
	here, err := os.Getwd()
	require.NoError(t, err)
	dir, replace := t.TempDir(), make(map[string]string)
	write := func(file string, text []byte) {
		replace[filepath.Join(here, file)] = filepath.Join(dir, file)
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), text, 0o600))
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, f, text, 0)
		require.NoError(t, err)
		found, text := changed(set, parsed, text, len(all))
		for _, name := range found {
			all = append(all, check{name, f})
		}
		write(f, text)
		write("leftout_flag.go", fmt.Appendf(nil, flagged, parsed.Name.Name, none))
	}
	overlay, bin := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "bin")
	text, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(overlay, text, 0o600))
	out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", overlay, "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin, all
}

// changed returns the names of a file's checks, and its text, in which each check may be left out. first is the number of the
// first one.
func changed(set *token.FileSet, parsed *ast.File, text []byte, first int) (names []string, with []byte) {
	at := func(p token.Pos) int { return set.Position(p).Offset }
	before, after := make(map[int]string), make(map[int]string) // what is written at a place
	for _, d := range parsed.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		seen := make(map[string]int)
		leave := func(x ast.Expr, format string) {
			from, to := at(x.Pos()), at(x.End())
			name := fn.Name.Name + ": " + strings.Join(strings.Fields(string(text[from:to])), " ")
			if seen[name]++; seen[name] > 1 {
				name += fmt.Sprintf(" (%d)", seen[name])
			}
			before[from] += fmt.Sprintf(format, first+len(names))
			after[to] += "))"
			names = append(names, name)
		}
		const never, always = "(!leftOut(%d) && (", "(leftOut(%d) || ("
		var operands func(x ast.Expr)
		operands = func(x ast.Expr) {
			switch x := x.(type) {
			case *ast.ParenExpr:
				operands(x.X)
			case *ast.BinaryExpr:
				format := map[token.Token]string{token.LAND: always, token.LOR: never}[x.Op]
				if format == "" {
					return
				}
				for _, y := range []ast.Expr{x.X, x.Y} {
					if inner, ok := y.(*ast.BinaryExpr); !ok || inner.Op != x.Op {
						leave(y, format)
					}
					operands(y)
				}
			}
		}
		condition := func(x ast.Expr) {
			leave(x, never)
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
	var b bytes.Buffer
	for i, c := range text {
		b.WriteString(after[i] + before[i])
		b.WriteByte(c)
	}
	return names, b.Bytes()
}
