// Package plot draws the curves of a training run, as SVG or as PNG, with
// nothing but the standard library.
//
// A [Chart] is a column of panels that share their horizontal axis. It is drawn
// once, on a small canvas interface of lines and text; one canvas writes SVG,
// the other computes pixels, with letters made of strokes, because a font would
// be the only file that the examples need.
package plot
