package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// python is Debian's.
const python = "/usr/bin/python3"

// TestShort is a small part of what "make interop" does.
func TestShort(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: make interop has it")
	}
	if err := exec.Command(python, "-c", "import torch.distributed").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch.distributed': %v", python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch.distributed': %v", python, err)
	}
	x, err := run(context.Background(), options{
		python: python, short: true, seed: 1, only: "^Go on 1|c10d store|two devices|killed|DETAIL, Go on 0|mismatch on 2, Go on .0", log: t.Output(),
	})
	require.NoError(t, err)
	require.Empty(t, x.Unexplained)
	names := make([]string, len(x.Jobs))
	for i, j := range x.Jobs {
		names[i] = j.Name
	}
	require.Contains(t, names, "Go on 1")
	require.Contains(t, names, "store: c10d store")
	require.Contains(t, names, "DETAIL, Go on 0")
	require.Contains(t, names, "mismatch on 2, Go on [0]")
	compared := 0
	for _, c := range x.Cells {
		compared += c.Compared
	}
	require.Greater(t, compared, 500)
}

// releases are the versions whose refusals were read off real groups.
var releases = map[version]int{113: 190, 206: 263}

func takenBy(v version) []script.Line {
	return slices.DeleteFunc(cells(), func(l script.Line) bool { return refusal(v, l) != "" })
}

func TestRefusals(t *testing.T) {
	for v, want := range releases {
		require.Len(t, takenBy(v), want, "PyTorch %v", v)
	}
	for _, l := range cells() {
		if refusal(113, l) == "" {
			require.Empty(t, refusal(206, l), "2.6 does what 1.13 does: %+v", l)
		}
	}
}

// TestScripts parses every script, and wants each cell with no, one and an odd
// number of elements, and a tensor of more than two segments a rank.
func TestScripts(t *testing.T) {
	parse := func(t *testing.T, lines []script.Line, size int) []script.Line {
		return must.Get(script.Parse(bytes.NewReader(text(lines)), size))
	}
	for v := range releases {
		taken := takenBy(v)
		for size := 2; size <= 5; size++ {
			t.Run(fmt.Sprintf("%v, %d ranks", v, size), func(t *testing.T) {
				parse(t, sample(v, taken, size), size)
				for seed := range uint64(20) {
					require.Len(t, parse(t, random(v, taken, size, 500, seed), size), 500)
				}
				lines := parse(t, full(v, taken, size), size)
				type key struct{ op, dtype, reduce, what string }
				found := map[key]bool{}
				tags := map[uint32]bool{}
				for _, l := range lines {
					n := 1
					for _, d := range append(l.Shape, slices.Concat(l.Shapes...)...) {
						n *= d
					}
					what := "odd"
					switch {
					case slices.Contains(l.Shape, 0):
						what = "none"
						require.Empty(t, emptyRefusal(v, l.Op))
					case n == 1:
						what = "one"
					case n%2 == 0:
						what = "even"
					}
					found[key{l.Op, l.DType, l.Reduce, what}] = true
					d, err := tensor.ParseDType(l.DType)
					if err == nil && n*d.Size() > 2*size<<20 {
						found[key{l.Op, "", "", "segments"}] = true
					}
					if l.Op == "recv_any" {
						require.False(t, tags[l.Tag], "two lines may take each other's message")
						tags[l.Tag] = true
					}
				}
				for _, c := range taken {
					if c.Op == "barrier" || c.Op == "all_reduce_coalesced" {
						continue
					}
					require.True(t, found[key{c.Op, c.DType, c.Reduce, "one"}], "%+v", c)
					require.True(t, found[key{c.Op, c.DType, c.Reduce, "odd"}], "%+v", c)
					require.Equal(t, emptyRefusal(v, c.Op) == "", found[key{c.Op, c.DType, c.Reduce, "none"}], "%+v", c)
				}
				for _, op := range []string{"all_reduce", "reduce", "broadcast", "send_recv", "recv_any"} {
					require.True(t, found[key{op, "", "", "segments"}], op)
				}
			})
		}
	}
}

// TestQuick compares the jobs of quick runs with all: every environment is in them, and every job is
// compared with one of PyTorch ranks alone.
func TestQuick(t *testing.T) {
	for v, want := range map[version]int{113: 28, 206: 31} {
		count := func(quick bool) (kinds map[string]bool, n int) {
			kinds = map[string]bool{}
			for _, same := range jobs(v, takenBy(v), 1, quick, false) {
				require.Equal(t, "PyTorch alone", same[0].Name)
				require.Greater(t, len(same), 1)
				n += len(same)
				for _, j := range same[1:] {
					require.NotEmpty(t, j.Kind)
					kinds[j.Kind] = true
				}
			}
			return kinds, n
		}
		every, all := count(false)
		kinds, n := count(true)
		require.Equal(t, want, n, "PyTorch %v", v)
		require.Less(t, n, all)
		for kind := range every {
			matrix := strings.Contains(kind, "in every place") || strings.HasSuffix(kind, "Go alone")
			require.True(t, matrix || kinds[kind], kind)
		}
	}
}

// TestGroupsInGroups checks that every such script has operations in groups of each kind while
// others exist. Members of a local group must be in equally many groups, because PyTorch makes
// its name from that number.
func TestGroupsInGroups(t *testing.T) {
	for v := range releases {
		for size := 4; size <= 6; size++ {
			for _, local := range []bool{false, true} {
				lines := must.Get(script.Parse(bytes.NewReader(text(inGroups(v, takenBy(v), size, local))), size))
				in, memberships, latest := map[string]int{}, make([]int, size), ""
				elder := 0 // operations in groups that are not the latest
				for _, l := range lines {
					if l.Op != "new_group" {
						in[l.Group]++
						if l.Group != latest {
							elder++
						}
						continue
					}
					latest = l.Name
					require.Equal(t, local, l.Local)
					for _, r := range l.Ranks {
						require.True(t, !local || memberships[r] == memberships[l.Ranks[0]], "%s: %v", l.Name, memberships)
					}
					for _, r := range l.Ranks {
						memberships[r]++
					}
				}
				for name, n := range in {
					require.Greater(t, n, 3, name)
				}
				require.Contains(t, in, "grandchild")
				require.Greater(t, elder, len(lines)/3)
			}
		}
	}
}

// TestInDetail: what PyTorch 2 cannot do under DETAIL is left out, nothing else.
func TestInDetail(t *testing.T) {
	p2p := func(l script.Line) bool { return l.Op == "send_recv" || l.Op == "recv_any" }
	for size := 2; size <= 4; size++ {
		all := sample(206, takenBy(206), size)
		left := inDetail(206, all, size)
		require.Equal(t, all, inDetail(113, all, size))
		without := func(lines []script.Line) []script.Line {
			return slices.DeleteFunc(slices.Clone(lines), p2p)
		}
		require.Equal(t, without(all), without(left))
		require.True(t, slices.ContainsFunc(left, p2p))
		for _, l := range left {
			require.False(t, p2p(l) && l.Group == "" && size > 2)
		}
		if size == 2 {
			require.Equal(t, all, left)
		}
	}
}

// TestJudge holds judge to what it must refuse.
func TestJudge(t *testing.T) {
	good, usual, other := script.Line{Op: "all_reduce", Shape: []int{8}}, script.Line{Op: "all_reduce", Shape: []int{5}}, script.Line{Op: "barrier"}
	j := job{Size: 3, Go: []int{0, 1}, lines: []script.Line{good, usual}, own: map[int][]script.Line{2: {good, other}}}
	said := func(errors ...string) [][]script.Result {
		got := make([][]script.Result, len(errors))
		for r, e := range errors {
			got[r] = []script.Result{{SHA256: "a"}, {I: 1, Error: e}}
		}
		return got
	}
	one, two := `rank 0 of group "0" calls all_reduce, but rank 2 calls something`, `rank 1 of group "0" calls all_reduce, but rank 2 calls something`
	torch := "Rank 2 is running collective: BARRIER, but Rank 0 is running collective: ALLREDUCE"
	require.NoError(t, judge(j, 2, said(one, two, torch)))
	require.Error(t, judge(j, 2, said("", two, torch)), "no error")
	require.Error(t, judge(j, 2, said(one, two, "")), "no error of PyTorch")
	require.Error(t, judge(j, 2, said(one, `rank 1 of group "0" calls all_reduce, but rank 0 calls something`, torch)), "the wrong rank")
	j.Go = []int{0, 1, 2}
	three := `rank 2 of group "0" calls barrier, but ranks 0, 1 call all_reduce`
	require.Error(t, judge(j, 2, said(one, two, three)), "Go ranks know what Go ranks call")
	all := said(strings.ReplaceAll(one, "something", "barrier"), strings.ReplaceAll(two, "something", "barrier"), three)
	require.NoError(t, judge(j, 2, all))
	all[1][0].SHA256 = "b"
	require.Error(t, judge(j, 2, all), "another result where all agree")
}

func TestADifferenceIsReported(t *testing.T) {
	lines := []script.Line{{Op: "all_reduce", DType: "float32", Reduce: "sum"}, {Op: "barrier", DType: "float32"}}
	want := [][]script.Result{{{I: 0, Op: "all_reduce", SHA256: "a"}, {I: 1, Op: "barrier"}}}
	outcome := func(got ...script.Result) *Outcome {
		x := &Outcome{Label: "1.13.1", Cells: []Cell{
			{Op: "all_reduce", DType: "float32", Reduce: "sum"},
			{Op: "all_reduce", DType: "int16", Reduce: "sum", Reason: "no int16"},
			{Op: "reduce", DType: "int16", Reduce: "sum", Reason: "no int16"},
			{Op: "barrier", DType: "float32"},
		}}
		var r Job
		x.compare(&r, job{Name: "Go on 0", Size: 1, lines: lines}, want, [][]script.Result{got})
		r.Kind = "one rank"
		x.job(r)
		return x
	}
	same := outcome(want[0]...)
	require.Empty(t, same.Unexplained)
	other := outcome(script.Result{I: 0, Op: "all_reduce", SHA256: "b"}, script.Result{I: 1, Op: "barrier", Error: "no"})
	require.Len(t, other.Unexplained, 2)
	require.Contains(t, other.Unexplained[0], "digest b")
	require.Contains(t, other.Unexplained[1], "no")

	var b strings.Builder
	require.NoError(t, markdown(&b, []*Outcome{same, other}))
	require.Contains(t, b.String(), "| `all_reduce` | equal [1] | 1 of 1 results differ [1] |")
	require.Contains(t, b.String(), "| `reduce` | no [1] | no [1] |")
	require.Contains(t, b.String(), "1. no int16")
	require.Contains(t, b.String(), "| one rank | yes | 1 of 1 jobs failed |")
}

func TestVersions(t *testing.T) {
	for text, want := range map[string]version{"1.13.0a0": 113, "2.6.0+debian": 206, "2.11.0+cu130": 211} {
		require.Equal(t, want, must.Get(parseVersion(text)))
	}
	for _, text := range []string{"", "2", "x.1", "2.y"} {
		require.Error(t, must.Err(parseVersion(text)), text)
	}
}
