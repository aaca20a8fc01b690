package rules

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestShort: a test that is skipped because of -short says so with "-short: ", which .ci/run allows.
func TestShort(t *testing.T) {
	skip, n := regexp.MustCompile(`testing\.Short\(\).*\{\n\s*\w+\.Skipf?\((.*)`), 0
	files(t, func(name string) {
		if !strings.HasSuffix(name, "_test.go") {
			return
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
		}
		for _, m := range skip.FindAllSubmatch(text, -1) {
			if n++; !strings.HasPrefix(string(m[1]), `"-short: `) {
				t.Errorf("a test in %s is skipped with %s: let the text begin with -short:", name, m[1])
			}
		}
	})
	if n == 0 {
		t.Error("no test is skipped because of -short")
	}
}
