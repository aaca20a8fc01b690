package rules

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root   = "../.."
	module = "github.com/c10d-go/c10d"
)

// layers says what each package may import besides the standard library, from
// the bottom up. A name with /... stands for a package and those below it. The
// first row that fits a file counts; a package without a row may not exist.
//
// Imports go one way: tensor <- work, store <- backend <- backend/gloo <- pg <-
// ddp <- cmd, examples. Backends are found by name through the registry, so pg
// knows one in a single file, and ddp knows none. A test file may import what
// it likes.
var layers = []layer{
	{".", nil}, // documentation only
	{"tensor", nil},
	{"work", []string{"tensor"}},
	{"internal/reduce", []string{"tensor", "golang.org/x/sys/cpu"}},
	{"internal/reduce/asm", nil},
	{"internal/option", nil}, // every package of the core may import it
	{"internal/openfiles", nil},
	{"internal/ownfile", nil},
	{"internal/copies", []string{"golang.org/x/sys/..."}},
	{"internal/hostmem", []string{"golang.org/x/sys/..."}},
	{"internal/memfd", []string{"internal/openfiles", "golang.org/x/sys/..."}},
	{"internal/freeport", nil},
	{"internal/hole", []string{"internal/freeport"}},
	{"internal/bytesize", nil},
	{"internal/netns", nil},
	{"internal/sockets", nil},
	{"internal/credentials", []string{"internal/ownfile"}},
	{"internal/testcerts", []string{"internal/credentials"}},
	{"internal/must", []string{"github.com/stretchr/testify/..."}},
	{"internal/rules", nil},
	{"internal/testsize", nil},
	{"internal/leaveout", []string{"internal/testsize", "github.com/stretchr/testify/...", "golang.org/x/sync/..."}},
	{"internal/torchtest", nil},
	{"internal/tcpsock", []string{"golang.org/x/sys/..."}},
	{"internal/ring", nil},
	{"internal/lazytimer", nil},
	{"internal/strangers", nil},
	{"internal/cputime", nil},
	{"internal/begun", nil},
	{"internal/attack", nil},
	{"internal/waiting/...", nil},
	{"internal/overlaptest", []string{"tensor", "work", "backend"}},

	{"store", []string{"internal/ownfile"}},
	{"store/storetest", []string{"store", "github.com/stretchr/testify/..."}},
	{"store/tcp", []string{"store", "internal/credentials", "internal/cputime", "internal/openfiles", "internal/strangers", "internal/tcpsock", "internal/waiting"}},
	{"store/redis", []string{"store", "internal/credentials", "internal/tcpsock", "github.com/redis/go-redis/v9/..."}},

	{"backend", []string{"tensor", "work", "store", "internal/reduce", "internal/bytesize"}},

	{"internal/registry", nil},
	{"internal/argcheck", []string{"tensor", "work", "backend"}},

	{"trace", []string{"tensor", "work", "backend", "internal/ownfile"}},
	{"internal/rankpage", []string{"trace", "internal/credentials"}},
	{"trace/debug", []string{"work", "backend", "trace", "internal/credentials", "internal/ownfile", "internal/rankpage", "internal/strangers"}},

	{"backend/detail", []string{"tensor", "work", "store", "backend", "internal/begun"}},

	// Plans and transports know nothing of tensors and backends.
	{"internal/plan", nil},
	{"internal/choice", []string{"internal/plan"}},
	{"internal/ways", []string{"internal/plan", "internal/choice"}},
	{"internal/cluster", []string{"internal/plan", "internal/ownfile"}},
	{"internal/transport", nil},
	{"internal/callback", nil},
	{"backend/gloo/internal/blame", []string{"work", "internal/plan", "internal/transport", "internal/waiting"}},
	{"internal/transport/tcp", []string{"internal/credentials", "internal/openfiles", "internal/lazytimer", "internal/strangers", "internal/tcpsock", "internal/callback", "internal/transport", "internal/transport/mesh", "golang.org/x/sys/..."}},
	{"internal/transport/transporttest", []string{"internal/must", "internal/testsize", "internal/transport", "github.com/stretchr/testify/..."}},
	{"internal/transport/shm", []string{"internal/copies", "internal/memfd", "internal/openfiles", "internal/lazytimer", "internal/strangers", "internal/transport", "golang.org/x/sys/..."}},
	{"internal/transport/mesh", []string{"internal/tcpsock", "internal/transport", "golang.org/x/sys/..."}},
	{"internal/transport/wire", []string{"internal/tcpsock", "internal/transport", "internal/transport/mesh"}},
	{"internal/transport/...", []string{"internal/transport"}},
	{"internal/rendezvous", []string{"store", "internal/cputime", "internal/openfiles", "internal/strangers", "internal/waiting", "internal/transport", "internal/transport/wire"}},
	{"internal/netstage", []string{"work", "internal/cluster"}},
	{"backend/gloo/internal/ask", []string{"work", "internal/cputime", "internal/plan", "internal/transport", "backend/gloo/internal/blame"}},
	{"backend/gloo/internal/hostmesh", []string{"internal/transport", "internal/transport/shm", "backend/gloo/internal/blame"}},
	{"backend/gloo/internal/run", []string{
		"tensor", "work", "backend",
		"internal/argcheck", "internal/begun", "internal/bytesize", "internal/callback", "internal/plan", "internal/choice", "internal/cluster", "internal/cputime", "internal/lazytimer", "internal/netstage", "internal/registry", "internal/ring", "internal/waiting",
		"internal/transport", "internal/transport/shm", "internal/transport/tcp",
		"backend/gloo/internal/ask", "backend/gloo/internal/blame", "backend/gloo/internal/hostmesh",
	}},
	{"backend/gloo", []string{
		"tensor", "work", "store", "backend", "internal/plan", "internal/choice", "internal/cluster", "internal/waiting",
		"internal/transport", "internal/transport/mem", "internal/transport/shm", "internal/transport/tcp", "internal/rendezvous",
		"backend/gloo/internal/ask", "backend/gloo/internal/blame", "backend/gloo/internal/hostmesh", "backend/gloo/internal/run",
	}},

	// The driver's simulator, edges and suite are its users; it knows none of them.
	{"backend/cuda/internal/pause", nil},
	{"backend/cuda/driver", []string{"tensor", "backend/cuda/internal/pause"}},
	{"backend/cuda/driver/edges", []string{"tensor", "backend/cuda/driver"}},
	{"backend/cuda/driver/sim", []string{"tensor", "backend/cuda/driver", "golang.org/x/sys/..."}},
	{"backend/cuda/internal/kernels", []string{"tensor", "backend", "backend/cuda/driver"}},
	{"backend/cuda/driver/sim/simkernels", []string{
		"tensor", "backend", "backend/cuda/driver", "backend/cuda/driver/sim", "backend/cuda/internal/kernels", "backend/cuda/internal/direct", "backend/cuda/internal/window",
	}},
	{"backend/cuda/internal/libcuda", []string{"tensor", "backend/cuda/driver"}},
	{"internal/pool", []string{"backend/cuda/driver"}},
	{"backend/cuda/internal/region", []string{"backend/cuda/driver", "internal/hostmem", "internal/memfd", "golang.org/x/sys/..."}},
	{"backend/cuda/internal/place", []string{"tensor", "backend/cuda/driver", "backend/cuda/internal/kernels"}},
	{"backend/cuda/internal/board", []string{"tensor", "work", "backend", "backend/cuda/internal/region"}},
	{"backend/cuda/internal/hostshm", []string{"backend", "backend/cuda/driver", "backend/cuda/internal/kernels", "backend/cuda/internal/board", "backend/cuda/internal/pause", "backend/cuda/internal/region", "internal/reduce"}},
	{"backend/cuda/internal/window", []string{"backend/cuda/driver"}},
	{"backend/cuda/internal/direct", []string{"tensor", "backend", "backend/cuda/driver", "backend/cuda/internal/kernels", "backend/cuda/internal/window"}},
	{"backend/cuda/driver/nvidia", []string{
		"backend/cuda/driver", "backend/cuda/internal/libcuda", "github.com/ebitengine/purego", "golang.org/x/sys/...",
	}},
	{"backend/cuda/internal/group", []string{
		"tensor", "work", "backend", "backend/cuda/driver", "backend/cuda/driver/edges", "backend/cuda/internal/kernels", "backend/cuda/internal/board",
		"backend/cuda/internal/hostshm", "backend/cuda/internal/place", "internal/pool", "backend/cuda/internal/region", "internal/ring",
	}},
	{"backend/cuda/internal/registered", []string{
		"backend/cuda/driver", "backend/cuda/internal/direct", "internal/pool", "backend/cuda/internal/region", "backend/cuda/internal/window",
	}},
	{"backend/cuda/internal/directway", []string{
		"tensor", "work", "backend", "backend/cuda/driver", "backend/cuda/driver/edges", "backend/cuda/internal/kernels", "backend/cuda/internal/board",
		"backend/cuda/internal/direct", "backend/cuda/internal/group", "backend/cuda/internal/place", "internal/pool", "backend/cuda/internal/region",
		"backend/cuda/internal/registered", "backend/cuda/internal/window",
	}},
	{"backend/cuda/internal/clusterway", []string{
		"tensor", "work", "backend", "backend/gloo", "backend/cuda/driver", "backend/cuda/driver/edges", "backend/cuda/internal/kernels", "backend/cuda/internal/board",
		"backend/cuda/internal/direct", "backend/cuda/internal/directway", "backend/cuda/internal/group", "backend/cuda/internal/place", "internal/pool",
		"backend/cuda/internal/window", "internal/cluster", "internal/netstage", "internal/plan",
	}},
	{"backend/cuda", []string{
		"tensor", "work", "store", "backend", "backend/gloo", "internal/cluster", "internal/netstage", "internal/plan", "backend/cuda/internal/clusterway",
		"backend/cuda/driver", "backend/cuda/driver/edges", "backend/cuda/driver/nvidia", "backend/cuda/internal/kernels", "backend/cuda/internal/window", "backend/cuda/internal/direct", "internal/pool", "backend/cuda/internal/region", "backend/cuda/internal/place",
		"backend/cuda/internal/board", "backend/cuda/internal/hostshm", "backend/cuda/internal/group", "backend/cuda/internal/directway",
		"internal/argcheck", "internal/plan", "internal/choice", "internal/registry", "internal/ways",
	}},
	{"backend/nccl/internal/libnccl", []string{"backend/cuda/driver", "github.com/ebitengine/purego"}},
	{"backend/nccl/internal/ncclsim", []string{"tensor", "backend", "backend/cuda/driver", "backend/cuda/driver/sim", "backend/nccl/internal/libnccl"}},
	{"backend/nccl", []string{
		"tensor", "work", "store", "backend", "backend/gloo", "backend/cuda/driver", "backend/cuda/driver/nvidia", "backend/nccl/internal/libnccl", "internal/argcheck", "internal/pool",
	}},
	{"backend/cuda/gorgonia", []string{"tensor", "backend/cuda/driver", "backend/cuda/internal/libcuda"}},
	{"backend/cuda/driver/drivertest", []string{"tensor", "backend/cuda/driver", "backend/cuda/driver/edges", "github.com/stretchr/testify/..."}},

	{"internal/meet", []string{"store", "internal/cputime"}},
	{"internal/membership", []string{"store", "internal/cputime", "internal/meet"}},
	{"internal/launch", []string{"store", "internal/ownfile"}},
	{"internal/launch/agent", []string{"internal/credentials", "internal/launch", "internal/ownfile", "internal/rankpage", "store", "store/tcp", "trace/debug", "golang.org/x/sys/..."}},
	{"pg/default.go", []string{"backend/gloo"}},
	{"pg", []string{"tensor", "work", "trace", "store", "store/tcp", "backend", "backend/detail", "internal/cputime", "internal/credentials", "internal/launch", "internal/meet", "internal/membership", "internal/rankpage", "internal/waiting"}},
	{"pg/pgweights", []string{"tensor", "work", "pg"}},
	{"pg/pgtest", []string{"store", "backend", "backend/gloo", "pg"}},
	{"ddp", []string{"tensor", "work", "store", "backend", "pg"}},
	{"weights", []string{ // a module of its own
		"tensor", "internal/credentials", "internal/hostmem", "internal/reduce", "internal/strangers", "internal/tcpsock",
	}},
	{"ddp/checkpoint", nil},
	{"ddp/gpu", []string{"tensor", "work", "backend/cuda", "backend/cuda/driver", "ddp", "internal/pool"}},

	{"internal/script", []string{"tensor", "work", "backend", "pg"}},
	{"internal/typecheck", nil},
	{"cmd/...", []string{
		"tensor", "work", "trace/...", "store/...", "backend/...", "pg", "ddp",
		"internal/credentials", "internal/bytesize", "internal/launch/...", "internal/ownfile", "internal/script", "internal/plan", "internal/choice", "internal/cluster", "internal/ways",
		"golang.org/x/sys/...", "golang.org/x/term",
	}},

	// What only developers run is in modules of its own.
	{"interop", append([]string{"internal/freeport", "internal/script"}, public...)},
	{"tools/...", append([]string{
		"tools/internal/...", "internal/bytesize", "internal/choice", "internal/freeport", "internal/netns", "internal/plan", "internal/script",
	}, public...)},

	{"docs", nil},
	{"bench/nccl", append([]string{"internal/freeport"}, public...)},

	// Examples use what users can use.
	{"examples/...", append([]string{"examples/internal/..."}, public...)},
}

// public is what users can use. Modules below the core are users too, where they
// have no row of their own, and choose their other dependencies themselves.
var public = []string{
	"tensor", "work", "trace/...", "store/...", "backend", "backend/detail", "backend/gloo", "backend/cuda", "backend/cuda/driver/...", "backend/nccl", "pg/...", "ddp/...", "weights",
	"integrations/...",
}

type layer struct {
	files string
	may   []string
}

// requirements is what the core's go.mod may require directly, with the reason.
// Anything else goes into a module of its own.
var requirements = map[string]string{
	"github.com/ebitengine/purego": "backend/cuda/driver/nvidia and backend/nccl: C functions without cgo",
	"github.com/redis/go-redis/v9": "store/redis",
	"github.com/stretchr/testify":  "tests",
	"go.uber.org/goleak":           "tests",
	"golang.org/x/sync":            "errgroup, in tests",
	"golang.org/x/sys":             "what a CPU can do, and the launcher's processes",
	"golang.org/x/term":            "cmd/c10d: colours and progress are for terminals",
}

// cgoUnder are the only places where a file may import "C".
var cgoUnder = []string{"backend/cuda/", "interop/judge/"}

// fits reports whether pattern stands for the package or file name.
func fits(pattern, name string) bool {
	if p, ok := strings.CutSuffix(pattern, "/..."); ok {
		return name == p || strings.HasPrefix(name, p+"/")
	}
	return pattern == name
}

// layerOf returns the row of a file.
func layerOf(file string) (layer, bool) {
	i := slices.IndexFunc(layers, func(l layer) bool { return fits(l.files, file) || fits(l.files, path.Dir(file)) })
	if i < 0 {
		return layer{}, false
	}
	return layers[i], true
}

// complaint returns what is wrong with an import of a file that is no test, ""
// if nothing is. Nested is the folder of the nested module that the file is in,
// "" for the core.
func complaint(file, imported, nested string) string {
	if imported == "C" {
		if slices.ContainsFunc(cgoUnder, func(dir string) bool { return strings.HasPrefix(file, dir) }) {
			return ""
		}
		return fmt.Sprintf("%s needs cgo; only files under %v may", file, cgoUnder)
	}
	first, _, _ := strings.Cut(imported, "/")
	if !strings.Contains(first, ".") {
		return "" // the standard library
	}
	name, own := strings.CutPrefix(imported, module+"/")
	l, ok := layerOf(file)
	if nested != "" {
		if !own {
			return ""
		}
		if !ok {
			l, ok = layer{nested, append([]string{nested + "/..."}, public...)}, true
		}
	}
	if !ok {
		return fmt.Sprintf("%s is in no layer: give %s a row in internal/rules", file, path.Dir(file))
	}
	if name == "internal/option" && !strings.HasPrefix(nested, "integrations/") || slices.ContainsFunc(l.may, func(p string) bool { return fits(p, name) }) {
		return ""
	}
	return fmt.Sprintf("%s imports %s; %s may import %v", file, imported, l.files, l.may)
}

// files calls f for every file of the tree but those that git ignores, with
// its name from the root.
func files(t *testing.T, f func(name string)) {
	t.Helper()
	ignored := []string{".git", "bin", "dist", "tmp"}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		switch {
		case d.IsDir() && slices.Contains(ignored, name):
			return filepath.SkipDir
		case name == ".git": // a file in a linked work tree
		case d.Type().IsRegular():
			f(name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// nestedModules returns the folders of the modules below the core.
func nestedModules(t *testing.T) []string {
	var dirs []string
	files(t, func(name string) {
		if path.Base(name) == "go.mod" && name != "go.mod" {
			dirs = append(dirs, path.Dir(name))
		}
	})
	return dirs
}

func TestLayers(t *testing.T) {
	modules := nestedModules(t)
	files(t, func(name string) {
		if path.Ext(name) != ".go" {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.ImportsOnly)
		if err != nil {
			t.Error(err)
			return
		}
		nested := ""
		if i := slices.IndexFunc(modules, func(dir string) bool { return strings.HasPrefix(name, dir+"/") }); i >= 0 {
			nested = modules[i]
		} else if _, ok := layerOf(name); !ok {
			t.Errorf("%s is in no layer: give %s a row", name, path.Dir(name))
			return
		}
		for _, imported := range parsed.Imports {
			p, err := strconv.Unquote(imported.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(name, "_test.go") && p != "C" {
				continue
			}
			if c := complaint(name, p, nested); c != "" {
				t.Error(c)
			}
		}
	})
}

// TestComplaints holds the rule itself: what it must refuse, and what not.
func TestComplaints(t *testing.T) {
	for _, c := range []struct {
		file, imports, nested string
		bad                   bool
	}{
		{file: "tensor/tensor.go", imports: "fmt"},
		{file: "tensor/tensor.go", imports: module + "/work", bad: true},
		{file: "work/work.go", imports: module + "/tensor"},
		{file: "internal/reduce/kernel.go", imports: module + "/backend", bad: true},
		{file: "store/store.go", imports: module + "/tensor", bad: true},
		{file: "store/tcp/client.go", imports: "github.com/redis/go-redis/v9", bad: true},
		{file: "store/redis/redis.go", imports: "github.com/redis/go-redis/v9/maintnotifications"},
		{file: "internal/transport/wire/mesh.go", imports: module + "/backend", bad: true},
		{file: "internal/transport/wire/mesh.go", imports: module + "/internal/transport"},
		{file: "pg/pg.go", imports: module + "/backend/gloo", bad: true},
		{file: "pg/default.go", imports: module + "/backend/gloo"},
		{file: "ddp/ddp.go", imports: module + "/backend/gloo", bad: true},
		{file: "backend/backend.go", imports: module + "/pg", bad: true},
		{file: "examples/ddp/main.go", imports: module + "/internal/launch", bad: true},
		{file: "examples/ddp/main.go", imports: module + "/examples/internal/mlp"},
		{file: "examples/ddp/main.go", imports: "example.com/x", bad: true},
		{file: "examples/other/main.go", imports: "example.com/x", nested: "examples/other"},
		{file: "examples/other/main.go", imports: module + "/internal/launch", nested: "examples/other", bad: true},
		{file: "metrics/main.go", imports: module + "/pg", nested: "metrics"},
		{file: "metrics/main.go", imports: module + "/metrics/names", nested: "metrics"},
		{file: "metrics/main.go", imports: module + "/internal/launch", nested: "metrics", bad: true},
		{file: "pg/pg.go", imports: "C", bad: true},
		{file: "backend/cuda/x.go", imports: "C"},
		{file: "util/util.go", imports: module + "/tensor", bad: true},
	} {
		if got := complaint(c.file, c.imports, c.nested); (got != "") != c.bad {
			t.Errorf("%s importing %s: %q, want a complaint: %v", c.file, c.imports, got, c.bad)
		}
	}
}

// TestRequirements keeps the core's go.mod short enough to read aloud.
func TestRequirements(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^(?:require )?\s*(\S+) v\S+(.*)$`).FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(m[2], "// indirect") {
			continue
		}
		found[m[1]] = true
		if requirements[m[1]] == "" {
			t.Errorf("go.mod requires %s: put what needs it in a module of its own, or argue for it in internal/rules", m[1])
		}
	}
	for name, why := range requirements {
		if !found[name] {
			t.Errorf("go.mod does not require %s (%s) any more", name, why)
		}
	}
}

// TestTemplates: no program with groups has text/template. It calls methods by name, and then the
// linker keeps all methods of all types. See decision 41.
func TestTemplates(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "./cmd/...", "./ddp/...", "./backend/cuda/...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Fields(string(out))
	if !slices.Contains(all, module+"/trace/debug") {
		t.Error("the list lacks the debug page")
	}
	for _, name := range []string{"text/template", "html/template"} {
		if slices.Contains(all, name) {
			t.Errorf("programs would have %s: find who imports it with go mod why, or write the text without it", name)
		}
	}
}
