package trace

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// sample returns the recorder of a rank of two. Rank 1 is 3 ms late in the second collective, and has
// not called the fourth. Rank 0 has failed in that one.
func sample(t *testing.T, rank int) *Recorder {
	explain := func() []backend.Explanation {
		return []backend.Explanation{{
			Backend: "gloo", Links: []backend.Link{{Rank: 1 - rank, Transport: "shm"}},
			Choices: []backend.Choice{{Op: "all_reduce", UpTo: 1 << 10, Algorithm: "flat"}, {Op: "all_reduce", UpTo: -1, Algorithm: "ring"}},
		}}
	}
	r := New(Options{Entries: 8})
	g := r.Join(Member{Name: "0", Rank: rank, Ranks: []int{0, 1}, Timeout: time.Minute, Explain: explain})
	sub := r.Join(Member{Name: "1", Description: "pair", Rank: rank, Ranks: []int{0, 1}, Timeout: time.Minute})
	small := must.Get(tensor.New(tensor.Float32, 2, 3))
	large, err := tensor.New(tensor.BFloat16, 2, 1024)
	require.NoError(t, err)
	gloo := &named{name: "gloo"}
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	add := func(g *Group, op work.OpType, in, out []*tensor.Tensor, peer int, began, ended time.Duration, err error) {
		var call Call
		call.Begin(g, gloo, op, in, out, peer, 0)
		require.NotZero(t, call.entry)
		r.Ended(uint32(call.entry), r.records-1, began, ended, err)
	}
	one := func(x *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{x} }
	ts := one(small)
	add(g, work.AllReduce, ts, ts, -1, ms(10), ms(12), nil)
	add(g, work.AllReduce, one(large), one(large), -1, ms(20+3*rank), ms(25), nil)
	add(sub, work.AllGather, ts, []*tensor.Tensor{small, small}, -1, ms(30), ms(31), nil)
	if rank == 0 {
		add(g, work.Send, ts, nil, 1, ms(33), ms(34), nil)
		add(g, work.Barrier, nil, nil, -1, ms(40), ms(90), work.ErrTimeout)
	} else {
		add(g, work.Recv, nil, ts, 0, ms(33), ms(35), nil)
	}
	for i := range r.entries {
		r.entries[i].called = r.entries[i].began
	}
	return r
}

// steady replaces the times, which count from the start of the process, and the host.
func steady(t *testing.T, data []byte) []byte {
	v := must.Get(unpickle(data))
	origin := work.Origin().UnixNano()
	fields(v)["host_name"] = "HOST"
	for _, e := range items(fields(v)["entries"]) {
		for key, x := range fields(e) {
			if n, ok := x.(int64); ok && strings.HasSuffix(key, "_ns") {
				fields(e)[key] = (n - origin) / 1e6
			}
		}
	}
	return append(must.Get(json.MarshalIndent(plain(v), "", " ")), '\n')
}

// plain makes a value fit for JSON.
func plain(v any) any {
	switch v := v.(type) {
	case *pydict:
		m := make(map[string]any)
		for k, x := range v.items {
			m[k] = plain(x)
		}
		return m
	case *pylist, tuple:
		l := []any{}
		for _, x := range items(v) {
			l = append(l, plain(x))
		}
		return l
	}
	return v
}

// TestDumpFormat compares a dump with the golden file, whose keys and values are those of PyTorch's
// FlightRecorder. Times are milliseconds there.
func TestDumpFormat(t *testing.T) {
	var b bytes.Buffer
	must.Get(sample(t, 0).WriteTo(&b))
	got := steady(t, b.Bytes())
	golden := filepath.Join("testdata", "dump.json")
	if *update {
		require.NoError(t, os.WriteFile(golden, got, 0o644))
	}
	require.Equal(t, string(must.Get(os.ReadFile(golden))), string(got))
}

// TestPythonReadsDumps: Python's pickle module reads what this package does, and writes what this
// package reads.
func TestPythonReadsDumps(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	data, _, _ := sample(t, 0).marshal()
	const program = `import sys, json, pickle
v = pickle.load(sys.stdin.buffer)
assert type(v["entries"][0]["process_group"]) is tuple
v["more"] = [-1, 1 << 40, -(1 << 40), 200, 70000, 1.5, (), (1,), (1, 2), (1, 2, 3), "x" * 300, True, None]
sys.stdout.buffer.write(pickle.dumps([json.dumps(v), pickle.dumps(v, 2).hex(), pickle.dumps(v, 4).hex()], 2))`
	c := exec.CommandContext(t.Context(), python, "-c", program)
	c.Stdin = bytes.NewReader(data)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	require.NoError(t, err, stderr.String())
	back := must.Get(unpickle(out))
	for _, hexed := range items(back)[1:] {
		data := must.Get(hex.DecodeString(text(hexed)))
		require.JSONEq(t, text(items(back)[0]), string(must.Get(json.Marshal(plain(must.Get(unpickle(data)))))))
	}
}

// TestPythonsText: Python's text is valid UTF-8, whatever an error says.
func TestPythonsText(t *testing.T) {
	require.Equal(t, pickle(nil, "5 ?s"), pickle(nil, "5 \xb5s"))
	require.Equal(t, pickle(nil, "5 µs")[5:], []byte("5 µs"))
}

// TestLargeShapes: dimensions beyond 2^31 are not cut.
func TestLargeShapes(t *testing.T) {
	n := 3 << 29
	if n *= 2; n < 0 {
		t.Skip("an int has 32 bits")
	}
	one := must.Get(tensor.New(tensor.Uint8, 1))
	for _, shape := range [][]int{{n}, {2, n}} {
		x := must.Get(one.AsStrided(shape, make([]int, len(shape)), 0))
		var s Shape
		s.set([]*tensor.Tensor{x})
		require.Equal(t, []int{x.Len()}, s.Dims())
		s.set([]*tensor.Tensor{x, x})
		require.Equal(t, []int{2 * x.Len()}, s.Dims())
	}
}

// dumped writes the sample's files.
func dumped(t *testing.T) (dir string, names []string) {
	dir = t.TempDir()
	for rank := range 2 {
		r := sample(t, rank)
		r.options.Prefix = filepath.Join(dir, "rank_")
		name := must.Get(r.Dump())
		names = append(names, name)
	}
	return dir, names
}

// TestTorchAnalyzer runs PyTorch's analyzer on dumps.
func TestTorchAnalyzer(t *testing.T) {
	dir, _ := dumped(t)
	analyzed(t, dir, 3)
}

// analyzed runs PyTorch's analyzer on a directory of dumps. It has to say that rank 1 lacks a collective.
func analyzed(t *testing.T, dir string, number int) {
	analyzer, err := exec.LookPath("torchfrtrace")
	if err != nil {
		t.Skip("torchfrtrace is not installed: it comes with PyTorch 2.8 and later")
	}
	out, err := exec.CommandContext(t.Context(), analyzer, dir, "-p", "rank_").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), fmt.Sprint("Not all ranks joining collective, sequence number: ", number))
	require.Contains(t, string(out), "missing ranks: {1}")
}

func merged(t *testing.T) *Job {
	_, names := dumped(t)
	var files []*File
	for _, n := range names {
		f := must.Get(ReadFile(n))
		files = append(files, f)
	}
	return must.Get(Merge(files))
}

func TestMerge(t *testing.T) {
	j := merged(t)
	require.Equal(t, []Stuck{{
		Group: "0", Op: "all_reduce_barrier", Number: 3, Waiting: []int{0}, NotCalled: []int{1}, Error: work.ErrTimeout.Error(),
	}}, j.Stuck)
	require.Equal(t, Late{"0", "all_reduce", 2, 1, 3 * time.Millisecond}, j.Late[0])
	require.Equal(t, RankLate{Rank: 1, Times: 3, Total: 3 * time.Millisecond, Of: 3}, j.Blame[0])
	var b bytes.Buffer
	require.NoError(t, j.Print(&b, 1))
	require.Equal(t, `2 dumps of ranks 0-1
stuck: all_reduce_barrier, collective 2 of group "0"
  not called by ranks 1
  not ended on ranks 0
  timed out
how often each rank called last, and how long the others waited for it alone:
  rank 1         3 of 3      3ms
  rank 0         0 of 3      0s
the latest calls:
  rank 1           3ms  all_reduce, collective 1 of group "0"
`, b.String())

	_, err := Merge([]*File{{Name: "a", Rank: 1}, {Name: "b", Rank: 1}})
	require.ErrorContains(t, err, "a and b are both of rank 1")
}

// TestStuckMessages: a job in which nothing but sends is stuck has a report that says so.
func TestStuckMessages(t *testing.T) {
	var files []*File
	for rank := range 2 {
		r := New(Options{Entries: 8})
		g := r.Join(Member{Name: "0", Rank: rank, Ranks: []int{0, 1}})
		begin := func(op work.OpType) (c Call) {
			c.Begin(g, &named{name: "gloo"}, op, nil, nil, 1-rank, 0)
			return c
		}
		if rank == 0 {
			failed := begin(work.Send)
			r.Ended(uint32(failed.entry), 0, 1, 2, work.ErrTimeout)
			begin(work.Send)
			begin(work.Recv)
		} else {
			received := begin(work.Recv)
			r.Ended(uint32(received.entry), 0, 1, 2, nil)
		}
		data, _, _ := r.marshal()
		files = append(files, must.Get(parse("rank", data)))
	}
	report := func() string {
		var b bytes.Buffer
		require.NoError(t, must.Get(Merge(files)).Print(&b, 1))
		return b.String()
	}
	require.Equal(t, `2 dumps of ranks 0-1
stuck: send 0->1 of group "0", 2 calls
  not ended on rank 0
  timed out
stuck: recv 0<-1 of group "0", 1 call
  not ended on rank 0
`, report())
	for _, f := range files {
		f.Host = "" // as in PyTorch's dumps, where sends of a batch stay scheduled
	}
	require.Equal(t, "2 dumps of ranks 0-1\n", report())
}

// TestOverwritten: a rank whose ring no longer has a call is not blamed. A rank that has not called it is, as far as its
// dump tells.
func TestOverwritten(t *testing.T) {
	gloo := &named{name: "gloo"}
	dump := func(rank, collectives, sends int, leave, torch bool) *File {
		r := New(Options{Entries: 8})
		g := r.Join(Member{Name: "0", Rank: rank, Ranks: []int{0, 1}})
		other := r.Join(Member{Name: "1", Rank: rank, Ranks: []int{0, 1}})
		add := func(g *Group, op work.OpType, err error) {
			var call Call
			call.Begin(g, gloo, op, nil, nil, -1, 0)
			r.Ended(uint32(call.entry), 0, 1, 2, err)
		}
		for range collectives {
			add(g, work.Broadcast, nil)
		}
		if rank == 0 {
			add(g, work.Broadcast, work.ErrTimeout)
		}
		if leave {
			g.Leave()
		}
		for range sends {
			add(other, work.Send, nil)
		}
		data, number, _ := r.marshal()
		require.Equal(t, rank, number)
		f := must.Get(parse("rank", data))
		if torch { // it does not say how many collectives a group has called
			f.Calls = nil
		}
		return f
	}
	for name, c := range map[string]struct {
		collectives, sends int
		leave, torch       bool
		want               string
	}{
		"called, and the ring has it":         {3, 4, false, false, ""},
		"not called, and the ring has more":   {2, 4, false, false, "not called by ranks 1"},
		"called, and the ring has none":       {3, 8, false, false, "the dumps of ranks 1 no longer have operations that old"},
		"not called, and the ring has none":   {2, 8, false, false, "not called by ranks 1"},
		"called, and a later one is there":    {9, 7, false, false, "the dumps of ranks 1 no longer have operations that old"},
		"nothing called":                      {0, 0, false, false, "not called by ranks 1"},
		"the group is left":                   {3, 8, true, false, "the dumps of ranks 1 no longer have operations that old"},
		"the group is left, the ring has all": {2, 4, true, false, "not called by ranks 1"},
		"PyTorch, the ring has none":          {2, 8, false, true, "the dumps of ranks 1 no longer have operations that old"},
		"PyTorch, the ring has more":          {2, 7, false, true, "not called by ranks 1"},
		"PyTorch, nothing called":             {0, 0, false, true, "not called by ranks 1"},
	} {
		t.Run(name, func(t *testing.T) {
			j := must.Get(Merge([]*File{dump(0, 2, 0, false, false), dump(1, c.collectives, c.sends, c.leave, c.torch)}))
			var b bytes.Buffer
			require.NoError(t, j.Print(&b, 0))
			about := ""
			for line := range strings.Lines(b.String()) {
				if strings.Contains(line, "not called") || strings.Contains(line, "no longer") {
					about += strings.TrimSpace(line)
				}
			}
			require.Equal(t, c.want, about, b.String())
		})
	}
}

// TestPendingKeepsItsPlace: a rank waits in an operation while its ring loses later ones.
func TestPendingKeepsItsPlace(t *testing.T) {
	file := func(rank int, numbers ...int64) *File {
		f := &File{Rank: rank, Groups: map[string][]int{"0": {0, 1}}}
		for _, n := range numbers {
			f.Entries = append(f.Entries, Entry{Record: n, Group: "0", Op: "broadcast", Collective: n + 1, State: "started", Called: time.UnixMilli(n)})
		}
		f.Entries = append(f.Entries, Entry{Record: 9, Group: "1", Op: "send", P2P: true, State: "completed", Called: time.UnixMilli(9)})
		return f
	}
	j := must.Get(Merge([]*File{file(0, 0, 1), file(1, 0)}))
	require.Equal(t, Stuck{Group: "0", Op: "broadcast", Number: 2, Waiting: []int{0}, Lost: []int{1}}, j.Stuck[1])
}

// TestClocksOfHosts: times of another host are shifted, those of the same host are not.
func TestClocksOfHosts(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(1000 + ms)) }
	file := func(rank int, host string, behind int) *File {
		f := &File{Rank: rank, Host: host, Groups: map[string][]int{"0": {0, 1}}}
		for i := range 3 {
			f.Entries = append(f.Entries, Entry{Group: "0", Op: "all_reduce", Collective: int64(i), State: "completed", Called: at(10*i - behind), Ended: at(10*i + 1 - behind)})
		}
		return f
	}
	j := must.Get(Merge([]*File{file(0, "a", 0), file(1, "b", 500)}))
	require.Equal(t, []Shift{{1, 500 * time.Millisecond}}, j.Shifts)
	require.Zero(t, j.Late[0].By)
	j = must.Get(Merge([]*File{file(0, "a", 0), file(1, "a", 500)}))
	require.Empty(t, j.Shifts)
	require.Equal(t, 500*time.Millisecond, j.Late[0].By)
}

// kinds are the JSON types of the fields that an event of a phase must have, and those that it may have
// ("?"). They follow the "Trace Event Format" of Chrome. Perfetto's importer (json_trace_parser_impl.cc)
// drops events without them.
var kinds = map[string]map[string]string{
	"X": {"name": "string", "ph": "string", "cat": "string", "ts": "time", "dur": "time", "pid": "id", "tid": "id?", "args": "object"},
	"M": {"name": "string", "ph": "string", "ts": "time?", "dur": "time?", "pid": "id", "tid": "id?", "args": "object"},
}

// metadata are the names of metadata events, with the field of args that each needs.
var metadata = map[string]string{"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}

// fits reports what is wrong with a value of an event.
func fits(kind string, v any, there bool) bool {
	kind, optional := strings.CutSuffix(kind, "?")
	if !there {
		return optional
	}
	n, isNumber := v.(float64)
	switch kind {
	case "string":
		text, ok := v.(string)
		return ok && text != ""
	case "time":
		return isNumber && n >= 0
	case "id": // Perfetto's are of 32 bits
		return isNumber && n == float64(int32(n)) && n >= 0
	}
	_, ok := v.(map[string]any)
	return ok
}

// TestChrome: the trace fits Chrome's format, as far as Perfetto's importer reads it: events with all
// fields of the right type, complete ones that do not overlap on a thread, and a name for each thread.
func TestChrome(t *testing.T) {
	var b bytes.Buffer
	j := merged(t)
	j.files[0].Entries[0].Ended = j.files[0].Entries[0].Called // it took no time
	require.NoError(t, j.WriteChrome(&b))
	var trace struct {
		TraceEvents     []map[string]any `json:"traceEvents"`
		DisplayTimeUnit string           `json:"displayTimeUnit"`
	}
	d := json.NewDecoder(&b)
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&trace))
	require.Contains(t, []string{"ms", "ns"}, trace.DisplayTimeUnit)
	type thread [2]any
	names, free, named := make(map[string]int), make(map[thread]float64), make(map[thread]bool)
	for _, e := range trace.TraceEvents {
		fields := kinds[fmt.Sprint(e["ph"])]
		require.NotNil(t, fields, "%v", e)
		for field, kind := range fields {
			v, there := e[field]
			require.True(t, fits(kind, v, there), "%s of %v", field, e)
		}
		for field := range e {
			require.Contains(t, fields, field)
		}
		tid, ok := e["tid"]
		if !ok {
			tid = 0.0
		}
		at, name, args := thread{e["pid"], tid}, e["name"].(string), e["args"].(map[string]any)
		if e["ph"] == "M" {
			require.Contains(t, metadata, name)
			require.Contains(t, args, metadata[name])
			named[at] = named[at] || name == "thread_name"
			continue
		}
		names[name]++
		require.True(t, named[at], "a thread's name comes before its events: %v", e)
		require.GreaterOrEqual(t, e["ts"], free[at])
		free[at] = e["ts"].(float64) + e["dur"].(float64)
	}
	require.Equal(t, map[string]int{"all_reduce": 4, "all_gather": 2, "send 0->1": 1, "recv 1<-0": 1, "all_reduce_barrier": 1}, names)
}

// TestBadDumps: each names the file and what is wrong.
func TestBadDumps(t *testing.T) {
	for _, c := range []struct{ name, data, want string }{
		{"rank_0", "", "unexpected EOF"},
		{"rank_0", "\x80\x02cos\nsystem\n.", "unknown command 0x63"},
		{"rank_0", "\x80\x02}.", "not a dump of a flight recorder"},
		{"rank_0", "\x80\x02}(X\x07\x00\x00\x00entriesX\xff\xff\xff\xff", "unexpected EOF"},
		{"rank", string(append(pickle(nil, dict{{"entries", []any{}}, {"pg_config", dict{}}}), opStop)), "it does not say its rank"},
		{"rank_0", string(append(pickle(nil, dict{{"entries", []any{dict{}}}, {"pg_config", dict{}}}), opStop)), "entry 0 has no process_group"},
	} {
		require.ErrorContains(t, must.Err(parse(c.name, []byte(c.data))), c.want)
	}
	require.ErrorContains(t, must.Err(New().Dump()), "C10D_TRACE")
}

// TestNestedTuples: a tuple of two references to a tuple of two references, and so on, is not written out.
func TestNestedTuples(t *testing.T) {
	entry := dict{{"process_group", tuple{"0", ""}}, {"profiling_name", "nccl:send"}, {"time_created_ns", int64(1)}, {"input_sizes", []any{[]any{"HERE"}}}}
	data := append(pickle(nil, dict{{"entries", []any{entry}}, {"pg_config", dict{}}}), opStop)
	nested := append([]byte{opEmptyTuple}, bytes.Repeat([]byte{opPut, 0, opGet, 0, opTuple2}, 60)...)
	f := must.Get(parse("rank_0", bytes.Replace(data, pickle(nil, "HERE"), nested, 1)))
	require.Equal(t, "[[0]]", f.Entries[0].Sizes)
}

// TestSharedLists: sizes and ranks that many entries and groups refer to are not written out for each.
func TestSharedLists(t *testing.T) {
	long := make([]any, 10_000)
	for i := range long {
		long[i] = int64(i)
	}
	entry := dict{{"process_group", tuple{"0", ""}}, {"profiling_name", "nccl:send"}, {"time_created_ns", int64(1)}, {"input_sizes", []any{long}}}
	ranks := strings.Repeat("1,", 10_000)
	data := append([]byte{opDict, opMark}, pickle(nil, "entries")...)
	data = append(append(data, opList, opMark), append(pickle(nil, entry), opPut, 0)...)
	data = append(data, bytes.Repeat([]byte{opGet, 0}, 10_000)...)
	data = append(append(data, opAppends), append(pickle(nil, "pg_config"), opDict, opMark)...)
	data = append(append(data, pickle(nil, "a")...), append(pickle(nil, dict{{"ranks", ranks}}), opPut, 1)...)
	for i := range 10_000 {
		data = append(pickle(data, fmt.Sprint(i)), opGet, 1)
	}
	data = append(data, opSetItems, opSetItems, opStop)
	f := must.Get(parse("rank_0", data))
	require.Len(t, f.Entries, 10_001)
	require.Equal(t, "[[0, 1, 2, 3, 4, 5, 6, 7, ...]]", f.Entries[9].Sizes)
	require.Len(t, f.Groups, 10_001)
	require.Same(t, &f.Groups["a"][0], &f.Groups["9"][0])
}

// FuzzParse: no bytes make the reader panic.
func FuzzParse(f *testing.F) {
	f.Add([]byte("\x80\x02}(X\x01\x00\x00\x00aK\x01u."))
	f.Add([]byte("(]q\x00h\x00a\x86\x85t."))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<16 {
			return
		}
		if d, err := parse("rank_0", data); err == nil {
			if j, err := Merge([]*File{d}); err == nil {
				_ = j.WriteChrome(new(bytes.Buffer))
			}
		}
	})
}

// TestDumpDoesNotFollowLinks: a link in the place of a dump is replaced, and the file behind it stays as it was.
func TestDumpDoesNotFollowLinks(t *testing.T) {
	dir, foreign := t.TempDir(), filepath.Join(t.TempDir(), "foreign")
	require.NoError(t, os.WriteFile(foreign, []byte("not a dump"), 0o600))
	if err := os.Symlink(foreign, filepath.Join(dir, "rank_0")); err != nil {
		t.Skipf("this system makes no links: %v", err)
	}
	r := sample(t, 0)
	r.options.Prefix = filepath.Join(dir, "rank_")
	for range 2 { // the second one replaces the first
		require.True(t, must.Get(os.Lstat(must.Get(r.Dump()))).Mode().IsRegular())
		require.Len(t, must.Get(os.ReadDir(dir)), 1)
	}
	require.Equal(t, "not a dump", string(must.Get(os.ReadFile(foreign))))
}

// TestDumpWithoutGroup: a process that is in no group yet has no number. It writes no file, which would be rank 0's, and
// its dump takes the number of the name that somebody gives it.
func TestDumpWithoutGroup(t *testing.T) {
	dir := t.TempDir()
	r := New(Options{Prefix: filepath.Join(dir, "rank_")})
	require.ErrorContains(t, must.Err(r.Dump()), "this process has no rank yet")
	require.Empty(t, must.Get(os.ReadDir(dir)))
	var b bytes.Buffer
	must.Get(r.WriteTo(&b))
	require.Equal(t, 3, must.Get(parse("rank_3", b.Bytes())).Rank)
}

// TestClaimedRanks: many ranks in the text of many groups cost no more than their bytes.
func TestClaimedRanks(t *testing.T) {
	const ranks, groups = 500_000, 10_000
	var list strings.Builder
	for r := range ranks {
		fmt.Fprint(&list, r, ",")
	}
	entry := dict{{"process_group", tuple{"0", ""}}, {"profiling_name", "nccl:all_reduce"}, {"time_created_ns", int64(1)}, {"collective_seq_id", int64(1 << 62)}}
	data := append([]byte{opDict, opMark}, pickle(pickle(nil, "entries"), []any{entry})...)
	data = append(append(data, pickle(nil, "pg_config")...), opDict, opMark)
	data = append(append(pickle(data, "0"), pickle(nil, dict{{"ranks", list.String()}})...), opPut, 1)
	for i := range groups {
		data = append(pickle(data, fmt.Sprint(i+1)), opGet, 1)
	}
	f := must.Get(parse("rank_0", append(data, opSetItems, opSetItems, opStop)))
	done := make(chan *Job, 1)
	go func() {
		j, _ := Merge([]*File{f})
		done <- j
	}()
	select {
	case j := <-done:
		require.Len(t, j.Missing, ranks-1)
		var b bytes.Buffer
		require.NoError(t, j.Print(&b, 1))
		require.Contains(t, b.String(), "no dump of ranks 1-499999\n")
	case <-time.After(time.Minute):
		t.Fatal("still merging")
	}
}

// TestRepeatedEntries: a dump that has one entry, or one text, in many places is refused.
func TestRepeatedEntries(t *testing.T) {
	for name, c := range map[string]struct {
		text  int
		times int
	}{"entry": {10, 100_000}, "text": {100_000, 1000}} {
		t.Run(name, func(t *testing.T) {
			entry := dict{{"process_group", tuple{"0", ""}}, {"profiling_name", "nccl:send"}, {"time_created_ns", int64(1)}, {"error", strings.Repeat("x", c.text)}}
			data := append([]byte{opDict, opMark}, pickle(pickle(nil, "pg_config"), dict{})...)
			data = append(append(data, pickle(nil, "entries")...), opList, opMark)
			data = append(append(data, pickle(nil, entry)...), opPut, 0)
			data = append(data, bytes.Repeat([]byte{opGet, 0}, c.times)...)
			_, err := parse("rank_0", append(data, opAppends, opSetItems, opStop))
			require.ErrorContains(t, err, "they repeat each other")
		})
	}
}
