package main

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/c10d-go/c10d/internal/bytesize"
)

// bar is a target for an operation: one line of a file such as
//
//	# operation  ranks  sizes  peer  at least
//	all_reduce   2      4,1K   openmpi     1.5x
//	all_reduce   8      4      -           2us
//
// The last word is a factor, by which the operation must be faster than the peer, or a time
// that it must not exceed. Sizes are "-" for an operation without sizes; the peer is "-"
// for a time. Operations, ranks and sizes can be lists with commas.
type bar struct {
	table
	size   int
	peer   string
	factor float64
	most   float64 // us; 0 if there is a factor
}

// loadBars reads a file of bars for one dtype and kind of device.
func loadBars(file, dtype, device string) ([]bar, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []bar
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		text, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		some, err := parseBars(words, dtype, device)
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, n, err)
		}
		all = append(all, some...)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no bar in it", file)
	}
	return all, nil
}

func parseBars(words []string, dtype, device string) ([]bar, error) {
	if len(words) != 5 {
		return nil, fmt.Errorf("%d words: a line has operation, ranks, sizes, peer, and a factor such as 2x or a time such as 2us", len(words))
	}
	one := bar{peer: words[3]}
	number, unit := strings.TrimRight(words[4], "xus"), strings.TrimLeft(words[4], "0123456789.")
	value, err := strconv.ParseFloat(number, 64)
	switch {
	case err != nil || value <= 0 || unit != "x" && unit != "us":
		return nil, fmt.Errorf("%q is not a factor such as 2x or a time such as 2us", words[4])
	case (unit == "us") != (one.peer == "-"):
		return nil, fmt.Errorf("%q beside %q: a factor has a peer, a time has none (-)", words[4], one.peer)
	case unit == "us":
		one.most = value
	default:
		one.factor = value
	}
	sizes := sizeList{0}
	if words[2] != "-" {
		sizes = nil
		if err := sizes.Set(words[2]); err != nil {
			return nil, err
		}
	}
	var all []bar
	for _, op := range strings.Split(words[0], ",") {
		if !slices.Contains(benchOps(), op) {
			return nil, fmt.Errorf("unknown operation %q", op)
		}
		for _, ranks := range strings.Split(words[1], ",") {
			world, err := strconv.Atoi(ranks)
			if err != nil || world < 1 {
				return nil, fmt.Errorf("%q is not a number of ranks", ranks)
			}
			for _, size := range sizes {
				one.table, one.size = table{op, dtype, device, world}, size
				all = append(all, one)
			}
		}
	}
	return all, nil
}

// best returns the fastest record of a case, of one system or of any.
func (rs records) best(t table, size int, system string) (record, bool) {
	var found record
	for _, r := range rs.of(t) {
		if r.Size == size && (system == "" || r.System == system) && (found.P50 == 0 || r.P50 < found.P50) {
			found = r
		}
	}
	return found, found.P50 > 0
}

// listBars prints the cases of the bars, each once: ranks, operation and size. Programs read
// this to measure them.
func (b *bench) listBars(std stdio) error {
	bars, err := loadBars(b.bars, b.dtype, "")
	if err != nil {
		return err
	}
	type key struct {
		table
		size int
	}
	seen := map[key]bool{}
	for _, x := range bars {
		if k := (key{x.table, x.size}); !seen[k] {
			seen[k] = true
			if _, err := fmt.Fprintln(std.out, x.world, x.op, x.size); err != nil {
				return err
			}
		}
	}
	return nil
}

// reportBars prints which of the measured bars hold.
func (b *bench) reportBars(std stdio, ours, peers records) error {
	device := ""
	if !b.device.onCPU() {
		device = b.device.kind
	}
	bars, err := loadBars(b.bars, b.dtype, device)
	if err != nil {
		return err
	}
	hold, measured := 0, 0
	w := tabwriter.NewWriter(std.out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "\n# bars of %s\n", b.bars)
	fmt.Fprintln(w, "operation\tranks\tsize\tpeer\twanted\tseen\t")
	for _, x := range bars {
		our, ok := ours.best(x.table, x.size, "")
		peer, beside := peers.best(x.table, x.size, x.peer)
		if !ok || !beside && x.most == 0 {
			continue
		}
		measured++
		wanted, seen, holds := fmt.Sprintf("%gus", x.most), fmt.Sprintf("%.2fus", our.P50), our.P50 <= x.most
		if x.most == 0 {
			ratio := peer.P50 / our.P50
			wanted, seen, holds = fmt.Sprintf("%gx", x.factor), fmt.Sprintf("%.2fx", ratio), ratio >= x.factor
		}
		verdict := "missed"
		if holds {
			verdict = "holds"
			hold++
		}
		size := bytesize.Name(x.size)
		if x.size == 0 {
			size = "-"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\n", x.op, x.world, size, x.peer, wanted, seen, verdict)
	}
	fmt.Fprintf(w, "# %d of %d bars hold; %d more were not measured\n", hold, measured, len(bars)-measured)
	return w.Flush()
}
