package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestCommitted fails when the files in the tree are not what generate writes.
func TestCommitted(t *testing.T) {
	files, err := generate()
	if err != nil {
		t.Fatal(err)
	}
	for suffix, want := range files {
		got, err := os.ReadFile(filepath.Join("..", name+suffix))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(want, got) {
			t.Errorf("%s%s is out of date: run go generate ./internal/reduce", name, suffix)
		}
	}
}
