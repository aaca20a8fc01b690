package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/internal/plan"
)

// String returns the stage's name.
func (s Stage) String() string {
	switch s {
	case Before:
		return "inside, before"
	case Between:
		return "between clusters"
	case After:
		return "inside, after"
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

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

// file is a plan as it lies in a file: a line of JSON, and its checksum.
type file struct {
	Version  int
	Clusters []int   // by rank
	Weights  []int64 // by rank
	Plan     *Plan
}

const fileVersion = 2

// Export writes a plan of the layout.
func (l *Layout) Export(w io.Writer, p *Plan) error {
	body, err := json.Marshal(file{fileVersion, l.cluster, l.weights, p})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n%08x\n", body, crc32.ChecksumIEEE(body))
	return err
}

// maxFile bounds what Import reads.
const maxFile = 64 << 20

// Import reads a plan that Export has written for the same layout.
func (l *Layout) Import(r io.Reader) (*Plan, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("cluster: plan: %w", err)
	}
	body, sum, _ := bytes.Cut(text, []byte("\n"))
	switch {
	case len(text) > maxFile:
		return nil, fmt.Errorf("cluster: a plan of more than %d bytes", maxFile)
	case string(sum) != fmt.Sprintf("%08x\n", crc32.ChecksumIEEE(body)):
		return nil, errors.New("cluster: the plan is damaged: its checksum is wrong")
	}
	var f file
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, fmt.Errorf("cluster: plan: %w", err)
	}
	switch {
	case f.Version != fileVersion:
		return nil, fmt.Errorf("cluster: plan of version %d, want %d", f.Version, fileVersion)
	case !slices.Equal(f.Clusters, l.cluster) || !slices.Equal(f.Weights, l.weights):
		return nil, fmt.Errorf("cluster: the plan is for clusters %v with weights %v, these are %v with %v", f.Clusters, f.Weights, l.cluster, l.weights)
	case f.Plan == nil:
		return nil, errors.New("cluster: the file has no plan")
	}
	if err := l.Check(f.Plan.Call); err != nil {
		return nil, err
	}
	for i := range f.Plan.Steps {
		if err := l.checkStep(f.Plan, &f.Plan.Steps[i]); err != nil {
			return nil, fmt.Errorf("cluster: step %d of the plan: %w", i, err)
		}
	}
	return f.Plan, nil
}

// checkStep returns why an executor could not run a step.
func (l *Layout) checkStep(p *Plan, s *Step) error {
	if s.Finish {
		return nil
	}
	if s.Stage > After || s.Op > plan.OpBarrier || s.Src > plan.Scratch || s.Dst > plan.Scratch {
		return errors.New("no such stage, operation or buffer")
	}
	if len(s.Ranks) == 0 || s.Root < 0 || s.Root >= len(s.Ranks) || !slices.Contains(s.Ranks, p.Call.Rank) {
		return fmt.Errorf("ranks %v with root %d, for rank %d", s.Ranks, s.Root, p.Call.Rank)
	}
	for _, r := range s.Ranks {
		if r < 0 || r >= l.Ranks() {
			return fmt.Errorf("rank %d in a group of %d", r, l.Ranks())
		}
	}
	if s.Stage == Between && (len(s.Parts) > 1 || s.Op != plan.OpBarrier && len(s.Parts) == 0 || s.ID < 0) {
		return fmt.Errorf("%d parts, number %d", len(s.Parts), s.ID)
	}
	for _, x := range s.Parts {
		if x.Len < 0 || x.Src < 0 || x.Dst < 0 || x.From < 0 || x.From >= len(s.Ranks) || x.To < 0 || x.To >= len(s.Ranks) {
			return fmt.Errorf("part %+v", x)
		}
		if s.Dst == plan.Scratch && x.To == slices.Index(s.Ranks, p.Call.Rank) && x.Dst+x.Len > p.Scratch {
			return fmt.Errorf("part %+v, with %d bytes of scratch", x, p.Scratch)
		}
	}
	return nil
}
