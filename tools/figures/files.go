package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// steps is the table of a file of training steps, as bench/step.sh leaves them: microseconds of a step with the
// exchange of gradients and without, of each system.
func steps(file string) (string, error) {
	type step struct {
		System  string
		Case    string
		Size    int
		With    float64 `json:"time_us_with"`
		Alone   float64 `json:"time_us_alone"`
		Exposed float64 `json:"time_us_exposed"`
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	all := make(map[[2]string]step)
	var cases []string
	for line := range bytes.Lines(text) {
		var s step
		if err := json.Unmarshal(line, &s); err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
		if !slices.Contains(cases, s.Case) {
			cases = append(cases, s.Case)
		}
		all[[2]string{s.System, s.Case}] = s
	}
	var b strings.Builder
	b.WriteString("| model | gradients | here: with | alone | exposed | PyTorch, these kernels: with | alone | exposed | ratio | PyTorch: with | alone | exposed | ratio |\n")
	b.WriteString("|" + strings.Repeat(" --- |", 13))
	for _, c := range cases {
		ours := all[[2]string{"c10d-go", c}]
		fmt.Fprintf(&b, "\n| `%s` | %.3g MiB | %.0f | %.0f | %.3g |", c, float64(ours.Size)/(1<<20), ours.With, ours.Alone, ours.Exposed)
		for _, peer := range []string{"torch-nccl-kernels", "torch-nccl"} {
			s, ok := all[[2]string{peer, c}]
			if !ok {
				return "", fmt.Errorf("%s: no %s of %s", file, c, peer)
			}
			fmt.Fprintf(&b, " %.0f | %.0f | %.3g | %.2f |", s.With, s.Alone, s.Exposed, ours.Exposed/s.Exposed)
		}
	}
	return b.String(), nil
}

// graphs is the smallest and the largest part of NCCL's time that calls in a CUDA graph take, in the output of
// BenchmarkNCCL of backend/cuda/internal/direct.
func graphs(file string, q query) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	var all []float64
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) != 4 {
			continue
		}
		key, ratio := strings.Fields(cells[0]), strings.Fields(cells[3])
		if len(key) != 3 || len(ratio) == 0 || q.ops != nil && !slices.Contains(q.ops, key[0]) {
			continue
		}
		size, err := strconv.Atoi(key[2])
		if err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
		if q.sizes != nil && !slices.Contains(q.sizes, targetSize(size)) {
			continue
		}
		r, err := strconv.ParseFloat(ratio[0], 64)
		if err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, r)
	}
	if len(all) == 0 {
		return "", fmt.Errorf("no line of %s fits", file)
	}
	return fmt.Sprintf("%.2f to %.2f", slices.Min(all), slices.Max(all)), nil
}
