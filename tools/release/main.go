// Command release proves that programs outside this tree can require its modules.
//
//	make release-check
//
// In the tree, the nested modules use the files of the others, because their go.mod replaces them. Elsewhere a replace does
// not count. So the command makes a module proxy of the last commit, in a directory of its own, with the version that
// the nested modules require of each other. Then it makes a program for each module that imports all its packages,
// and builds and runs it with that proxy. The program for the core is the first one in README.md.
//
// Other modules come from the module cache, or from the proxies that "go env GOPROXY" names.
package main

import (
	"archive/zip"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	modzip "golang.org/x/mod/zip"
)

const core = "github.com/c10d-go/c10d"

// published are the folders of the modules that users require.
var published = []string{
	".", "weights", "integrations/gomlx", "integrations/gorgonia", "integrations/otel", "integrations/prometheus", "backend/cuda/gorgonia",
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("release: ")
	keep := flag.Bool("keep", false, "keep the directory with the proxy and the programs")
	flag.Parse()
	dir, err := os.MkdirTemp("", "release")
	if err != nil {
		log.Fatal(err)
	}
	err = check("..", dir) // make release-check runs this in tools
	if *keep {
		log.Print("the proxy and the programs are in ", dir)
	} else if e := clean(dir); err == nil {
		err = e
	}
	if err != nil {
		log.Fatal(err)
	}
}

// clean removes the directory. The go command writes its cache without permission to change it.
func clean(dir string) error {
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(name, 0o755)
		}
		return err
	})
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

func check(root, dir string) error {
	from, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	root = filepath.Join(dir, "tree") // of the last commit
	if out, err := run(from, nil, "git", "clone", "-q", from, root); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	version, err := required(root)
	if err != nil {
		return err
	}
	for _, at := range published {
		if err := publish(root, at, version, filepath.Join(dir, "proxy")); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	for i, at := range published {
		began := time.Now()
		if err := try(root, at, version, dir, fmt.Sprintf("program%d", i)); err != nil {
			return fmt.Errorf("a program that requires %s: %w", path.Join(core, at), err)
		}
		log.Printf("a program outside the tree builds with %s %s and runs, in %v", path.Join(core, at), version, time.Since(began).Round(time.Second))
	}
	return nil
}

// required returns the version in which all modules require the core and each other, and checks that each of them
// replaces these requirements in the tree.
func required(root string) (version string, err error) {
	for _, at := range published[1:] {
		m, err := parse(root, at)
		if err != nil {
			return "", err
		}
		replaced := make(map[string]bool)
		for _, r := range m.Replace {
			replaced[r.Old.Path] = true
		}
		for _, r := range m.Require {
			if r.Mod.Path != core && !strings.HasPrefix(r.Mod.Path, core+"/") {
				continue
			}
			if version == "" {
				version = r.Mod.Version
			}
			if r.Mod.Version != version {
				return "", fmt.Errorf("%s/go.mod requires %v, another module %s", at, r.Mod, version)
			}
			if !replaced[r.Mod.Path] {
				return "", fmt.Errorf("%s/go.mod does not replace %s", at, r.Mod.Path)
			}
		}
	}
	return version, nil
}

func parse(root, at string) (*modfile.File, error) {
	name := filepath.Join(root, at, "go.mod")
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return modfile.Parse(name, text, nil)
}

// publish adds a module to the proxy, as a tag of the last commit would.
func publish(root, at, version, proxy string) error {
	m, err := parse(root, at)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(root, at, "go.mod"))
	if err != nil {
		return err
	}
	escaped, err := module.EscapePath(m.Module.Mod.Path)
	if err != nil {
		return err
	}
	dir := filepath.Join(proxy, escaped, "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	info, err := json.Marshal(map[string]string{"Version": version, "Time": time.Now().UTC().Format(time.RFC3339)})
	if err != nil {
		return err
	}
	for name, b := range map[string][]byte{"list": []byte(version + "\n"), version + ".info": info, version + ".mod": text} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			return err
		}
	}
	f, err := os.Create(filepath.Join(dir, version+".zip"))
	if err != nil {
		return err
	}
	defer f.Close()
	sub := strings.TrimPrefix(filepath.ToSlash(filepath.Clean(at)), ".")
	if err := modzip.CreateFromVCS(f, module.Version{Path: m.Module.Mod.Path, Version: version}, root, "HEAD", sub); err != nil {
		return err
	}
	return f.Close()
}

// try builds and runs a program that requires a module.
func try(root, at, version, dir, name string) error {
	m, err := parse(root, at)
	if err != nil {
		return err
	}
	own := m.Module.Mod.Path
	text := "module example.com/outside\n\ngo " + m.Go.Version + "\n\nrequire " + own + " " + version + "\n"
	program := filepath.Join(dir, name)
	if err := os.Mkdir(program, 0o755); err != nil {
		return err
	}
	packages, err := packagesOf(filepath.Join(dir, "proxy"), own, version)
	if err != nil {
		return err
	}
	source := "package main\n\nimport (\n\t\"fmt\"\n\n"
	for _, p := range packages {
		source += "\t_ \"" + p + "\"\n"
	}
	source += ")\n\nfunc main() { fmt.Println(\"ok\") }\n"
	if err := os.WriteFile(filepath.Join(program, "imports.go"), []byte(source), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(program, "go.mod"), []byte(text), 0o644); err != nil {
		return err
	}
	env, err := environment(dir)
	if err != nil {
		return err
	}
	if out, err := run(program, env, "go", "mod", "tidy"); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	if out, err := run(program, env, "go", "build", "-o", "program", "."); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	if out, err := run(program, env, "./program"); err != nil || out != "ok\n" {
		return fmt.Errorf("it printed %q: %v", out, err)
	}
	if at != "." {
		return nil
	}
	return readme(root, program, env)
}

// readme builds and runs the first program in README.md, as the only rank of a job.
func readme(root, program string, env []string) error {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		return err
	}
	found := regexp.MustCompile("(?s)```go\n(func main.*?)```").FindSubmatch(text)
	if found == nil {
		return fmt.Errorf("README.md has no program")
	}
	source := "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\t\"log\"\n\n\t\"" + core + "/pg\"\n)\n\n" + string(found[1])
	if err := os.WriteFile(filepath.Join(program, "imports.go"), []byte(source), 0o644); err != nil {
		return err
	}
	if out, err := run(program, env, "go", "build", "-o", "program", "."); err != nil {
		return fmt.Errorf("the program in README.md: %w\n%s", err, out)
	}
	out, err := run(program, append(env, "RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"), "./program")
	if err != nil || out != "rank 0 of 1: the sum is 0\n" {
		return fmt.Errorf("the program in README.md printed %q: %v", out, err)
	}
	return nil
}

// packagesOf returns the packages in a module's zip that others can import.
func packagesOf(proxy, own, version string) (list []string, err error) {
	escaped, err := module.EscapePath(own)
	if err != nil {
		return nil, err
	}
	z, err := zip.OpenReader(filepath.Join(proxy, escaped, "@v", version+".zip"))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	clause := regexp.MustCompile(`(?m)^package (\w+)`)
	tagged := regexp.MustCompile(`(?m)^//go:build `)
	for _, f := range z.File {
		name := strings.TrimPrefix(f.Name, own+"@"+version+"/")
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || slices.Contains(strings.Split(name, "/"), "internal") ||
			slices.Contains(strings.Split(name, "/"), "testdata") {
			continue
		}
		text, err := fs.ReadFile(z, f.Name)
		if err != nil {
			return nil, err
		}
		m := clause.FindSubmatch(text)
		if m == nil || string(m[1]) == "main" || tagged.Match(text) || strings.Contains(filepath.Base(name), "_") {
			continue // a package has a file for every system
		}
		if p := path.Join(own, path.Dir(name)); !slices.Contains(list, p) {
			list = append(list, p)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no package")
	}
	return list, nil
}

// environment returns that of the go command outside the tree.
func environment(dir string) ([]string, error) {
	value := func(name string) (string, error) {
		out, err := exec.Command("go", "env", name).Output()
		return strings.TrimSpace(string(out)), err
	}
	cache, err := value("GOMODCACHE")
	if err != nil {
		return nil, err
	}
	proxies, err := value("GOPROXY")
	if err != nil {
		return nil, err
	}
	private, err := value("GONOSUMDB")
	if err != nil {
		return nil, err
	}
	proxy := "file://" + filepath.ToSlash(filepath.Join(dir, "proxy")) + ",file://" + filepath.ToSlash(filepath.Join(cache, "cache", "download")) + "," + proxies
	return append(os.Environ(), "GOWORK=off", "GOFLAGS=", "GOMODCACHE="+filepath.Join(dir, "modules"), "GOPROXY="+proxy,
		"GONOSUMDB="+strings.TrimPrefix(private+","+core+","+core+"/*", ",")), nil
}

func run(dir string, env []string, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, env
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return string(out), err
}
