// Command plot draws curves of measurements: of the records that "c10d bench -json"
// prints, and of the trainings that examples/ddp writes with -curves.
//
//	go build -C bench/plot -o ../../bin/plot .
//	bin/plot -o curves.svg ours.jsonl gloo.jsonl openmpi.jsonl
//	bin/plot -o ratios.svg -against c10d-go ours.jsonl openmpi.jsonl
//	bin/plot -o loss.png loss.jsonl
//
// It draws a row of two panels for each operation and each training. It is a module of
// its own: gonum.org/v1/plot has fonts, rasterisers and file formats that the library
// does not need.
package main

import (
	"flag"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	_ "gonum.org/v1/plot/vg/vgimg"
	_ "gonum.org/v1/plot/vg/vgsvg"
)

func init() { plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"} }

func main() {
	out := flag.String("o", "", "write the plot to this `file`, whose name ends in .svg or .png")
	var only only
	flag.StringVar(&only.op, "op", "", "draw the records of this `operation` alone")
	flag.IntVar(&only.ranks, "ranks", 0, "draw the records of `n` ranks alone; 0 means any number")
	against := flag.String("against", "", "show times as multiples of this `system`'s, instead of the bus bandwidth")
	flag.Parse()
	if err := run(*out, *against, only, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(1)
	}
}

func run(out, against string, only only, files []string) error {
	format := strings.TrimPrefix(filepath.Ext(out), ".")
	if format != "svg" && format != "png" {
		return fmt.Errorf("-o %q: the name must end in .svg or .png", out)
	}
	all, err := load(files, only)
	if err != nil {
		return err
	}
	rows, err := all.rows(against)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return fmt.Errorf("%v: no training, and no record with a size of what -op and -ranks ask for", files)
	}
	var b strings.Builder
	if err := render(&b, format, rows); err != nil {
		return err
	}
	// Readers of an SVG may have other fonts.
	text := strings.ReplaceAll(b.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Helvetica,Arial,sans-serif")
	return os.WriteFile(out, []byte(text), 0o644)
}

// row is two panels side by side.
type row [2]panel

// panel is one coordinate system.
type panel struct {
	title, xLabel string
	xLog, yLog    *powers // nil is a linear axis
	percent       bool    // the vertical axis
	legend        corner
	curves        []curve
}

// corner is where curves leave room for the legend.
type corner struct{ top, left bool }

// curve is a line through points. Points that the axes cannot show are left out.
type curve struct {
	name   string
	color  int  // the number of a colour and of a mark
	faint  bool // a thin grey line without marks
	dashed bool // it may cover another curve
	x, y   []float64
}

const (
	width  = 16 * vg.Centimeter
	height = 9 * vg.Centimeter
)

// render draws the rows, one below the other.
func render(w io.Writer, format string, rows []row) error {
	grid := make([][]*plot.Plot, len(rows))
	for i, r := range rows {
		for _, p := range r {
			drawn, err := p.draw()
			if err != nil {
				return err
			}
			grid[i] = append(grid[i], drawn)
		}
	}
	canvas, err := draw.NewFormattedCanvas(2*width, height*vg.Length(len(rows)), format)
	if err != nil {
		return err
	}
	page := draw.New(canvas)
	page.SetColor(color.White)
	page.Fill(page.Rectangle.Path())
	const gap = 4 * vg.Millimeter
	tiles := draw.Tiles{Rows: len(rows), Cols: 2, PadX: 2 * gap, PadY: gap, PadTop: gap, PadBottom: gap, PadLeft: gap, PadRight: 2 * gap}
	for i, line := range plot.Align(grid, tiles, page) {
		for j, c := range line {
			grid[i][j].Draw(c)
		}
	}
	_, err = canvas.WriteTo(w)
	return err
}

func (p *panel) draw() (*plot.Plot, error) {
	d := plot.New()
	d.Legend.YOffs, d.Legend.XOffs = -vg.Millimeter, vg.Millimeter
	if !p.legend.left {
		d.Legend.XOffs *= -1
	}
	if !p.legend.top {
		d.Legend.YOffs *= -1
	}
	d.Title.Text, d.X.Label.Text = p.title, p.xLabel
	d.Legend.Top, d.Legend.Left = p.legend.top, p.legend.left
	d.Add(plotter.NewGrid())
	for _, c := range p.curves {
		var points plotter.XYs
		for i, y := range c.y {
			if shown(c.x[i], p.xLog) && shown(y, p.yLog) {
				points = append(points, plotter.XY{X: c.x[i], Y: y})
			}
		}
		if len(points) == 0 {
			continue // NewLinePoints refuses it
		}
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, line.Width = plotutil.Color(c.color), vg.Points(1.5)
		if c.dashed {
			line.Dashes = []vg.Length{vg.Points(6), vg.Points(6)}
		}
		if c.faint {
			line.Color, line.Width = color.Gray{Y: 0xc0}, vg.Points(0.7)
		}
		d.Add(line)
		if c.faint {
			d.Legend.Add(c.name, line)
			continue
		}
		marks.Color, marks.Shape = line.Color, plotutil.Shape(c.color)
		d.Add(marks)
		d.Legend.Add(c.name, line, marks)
	}
	p.xLog.set(&d.X)
	p.yLog.set(&d.Y)
	if p.percent {
		d.Y.Tick.Marker = plot.TickerFunc(func(low, high float64) []plot.Tick {
			ticks := plot.DefaultTicks{}.Ticks(low, high)
			for i := range ticks {
				if ticks[i].Label != "" {
					ticks[i].Label = fmt.Sprintf("%.4g %%", 100*ticks[i].Value)
				}
			}
			return ticks
		})
	}
	return d, nil
}

// shown reports whether an axis has a place for v.
func shown(v float64, log *powers) bool {
	return !math.IsNaN(v) && !math.IsInf(v, 0) && (log == nil || v > 0)
}

// powers is a logarithmic axis from one power of base to another, with a tick at each.
type powers struct {
	base  float64
	label func(float64) string
}

// set makes a logarithmic, unless p is nil.
func (p *powers) set(a *plot.Axis) {
	if p == nil || a.Min > a.Max { // nothing was drawn
		return
	}
	exponent := func(v float64) float64 { return math.Log(v) / math.Log(p.base) }
	low, high := math.Floor(exponent(a.Min)+1e-9), math.Ceil(exponent(a.Max)-1e-9)
	high = max(high, low+1)
	a.Scale = plot.LogScale{}
	a.Min, a.Max = math.Pow(p.base, low), math.Pow(p.base, high)
	var ticks []plot.Tick
	const most = 14
	for e, step := low, max(1, math.Ceil((high-low)/most)); e <= high; e += step {
		v := math.Pow(p.base, e)
		ticks = append(ticks, plot.Tick{Value: v, Label: p.label(v)})
	}
	a.Tick.Marker = plot.ConstantTicks(ticks)
}

// unit returns a function that labels values with units. Each unit is step times the one
// before. Values are in unit number base.
func unit(step float64, base int, names ...string) func(float64) string {
	return func(v float64) string {
		i := int(math.Floor(math.Log(v)/math.Log(step)+1e-9)) + base
		i = min(max(i, 0), len(names)-1)
		return fmt.Sprintf("%.4g%s", v/math.Pow(step, float64(i-base)), names[i])
	}
}

var (
	byteAxis      = &powers{2, unit(1024, 0, "", "K", "M", "G", "T")}
	timeAxis      = &powers{10, unit(1000, 1, " ns", " µs", " ms", " s")}
	bandwidthAxis = &powers{10, unit(1000, 3, " B/s", " kB/s", " MB/s", " GB/s", " TB/s")}
	ratioAxis     = &powers{2, unit(2, 0, "x")}
	lossAxis      = &powers{10, func(v float64) string { return fmt.Sprintf("%.4g", v) }}
)

// indexOf returns the number of name in names, to which it adds a new one.
func indexOf(names *[]string, name string) int {
	i := slices.Index(*names, name)
	if i < 0 {
		i = len(*names)
		*names = append(*names, name)
	}
	return i
}
