package agent

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"
)

const (
	// maxLine is the longest line. Longer lines are cut. It is a pipe's default capacity
	// on Linux.
	maxLine = 64 << 10

	// tailLines is the number of last lines that are kept of each rank's standard error,
	// and tailWidth their length: the first goroutine of a panic or a Python traceback.
	tailLines = 20
	tailWidth = 1 << 10
)

// output writes all ranks' output, a line at a time.
type output struct {
	mu             sync.Mutex
	stdout, stderr io.Writer

	lost sync.Once // the first error was logged
	logf func(format string, args ...any)
}

// written logs the first error of a write, such as that of a full disk.
func (o *output) written(err error) {
	if err != nil {
		o.lost.Do(func() { o.logf("output of the ranks is lost: %v", err) })
	}
}

func newOutput(stdout, stderr io.Writer) *output {
	if stdout == nil {
		stdout = io.Discard
	}
	if stderr == nil {
		stderr = io.Discard
	}
	return &output{stdout: stdout, stderr: stderr, logf: func(string, ...any) {}}
}

// prefix marks a rank's lines.
func prefix(rank int, color bool) string {
	if !color {
		return fmt.Sprintf("[rank%d] ", rank)
	}
	// The six colours of ANSI between black and white.
	return fmt.Sprintf("\x1b[%dm[rank%d]\x1b[0m ", 31+(rank+5)%6, rank)
}

// rankOutput is the output of one rank.
type rankOutput struct {
	out    *output
	prefix string // empty: pass bytes on as they come
	show   bool

	mu    sync.Mutex
	log   *os.File // nil if there is none; the agent closes it
	tail  []string
	torn  bool      // the last of tail has no end yet
	wrote time.Time // when standard error last had something
	crash crash
}

// crash is the last Go panic or Python traceback in a rank's standard error.
type crash struct {
	head   []string // its first lines
	why    string   // the line that says what happened; "" if it has not come
	python bool
}

// traceback begins the first line of a Python traceback.
const traceback = "Traceback (most recent call last):"

// rankPrefix is the prefix that PyTorch adds to each line of a traceback.
var rankPrefix = regexp.MustCompile(`^\[rank\d+\]: ?`)

// line takes the next line of standard error.
func (c *crash) line(text string) {
	text = rankPrefix.ReplaceAllString(strings.TrimSuffix(text, "\r"), "")
	switch {
	case strings.HasPrefix(text, "panic: "), strings.HasPrefix(text, "fatal error: "), strings.HasPrefix(text, "unexpected fault address "):
		*c = crash{head: []string{text}, why: text}
	case strings.HasPrefix(text, traceback):
		*c = crash{head: []string{text}, python: true}
	case len(c.head) > 0:
		if len(c.head) < tailLines {
			c.head = append(c.head, text)
		}
		if c.python && c.why == "" && text != "" && text[0] != ' ' && text[0] != '\t' {
			c.why = text
			if len(c.head) == tailLines {
				c.head[tailLines-1] = text
			}
		}
	}
}

// copy passes on the output from r until its end.
func (o *rankOutput) copy(r io.Reader, isErr bool) {
	w := o.out.stdout
	if isErr {
		w = o.out.stderr
	}
	in := bufio.NewReaderSize(r, maxLine)
	for {
		piece, err := o.next(in)
		if len(piece) > 0 {
			o.record(piece, isErr)
			if o.show {
				o.write(w, piece)
			}
		}
		if err != nil {
			return
		}
	}
}

// next returns a line with its end or a piece of a line. Without a prefix it returns all
// bytes that have come.
func (o *rankOutput) next(in *bufio.Reader) ([]byte, error) {
	if o.prefix != "" {
		line, err := in.ReadSlice('\n')
		if err == bufio.ErrBufferFull {
			err = nil
		}
		return line, err
	}
	if _, err := in.Peek(1); err != nil {
		return nil, err
	}
	piece, err := in.Peek(in.Buffered())
	piece = append([]byte(nil), piece...)
	in.Discard(len(piece))
	return piece, err
}

// write writes a line in one call: other writers to the same file cannot cut it.
func (o *rankOutput) write(w io.Writer, piece []byte) {
	line := append([]byte(o.prefix), piece...)
	if o.prefix != "" && line[len(line)-1] != '\n' {
		line = append(line, '\n')
	}
	o.out.mu.Lock()
	_, err := w.Write(line)
	o.out.mu.Unlock()
	o.out.written(err)
}

// record keeps a piece in the log and, of standard error, its last lines.
func (o *rankOutput) record(piece []byte, isErr bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.log != nil {
		_, err := o.log.Write(piece)
		o.out.written(err)
	}
	if !isErr {
		return
	}
	o.wrote = time.Now()
	for line := range strings.Lines(string(piece)) {
		text, whole := strings.CutSuffix(line, "\n")
		if o.torn {
			text = o.tail[len(o.tail)-1] + text
			o.tail = o.tail[:len(o.tail)-1]
		}
		text = text[:min(len(text), tailWidth)]
		o.tail = append(o.tail, text)
		o.tail = o.tail[max(0, len(o.tail)-tailLines):]
		o.torn = !whole
		if whole {
			o.crash.line(text)
		}
	}
}

func (o *rankOutput) lastLines() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.tail...)
}

// crashed returns the first lines of the rank's panic or traceback, nil if there is none.
func (o *rankOutput) crashed() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.crash.head...)
}

// whyCrashed returns the line of the rank's panic or traceback that says what happened.
func (o *rankOutput) whyCrashed() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.crash.why
}

// lastWrote returns when standard error last had something.
func (o *rankOutput) lastWrote() time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.wrote
}
