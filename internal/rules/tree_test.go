package rules

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// elsewhere is what a checkout must not rely on: folders of one person's
// machine, and the hosts of package registries, which the tools' own
// configuration names.
var elsewhere = regexp.MustCompile(`(^|[^\w./-])/(work|root|home)/|` +
	`proxy\.golang\.org|sum\.golang\.org|(deb|security)\.debian\.org|registry\.npmjs\.org|pypi\.org`)

// suspect is in every line that elsewhere matches. It begins with a constant, so it takes a tenth of
// the time.
var suspect = regexp.MustCompile(`/(?:work|root|home)/`)

func TestElsewhere(t *testing.T) {
	const own = "wor" + "k" // this module's package of that name
	for text, bad := range map[string]bool{
		`dir := "/` + `root/data"`:                 true,
		"cd /" + "work/x":                          true,
		"github.com/c10d-go/c10d/" + own + "/x.go": false,
		"./" + own + "/" + own + ".go":             false,
		"GOPROXY=https://proxy." + "golang.org":    true,
	} {
		if elsewhere.MatchString(text) != bad {
			t.Errorf("%q: want a match: %v", text, bad)
		}
	}
	files(t, func(name string) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
			return
		}
		if bytes.IndexByte(text, 0) >= 0 {
			return // not a text
		}
		for i, line := range strings.Split(string(text), "\n") {
			if !strings.Contains(line, ".org") && !suspect.MatchString(line) {
				continue
			}
			if found := elsewhere.FindString(line); found != "" {
				t.Errorf("%s:%d: %q is of one machine or one network only", name, i+1, strings.TrimSpace(found))
			}
		}
	})
}

// heading is a heading of a document, notAnchor what a link to one leaves out.
var (
	heading   = regexp.MustCompile(`(?m)^#+ (.+)$`)
	notAnchor = regexp.MustCompile(`[^\w-]`)
)

// hasHeading reports whether a document has the heading that the end of a link names.
func hasHeading(text []byte, anchor string) bool {
	for _, h := range heading.FindAllStringSubmatch(string(text), -1) {
		if notAnchor.ReplaceAllString(strings.ReplaceAll(strings.ToLower(h[1]), " ", "-"), "") == anchor {
			return true
		}
	}
	return false
}

// TestLinks follows the links between documents, to files and to headings.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`(?:\]\(|src="|href="|srcset=")([^)"#]*)(?:#([^)"]+))?[)"]`)
	n, anchors := 0, 0
	files(t, func(name string) {
		if filepath.Ext(name) != ".md" {
			return
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
			return
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			n++
			target := name
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(name), m[1])
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s, which is not there", name, m[1])
				continue
			}
			if m[2] == "" || filepath.Ext(target) != ".md" {
				continue
			}
			anchors++
			linked, err := os.ReadFile(filepath.Join(root, target))
			if err != nil || !hasHeading(linked, m[2]) {
				t.Errorf("%s links to %s#%s, and there is no such heading (%v)", name, m[1], m[2], err)
			}
		}
	})
	if n == 0 || anchors == 0 {
		t.Error("no links found")
	}
}

// TestReadmeProgram keeps the program in README.md the one that is tested: the example of package pg.
func TestReadmeProgram(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile(filepath.Join(root, "pg/readme_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	_, code, ok := strings.Cut(string(example), "\t// README.md:\n")
	code, _, found := strings.Cut(code, "\t// Output:")
	if !ok || !found || !strings.Contains(string(readme), "```go\nfunc main() {\n"+code+"}\n```\n") {
		t.Error("the first program in README.md is not the example in pg/readme_test.go")
	}
}
