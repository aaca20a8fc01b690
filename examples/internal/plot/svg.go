package plot

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"image/color"
	"strconv"
)

type svg struct{ out *bytes.Buffer }

func newSVG(out *bytes.Buffer, width, height int, title string) svg {
	fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="Helvetica, Arial, sans-serif">`+"\n<title>", width, height, width, height)
	s := svg{out}
	s.escape(title)
	fmt.Fprintf(out, "</title>\n"+`<rect width="100%%" height="100%%" fill="#fff"/>`+"\n")
	return s
}

func (s svg) end() { s.out.WriteString("</svg>\n") }

// escape leaves runes out that XML cannot hold; writing to a buffer cannot fail.
func (s svg) escape(text string) { _ = xml.EscapeText(s.out, []byte(text)) }

func (s svg) line(points []point, k stroke) {
	fmt.Fprintf(s.out, `<polyline fill="none" stroke="%s" stroke-width="%s" stroke-linejoin="round"`, hex(k.color), short(k.width))
	if k.dashed {
		fmt.Fprintf(s.out, ` stroke-dasharray="%d %d"`, dashOn, dashOff)
	}
	s.out.WriteString(` points="`)
	for i, p := range points {
		if i > 0 {
			s.out.WriteByte(' ')
		}
		s.out.WriteString(short(p.x) + "," + short(p.y))
	}
	s.out.WriteString("\"/>\n")
}

func (s svg) text(at point, text string, size float64, c color.RGBA, a align) {
	fmt.Fprintf(s.out, `<text x="%s" y="%s" font-size="%s" fill="%s" text-anchor="%s">`,
		short(at.x), short(at.y), short(size), hex(c), [...]string{left: "start", centre: "middle", right: "end"}[a])
	s.escape(text)
	s.out.WriteString("</text>\n")
}

func hex(c color.RGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

func short(v float64) string {
	return strconv.FormatFloat(float64(int(v*10+.5))/10, 'f', -1, 64)
}
