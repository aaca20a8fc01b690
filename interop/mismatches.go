package main

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/script"
)

// mismatches lets one rank make another call under TORCH_DISTRIBUTED_DEBUG=DETAIL. Every rank
// must get an error that names the other side, and the operations before and after must work.
func (l *lab) mismatches(ctx context.Context, only *regexp.Regexp, quick bool) []Job {
	good := script.Line{Op: "all_reduce", Shape: []int{8}, Fill: "frac"}
	usual := script.Line{Op: "all_reduce", Shape: []int{5}}
	// The calls of the odd rank.
	odd := []script.Line{
		{Op: "all_reduce", Shape: []int{5}, DType: "int32"}, // as many bytes
		{Op: "all_reduce", Shape: []int{6}},
		{Op: "all_reduce", Shape: []int{5, 1}},
		{Op: "broadcast", Shape: []int{5}},
		{Op: "barrier"},
	}
	lines, others := []script.Line{good}, []script.Line{good}
	for _, o := range odd {
		lines = append(lines, usual, good)
		others = append(others, o, good)
	}
	const kind = "3 ranks, one calls something else under " + detail + ": all say so, and go on"
	var all []Job
	for _, m := range []struct {
		ours  []int
		odd   int
		again bool // not in quick runs
	}{
		{nil, 1, true}, {[]int{0}, 0, true}, {[]int{0}, 2, false},
		{[]int{1, 2}, 2, false}, {[]int{1, 2}, 0, true}, {[]int{0, 1, 2}, 1, true},
	} {
		j := job{
			Kind: kind, Name: fmt.Sprintf("mismatch on %d, Go on %v", m.odd, m.ours), Size: 3, Go: m.ours,
			Store: storeRank0, Env: []string{detail}, lines: lines, own: map[int][]script.Line{m.odd: others},
		}
		if !only.MatchString(j.Name) || quick && m.again {
			continue
		}
		start := time.Now()
		x := Job{Kind: j.Kind, Name: j.Name, Size: j.Size, Go: j.Go, Lines: len(j.lines)}
		if len(m.ours) == 0 {
			x.Kind = "" // of PyTorch alone: what this is held against
		}
		got, err := l.run(ctx, j)
		if err == nil {
			err = judge(j, m.odd, got)
		}
		if err != nil {
			x.Error = err.Error()
		}
		x.Seconds = time.Since(start).Seconds()
		all = append(all, x)
	}
	return all
}

// judge checks the errors of a job's ranks where rank odd differed.
func judge(j job, odd int, got [][]script.Result) error {
	for r, results := range got {
		for i, x := range results {
			own, other := j.script(r)[i], j.script(odd)[i]
			peer := odd
			if r == odd {
				peer = (odd + 1) % j.Size
				other = j.lines[i]
			}
			if i%2 == 0 {
				if x.Error != "" || x.SHA256 != got[0][0].SHA256 {
					return fmt.Errorf("rank %d, operation %d, on which all agree: %+v", r, i, x)
				}
				continue
			}
			var want []string
			if j.isGo(r) {
				// A PyTorch rank does not send its call when the lengths differ.
				want = []string{fmt.Sprintf("rank %d of group", r), own.Op}
				if j.isGo(peer) || len(own.Shape) == len(other.Shape) {
					want = append(want, other.Op)
				}
			} else {
				want = []string{fmt.Sprintf("Rank %d is running", r), "but Rank"}
			}
			if r != odd {
				want = append(want, fmt.Sprintf("ank %d", odd)) // Rank or rank
			}
			for _, w := range want {
				if !strings.Contains(x.Error, w) {
					return fmt.Errorf("rank %d, operation %d: %q does not say %q", r, i, x.Error, w)
				}
			}
		}
	}
	return nil
}
