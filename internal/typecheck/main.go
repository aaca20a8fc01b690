// Command typecheck type-checks the packages of the module in the current folder for platforms, from their
// sources:
//
//	go run ./internal/typecheck linux/arm64 darwin/arm64
//
// It finds what a compiler finds, but for functions without a body. It takes seconds for a platform, and a
// compiler minutes, because it compiles the standard library first.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	for _, platform := range os.Args[1:] {
		n, err := check(".", platform)
		if err != nil {
			fmt.Fprintf(os.Stderr, "typecheck: %s: %v\n", platform, err)
			os.Exit(1)
		}
		fmt.Printf("type-checked %d packages for %s\n", n, platform)
	}
}

// listed is what go list says of a package.
type listed struct {
	ImportPath, Dir string
	GoFiles         []string
	ImportMap       map[string]string
	DepOnly         bool
	Error           *struct{ Err string }
}

// checked has the packages that were checked, by path. It is the importer of one more.
type checked struct {
	all map[string]*types.Package
	of  listed
}

func (c checked) Import(path string) (*types.Package, error) {
	if path == "unsafe" {
		return types.Unsafe, nil
	}
	if vendored, ok := c.of.ImportMap[path]; ok {
		path = vendored
	}
	if p, ok := c.all[path]; ok {
		return p, nil
	}
	return nil, fmt.Errorf("%s was not checked before %s", path, c.of.ImportPath)
}

// check checks ./... in dir for a platform, and returns the number of packages. Of what they import from
// elsewhere it checks declarations only.
func check(dir, platform string) (int, error) {
	system, arch, _ := strings.Cut(platform, "/")
	sizes := types.SizesFor("gc", arch)
	if sizes == nil {
		return 0, errors.New("want a platform as of go tool dist list")
	}
	// Packages come after what they import.
	cmd := exec.Command("go", "list", "-e", "-deps", "-json=ImportPath,Dir,GoFiles,ImportMap,DepOnly,Error", "./...")
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	cmd.Env = append(os.Environ(), "GOOS="+system, "GOARCH="+arch, "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("go list: %w", err)
	}
	all, n := map[string]*types.Package{}, 0
	for in := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := in.Decode(&p); err == io.EOF {
			return n, nil
		} else if err != nil {
			return 0, err
		}
		switch {
		case p.ImportPath == "unsafe" || p.Error != nil && len(p.GoFiles) == 0 && !p.DepOnly: // nothing for this platform
			continue
		case p.Error != nil:
			return 0, fmt.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		fset := token.NewFileSet()
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				return 0, err
			}
			files = append(files, f)
		}
		var found []error
		conf := types.Config{
			Importer: checked{all, p}, Sizes: sizes, IgnoreFuncBodies: p.DepOnly,
			Error: func(err error) { found = append(found, err) },
		}
		all[p.ImportPath], _ = conf.Check(p.ImportPath, fset, files, nil)
		if len(found) > 0 && !p.DepOnly {
			return 0, errors.Join(found...)
		}
		if !p.DepOnly {
			n++
		}
	}
}
