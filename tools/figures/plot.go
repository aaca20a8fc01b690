package main

import (
	"fmt"
	"math"
	"strings"
)

// Measures of a plot, in pixels.
const (
	panelWidth, panelHeight = 290.0, 190.0
	panelLeft, panelTop     = 62.0, 98.0
	columnStep, rowStep     = 370.0, 286.0
	labelWidth              = 42.0 // of a size
)

const plotHead = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img" aria-labelledby="title">
  <title id="title">%s</title>
  <style>
    .page { fill: #ffffff } .grid { stroke: #d8dee6 } .line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
    text { font: 13px "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1d2733 }
    .name { font-weight: 600 } .mid { text-anchor: middle } .end { text-anchor: end } .small { font-size: 12px }
    path.s0 { stroke: #2f6db5 } path.s1 { stroke: #c4561a } path.s2 { stroke: #5d7a1f } path.s3 { stroke: #8a4fa3 }
    circle.s0 { fill: #2f6db5 } circle.s1 { fill: #c4561a } circle.s2 { fill: #5d7a1f } circle.s3 { fill: #8a4fa3 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .grid { stroke: #2a323c } text { fill: #e6edf3 }
      path.s0 { stroke: #6ea8ee } path.s1 { stroke: #f0955b } path.s2 { stroke: #a5c860 } path.s3 { stroke: #c99be0 }
      circle.s0 { fill: #6ea8ee } circle.s1 { fill: #f0955b } circle.s2 { fill: #a5c860 } circle.s3 { fill: #c99be0 }
    }
  </style>
  <rect class="page" width="%g" height="%g"/>
`

// A panel has a line for each system: what of says, over the size.
type panel struct {
	title, axis string
	points      []point
	of          func(w point, us float64) float64
	unit        func(float64) string
	linear      bool // the scale is not logarithmic
}

// plot draws a panel with the times of each operation and number of ranks. If there is one panel only, the bus
// bandwidth stands beside it.
func plot(r *run, q query) []byte {
	var panels []panel
	for _, w := range r.cases(q) {
		if w.size == 0 {
			continue
		}
		title := fmt.Sprintf("%s, %d ranks", w.op, w.ranks)
		if n := len(panels); n == 0 || panels[n-1].title != title {
			panels = append(panels, panel{title: title, axis: "time over size, lower is better", unit: shortTime,
				of: func(_ point, us float64) float64 { return us }})
		}
		p := &panels[len(panels)-1]
		p.points = append(p.points, w)
	}
	if len(panels) == 1 {
		panels = append(panels, panel{title: panels[0].title, axis: "bus bandwidth over size, higher is better", points: panels[0].points,
			of: bandwidth, unit: func(v float64) string { return fmt.Sprintf("%g GB/s", v) }, linear: true})
	}
	columns := min(len(panels), 2)
	rows := (len(panels) + columns - 1) / columns
	width, height := columnStep*float64(columns)+14, panelTop+rowStep*float64(rows-1)+panelHeight+28
	systems := append(append([]column(nil), r.ours[:1]...), r.peers...)
	var b strings.Builder
	fmt.Fprintf(&b, plotHead, width, height, width, height, "Time over the size, "+q.on, width, height)
	fmt.Fprintf(&b, `  <text x="%g" y="20">%s</text>`+"\n", panelLeft, q.on)
	x := panelLeft
	for k, c := range systems {
		fmt.Fprintf(&b, `  <path class="line s%d" d="M%g 36h22"/><circle class="s%d" cx="%g" cy="36" r="4"/><text x="%g" y="41">%s</text>`+"\n",
			k%4, x, k%4, x+11, x+29, c.label())
		x += 60 + 7*float64(len(c.label()))
	}
	for i, p := range panels {
		p.draw(&b, r, systems, panelLeft+columnStep*float64(i%columns), panelTop+rowStep*float64(i/columns))
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func (p *panel) draw(b *strings.Builder, r *run, systems []column, left, top float64) {
	least, most := math.Inf(1), 0.0
	for _, w := range p.points {
		for _, c := range systems {
			if us := r.p50[w][c]; us > 0 {
				least, most = min(least, p.of(w, us)), max(most, p.of(w, us))
			}
		}
	}
	place, mark, step := math.Log10, func(v float64) float64 { return math.Pow(10, v) }, 1.0
	low, high := math.Floor(math.Log10(least)), math.Ceil(math.Log10(most))
	if p.linear {
		place = func(v float64) float64 { return v }
		mark = place
		step = math.Pow(10, math.Floor(math.Log10(most)))
		if most > 5*step {
			step *= 2
		}
		low, high = 0, math.Ceil(most/step)*step
	}
	first, last := math.Log2(float64(p.points[0].size)), math.Log2(float64(p.points[len(p.points)-1].size))
	at := func(w point, v float64) (float64, float64) {
		return left + panelWidth*(math.Log2(float64(w.size))-first)/max(last-first, 1), top + panelHeight*(high-place(v))/(high-low)
	}
	fmt.Fprintf(b, `  <text class="name" x="%g" y="%g">%s</text><text class="small" x="%g" y="%g">%s</text>`+"\n",
		left, top-26, p.title, left, top-9, p.axis)
	for e := low; e <= high; e += step {
		_, y := at(p.points[0], mark(e))
		fmt.Fprintf(b, `  <path class="grid" d="M%g %.1fh%g"/><text class="end small" x="%g" y="%.1f">%s</text>`+"\n",
			left, y, panelWidth, left-6, y+4, p.unit(mark(e)))
	}
	for i, w := range p.points {
		x, _ := at(w, 1)
		text := sizeName(w.size)
		if i+1 < len(p.points) {
			if next, _ := at(p.points[i+1], 1); next-x < labelWidth {
				text = ""
			}
		}
		fmt.Fprintf(b, `  <path class="grid" d="M%.1f %gv%g"/><text class="mid small" x="%.1f" y="%g">%s</text>`+"\n",
			x, top, panelHeight, x, top+panelHeight+17, text)
	}
	for k, c := range systems {
		line, marks, to := "", "", 'M'
		for _, w := range p.points {
			us := r.p50[w][c]
			if us == 0 {
				continue
			}
			x, y := at(w, p.of(w, us))
			line += fmt.Sprintf("%c%.1f %.1f", to, x, y)
			to = 'L'
			marks += fmt.Sprintf(`<circle class="s%d" cx="%.1f" cy="%.1f" r="3.5"/>`, k%4, x, y)
		}
		fmt.Fprintf(b, `  <path class="line s%d" d="%s"/>%s`+"\n", k%4, line, marks)
	}
}

// label is a system's name in a plot.
func (c column) label() string {
	if c.ours {
		return "c10d for Go"
	}
	return c.name
}

// bandwidth is nccl-tests' bus bandwidth in GB/s: what each link of a ring would have to carry.
func bandwidth(w point, us float64) float64 {
	n, factor := float64(w.ranks), 1.0
	switch w.op {
	case "all_reduce":
		factor = 2 * (n - 1) / n
	case "all_gather", "reduce_scatter_tensor", "all_to_all_single":
		factor = (n - 1) / n
	}
	return factor * float64(w.size) / us / 1000
}

func shortTime(us float64) string {
	switch {
	case us >= 1e6:
		return fmt.Sprintf("%g s", us/1e6)
	case us >= 1000:
		return fmt.Sprintf("%g ms", us/1000)
	}
	return fmt.Sprintf("%g us", us)
}
