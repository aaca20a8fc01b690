package gomlx_test

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
)

// mostLines is how many lines of a program may change or be new.
const mostLines = 10

// difference returns the lines that are in one program only: "-" for a, "+" for b, and ".." between
// places.
func difference(a, b []string) (lines []string, added int) {
	// common[i][j] is the length of the longest common subsequence of a[i:] and b[j:].
	common := make([][]int, len(a)+1)
	for i := range common {
		common[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if common[i][j] = max(common[i+1][j], common[i][j+1]); a[i] == b[j] {
				common[i][j] = common[i+1][j+1] + 1
			}
		}
	}
	apart := false
	add := func(line string) {
		if apart && len(lines) > 0 {
			lines = append(lines, "..")
		}
		lines, apart = append(lines, line), false
	}
	for i, j := 0, 0; i < len(a) || j < len(b); {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			i, j, apart = i+1, j+1, true
		case i < len(a) && (j == len(b) || common[i+1][j] >= common[i][j+1]):
			add("-" + a[i])
			i++
		default:
			add("+" + b[j])
			j, added = j+1, added+1
		}
	}
	return lines, added
}

func linesOf(t *testing.T, file string) []string {
	t.Helper()
	return strings.Split(string(must.Get(os.ReadFile(file))), "\n")
}

// TestDifference holds the programs of testdata to mostLines, and the package's documentation to them.
func TestDifference(t *testing.T) {
	lines, added := difference(linesOf(t, "testdata/single/main.go"), linesOf(t, "testdata/parallel/main.go"))
	require.LessOrEqual(t, added, mostLines, strings.Join(lines, "\n"))
	require.Positive(t, added)
	want := "//\t" + strings.Join(lines, "\n//\t") + "\n"
	doc := must.Get(os.ReadFile("doc.go"))
	require.Contains(t, string(doc), want, "doc.go has another difference")
}

// TestPrograms runs the programs: parallel prints single's loss.
func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"single", "parallel"} {
		out, err := exec.CommandContext(t.Context(), "go", "build", "-o", dir, "./testdata/"+name).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	run := func(name string, env ...string) float64 {
		cmd := exec.CommandContext(t.Context(), filepath.Join(dir, name))
		cmd.Env = append(os.Environ(), env...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out.Bytes())
			return -1
		}
		m := regexp.MustCompile(`loss (\S+)`).FindStringSubmatch(out.String())
		if m == nil {
			t.Errorf("%s printed %q", name, out.String())
			return -1
		}
		loss, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Error(err)
		}
		return loss
	}
	single := run("single")
	require.Positive(t, single)
	require.Equal(t, single, run("parallel"), "alone")
	const size = 2
	host, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	var losses [size]float64
	var ranks sync.WaitGroup
	for r := range size {
		ranks.Go(func() {
			losses[r] = run("parallel", "RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(size), "MASTER_ADDR="+host, "MASTER_PORT="+port)
		})
	}
	ranks.Wait()
	for r, loss := range losses {
		require.InDelta(t, single, loss, 1e-2*single+2e-6, "rank %d", r)
	}
}
