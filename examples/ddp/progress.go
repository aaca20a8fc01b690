package main

import (
	"fmt"
	"io"
	"time"
)

// progress prints a line after each epoch.
type progress struct {
	out    io.Writer
	epochs int // of the training
	from   int // the first epoch of this run
	images int // of an epoch
	begun  time.Time
}

// epoch prints the results of all ranks after an epoch.
func (p *progress) epoch(h *history) {
	took := time.Since(p.begun)
	done := len(h.Train)
	each := took / time.Duration(done-p.from)
	left := (each * time.Duration(p.epochs-done)).Round(time.Second)
	fmt.Fprintf(p.out, "epoch %*d/%d  loss %.4f  held-out accuracy %5.2f%%  %6.0f images/s  %v left\n",
		len(fmt.Sprint(p.epochs)), done, p.epochs, h.Train[done-1], 100*h.Accuracy[done-1], float64(p.images)/max(each.Seconds(), 1e-9), left)
}
