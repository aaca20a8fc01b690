// Package torchtest runs Python programs beside the ranks of a test. One interpreter imports PyTorch, which takes more
// than a second of a CPU, and forks for each program. It ends with the test binary.
package torchtest

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// python is Debian's interpreter.
const python = "/usr/bin/python3"

var (
	//go:embed interpreter.py
	interpreter string
	//go:embed client.py
	client string
)

// start starts the interpreter, and returns the path of the command that runs a program in it.
var start = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "torch")
	if err != nil {
		return "", err
	}
	command, file, socket := filepath.Join(dir, "python"), filepath.Join(dir, "client.py"), filepath.Join(dir, "socket")
	if err := os.WriteFile(file, []byte(client), 0o600); err != nil {
		return "", err
	}
	script := fmt.Sprintf("#!/bin/sh\nexec %s -S '%s' '%s' \"$@\"\n", python, file, socket)
	if err := os.WriteFile(command, []byte(script), 0o700); err != nil {
		return "", err
	}
	cmd := exec.Command(python, "-c", interpreter, socket)
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	var stderr strings.Builder
	in, err := cmd.StdinPipe() // the interpreter ends with it
	if err != nil {
		return "", err
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		os.RemoveAll(dir)
		return "", err
	}
	for lines := bufio.NewScanner(errs); lines.Scan(); {
		if lines.Text() == "ready" {
			kept = append(kept, in)
			return command, nil
		}
		fmt.Fprintln(&stderr, lines.Text())
	}
	cmd.Wait()
	os.RemoveAll(dir)
	return "", fmt.Errorf("%s cannot import torch.distributed: %s", python, &stderr)
})

// kept keeps the interpreter's standard input open.
var kept []any

// Need skips a test if there is no PyTorch. With C10D_REQUIRE_SERVICES=1 the test fails.
func Need(t testing.TB) {
	t.Helper()
	if _, err := start(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required (Debian: python3-torch): %v", err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %v", err)
	}
}

// Interpreter returns the path of a command that takes a program: a file and its arguments, or "-c", text and arguments.
// Its process stands for the program's: it has its standard files and its exit code. If it is killed, the program is
// killed. It cannot be stopped.
func Interpreter(t testing.TB) string {
	Need(t)
	path, _ := start()
	return path
}

// Command returns a command that runs a program.
func Command(ctx context.Context, t testing.TB, program ...string) *exec.Cmd {
	return exec.CommandContext(ctx, Interpreter(t), program...)
}
