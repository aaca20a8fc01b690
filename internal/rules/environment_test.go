package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// environmentPage has the variables of the library and of c10d, testsPage those of tests.
const (
	environmentPage = "docs/environment.md"
	testsPage       = "CONTRIBUTING.md"

	// launchersHeading is where the tables of launchers begin.
	launchersHeading = "## Launchers\n"
)

var (
	// variableName is the form of a variable's name with an underscore, such as OMPI_MCA_ess_base_jobid.
	variableName = regexp.MustCompile(`^[A-Z][A-Z0-9]*(_[A-Za-z0-9]+)+$`)

	// environmentRow is a row of a table of variables.
	environmentRow = regexp.MustCompile("^\\| `([A-Za-z0-9_]+)` \\|")

	// quotedName is a variable in a cell of a table of launchers: those have a row for what variables tell.
	quotedName = regexp.MustCompile("`([A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)+)`")

	// childVariable is the form of the variables by which a test instructs a process that it starts.
	childVariable = regexp.MustCompile(`(^|_)TEST(_|$)`)
)

// notVariables are string constants that have the form of a variable's name and are something else.
var notVariables = regexp.MustCompile(`^(CUDA_ERROR_.*|SEQ_NUM_STORE_KEY|` +
	// the requests of TCPStore
	`COMPARE_SET|DELETE_KEY|MULTI_GET|MULTI_SET|CANCEL_WAIT|QUEUE_PUSH|QUEUE_POP|QUEUE_LEN|QUEUE_TAKE|LIST_KEYS|WATCH_KEY|GIVE_UP|SET_WILL|DROP_WILL)$`)

// TestEnvironment compares the variables in the documents with those in the sources: a variable of either
// must be in the other.
func TestEnvironment(t *testing.T) {
	inSources := make(map[string]string) // variables, each with a file that has it
	files(t, func(name string) {
		if filepath.Ext(name) != ".go" {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		for _, v := range variablesOf(parsed, strings.HasSuffix(name, "_test.go")) {
			if inSources[v] == "" {
				inSources[v] = name
			}
		}
	})
	onPage := make(map[string]string) // variables, each with its page
	for _, name := range []string{environmentPage, testsPage} {
		page, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		last, launchers := "", false
		for line := range strings.Lines(string(page)) {
			launchers = launchers || line == launchersHeading
			row := environmentRow.FindStringSubmatch(line)
			if row == nil || launchers {
				last = "" // the next table has an order of its own
				if launchers && strings.HasPrefix(line, "| ") {
					for _, m := range quotedName.FindAllStringSubmatch(line, -1) {
						if inSources[m[1]] == "" {
							t.Errorf("%s has %s, which no Go file has", name, m[1])
						}
						onPage[m[1]] = name
					}
				}
				continue
			}
			v := row[1]
			if onPage[v] != "" {
				t.Errorf("%s has a row for %s, and so has %s", name, v, onPage[v])
			}
			if v < last {
				t.Errorf("%s: the row of %s comes after that of %s; sort the table", name, v, last)
			}
			if inSources[v] == "" {
				t.Errorf("%s has a row for %s, which no Go file has", name, v)
			}
			onPage[v], last = name, v
		}
	}
	for _, v := range slices.Sorted(maps.Keys(inSources)) {
		if onPage[v] == "" {
			t.Errorf("%s has no row for %s, which %s has; if it is no variable, add it to notVariables", environmentPage, v, inSources[v])
		}
	}
}

// variablesOf returns the environment variables that a file names, without those that have
// childVariable's form. They are the constant arguments of getenv functions, and all string constants
// that look like a variable's name. In a test they are those of this library only.
func variablesOf(file *ast.File, test bool) (found []string) {
	add := func(e ast.Expr, accept func(string) bool) {
		lit, ok := e.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			return
		}
		v, err := strconv.Unquote(lit.Value)
		if err == nil && accept(v) && !childVariable.MatchString(v) && (!test || strings.HasPrefix(v, "C10D_")) {
			found = append(found, v)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if len(n.Args) == 1 && readsEnvironment(n.Fun) {
				add(n.Args[0], func(string) bool { return true })
			}
		case *ast.BasicLit:
			add(n, func(v string) bool { return variableName.MatchString(v) && !notVariables.MatchString(v) })
		}
		return true
	})
	return found
}

// readsEnvironment reports whether f is os.Getenv, os.LookupEnv or a function named getenv.
func readsEnvironment(f ast.Expr) bool {
	if s, ok := f.(*ast.SelectorExpr); ok {
		f = s.Sel
	}
	id, ok := f.(*ast.Ident)
	return ok && slices.Contains([]string{"getenv", "lookupenv"}, strings.ToLower(id.Name))
}

// TestVariablesOf holds what counts as a variable.
func TestVariablesOf(t *testing.T) {
	const source = `package p
const a = "C10D_WIRE"
func f() {
	os.Getenv("ONE"); r.getenv("TWO"); os.LookupEnv("THREE"); r.number(0, "SLURM_X", "OMPI_MCA_a_b")
	g("CUDA_ERROR_X", "FOUR", "A B_C", "C10D_TEST_X", "X_TEST_Y", "C10D_TEST", "b_C")
}`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	for test, want := range map[bool]string{false: "C10D_WIRE ONE TWO THREE SLURM_X OMPI_MCA_a_b", true: "C10D_WIRE"} {
		if got := strings.Join(variablesOf(file, test), " "); got != want {
			t.Errorf("in a test %v: %s, want %s", test, got, want)
		}
	}
}
