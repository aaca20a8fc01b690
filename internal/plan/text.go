package plan

import (
	"fmt"
	"strings"
)

var (
	kindNames   = [...]string{"send", "recv", "wait", "reduce", "copy"}
	bufferNames = [...]string{"out", "in", "scratch"}
)

// String returns the step's name, in lower case.
func (k Kind) String() string {
	if int(k) >= len(kindNames) {
		return fmt.Sprintf("kind(%d)", uint8(k))
	}
	return kindNames[k]
}

// String returns the buffer's name, in lower case.
func (b Buffer) String() string {
	if int(b) >= len(bufferNames) {
		return fmt.Sprintf("buffer(%d)", uint8(b))
	}
	return bufferNames[b]
}

// String returns the step as a line of text: its kind, request and peer, and byte ranges, the
// result first.
func (s Step) String() string {
	to := fmt.Sprintf("%v[%d:%d]", s.Buf, s.Off, s.Off+s.Len)
	switch s.Kind {
	case Send:
		return fmt.Sprintf("send   #%d to %d %s", s.Req, s.Peer, to)
	case Recv:
		return fmt.Sprintf("recv   #%d from %d %s", s.Req, s.Peer, to)
	case Wait:
		return fmt.Sprintf("wait   #%d", s.Req)
	}
	return fmt.Sprintf("%-6v %s %v[%d:%d]", s.Kind, to, s.Src, s.SrcOff, s.SrcOff+s.Len)
}

// String returns the plan as text: a line with the requests and scratch, and one for each step.
func (p *Plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "requests %d, scratch %d\n", p.Requests, p.Scratch)
	for _, s := range p.Steps {
		b.WriteString(s.String())
		b.WriteByte('\n')
	}
	return b.String()
}
