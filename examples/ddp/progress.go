package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// progress shows how the training goes: on a terminal as one line that is
// written again and again, elsewhere as a line an epoch.
type progress struct {
	out      io.Writer // nil: nothing is shown
	terminal func() (columns int, ok bool)

	epochs, images int // of the run
	size           int
	begun          time.Time
	from           int // the first epoch

	done     int // images of this rank since begun
	loss     float64
	seen     int // images in loss
	accuracy float64
	shown    time.Time
}

func newProgress(f *os.File, show bool, c *config, from, images, size int) *progress {
	p := &progress{
		epochs: c.epochs, images: images, size: size, from: from, begun: time.Now(), accuracy: -1,
		terminal: func() (int, bool) {
			columns, _, err := term.GetSize(int(f.Fd()))
			return columns, err == nil && columns >= minColumns
		},
	}
	if show {
		p.out = f
	}
	return p
}

const (
	minColumns  = 40
	refresh     = 100 * time.Millisecond // as often as the eye follows
	showAverage = 0.9                    // weight of the past in the loss of the bar
)

// step counts a step's images and, on a terminal, draws the bar.
func (p *progress) step(loss float64, images int) {
	if p.out == nil || images == 0 {
		return
	}
	p.done += images
	mean := loss / float64(images)
	if p.seen == 0 {
		p.loss = mean
	}
	p.seen += images
	p.loss = showAverage*p.loss + (1-showAverage)*mean
	if now := time.Now(); now.Sub(p.shown) >= refresh {
		if columns, ok := p.terminal(); ok {
			p.shown = now
			fmt.Fprint(p.out, "\r"+p.bar(columns, now)+"\x1b[K")
		}
	}
}

// epoch is called with what all ranks know after an epoch.
func (p *progress) epoch(h *history) {
	if p.out == nil {
		return
	}
	last := len(h.Train) - 1
	p.accuracy = h.Accuracy[last]
	if _, ok := p.terminal(); ok {
		return
	}
	now := time.Now()
	speed, eta := p.speed(now)
	fmt.Fprintf(p.out, "epoch %*d/%d  loss %.4f  held-out accuracy %5.2f%%  %6.0f images/s  ETA %s\n",
		len(fmt.Sprint(p.epochs)), last+1, p.epochs, h.Train[last], 100*p.accuracy, speed, clock(eta))
}

// end leaves the bar as it is at the end.
func (p *progress) end() {
	if p.out == nil {
		return
	}
	if columns, ok := p.terminal(); ok {
		fmt.Fprint(p.out, "\r"+p.bar(columns, time.Now())+"\x1b[K\n")
	}
}

// share is how much of the run is done, from this rank's share of the images.
func (p *progress) share() float64 {
	return min(1, float64(p.done*p.size)/float64(p.images*(p.epochs-p.from)))
}

func (p *progress) speed(now time.Time) (imagesPerSecond float64, left time.Duration) {
	took := now.Sub(p.begun)
	if share := p.share(); share > 0 {
		left = time.Duration(float64(took) * (1 - share) / share)
	}
	return float64(p.done*p.size) / max(took.Seconds(), 1e-9), left
}

// bar is the line for a terminal of the given width. Loss is this rank's,
// smoothed; accuracy that of all ranks after the last epoch.
func (p *progress) bar(columns int, now time.Time) string {
	share := p.share()
	speed, eta := p.speed(now)
	epoch := min(p.epochs, p.from+1+int(share*float64(p.epochs-p.from)))
	front := fmt.Sprintf("epoch %*d/%d ", len(fmt.Sprint(p.epochs)), epoch, p.epochs)
	back := fmt.Sprintf(" %3.0f%%", 100*share)
	accuracy := ""
	if p.accuracy >= 0 {
		accuracy = fmt.Sprintf("accuracy %.1f%%", 100*p.accuracy)
	}
	const least = 8 // columns of the bar itself
	for _, field := range []string{fmt.Sprintf("loss %.4f", p.loss), accuracy, fmt.Sprintf("%.0f images/s", speed), "ETA " + clock(eta)} {
		if field != "" && len(front)+least+len(back)+2+len(field) < columns {
			back += "  " + field
		}
	}
	width := min(40, columns-1-len(front)-len(back))
	full := int(share * float64(width))
	return front + strings.Repeat("━", full) + strings.Repeat("─", width-full) + back
}

func clock(d time.Duration) string {
	d = d.Round(time.Second)
	return fmt.Sprintf("%d:%02d", int(d.Minutes()), int(d.Seconds())%60)
}
