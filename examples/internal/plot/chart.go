package plot

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Chart is a title over a column of panels.
type Chart struct {
	Title  string
	XLabel string
	Panels []Panel
}

// Panel is one coordinate system. Its vertical range fits its curves.
type Panel struct {
	Title   string
	Log     bool // logarithmic vertical axis; values that are not positive are left out
	Percent bool // the vertical axis is labelled in percent
	Curves  []Curve
}

// Curve is a line through points. X must not decrease. Points that are not
// finite are left out.
type Curve struct {
	Label string
	Style Style
	X, Y  []float64
}

// Style tells curves apart.
type Style int

const (
	Strong Style = iota // what the chart is about
	Faint               // raw values behind a Strong curve
	Dashed              // what the Strong curve is compared with
)

type point struct{ x, y float64 }

type stroke struct {
	color  color.RGBA
	width  float64
	dashed bool
}

// canvas has its origin at the top left and takes text by its baseline.
type canvas interface {
	line(points []point, s stroke)
	text(at point, s string, size float64, c color.RGBA, align align)
}

type align int

const (
	left align = iota
	centre
	right
)

const (
	width       = 800
	panelHeight = 200
	top         = 68 // above the first panel: the chart's title, the panel's own
	between     = 46
	bottom      = 48
	marginLeft  = 64
	marginRight = 24
)

var (
	ink    = color.RGBA{0x22, 0x2b, 0x38, 0xff}
	muted  = color.RGBA{0x6b, 0x76, 0x85, 0xff}
	grid   = color.RGBA{0xe3, 0xe7, 0xec, 0xff}
	styles = [...]stroke{
		Strong: {color: color.RGBA{0x1f, 0x6f, 0xb4, 0xff}, width: 2.2},
		Faint:  {color: color.RGBA{0xa9, 0xcb, 0xe8, 0xff}, width: 1},
		Dashed: {color: color.RGBA{0xd9, 0x5f, 0x0e, 0xff}, width: 1.6, dashed: true},
	}
)

// WriteFile draws the chart into a file, as PNG if its name ends in ".png" and
// as SVG if it ends in ".svg".
func (c *Chart) WriteFile(path string) error {
	b, err := c.Render(filepath.Ext(path))
	if err != nil {
		return fmt.Errorf("plot: %s: %w", path, err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	return nil
}

// CheckName returns the error that WriteFile would have for the ending of path.
func CheckName(path string) error {
	if _, err := new(Chart).Render(filepath.Ext(path)); err != nil {
		return fmt.Errorf("plot: %s: %w", path, err)
	}
	return nil
}

// Render returns the chart as a file with the given ending.
func (c *Chart) Render(ext string) ([]byte, error) {
	var out bytes.Buffer
	switch strings.ToLower(ext) {
	case ".svg":
		s := newSVG(&out, width, c.height(), c.Title)
		c.draw(s)
		s.end()
	case ".png":
		p := newPixels(width, c.height())
		c.draw(p)
		if err := p.encode(&out); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("the name must end in .svg or .png, not in %q", ext)
	}
	return out.Bytes(), nil
}

func (c *Chart) height() int {
	n := max(1, len(c.Panels))
	return top + n*panelHeight + (n-1)*between + bottom
}

func (c *Chart) draw(on canvas) {
	on.text(point{marginLeft, 26}, c.Title, 16, ink, left)
	all := span{0, math.Inf(-1)} // training begins at 0
	for _, p := range c.Panels {
		for _, v := range p.Curves {
			all.include(v.X)
		}
	}
	x := axis{span: all.orUnit(), from: marginLeft, to: width - marginRight}
	for i, p := range c.Panels {
		y0 := float64(top + i*(panelHeight+between))
		p.draw(on, x, y0, i == len(c.Panels)-1)
	}
	end := float64(c.height())
	on.text(point{(x.from + x.to) / 2, end - 10}, c.XLabel, 13, muted, centre)
}

func (p *Panel) draw(on canvas, x axis, y0 float64, last bool) {
	y1 := y0 + panelHeight
	values := span{math.Inf(1), math.Inf(-1)}
	for _, c := range p.Curves {
		values.include(p.scale(c.Y))
	}
	values = values.orUnit()
	pad := (values.high - values.low) * .06
	values = span{values.low - pad, values.high + pad}
	y := axis{span: values, from: y1, to: y0}

	for _, v := range ticks(x.span, 10) {
		at := x.at(v)
		on.line([]point{{at, y0}, {at, y1}}, stroke{color: grid, width: 1})
		if last {
			on.text(point{at, y1 + 18}, number(v), 12, muted, centre)
		}
	}
	for _, v := range p.ticks(values) {
		at := y.at(v.at)
		on.line([]point{{x.from, at}, {x.to, at}}, stroke{color: grid, width: 1})
		on.text(point{x.from - 8, at + 4}, v.label, 12, muted, right)
	}
	on.line([]point{{x.from, y0}, {x.from, y1}, {x.to, y1}}, stroke{color: muted, width: 1})

	on.text(point{x.from, y0 - 9}, p.Title, 13, ink, left)
	legend := x.to
	for i := len(p.Curves) - 1; i >= 0; i-- {
		c := &p.Curves[i]
		on.text(point{legend, y0 - 9}, c.Label, 12, muted, right)
		legend -= textWidth(c.Label, 12)*1.12 + 8 // an SVG may be shown in a wider font
		on.line([]point{{legend - 22, y0 - 13}, {legend, y0 - 13}}, styles[c.Style])
		legend -= 22 + 18
	}
	for _, c := range p.Curves {
		var line []point
		for i, v := range p.scale(c.Y) {
			if !finite(v) || !finite(c.X[i]) {
				continue
			}
			line = append(line, point{x.at(c.X[i]), y.at(v)})
		}
		if len(line) > 0 {
			on.line(line, styles[c.Style])
		}
	}
}

func (p *Panel) scale(y []float64) []float64 {
	if !p.Log {
		return y
	}
	logs := make([]float64, len(y))
	for i, v := range y {
		logs[i] = math.Log10(v)
	}
	return logs
}

type tick struct {
	at    float64
	label string
}

func (p *Panel) ticks(s span) []tick {
	var out []tick
	if !p.Log {
		for _, v := range ticks(s, 5) {
			label := number(v)
			if p.Percent {
				label = number(v*100) + "%"
			}
			out = append(out, tick{v, label})
		}
		return out
	}
	steps := []float64{1, 2, 5}
	if s.high-s.low > 2.5 {
		steps = steps[:1]
	}
	for decade := math.Floor(s.low); decade <= s.high; decade++ {
		for _, m := range steps {
			v := m * math.Pow(10, decade)
			if at := math.Log10(v); at >= s.low && at <= s.high {
				out = append(out, tick{at, number(v)})
			}
		}
	}
	return out
}

// ticks returns at most about n round numbers within s.
func ticks(s span, n int) []float64 {
	raw := (s.high - s.low) / float64(n)
	step := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5, 10} {
		if m*step >= raw {
			step *= m
			break
		}
	}
	var out []float64
	for i := math.Ceil(s.low / step); i*step <= s.high+step*1e-9; i++ {
		out = append(out, i*step)
	}
	return out
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }

type span struct{ low, high float64 }

func (s *span) include(values []float64) {
	for _, v := range values {
		if finite(v) {
			s.low, s.high = min(s.low, v), max(s.high, v)
		}
	}
}

// orUnit makes a span of no or one value wide enough to draw in.
func (s span) orUnit() span {
	switch {
	case s.low > s.high:
		return span{0, 1}
	case s.low == s.high:
		return span{s.low - .5, s.high + .5}
	}
	return s
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// axis maps a span to places on the canvas.
type axis struct {
	span
	from, to float64
}

func (a axis) at(v float64) float64 {
	return a.from + (v-a.low)/(a.high-a.low)*(a.to-a.from)
}
