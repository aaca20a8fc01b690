package plot

import (
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
)

// density is the number of pixels for a unit of the chart, so that the picture
// is sharp on a dense screen.
const density = 2

// The dashes of a dashed line, in units of the chart.
const (
	dashOn  = 6
	dashOff = 4
)

// pixels draws with smooth edges: a pixel's share of a line comes from the
// distance of its centre to the line.
type pixels struct {
	img   *image.RGBA
	cover []float64 // share of each pixel that the line being drawn covers
}

func newPixels(width, height int) *pixels {
	p := &pixels{img: image.NewRGBA(image.Rect(0, 0, width*density, height*density))}
	for i := range p.img.Pix {
		p.img.Pix[i] = 0xff
	}
	p.cover = make([]float64, width*height*density*density)
	return p
}

func (p *pixels) encode(w io.Writer) error { return png.Encode(w, p.img) }

func (p *pixels) line(points []point, s stroke) {
	lines := [][]point{points}
	if s.dashed {
		lines = dash(points)
	}
	p.strokes(lines, s.width, s.color)
}

// strokes draws lines as one shape: where they cross they are not darker.
func (p *pixels) strokes(lines [][]point, width float64, c color.RGBA) {
	b := p.img.Bounds()
	dirty := image.Rectangle{Min: b.Max, Max: b.Min}
	for _, points := range lines {
		for i := range max(1, len(points)-1) {
			from, to := points[i], points[min(i+1, len(points)-1)]
			dirty = grow(dirty, p.segment(from, to, width*density/2))
		}
	}
	for y := dirty.Min.Y; y < dirty.Max.Y; y++ {
		for x := dirty.Min.X; x < dirty.Max.X; x++ {
			a := &p.cover[y*b.Max.X+x]
			if *a == 0 {
				continue
			}
			old := p.img.RGBAAt(x, y)
			mix := func(o, n uint8) uint8 { return uint8(float64(o)*(1-*a) + float64(n)**a + .5) }
			p.img.SetRGBA(x, y, color.RGBA{mix(old.R, c.R), mix(old.G, c.G), mix(old.B, c.B), 0xff})
			*a = 0
		}
	}
}

// grow is Union without its rule that an empty rectangle, which a dirty
// rectangle is at first, does not count.
func grow(a, b image.Rectangle) image.Rectangle {
	return image.Rect(min(a.Min.X, b.Min.X), min(a.Min.Y, b.Min.Y), max(a.Max.X, b.Max.X), max(a.Max.Y, b.Max.Y))
}

// segment adds to cover what a line of the given half width covers and returns where.
func (p *pixels) segment(from, to point, half float64) image.Rectangle {
	x0, y0, x1, y1 := from.x*density, from.y*density, to.x*density, to.y*density
	reach := half + 1
	area := image.Rect(
		int(math.Floor(min(x0, x1)-reach)), int(math.Floor(min(y0, y1)-reach)),
		int(math.Ceil(max(x0, x1)+reach)), int(math.Ceil(max(y0, y1)+reach)),
	).Intersect(p.img.Bounds())
	dx, dy := x1-x0, y1-y0
	length := dx*dx + dy*dy
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			px, py := float64(x)+.5-x0, float64(y)+.5-y0
			along := 0.
			if length > 0 {
				along = min(max((px*dx+py*dy)/length, 0), 1)
			}
			far := math.Hypot(px-along*dx, py-along*dy)
			if c := min(half-far+.5, 1); c > 0 {
				a := &p.cover[y*p.img.Bounds().Max.X+x]
				*a = max(*a, c)
			}
		}
	}
	return area
}

func (p *pixels) text(at point, s string, size float64, c color.RGBA, a align) {
	switch a {
	case centre:
		at.x -= textWidth(s, size) / 2
	case right:
		at.x -= textWidth(s, size)
	}
	var lines [][]point
	unit := size / fontSize
	for _, r := range s {
		g := glyphOf(r)
		for _, line := range g.lines {
			moved := make([]point, len(line))
			for i, q := range line {
				moved[i] = point{at.x + q.x*unit, at.y - q.y*unit}
			}
			lines = append(lines, moved)
		}
		at.x += (g.width + letterSpace) * unit
	}
	p.strokes(lines, size*.095, c)
}

// dash cuts a line into its dashes.
func dash(points []point) [][]point {
	var out [][]point
	on, left := true, float64(dashOn)
	piece := []point{points[0]}
	for i := 1; i < len(points); i++ {
		from, to := points[i-1], points[i]
		for {
			length := math.Hypot(to.x-from.x, to.y-from.y)
			if length < left {
				left -= length
				piece = append(piece, to)
				break
			}
			cut := point{from.x + (to.x-from.x)*left/length, from.y + (to.y-from.y)*left/length}
			if on {
				out = append(out, append(piece, cut))
			}
			on = !on
			left = map[bool]float64{true: dashOn, false: dashOff}[on]
			piece, from = []point{cut}, cut
		}
	}
	if on {
		out = append(out, piece)
	}
	return out
}
