package main

import (
	"fmt"
	"math"
	"strings"
)

// Measures of a plot, in pixels.
const (
	panelWidth, panelHeight = 300.0, 170.0
	panelLeft, panelTop     = 44.0, 56.0
	columnStep, rowStep     = 350.0, 250.0
)

const plotHead = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img" aria-labelledby="title">
  <title id="title">How many times as fast as %s</title>
  <style>
    .page { fill: #ffffff } .grid { stroke: #d8dee6 } .one { stroke: #1d2733; stroke-width: 1.5 }
    text { font: 12px "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1d2733 }
    .name { font-weight: 600 } .mid { text-anchor: middle } .end { text-anchor: end } .small { font-size: 10px }
    .s0 { fill: #2f6db5 } .s1 { fill: #c4561a }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .grid { stroke: #2a323c } .one { stroke: #e6edf3 } text { fill: #e6edf3 }
      .s0 { fill: #6ea8ee } .s1 { fill: #f0955b }
    }
  </style>
  <rect class="page" width="%g" height="%g"/>
`

// plot draws a panel for each operation and number of ranks. For each size it has a bar for each
// peer, on a logarithmic scale: from 1 to the peer's time over this library's.
func plot(r *run, q query) []byte {
	type panel struct {
		op    string
		ranks int
	}
	var order []panel
	points := make(map[panel][]point)
	low, high := 1.0, 1.0
	for _, w := range r.cases(q) {
		p := panel{w.op, w.ranks}
		if points[p] == nil {
			order = append(order, p)
		}
		points[p] = append(points[p], w)
		for _, c := range r.peers {
			if ratio := r.p50[w][c] / r.p50[w][r.ours[0]]; ratio > 0 {
				low, high = min(low, ratio), max(high, ratio)
			}
		}
	}
	low, high = math.Floor(math.Log10(low)), math.Ceil(math.Log10(high))
	columns := min(len(order), 3)
	rows := (len(order) + columns - 1) / columns
	width, height := columnStep*float64(columns)+10, rowStep*float64(rows)+30
	var names []string
	for _, c := range r.peers {
		names = append(names, c.name)
	}
	var b strings.Builder
	fmt.Fprintf(&b, plotHead, width, height, width, height, strings.Join(names, " and "), width, height)
	x := panelLeft
	for i, name := range names {
		text := "times as fast as " + name
		fmt.Fprintf(&b, `  <rect class="s%d" x="%g" y="12" width="12" height="12"/><text x="%g" y="22">%s</text>`+"\n", i, x, x+18, text)
		x += 40 + 6.5*float64(len(text))
	}
	for i, p := range order {
		left, top := panelLeft+columnStep*float64(i%columns), panelTop+rowStep*float64(i/columns)
		y := func(exponent float64) float64 { return top + panelHeight*(high-exponent)/(high-low) }
		fmt.Fprintf(&b, `  <text class="name" x="%g" y="%g">%s, %d ranks</text>`+"\n", left, top-8, p.op, p.ranks)
		for e := low; e <= high; e++ {
			class := "grid"
			if e == 0 {
				class = "one"
			}
			fmt.Fprintf(&b, `  <path class="%s" d="M%g %.1fh%g"/><text class="end small" x="%g" y="%.1f">%gx</text>`+"\n", class, left, y(e), panelWidth, left-6, y(e)+4, math.Pow(10, e))
		}
		group := panelWidth / float64(len(points[p]))
		bar := min(group*0.8/float64(len(r.peers)), 30)
		for j, w := range points[p] {
			middle := left + group*(float64(j)+0.5)
			fmt.Fprintf(&b, `  <text class="mid" x="%.1f" y="%g">%s</text>`+"\n", middle, top+panelHeight+18, sizeName(w.size))
			for k, c := range r.peers {
				ratio := r.p50[w][c] / r.p50[w][r.ours[0]]
				if !(ratio > 0) {
					continue
				}
				end, at := y(math.Log10(ratio)), middle+bar*(float64(k)-float64(len(r.peers))/2)
				from, to := min(end, y(0)), max(end, y(0))
				fmt.Fprintf(&b, `  <rect class="s%d" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/><text class="mid small" x="%.1f" y="%.1f">%s</text>`+"\n",
					k%2, at, from, bar-1, to-from, at+bar/2, from-4, strings.TrimSuffix(ratioName(ratio), "x"))
			}
		}
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}
