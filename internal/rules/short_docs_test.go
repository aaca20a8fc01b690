package rules

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestShortDocuments: what users read first stays short. The pages are those in docs, without decisions.
func TestShortDocuments(t *testing.T) {
	const mostReadme, mostPages, mostPg = 800, 25_000, 600
	words := func(pattern string) (n int) {
		names, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(names) == 0 {
			t.Fatalf("no file %s: %v", pattern, err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			n += len(strings.Fields(string(text)))
		}
		return n
	}
	if n := words("README.md"); n > mostReadme {
		t.Errorf("README.md has %d words, and may have %d", n, mostReadme)
	}
	if n := words("docs/*.md"); n > mostPages {
		t.Errorf("the pages in docs have %d words, and may have %d", n, mostPages)
	}
	show := exec.Command("go", "doc", "-all", "./pg")
	show.Dir = root
	text, err := show.Output()
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte("\n")); n > mostPg {
		t.Errorf("go doc -all ./pg has %d lines, and may have %d", n, mostPg)
	}
}
