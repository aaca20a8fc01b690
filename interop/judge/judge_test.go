package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// python is Debian's.
const python = "/usr/bin/python3"

// TestShort is a small part of what "make judge" does.
func TestShort(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: make judge has it")
	}
	if err := exec.Command(python, "-c", "import torch.distributed").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch.distributed': %v", python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch.distributed': %v", python, err)
	}
	j, err := setup(t.Context(), options{python: python, only: `\.test_(all_reduce_sum|send_recv|all_to_all)$`, wires: "memory,DETAIL", parallel: 2, limit: time.Minute, log: t.Output()})
	require.NoError(t, err)
	defer os.RemoveAll(j.dir)
	x := &Outcome{Absent: j.has.Absent}
	require.NoError(t, j.run(t.Context(), x))
	var b strings.Builder
	require.True(t, x.summary(&b), b.String())
	require.Equal(t, counts{passed: 3}, x.count("distributed_test", "memory"))
	require.Equal(t, counts{passed: 3}, x.count("distributed_test", "DETAIL"))
}

// TestVerdicts: what fails, and what excuses it.
func TestVerdicts(t *testing.T) {
	defer func(old []expectation) { expected = old }(expected)
	expected = []expectation{{regexp.MustCompile(`\.b$`), "tcp", "a reason"}, {regexp.MustCompile(`\.c$`), "", otherText}}
	texts := []text{{"want", "got"}}
	for _, c := range []struct {
		name, wire, status, gloo string
		texts                    []text
		want                     Verdict
		reason                   string
	}{
		{name: "s.a", status: "pass", gloo: "pass", want: Passed},
		{name: "s.a", status: "fail", gloo: "pass", want: Failed},
		{name: "s.a", status: "fail", gloo: "fail", want: Both},
		{name: "s.a", status: "fail", gloo: "skip", want: Failed},
		{name: "s.a", status: "skip", gloo: "pass", want: Failed},
		{name: "s.a", status: "pass", gloo: "pass", texts: texts, want: Failed},
		{name: "s.b", wire: "tcp", status: "fail", gloo: "pass", want: Expected, reason: "a reason"},
		{name: "s.b", wire: "memory", status: "fail", gloo: "pass", want: Failed},
		{name: "s.b", wire: "tcp", status: "pass", gloo: "pass", want: Passed, reason: "a reason"},
		{name: "s.b", wire: "tcp", status: "pass", gloo: "pass", texts: texts, want: Failed},
		{name: "s.c", wire: "tcp", status: "pass", gloo: "pass", texts: texts, want: Expected, reason: otherText},
		{name: "s.c", wire: "tcp", status: "fail", gloo: "pass", texts: texts, want: Failed},
	} {
		got := verdict(Case{Name: c.name, Wire: c.wire, Status: c.status, Gloo: c.gloo, Texts: c.texts})
		require.Equal(t, c.want, got.Verdict, "%+v", c)
		require.Equal(t, c.reason, got.Reason, "%+v", c)
	}
}

// TestReasons: the list of expected failures stays short, and each row has a reason.
func TestReasons(t *testing.T) {
	why := map[string]bool{}
	for _, e := range expected {
		require.NotEmpty(t, e.why)
		why[e.why] = true
	}
	require.LessOrEqual(t, len(why), 12)
}

// TestTable: a failure is in the table, and the page keeps what is around it.
func TestTable(t *testing.T) {
	x := &Outcome{Label: "1.13.1", Cases: []Case{
		{Name: "s.a", Wire: "memory", Verdict: Passed}, {Name: "s.b", Wire: "memory", Verdict: Failed},
		{Name: "s.a", Wire: "tcp", Verdict: Expected, Reason: "a reason"},
	}, Speed: []Speed{{4, 200, 20}, {16 << 20, 17e3, 4e3}}}
	got := markdown([]*Outcome{x})
	for _, row := range []string{
		"| 1.13.1 | `s` | 1 passed, 1 FAILED | 0/1/0 | | |\n", "* 1: a reason.\n", "| 4 B | 200 us | 20 us |\n| 16 MiB | 17.0 ms | 4.0 ms |\n",
	} {
		require.Contains(t, got, row)
	}
	require.False(t, x.summary(new(strings.Builder)))

	file, page := filepath.Join(t.TempDir(), "x.json"), filepath.Join(t.TempDir(), "page.md")
	require.NoError(t, os.WriteFile(file, []byte(`{"Label":"2","Cases":[{"Name":"s.a","Wire":"memory","Status":"pass"}]}`), 0o600))
	require.NoError(t, os.WriteFile(page, []byte("before\n<!-- judge -->\nold\n<!-- judge end -->\nafter\n"), 0o600))
	require.NoError(t, tabulate([]string{file}, page))
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Regexp(t, "(?s)^before\n<!-- judge -->\n.* 1/0/0 .*<!-- judge end -->\nafter\n$", string(text))
	require.NotContains(t, string(text), "old")
	require.Error(t, tabulate([]string{file}, file), "a page without the lines")
}

// TestAWorkerThatHangs: the case fails, its children end, and the other cases go on.
func TestAWorkerThatHangs(t *testing.T) {
	dir := t.TempDir()
	program := fmt.Sprintf(`echo '{"cases":["A.hangs","A.ends","A.passes"]}'
while read case; do case $case in
A.hangs) sleep 1000 & echo $! >%s/child; wait ;;
A.ends) echo "what it said" >&2; exit 3 ;;
*) echo "{\"case\":\"$case\",\"status\":\"pass\"}" ;;
esac; done`, dir)
	j := &judge{options: options{limit: 2 * time.Second}, dir: dir, python: []string{"sh", "-c", program}, slots: make(chan struct{}, 1)}
	got := map[string]answer{}
	require.NoError(t, j.work(context.Background(), setting{suite: "s"}, []string{"A.hangs", "A.ends", "A.passes"}, func(a answer) { got[a.Case] = a }))
	require.Contains(t, got["A.hangs"].Text, "it did not end, and was killed")
	require.Contains(t, got["A.ends"].Text, "its process ended")
	require.Contains(t, got["A.ends"].Text, "what it said")
	require.Equal(t, "pass", got["A.passes"].Status)
	child, err := os.ReadFile(filepath.Join(dir, "child"))
	require.NoError(t, err)
	stat, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(child)), "stat"))
	require.True(t, err != nil || strings.Contains(string(stat), ") Z "), "the child runs: %s", stat)
}
