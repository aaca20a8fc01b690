package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestCommitted fails when a file in the tree is not what the program writes.
func TestCommitted(t *testing.T) {
	all, err := files()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range all {
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(want, got) {
			t.Errorf("%s is out of date: run go generate ./internal/reduce", name)
		}
	}
}
