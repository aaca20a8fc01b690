package trace

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// glooDump writes a dump as a rank of PyTorch 2.11 does for Gloo: groups have no names, and operations stay
// scheduled. So many have ended, in time or not. Operations of another group have its name and a slash before them.
func glooDump(t *testing.T, dir string, rank int, ended int64, ops ...string) string {
	var entries []any
	ranks := "[0, 1]"
	for i, op := range ops {
		group := tuple{"0", "default_pg"}
		if name, other, ok := strings.Cut(op, "/"); ok {
			group, op, ranks = tuple{name, "undefined"}, other, "[]"
		}
		entries = append(entries, dict{
			{"frames", []any{}}, {"record_id", int64(i)}, {"pg_id", int64(0)}, {"process_group", group},
			{"thread_name", "python3"}, {"thread_id", "140163780030784"},
			{"collective_seq_id", int64(i + 1)}, {"p2p_seq_id", int64(0)}, {"op_id", int64(i + 1)}, {"profiling_name", "gloo:" + op},
			{"time_created_ns", int64(1_000_000*(i+1) + 1000*rank)}, {"input_sizes", []any{[]any{int64(4)}}}, {"input_dtypes", []any{"Float"}},
			{"output_sizes", []any{[]any{int64(4)}}}, {"output_dtypes", []any{"Float"}}, {"state", "scheduled"},
			{"time_discovered_started_ns", nil}, {"time_discovered_completed_ns", nil},
			{"retired", int64(i) < ended}, {"timeout_ms", int64(1_800_000)}, {"is_p2p", op == "send"},
		})
	}
	name := filepath.Join(dir, fmt.Sprint("gloo_", rank))
	b := append(pickle([]byte{opProto, 2}, dict{
		{"version", "2.10"}, {"pg_config", dict{{"", dict{{"name", ""}, {"desc", ""}, {"ranks", ranks}}}}}, {"comm_lib_version", ""},
		{"pg_status", dict{{"0", dict{
			{"last_enqueued_collective", int64(len(ops))}, {"last_started_collective", int64(-1)}, {"last_completed_collective", ended},
		}}}},
		{"entries", entries},
	}), opStop)
	require.NoError(t, os.WriteFile(name, b, 0o644))
	return name
}

// glooJob is a job in which rank 1 has not called the last all_reduce. So many operations of rank 0 have ended.
func glooJob(t *testing.T, ended int64, more ...string) *Job {
	dir := t.TempDir()
	var files []*File
	for _, name := range []string{
		glooDump(t, dir, 0, ended, append([]string{"all_reduce", "broadcast", "barrier", "all_reduce"}, more...)...),
		glooDump(t, dir, 1, 3, "all_reduce", "broadcast", "barrier"),
	} {
		f := must.Get(ReadFile(name))
		files = append(files, f)
	}
	return must.Get(Merge(files))
}

// TestTorchGloo: dumps of PyTorch's Gloo are understood, and become ones that its analyzer takes.
func TestTorchGloo(t *testing.T) {
	stuck := []Stuck{{Group: "0", Op: "all_reduce", Number: 4, Waiting: []int{0}, NotCalled: []int{1}}}
	require.Equal(t, stuck, glooJob(t, 4).Stuck, "it has ended without rank 1, so it has timed out")
	require.Equal(t, stuck, glooJob(t, 3, "1/all_reduce", "1/all_reduce").Stuck[:1], "another group hides the members of this one")
	j := glooJob(t, 3, "send")
	require.Equal(t, stuck, j.Stuck)
	require.ErrorContains(t, (&Job{files: []*File{{Name: os.Args[0]}}}).WriteTorch(symlink(t, os.Args[0])), "is the dump itself")
	dir := filepath.Join(t.TempDir(), "new")
	require.NoError(t, j.WriteTorch(dir))
	for rank := range 2 {
		f := must.Get(ReadFile(filepath.Join(dir, fmt.Sprint("rank_", rank))))
		require.Equal(t, rank, f.Rank)
		require.Equal(t, map[string][]int{"0": {0, 1}}, f.Groups)
		for i, v := range items(f.top["entries"]) {
			e := fields(v)
			want, state := "nccl:all_reduce", "completed"
			switch i {
			case 1:
				want = "nccl:broadcast"
			case 2:
				want = "nccl:all_reduce_barrier"
			}
			if i == 3 {
				state = "scheduled"
			}
			require.Equal(t, want, e["profiling_name"])
			require.Equal(t, state, e["state"])
		}
		require.LessOrEqual(t, len(f.Entries), 4, "without the message")
		require.Equal(t, map[string]any{"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}, fields(fields(f.top["pg_config"])["0"]))
	}
}

// symlink returns a directory whose rank_0 is a file.
func symlink(t *testing.T, file string) string {
	dir := t.TempDir()
	require.NoError(t, os.Symlink(file, filepath.Join(dir, "rank_0")))
	return dir
}

// TestTorchGlooAnalyzer runs PyTorch's analyzer on what WriteTorch makes.
func TestTorchGlooAnalyzer(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, glooJob(t, 3, "send").WriteTorch(dir))
	analyzed(t, dir, 4)
}

// TestCopied: values that contain themselves, or each other over and over, are errors.
func TestCopied(t *testing.T) {
	self := new(pylist)
	self.items = []any{self}
	wide := any("x")
	for range 15 {
		wide = &pylist{[]any{wide, wide, wide, wide}}
	}
	long := any(strings.Repeat("x", 1000))
	for _, v := range []any{self, wide, &pydict{map[string]any{"a": mark{}}}, &pylist{[]any{long, long, long, long, long, long, long, long, long, long, long}}} {
		budget := 10_000
		require.Error(t, must.Err(copied(v, &budget, 0)))
	}
}
