package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
)

// Speed has the times of an all_reduce of float32 among two ranks, called from Python, in microseconds: the medians
// of rounds in which gloo and this library take turns.
type Speed struct {
	Bytes    int
	Gloo, Go float64
}

func (s Speed) size() string {
	switch {
	case s.Bytes >= 1<<20:
		return fmt.Sprintf("%d MiB", s.Bytes>>20)
	case s.Bytes >= 1<<10:
		return fmt.Sprintf("%d KiB", s.Bytes>>10)
	}
	return fmt.Sprintf("%d B", s.Bytes)
}

func micros(us float64) string {
	if us >= 1000 {
		return fmt.Sprintf("%.1f ms", us/1000)
	}
	return fmt.Sprintf("%.0f us", us)
}

func (s Speed) String() string {
	return fmt.Sprintf("all_reduce of %7s: gloo %8s, this library %8s, ratio %.1f", s.size(), micros(s.Gloo), micros(s.Go), s.Gloo/s.Go)
}

// speed measures.
func (j *judge) speed(ctx context.Context, x *Outcome) error {
	args := append(slices.Clone(j.python[1:]), filepath.Join(j.dir, "speed.py"), filepath.Join(j.dir, "libc10dgo.so"), filepath.Join(j.dir, "store"))
	cmd := exec.CommandContext(ctx, j.python[0], args...)
	cmd.Stderr = j.log
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("judge: speed.py: %w", err)
	}
	var got []Speed
	if err := json.Unmarshal(out, &got); err != nil {
		return fmt.Errorf("judge: speed.py printed %q: %w", out, err)
	}
	x.Speed = got
	return nil
}
