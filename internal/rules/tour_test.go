package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// place is a function or type in docs/tour.md: `file.go` `Name` or `file.go` `Type.Name`.
var place = regexp.MustCompile("`([a-z0-9_/]+\\.go)` `([A-Za-z0-9_.]+)`")

// TestTour: the places of docs/tour.md exist.
func TestTour(t *testing.T) {
	const doc = "docs/tour.md"
	text, err := os.ReadFile(filepath.Join(root, doc))
	if err != nil {
		t.Fatal(err)
	}
	places := place.FindAllSubmatch(text, -1)
	if len(places) < 10 {
		t.Errorf("%s names %d places, want at least 10 as `file.go` `Name`", doc, len(places))
	}
	for _, p := range places {
		file, name := string(p[1]), string(p[2])
		if !declares(t, filepath.Join(root, filepath.FromSlash(file)), name) {
			t.Errorf("%s: %s does not declare %s", doc, file, name)
		}
	}
}

// declares reports whether a file declares a function, a type, a method Type.Name, or a
// method of an interface.
func declares(t *testing.T, file, name string) bool {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Error(err)
		return true
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if receiver(d)+d.Name.Name == name {
				return true
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				s, ok := s.(*ast.TypeSpec)
				if !ok {
					continue
				}
				if s.Name.Name == name {
					return true
				}
				if i, ok := s.Type.(*ast.InterfaceType); ok {
					for _, m := range i.Methods.List {
						for _, n := range m.Names {
							if s.Name.Name+"."+n.Name == name {
								return true
							}
						}
					}
				}
			}
		}
	}
	return false
}

// receiver is "Type." for a method.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	e := d.Recv.List[0].Type
	if p, ok := e.(*ast.StarExpr); ok {
		e = p.X
	}
	if i, ok := e.(*ast.IndexExpr); ok {
		e = i.X
	}
	if id, ok := e.(*ast.Ident); ok {
		return id.Name + "."
	}
	return ""
}
