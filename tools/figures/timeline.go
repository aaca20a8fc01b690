package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
)

// kinds are what a kernel of a training step does, in the order of their colours.
var kinds = []string{"forward pass", "backward pass", "optimizer", "all_reduce"}

const timelineStyle = `  <style>
    .page { fill: #ffffff } .grid { stroke: #d8dee6 } text { font: 15px "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1d2733 }
    .mid { text-anchor: middle } .small { font-size: 13px } .k0 { fill: #8fb8e8 } .k1 { fill: #2f6db5 } .k2 { fill: #8b97a5 } .k3 { fill: #c4561a }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .grid { stroke: #2a323c } text { fill: #e6edf3 } .k0 { fill: #b9d4f5 } .k1 { fill: #4f8fdb } .k3 { fill: #f0955b }
    }
  </style>
`

// timeline draws when the kernels of a training step run on each rank, from the records of bench/timeline.sh.
func timeline(file string, q query) ([]byte, error) {
	type kernel struct {
		Rank   int
		Kind   string
		Begin  float64 `json:"begin_us"`
		End    float64 `json:"end_us"`
		Blocks int
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []kernel
	end, ranks := 0.0, 0
	for line := range bytes.Lines(text) {
		var k kernel
		if err := json.Unmarshal(line, &k); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if !slices.Contains(kinds, k.Kind) {
			return nil, fmt.Errorf("%s: no kind of kernel: %q", file, k.Kind)
		}
		all = append(all, k)
		end, ranks = max(end, k.End), max(ranks, k.Rank+1)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no kernels", file)
	}
	const width, left, top, row, gap = 760.0, 122.0, 84.0, 28.0, 20.0
	scale := (width - left - 34) / end
	bottom := top + float64(ranks)*(2*row+gap)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img" aria-labelledby="title">`+"\n", width, bottom+20, width, bottom+20)
	fmt.Fprintf(&b, "  <title id=\"title\">When the kernels of a training step run, %s</title>\n", q.on)
	b.WriteString(timelineStyle)
	fmt.Fprintf(&b, `  <rect class="page" width="%g" height="%g"/><text x="10" y="24">%s</text>`+"\n", width, bottom+20, q.on)
	x := left
	for i, name := range kinds {
		fmt.Fprintf(&b, `  <rect class="k%d" x="%g" y="42" width="16" height="16"/><text x="%g" y="55">%s</text>`+"\n", i, x, x+22, name)
		x += 46 + 8*float64(len(name))
	}
	step := 100.0
	for step*7 < end {
		step *= 2
		if step == 400 || step == 4000 {
			step = step * 5 / 4
		}
	}
	for t := 0.0; t <= end; t += step {
		fmt.Fprintf(&b, `  <path class="grid" d="M%.1f %gV%g"/><text class="mid small" x="%.1f" y="%g">%g us</text>`+"\n",
			left+t*scale, top-8, bottom-8, left+t*scale, bottom+10, t)
	}
	for r := range ranks {
		y := top + float64(r)*(2*row+gap)
		fmt.Fprintf(&b, `  <text x="10" y="%g">rank %d, trainer</text><text x="10" y="%g">all_reduces</text>`+"\n", y+18, r, y+row+18)
	}
	for _, k := range all {
		kind := slices.Index(kinds, k.Kind)
		y := top + float64(k.Rank)*(2*row+gap)
		if k.Kind == "all_reduce" {
			y += row
		}
		fmt.Fprintf(&b, `  <rect class="k%d" x="%.2f" y="%g" width="%.2f" height="%g"><title>%s: %g to %g us, %d blocks</title></rect>`+"\n",
			kind, left+k.Begin*scale, y, max((k.End-k.Begin)*scale, 0.4), row-3, k.Kind, k.Begin, k.End, k.Blocks)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String()), nil
}
