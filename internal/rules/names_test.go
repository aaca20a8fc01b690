package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// documented are the packages whose names the documents use.
var documented = map[string]string{
	"backend": "backend", "cuda": "backend/cuda", "driver": "backend/cuda/driver", "gloo": "backend/gloo", "detail": "backend/detail",
	"ddp": "ddp", "checkpoint": "ddp/checkpoint", "pg": "pg", "pgtest": "pg/pgtest", "pgweights": "pg/pgweights", "store": "store", "redis": "store/redis",
	"tcp": "store/tcp", "tensor": "tensor", "trace": "trace", "debug": "trace/debug", "weights": "weights", "work": "work",
	"rendezvous": "internal/rendezvous", "transport": "internal/transport",
}

// TestNames: the documents name functions, types, fields and methods that exist, as pg.Options.Timeout.
func TestNames(t *testing.T) {
	var packages []string
	for name := range documented {
		packages = append(packages, name)
	}
	name := regexp.MustCompile(`(?:^|[^\w./])(` + strings.Join(packages, "|") + `)\.([A-Z]\w*)(?:\.([A-Z]\w*))?`)
	declared := make(map[string]map[string]bool)
	n := 0
	files(t, func(page string) {
		if filepath.Ext(page) != ".md" || strings.HasPrefix(page, "docs/decisions/") || strings.Contains(page, "testdata") || page == "CHANGELOG.md" {
			return
		}
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Error(err)
			return
		}
		for _, m := range name.FindAllStringSubmatch(string(text), -1) {
			dir := documented[m[1]]
			if declared[dir] == nil {
				declared[dir] = names(t, filepath.Join(root, dir))
			}
			n++
			if !declared[dir][m[2]] {
				t.Errorf("%s names %s.%s, which %s does not declare", page, m[1], m[2], dir)
			} else if m[3] != "" && !declared[dir][m[2]+"."+m[3]] {
				t.Errorf("%s names %s.%s.%s, which is no field or method", page, m[1], m[2], m[3])
			}
		}
	})
	if n < 100 {
		t.Errorf("only %d names found", n)
	}
}

// names returns what a package declares: Name, and Type.Name for fields and methods. A type has the names of what it
// embeds.
func names(t *testing.T, dir string) map[string]bool {
	t.Helper()
	all := make(map[string]bool)
	embeds := make(map[string][]string)
	sources, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(sources) == 0 {
		t.Fatalf("%s: no sources (%v)", dir, err)
	}
	for _, source := range sources {
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), source, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				all[receiver(d)+d.Name.Name] = true
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.ValueSpec:
						for _, id := range s.Names {
							all[id.Name] = true
						}
					case *ast.TypeSpec:
						all[s.Name.Name] = true
						var list *ast.FieldList
						switch u := s.Type.(type) {
						case *ast.StructType:
							list = u.Fields
						case *ast.InterfaceType:
							list = u.Methods
						}
						if list == nil {
							continue
						}
						for _, field := range list.List {
							for _, id := range field.Names {
								all[s.Name.Name+"."+id.Name] = true
							}
							if id, ok := field.Type.(*ast.Ident); ok && len(field.Names) == 0 {
								embeds[s.Name.Name] = append(embeds[s.Name.Name], id.Name)
							}
						}
					}
				}
			}
		}
	}
	for outer, inner := range embeds {
		for name := range all {
			for _, in := range inner {
				if rest, ok := strings.CutPrefix(name, in+"."); ok {
					all[outer+"."+rest] = true
				}
			}
		}
	}
	return all
}
