package plot

import (
	"strconv"
	"strings"
	"unicode"
)

// The font has an x-height of 10 units, capitals and digits of 14, and is as
// large as an ordinary font of the size fontSize.
const (
	fontSize    = 19.5
	letterSpace = 3.2
)

type glyph struct {
	width float64
	lines [][]point // y upwards from the baseline
}

// strokes are the letters' pen movements: m moves, l draws a straight line, q a
// quadratic curve through a control point. The number before them is the
// letter's width.
var strokes = map[rune]string{
	' ': "4",
	'a': "8 m 8 5 q 8 10 4 10 q 0 10 0 5 q 0 0 4 0 q 8 0 8 5 m 8 10 l 8 0",
	'b': "8 m 0 14 l 0 0 m 0 5 q 0 10 4 10 q 8 10 8 5 q 8 0 4 0 q 0 0 0 5",
	'c': "7 m 7.2 8.3 q 6 10 4 10 q 0 10 0 5 q 0 0 4 0 q 6 0 7.2 1.7",
	'd': "8 m 8 14 l 8 0 m 8 5 q 8 10 4 10 q 0 10 0 5 q 0 0 4 0 q 8 0 8 5",
	'e': "8 m 0 5.2 l 8 5.2 q 8 10 4 10 q 0 10 0 5 q 0 0 4.2 0 q 6.5 0 7.6 1.8",
	'f': "4.6 m 5 14 q 2 14.6 2 11 l 2 0 m 0 9.8 l 5 9.8",
	'g': "8 m 8 5 q 8 10 4 10 q 0 10 0 5 q 0 0 4 0 q 8 0 8 5 m 8 10 l 8 -.5 q 8 -4 4 -4 q 1.5 -4 .6 -2.6",
	'h': "7.5 m 0 14 l 0 0 m 0 6 q .5 10 4 10 q 7.5 10 7.5 6 l 7.5 0",
	'i': "1 m .5 10 l .5 0 m .5 13.3 l .5 13.7",
	'j': "2.5 m 2 10 l 2 -1.5 q 2 -4 -.5 -4 m 2 13.3 l 2 13.7",
	'k': "7 m 0 14 l 0 0 m 6.6 10 l 0 3.8 m 2.6 6.2 l 7 0",
	'l': "1 m .5 14 l .5 0",
	'm': "12 m 0 10 l 0 0 m 0 6.5 q .5 10 3.2 10 q 6 10 6 6.5 l 6 0 m 6 6.5 q 6.5 10 9.2 10 q 12 10 12 6.5 l 12 0",
	'n': "7.5 m 0 10 l 0 0 m 0 6 q .5 10 4 10 q 7.5 10 7.5 6 l 7.5 0",
	'o': "8 m 4 10 q 0 10 0 5 q 0 0 4 0 q 8 0 8 5 q 8 10 4 10",
	'p': "8 m 0 10 l 0 -4 m 0 5 q 0 10 4 10 q 8 10 8 5 q 8 0 4 0 q 0 0 0 5",
	'q': "8 m 8 10 l 8 -4 m 8 5 q 8 10 4 10 q 0 10 0 5 q 0 0 4 0 q 8 0 8 5",
	'r': "4.2 m 0 10 l 0 0 m 0 6 q .5 10 4.4 10",
	's': "6.8 m 6.4 8.4 q 5.6 10 3.5 10 q .5 10 .5 7.6 q .5 5.7 3.4 5.2 q 6.8 4.6 6.8 2.6 q 6.8 0 3.5 0 q .8 0 0 1.8",
	't': "4.6 m 2 13 l 2 3 q 2 -.2 5 .2 m 0 9.8 l 4.8 9.8",
	'u': "7.5 m 0 10 l 0 4 q 0 0 3.5 0 q 7 0 7.5 4 m 7.5 10 l 7.5 0",
	'v': "8 m 0 10 l 4 0 l 8 10",
	'w': "12 m 0 10 l 3 0 l 6 10 l 9 0 l 12 10",
	'x': "7.4 m 0 10 l 7.4 0 m 7.4 10 l 0 0",
	'y': "8 m 0 10 l 4 0 m 8 10 l 3.6 -1.6 q 2.7 -4 .4 -4",
	'z': "7 m .4 10 l 6.8 10 l 0 0 l 7.2 0",
	'0': "8 m 4 14 q 0 14 0 7 q 0 0 4 0 q 8 0 8 7 q 8 14 4 14",
	'1': "8 m 1.4 11.5 l 4.8 14 l 4.8 0",
	'2': "8 m .4 10.4 q .6 14 4 14 q 7.6 14 7.6 10.6 q 7.6 8.4 5 5.6 l 0 0 l 8 0",
	'3': "8 m .7 11.2 q 1.2 14 4 14 q 7.4 14 7.4 10.7 q 7.4 7.6 3.4 7.5 q 8 7.4 8 3.8 q 8 0 4 0 q .6 0 0 3",
	'4': "8 m 6 0 l 6 14 l 0 4.2 l 8.4 4.2",
	'5': "8 m 7.2 14 l 1.4 14 l .8 7.6 q 2 9 4 9 q 8 9 8 4.5 q 8 0 4 0 q 1 0 .2 2.6",
	'6': "8 m 7 12.4 q 6.2 14 4.4 14 q 0 14 0 6.2 l 0 4.4 q 0 0 4 0 q 8 0 8 4.3 q 8 8.6 4.2 8.6 q .4 8.6 0 4.4",
	'7': "8 m 0 14 l 8 14 l 3 0",
	'8': "8 m 4 7.6 q .6 7.6 .6 10.8 q .6 14 4 14 q 7.4 14 7.4 10.8 q 7.4 7.6 4 7.6 q 0 7.6 0 3.8 q 0 0 4 0 q 8 0 8 3.8 q 8 7.6 4 7.6",
	'9': "8 m 1 1.6 q 1.8 0 3.6 0 q 8 0 8 7.8 l 8 9.6 q 8 14 4 14 q 0 14 0 9.7 q 0 5.4 3.8 5.4 q 7.6 5.4 8 9.6",
	'.': "1 m .5 0 l .5 .4",
	',': "1.5 m 1.2 .4 l .2 -2.6",
	':': "1 m .5 0 l .5 .4 m .5 8.6 l .5 9",
	'-': "5 m 0 5 l 5 5",
	'+': "8 m 0 5.5 l 8 5.5 m 4 1.5 l 4 9.5",
	'=': "8 m 0 3.8 l 8 3.8 m 0 7.4 l 8 7.4",
	'/': "6 m 0 -2 l 6 15",
	'(': "3 m 3 15.5 q 0 12 0 6 q 0 0 3 -3.5",
	')': "3 m 0 15.5 q 3 12 3 6 q 3 0 0 -3.5",
	'_': "8 m 0 -2 l 8 -2",
	'%': "12 m 1.5 0 l 10.5 14 m 2.6 14 q 0 14 0 10.8 q 0 7.6 2.6 7.6 q 5.2 7.6 5.2 10.8 q 5.2 14 2.6 14 m 9.4 6.4 q 6.8 6.4 6.8 3.2 q 6.8 0 9.4 0 q 12 0 12 3.2 q 12 6.4 9.4 6.4",
}

var glyphs = func() map[rune]glyph {
	all := make(map[rune]glyph, len(strokes))
	for r, s := range strokes {
		all[r] = parseGlyph(s)
	}
	return all
}()

// missing is drawn for a rune that the font lacks.
var missing = parseGlyph("7 m 0 0 l 7 0 l 7 14 l 0 14 l 0 0")

// glyphOf draws capitals as small letters.
func glyphOf(r rune) glyph {
	if g, ok := glyphs[unicode.ToLower(r)]; ok {
		return g
	}
	return missing
}

func parseGlyph(s string) glyph {
	words := strings.Fields(s)
	next := func() (v float64) {
		v, err := strconv.ParseFloat(words[0], 64)
		if err != nil {
			panic("plot: " + s + ": " + err.Error())
		}
		words = words[1:]
		return v
	}
	g := glyph{width: next()}
	for len(words) > 0 {
		pen := words[0]
		words = words[1:]
		to := point{next(), next()}
		if pen == "m" {
			g.lines = append(g.lines, []point{to})
			continue
		}
		line := &g.lines[len(g.lines)-1]
		if pen == "l" {
			*line = append(*line, to)
			continue
		}
		from, control, to := (*line)[len(*line)-1], to, point{next(), next()}
		const pieces = 8
		for i := 1; i <= pieces; i++ {
			t := float64(i) / pieces
			a, b, c := (1-t)*(1-t), 2*t*(1-t), t*t
			*line = append(*line, point{a*from.x + b*control.x + c*to.x, a*from.y + b*control.y + c*to.y})
		}
	}
	return g
}

// textWidth is the width of s in this font; ordinary sans-serif fonts are within some percent of it.
func textWidth(s string, size float64) float64 {
	w := 0.
	for _, r := range s {
		w += glyphOf(r).width + letterSpace
	}
	return max(0, w-letterSpace) * size / fontSize
}
