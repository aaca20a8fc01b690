package cluster

import (
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/internal/plan"
)

// String returns the step as a line of text.
func (s *Step) String() string {
	if s.Finish {
		return fmt.Sprintf("%v: end of chunk %d", s.Stage, s.Chunk)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%v: chunk %d, %v of ranks %v", s.Stage, s.Chunk, s.Op, s.Ranks)
	if s.Stage == Between {
		fmt.Fprintf(&b, ", number %d", s.ID)
	}
	if s.Op.Rooted() {
		fmt.Fprintf(&b, ", root %d", s.Ranks[s.Root])
	}
	for _, p := range s.Parts {
		switch from := fmt.Sprintf("%v[%d:%d]", s.Src, p.Src, p.Src+p.Len); {
		case s.Src == s.Dst && p.Src == p.Dst:
			fmt.Fprintf(&b, " %s", from)
		default:
			fmt.Fprintf(&b, " %s to %v[%d:%d]", from, s.Dst, p.Dst, p.Dst+p.Len)
		}
		switch {
		case s.Stage == Between:
		case s.Op == plan.OpReduceScatter:
			fmt.Fprintf(&b, " on %d", s.Ranks[p.To])
		case s.Op == plan.OpAllGather:
			fmt.Fprintf(&b, " from %d", s.Ranks[p.From])
		default:
			fmt.Fprintf(&b, " %d to %d", s.Ranks[p.From], s.Ranks[p.To])
		}
	}
	return b.String()
}

// String returns the plan as text: a line with the scratch, and one for each step.
func (p *Plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "chunks %d, scratch %d\n", p.Chunks, p.Scratch)
	for i := range p.Steps {
		b.WriteString(p.Steps[i].String())
		b.WriteByte('\n')
	}
	return b.String()
}
