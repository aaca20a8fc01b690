package main

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// figure is what is plotted of one operation: the curves of the systems that
// measured it.
type figure struct {
	title string
	of    records
}

// Measures of a plot, in pixels. A figure is a row of two panels.
const (
	panelWidth, panelHeight = 440.0, 250.0
	panelLeft, panelGap     = 64.0, 76.0
	rowHead, rowFoot        = 52.0, 58.0
	plotHead                = 40.0
	plotWidth               = 2*panelWidth + panelLeft + panelGap + 20
)

// plotStyle works on a light and on a dark page. The colours can be told apart
// by people who do not see all of them, and each system has a mark of its own.
const plotStyle = `
    .page { fill: #ffffff }
    .frame { fill: none; stroke: #5b6b7d }
    .grid { stroke: #d8dee6 }
    text { font: 12px "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1d2733 }
    .name { font-size: 14px; font-weight: 600 }
    .mid { text-anchor: middle }
    .end { text-anchor: end }
    .curve { fill: none; stroke-width: 2 }
    .s0 { stroke: #2f6db5 } .m0 { fill: #2f6db5 }
    .s1 { stroke: #c4561a } .m1 { fill: #c4561a }
    .s2 { stroke: #3b8a4a } .m2 { fill: #3b8a4a }
    .s3 { stroke: #a14f93 } .m3 { fill: #a14f93 }
    .s4 { stroke: #8a6d0b } .m4 { fill: #8a6d0b }
    .s5 { stroke: #51606f } .m5 { fill: #51606f }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 }
      .frame { stroke: #8593a3 }
      .grid { stroke: #2a323c }
      text { fill: #e6edf3 }
      .s0 { stroke: #6ea8ee } .m0 { fill: #6ea8ee }
      .s1 { stroke: #f0955b } .m1 { fill: #f0955b }
      .s2 { stroke: #67b878 } .m2 { fill: #67b878 }
      .s3 { stroke: #d58cc8 } .m3 { fill: #d58cc8 }
      .s4 { stroke: #d9b84a } .m4 { fill: #d9b84a }
      .s5 { stroke: #a3b0bd } .m5 { fill: #a3b0bd }
    }
`

const plotColours = 6

// marks are drawn at the points of a curve, one shape a system.
var marks = []string{
	"M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", // disc
	"M-3.6 -3.6h7.2v7.2h-7.2z",            // square
	"M0 -4.8L4.6 3.6H-4.6z",               // triangle
	"M0 -5L5 0L0 5L-5 0z",                 // diamond
	"M0 4.8L4.6 -3.6H-4.6z",               // triangle on its tip
	"M-4.5 -1.5h9v3h-9z",                  // bar
}

// axis maps values to pixels on a logarithmic scale.
type axis struct {
	low, high float64 // logarithms of the ends
	base      float64
	from, to  float64
}

// newAxis covers values from one full power of base to another.
func newAxis(base float64, values []float64, from, to float64) axis {
	log := func(v float64) float64 { return math.Log(v) / math.Log(base) }
	a := axis{low: math.Floor(log(slices.Min(values)) + 1e-9), high: math.Ceil(log(slices.Max(values)) - 1e-9), base: base, from: from, to: to}
	if a.low == a.high {
		a.high++
	}
	return a
}

func (a axis) at(v float64) float64 {
	return a.from + (math.Log(v)/math.Log(a.base)-a.low)/(a.high-a.low)*(a.to-a.from)
}

// ticks are the powers that a line is drawn for, most at the most.
func (a axis) ticks(most int) []float64 {
	step := math.Max(1, math.Ceil((a.high-a.low)/float64(most)))
	var values []float64
	for e := a.low; e <= a.high; e += step {
		values = append(values, math.Pow(a.base, e))
	}
	return values
}

// rounded keeps three digits.
func rounded(v float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(v))-2)
	return math.Round(v/unit) * unit
}

// timeName writes microseconds in the unit they are read in.
func timeName(us float64) string {
	switch {
	case us >= 1e6:
		return fmt.Sprintf("%.4g s", us/1e6)
	case us >= 1e3:
		return fmt.Sprintf("%.4g ms", us/1e3)
	case us >= 1:
		return fmt.Sprintf("%.4g µs", us)
	}
	return fmt.Sprintf("%.4g ns", us*1e3)
}

func bandwidthName(gb float64) string {
	switch {
	case gb >= 1:
		return fmt.Sprintf("%.4g GB/s", gb)
	case gb >= 1e-3:
		return fmt.Sprintf("%.4g MB/s", gb*1e3)
	}
	return fmt.Sprintf("%.4g kB/s", gb*1e6)
}

// plotSVG writes one row of two panels for each figure: time, and bus
// bandwidth, against bytes, both on logarithmic scales.
func plotSVG(out io.Writer, figures []figure) error {
	var systems []string
	for _, f := range figures {
		for _, name := range f.of.systems() {
			if !slices.Contains(systems, name) {
				systems = append(systems, name)
			}
		}
	}
	row := rowHead + panelHeight + rowFoot
	height := plotHead + row*float64(len(figures))
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img" aria-labelledby="title desc">`+"\n", plotWidth, height, plotWidth, height)
	fmt.Fprintf(&b, "  <title id=\"title\">Time and bus bandwidth of %s</title>\n", html.EscapeString(strings.Join(systems, ", ")))
	b.WriteString("  <desc id=\"desc\">Curves on logarithmic scales against the bytes of the operation; p50 of the slowest rank.</desc>\n")
	fmt.Fprintf(&b, "  <style>%s  </style>\n", plotStyle)
	fmt.Fprintf(&b, `  <rect class="page" x="0" y="0" width="%g" height="%g"/>`+"\n", plotWidth, height)
	x := panelLeft
	for i, name := range systems {
		fmt.Fprintf(&b, `  <path class="curve s%d" d="M%g 24h28"/><path class="m%d" transform="translate(%g 24)" d="%s"/><text x="%g" y="28">%s</text>`+"\n",
			i%plotColours, x, i%plotColours, x+14, marks[i%len(marks)], x+36, html.EscapeString(name))
		x += 64 + 7*float64(len(name))
	}
	for i, f := range figures {
		top := plotHead + row*float64(i)
		fmt.Fprintf(&b, `  <text class="name" x="%g" y="%g">%s</text>`+"\n", panelLeft, top+24, html.EscapeString(f.title))
		panel(&b, f.of, systems, panelLeft, top+rowHead, "p50", timeName, func(r record) float64 { return r.P50 })
		panel(&b, f.of, systems, panelLeft+panelWidth+panelGap, top+rowHead, "bus bandwidth", bandwidthName, func(r record) float64 { return r.BusBW })
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(out, b.String())
	return err
}

// panel draws the curves of one value.
func panel(b *strings.Builder, of records, systems []string, left, top float64, title string, name func(float64) string, value func(record) float64) {
	var xs, ys []float64
	for _, r := range of {
		if r.Bytes > 0 && value(r) > 0 {
			xs, ys = append(xs, float64(r.Bytes)), append(ys, value(r))
		}
	}
	right, bottom := left+panelWidth, top+panelHeight
	if len(xs) > 0 {
		x, y := newAxis(2, xs, left, right), newAxis(10, ys, bottom, top)
		for _, v := range x.ticks(12) {
			fmt.Fprintf(b, `  <path class="grid" d="M%.1f %gV%g"/><text class="mid" x="%.1f" y="%g">%s</text>`+"\n", x.at(v), top, bottom, x.at(v), bottom+17, sizeName(int(v)))
		}
		for _, v := range y.ticks(8) {
			fmt.Fprintf(b, `  <path class="grid" d="M%g %.1fH%g"/><text class="end" x="%g" y="%.1f">%s</text>`+"\n", left, y.at(v), right, left-6, y.at(v)+4, name(v))
		}
		for i, system := range systems {
			var points records
			for _, r := range of {
				if r.System == system && r.Bytes > 0 && value(r) > 0 {
					points = append(points, r)
				}
			}
			slices.SortFunc(points, func(p, q record) int { return p.Bytes - q.Bytes })
			var line, dots strings.Builder
			for j, r := range points {
				at := fmt.Sprintf("%.1f %.1f", x.at(float64(r.Bytes)), y.at(value(r)))
				line.WriteString("ML"[min(j, 1):min(j, 1)+1] + at)
				fmt.Fprintf(&dots, `<path class="m%d" transform="translate(%s)" d="%s"><title>%s, %s: %s</title></path>`,
					i%plotColours, at, marks[i%len(marks)], html.EscapeString(system), sizeName(r.Bytes), name(rounded(value(r))))
			}
			if len(points) > 0 {
				fmt.Fprintf(b, `  <path class="curve s%d" d="%s"/>%s`+"\n", i%plotColours, line.String(), dots.String())
			}
		}
	}
	fmt.Fprintf(b, `  <rect class="frame" x="%g" y="%g" width="%g" height="%g"/>`+"\n", left, top, panelWidth, panelHeight)
	fmt.Fprintf(b, `  <text class="mid" x="%g" y="%g">bytes</text><text x="%g" y="%g">%s</text>`+"\n", left+panelWidth/2, bottom+36, left, top-6, title)
}
