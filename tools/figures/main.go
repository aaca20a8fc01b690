package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/tools/internal/faults"
)

// documents are the files with figures, from the root of the tree.
var documents = []string{"README.md", "docs/benchmarks.md", "docs/faults.md", "docs/tuning.md"}

func main() {
	log.SetFlags(0)
	log.SetPrefix("figures: ")
	files, err := render("..") // make figures runs this in tools
	if err != nil {
		log.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join("..", name), text, 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

// render returns what the documents and their pictures have to be, by name.
func render(root string) (map[string][]byte, error) {
	files := make(map[string][]byte)
	for _, name := range documents {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return nil, err
		}
		d := document{root: root, name: name, files: files}
		if files[name], err = d.fill(text); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return files, nil
}

var marked = regexp.MustCompile(`(?s)(<!-- figures (\w+) ([^>]*?) ?-->)(\n?).*?(<!-- figures end -->)`)

// document is a file with figures.
type document struct {
	root, name string
	files      map[string][]byte // pictures are added here
}

// fill replaces what is between the comments.
func (d *document) fill(text []byte) ([]byte, error) {
	var failed error
	out := marked.ReplaceAllFunc(text, func(found []byte) []byte {
		m := marked.FindSubmatch(found)
		made, err := d.figure(string(m[2]), string(m[3]))
		if err != nil && failed == nil {
			failed = fmt.Errorf("%s: %w", m[1], err)
		}
		return slices.Concat(m[1], m[4], []byte(made), m[4], m[5])
	})
	if n := bytes.Count(text, []byte("<!-- figures ")); failed == nil && n != 2*len(marked.FindAll(text, -1)) {
		failed = fmt.Errorf("%d comments for figures: each needs an end", n)
	}
	return out, failed
}

// query is what a comment asks for.
type query struct {
	runs, ops, sizes []string
	ranks            []int
	file, of, on     string
}

var argument = regexp.MustCompile(`(\w+)=(?:"([^"]*)"|(\S*))`)

func (d *document) figure(kind, args string) (string, error) {
	var q query
	for _, m := range argument.FindAllStringSubmatch(args, -1) {
		value := m[2] + m[3]
		switch key := m[1]; key {
		case "run":
			q.runs = strings.Split(value, ",")
		case "op":
			q.ops = strings.Split(value, ",")
		case "sizes":
			q.sizes = strings.Split(value, ",")
		case "ranks":
			for _, text := range strings.Split(value, ",") {
				n, err := strconv.Atoi(text)
				if err != nil {
					return "", err
				}
				q.ranks = append(q.ranks, n)
			}
		case "file":
			q.file = value
		case "of":
			q.of = value
		case "on":
			q.on = value
		default:
			return "", fmt.Errorf("unknown key %q", key)
		}
	}
	file := filepath.Join(d.root, "docs/benchmarks", q.of)
	switch kind {
	case "faults":
		records, err := faults.Load(file)
		return faults.Table(records), err
	case "steps":
		return steps(file)
	case "graphs":
		return graphs(file, q)
	case "timeline":
		picture, err := timeline(file, q)
		if err != nil {
			return "", err
		}
		return d.picture(q, picture, "Forward pass, backward pass with all_reduces beside it, optimizer: "+q.on), nil
	}
	var runs []*run
	for _, name := range q.runs {
		r, err := load(filepath.Join(d.root, "docs/benchmarks"), name)
		if err != nil {
			return "", err
		}
		runs = append(runs, r)
	}
	if len(runs) == 0 {
		return "", fmt.Errorf("no run is named")
	}
	switch kind {
	case "table":
		return table(runs, q), nil
	case "plot":
		return d.picture(q, plot(runs[0], q), "Time over the size, beside its peers: "+strings.Join(q.ops, ", ")), nil
	case "range":
		return ratios(runs[0], q)
	case "time", "rate":
		return single(runs[0], q, kind)
	case "targets":
		return targets(runs[0], filepath.Join(d.root, "bench", q.of))
	}
	return "", fmt.Errorf("unknown figure %q", kind)
}

// picture adds a picture to the files, and returns what the document has of it.
func (d *document) picture(q query, picture []byte, about string) string {
	dir := filepath.ToSlash(filepath.Dir(d.name))
	d.files[strings.TrimPrefix(dir+"/"+q.file, "./")] = picture
	return fmt.Sprintf("![%s](%s)", about, q.file)
}

// record is a line of a file of records.
type record struct {
	System string  `json:"system"`
	Op     string  `json:"op"`
	Size   int     `json:"size"`
	World  int     `json:"world"`
	P50    float64 `json:"time_us_p50"`
	Work   string  `json:"work"`
	Alloc  bool    `json:"alloc"`
}

// column is a system as tables and plots name it.
type column struct {
	name string
	ours bool
}

func (r record) column() column {
	switch {
	case r.Alloc:
		return column{"with `Alloc`", true}
	case r.Work != "":
		return column{"`" + r.Work + "`", true}
	case r.System == "c10d-go":
		return column{"here", true}
	case strings.HasPrefix(r.System, "openmpi"):
		return column{"Open MPI", false}
	case r.System == "torch-nccl":
		return column{"PyTorch NCCL", false}
	case r.System == "link":
		return column{"the link alone", false}
	}
	return column{"PyTorch gloo", false}
}

// point is a case: an operation, a number of ranks and a size.
type point struct {
	op          string
	ranks, size int
}

// run is what was measured in one session: microseconds by case and system.
type run struct {
	points      []point
	ours, peers []column
	p50         map[point]map[column]float64
}

func load(dir, name string) (*run, error) {
	r := &run{p50: make(map[point]map[column]float64)}
	for _, system := range []string{"c10d-go", "link", "openmpi", "openmpi-tcp", "torch-nccl", "torch-gloo"} {
		text, err := os.ReadFile(filepath.Join(dir, system+"-"+name+".jsonl"))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(text) {
			var rec record
			if err := json.Unmarshal(line, &rec); err != nil {
				return nil, fmt.Errorf("records of %s-%s: %w", system, name, err)
			}
			r.add(rec)
		}
	}
	if len(r.ours) == 0 {
		return nil, fmt.Errorf("no records of this library in run %s", name)
	}
	slices.SortStableFunc(r.points, func(a, b point) int { return cmp.Compare(a.ranks, b.ranks) })
	return r, nil
}

// add keeps the best of each case and system.
func (r *run) add(rec record) {
	if rec.P50 == 0 {
		return
	}
	w, c := point{rec.Op, rec.World, rec.Size}, rec.column()
	if r.p50[w] == nil {
		r.p50[w] = make(map[column]float64)
		r.points = append(r.points, w)
	}
	if old, ok := r.p50[w][c]; !ok || rec.P50 < old {
		r.p50[w][c] = rec.P50
	}
	list := &r.peers
	if c.ours {
		list = &r.ours
	}
	if !slices.Contains(*list, c) {
		*list = append(*list, c)
	}
}

// operations is the order of the operations in tables and plots.
var operations = []string{"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter", "send_recv", "barrier"}

// cases are the cases of a run that a comment asks for.
func (r *run) cases(q query) []point {
	var all []point
	for _, w := range r.points {
		if (q.ops == nil || slices.Contains(q.ops, w.op)) && (q.ranks == nil || slices.Contains(q.ranks, w.ranks)) &&
			(q.sizes == nil || slices.Contains(q.sizes, cmp.Or(targetSize(w.size), "-"))) {
			all = append(all, w)
		}
	}
	slices.SortStableFunc(all, func(a, b point) int {
		return cmp.Or(slices.Index(operations, a.op)-slices.Index(operations, b.op), a.ranks-b.ranks, a.size-b.size)
	})
	return all
}

// table writes a row for each case, and for each peer its time and how many times as fast
// this library is.
func table(runs []*run, q query) string {
	cases := runs[0].cases(q)
	several := func(of func(point) string) bool {
		return slices.ContainsFunc(cases, func(w point) bool { return of(w) != of(cases[0]) })
	}
	var keys []func(point) string
	var head []string
	for _, k := range []struct {
		title string
		of    func(point) string
	}{
		{"operation", func(w point) string { return w.op }},
		{"ranks", func(w point) string { return strconv.Itoa(w.ranks) }},
		{"size", func(w point) string { return sizeName(w.size) }},
	} {
		if several(k.of) {
			head, keys = append(head, k.title), append(keys, k.of)
		}
	}
	for _, r := range runs {
		for _, c := range r.ours {
			head = append(head, c.name)
		}
		for _, p := range r.peers {
			head = append(head, p.name)
			for _, c := range r.ours {
				if len(r.ours) == 1 {
					head = append(head, "ratio")
				} else {
					head = append(head, "ratio of "+c.name)
				}
			}
		}
	}
	var b strings.Builder
	row := func(cells []string) { b.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	row(head)
	row(slices.Repeat([]string{"---"}, len(head)))
	for _, w := range cases {
		var cells []string
		for _, key := range keys {
			cells = append(cells, key(w))
		}
		for _, r := range runs {
			for _, c := range r.ours {
				cells = append(cells, timeName(r.p50[w][c]))
			}
			for _, p := range r.peers {
				cells = append(cells, timeName(r.p50[w][p]))
				for _, c := range r.ours {
					cells = append(cells, ratioName(r.p50[w][p]/r.p50[w][c]))
				}
			}
		}
		row(cells)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// ratios returns the smallest and the largest ratio to the first peer.
func ratios(r *run, q query) (string, error) {
	var all []float64
	for _, w := range r.cases(q) {
		if our, peer := r.p50[w][r.ours[0]], r.p50[w][r.peers[0]]; our > 0 && peer > 0 {
			all = append(all, peer/our)
		}
	}
	if len(all) == 0 {
		return "", fmt.Errorf("no case of the run fits")
	}
	return strings.TrimSuffix(ratioName(slices.Min(all)), "x") + " to " + ratioName(slices.Max(all)), nil
}

// single is this library's time in one case, or its bytes over that time.
func single(r *run, q query, kind string) (string, error) {
	cases := r.cases(q)
	if len(cases) != 1 {
		return "", fmt.Errorf("%d cases of the run fit, instead of one", len(cases))
	}
	us := r.p50[cases[0]][r.ours[0]]
	if us == 0 {
		return "", fmt.Errorf("no record of this library fits")
	}
	if kind == "rate" {
		return strconv.FormatFloat(float64(cases[0].size)/us/1e3, 'g', 3, 64) + " GB/s", nil
	}
	name := timeName(us)
	if us < 1000 {
		name += " us"
	}
	return name, nil
}

// targets counts the lines of a file of bars that a run meets.
func targets(r *run, file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	met, all := 0, 0
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if len(words) != 5 {
			return "", fmt.Errorf("%s: %q has not five words", file, line)
		}
		limit, err := strconv.ParseFloat(strings.TrimRight(words[4], "xus"), 64)
		if err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
		for _, w := range r.points {
			if !slices.Contains(strings.Split(words[0], ","), w.op) || !slices.Contains(strings.Split(words[1], ","), strconv.Itoa(w.ranks)) ||
				!slices.Contains(strings.Split(words[2], ","), cmp.Or(targetSize(w.size), "-")) {
				continue
			}
			our := r.p50[w][r.ours[0]]
			if words[3] == "-" {
				all++
				if our <= limit {
					met++
				}
				continue
			}
			if peer := r.p50[w][record{System: words[3]}.column()]; peer > 0 {
				all++
				if peer/our >= limit {
					met++
				}
			}
		}
	}
	return fmt.Sprintf("%d of %d", met, all), nil
}

// targetSize is a size as files of bars write it.
func targetSize(size int) string {
	if size == 0 {
		return ""
	}
	return strings.NewReplacer(" B", "", " KiB", "K", " MiB", "M", " GiB", "G").Replace(sizeName(size))
}

func sizeName(size int) string {
	units, unit := []string{"B", "KiB", "MiB", "GiB"}, 0
	for size >= 1024 && size%1024 == 0 && unit+1 < len(units) {
		size, unit = size/1024, unit+1
	}
	if size == 0 {
		return ""
	}
	return fmt.Sprintf("%d %s", size, units[unit])
}

// timeName writes microseconds with three digits.
func timeName(us float64) string {
	if us == 0 {
		return ""
	}
	unit := math.Pow(10, math.Floor(math.Log10(us))-2)
	switch us = math.Round(us/unit) * unit; {
	case us >= 1e6:
		return strconv.FormatFloat(us/1e6, 'g', 3, 64) + " s"
	case us >= 1000:
		return strconv.FormatFloat(us/1000, 'g', 3, 64) + " ms"
	}
	return strconv.FormatFloat(us, 'g', 3, 64)
}

func ratioName(r float64) string {
	switch {
	case math.IsNaN(r) || math.IsInf(r, 0) || r == 0:
		return ""
	case r < 0.95:
		return fmt.Sprintf("%.2fx", r)
	case r < 9.95:
		return fmt.Sprintf("%.1fx", r)
	}
	return fmt.Sprintf("%.0fx", r)
}
