package trace

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/c10d-go/c10d/internal/ownfile"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// formatVersion is that of PyTorch 2.8 to 2.11. PyTorch's analyzer wants the same from all ranks.
const formatVersion = "2.10"

// Dump writes the recorder's file, and returns its name: Options.Prefix and this rank's number, which it keeps
// in all epochs. Another Dump of the same run replaces it. A file of an earlier run, or of an earlier attempt, gets
// another name: see package trace.
func (r *Recorder) Dump() (string, error) {
	if r.options.Prefix == "" {
		return "", errors.New("trace: the recorder has no prefix: set C10D_TRACE or trace.Options.Prefix, or use WriteTo")
	}
	r.dumps.files.Lock()
	defer r.dumps.files.Unlock()
	data, number, run := r.marshal()
	if number < 0 {
		return "", errors.New("trace: this process has no rank yet: no group has begun")
	}
	name := r.options.Prefix + strconv.Itoa(number)
	err := ownfile.MkdirAll(filepath.Dir(name))
	if written := name + "\x00" + run; err == nil && r.dumps.written != written {
		if err = keep(name, r.options.Prefix, number); err == nil {
			r.dumps.written = written
		}
	}
	if err == nil {
		err = ownfile.Replace(name, data)
	}
	if err != nil {
		return "", fmt.Errorf("trace: dump %s cannot be written: %w", name, err)
	}
	return name, nil
}

// keep gives a dump of an earlier run another name, by its run and attempt. It does nothing if there is no file. It does
// not read what another user has put there: that may be as large as memory.
func keep(name, prefix string, number int) error {
	info, err := os.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return nil // ownfile.Replace says what is wrong
	}
	run, attempt := "", 0
	if !ownfile.Foreign(info) {
		if data, err := ownfile.Read(name, info.Size()); err == nil {
			if f, err := Parse(name, data); err == nil {
				run, attempt = cmp.Or(short(f.Run), f.Job), f.Attempt
			}
		}
	}
	if run = strings.Map(fit, run); run == "" {
		run = info.ModTime().UTC().Format("20060102T150405.000")
	}
	return ownfile.Explain(name, os.Rename(name, earlier(prefix, run[:min(len(run), 64)], attempt)+strconv.Itoa(number)))
}

// fit replaces a character that a job's name can have, and that need not be in a file's name.
func fit(r rune) rune {
	if r < '0' && r != '.' && r != '-' || '9' < r && r < 'A' || 'Z' < r && r < 'a' && r != '_' || 'z' < r {
		return '-'
	}
	return r
}

// earlier returns the prefix of the dumps of an earlier run. It lacks the last character of prefix, because PyTorch's
// analyzer reads each file whose name contains prefix as a dump of the newest run.
func earlier(prefix, run string, attempt int) string {
	dir, base := filepath.Split(prefix)
	_, last := utf8.DecodeLastRuneInString(base)
	dot := "."
	if strings.HasSuffix(base, dot) {
		dot = "-"
	}
	return dir + base[:len(base)-last] + dot + run + dot + strconv.Itoa(attempt) + dot
}

// short is the part of a run's name that file names and reports show.
func short(run string) string { return run[:min(len(run), 8)] }

// WriteTo writes a dump.
func (r *Recorder) WriteTo(w io.Writer) (int64, error) {
	data, _, _ := r.marshal()
	n, err := w.Write(data)
	return int64(n), err
}

// marshal returns a dump of the newest run, this rank's number, -1 if no group has begun, and the run.
func (r *Recorder) marshal() (data []byte, number int, run string) {
	all, calls := r.snapshot()
	number = -1
	var config, status dict
	groups := slices.SortedFunc(maps.Keys(calls), func(a, b *Group) int { return cmp.Compare(a.ID, b.ID) })
	var newest Member
	if len(groups) > 0 {
		newest = groups[len(groups)-1].Member
	}
	groups = slices.DeleteFunc(groups, func(g *Group) bool { return g.Run != newest.Run })
	all = slices.DeleteFunc(all, func(o Operation) bool { return o.Group.Run != newest.Run })
	for _, g := range groups {
		if g.Rank >= 0 && g.Rank < len(g.Numbers) {
			number = g.Numbers[g.Rank]
		}
		ranks := strings.ReplaceAll(fmt.Sprint(g.Numbers), " ", ", ")
		config = append(config, pair{g.Name, dict{{"name", g.Name}, {"desc", g.describe()}, {"ranks", ranks}}})
		status = append(status, pair{strconv.Itoa(g.ID), g.status(all, calls[g])})
	}
	entries := []any{}
	for i := range all {
		entries = append(entries, all[i].pickled())
	}
	host, _ := os.Hostname()
	d := dict{
		{"version", formatVersion}, {"pg_config", config}, {"pg_status", status}, {"entries", entries},
		{"host_name", host}, {"run", newest.Run}, {"job", newest.Job}, {"attempt", int64(newest.Attempt)},
	}
	if number >= 0 { // else ReadFile takes the number of the file's name
		d = append(d, pair{"rank", int64(number)})
	}
	return append(pickle([]byte{opProto, 2}, d), opStop), number, newest.Run
}

// describe returns the description, as PyTorch has it where there is none.
func (g *Group) describe() string {
	if g.Description == "" && g.ID == 0 {
		return "default_pg"
	}
	return cmp.Or(g.Description, "undefined")
}

// status is PyTorch's ProcessGroupStatus, and the group's name. The group has called so many collectives.
func (g *Group) status(all []Operation, calls uint64) dict {
	called, completed := int64(-1), int64(-1)
	if calls > 0 {
		called = int64(calls)
	}
	for i := range all {
		if o := &all[i]; o.Group == g && !o.Op.IsP2P() && !o.Ended.IsZero() && o.Err == nil {
			completed = max(completed, int64(o.Collective))
		}
	}
	return dict{
		{"name", g.Name}, {"last_enqueued_collective", called}, {"last_started_collective", called}, {"last_completed_collective", completed},
	}
}

// pickled is the entry of an operation.
func (o *Operation) pickled() dict {
	g := o.Group
	state, failure := "scheduled", any(nil)
	switch {
	case o.Err != nil:
		failure = o.Err.Error()
		if !o.Began.IsZero() {
			state = "started"
		}
	case !o.Ended.IsZero():
		state = "completed"
	}
	completed := o.Ended
	if o.Err != nil {
		completed = time.Time{}
	}
	d := dict{
		{"record_id", int64(o.Record)}, {"pg_id", int64(g.ID)}, {"process_group", tuple{g.Name, g.describe()}},
		{"collective_seq_id", int64(o.Collective)}, {"p2p_seq_id", int64(o.P2P)}, {"op_id", int64(o.Seq)},
		{"profiling_name", o.profilingName()}, {"time_created_ns", o.Called.UnixNano()},
		{"input_sizes", o.In.sizes()}, {"input_dtypes", o.In.dtypes()},
		{"output_sizes", o.Out.sizes()}, {"output_dtypes", o.Out.dtypes()},
		{"state", state}, {"time_discovered_started_ns", nanos(o.Began)}, {"time_discovered_completed_ns", nanos(completed)},
		{"retired", !o.Ended.IsZero()}, {"timeout_ms", cmp.Or(o.Timeout, g.Timeout).Milliseconds()},
		{"is_p2p", o.Op.IsP2P()}, {"frames", o.frames()}, {"route", o.Route()},
	}
	if failure != nil {
		d = append(d, pair{"error", failure}, pair{"time_failed_ns", nanos(o.Ended)})
	}
	return d
}

// frames is the stack of a call as PyTorch's flight recorder has it.
func (o *Operation) frames() []any {
	all := []any{}
	for _, f := range o.Frames() {
		all = append(all, dict{{"name", f.Function}, {"filename", f.File}, {"line", int64(f.Line)}})
	}
	return all
}

// nanos is a time, None if it is zero.
func nanos(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixNano()
}

// profilingName is the name that PyTorch's analyzer knows the operation by.
func (o *Operation) profilingName() string {
	name := o.Op.String()
	switch o.Op {
	case work.AllReduceCoalesced:
		name = "allreduce_coalesced"
	case work.AllGatherIntoTensor:
		name = "_all_gather_base"
	case work.AllGatherCoalesced:
		name = "all_gather_into_tensor_coalesced"
	case work.ReduceScatterTensor:
		name = "_reduce_scatter_base"
	case work.AllToAllSingle:
		name = "all_to_all"
	case work.Barrier:
		name = "all_reduce_barrier"
	case work.Send:
		name = fmt.Sprintf("send %d->%d", o.Group.Rank, o.Peer)
	case work.Recv, work.RecvAnySource:
		name = fmt.Sprintf("recv %d<-%d", o.Group.Rank, o.Peer)
	}
	return profilingPrefix + name
}

// profilingPrefix is NCCL's, for all backends: the analyzer of PyTorch 2.11 fails on "gloo:", which
// PyTorch's own gloo ranks write.
const profilingPrefix = "nccl:"

func (s *Shape) sizes() []any {
	if s.Tensors == 0 {
		return []any{}
	}
	dims := []any{}
	for _, d := range s.Dims() {
		dims = append(dims, int64(d))
	}
	return []any{dims}
}

func (s *Shape) dtypes() []any {
	if s.Tensors == 0 {
		return []any{}
	}
	return []any{scalarType(s.DType)}
}

// scalarTypes are PyTorch's names of its ScalarTypes.
var scalarTypes = map[tensor.DType]string{
	tensor.Uint8: "Byte", tensor.Int8: "Char", tensor.Int16: "Short", tensor.Int32: "Int", tensor.Int64: "Long",
	tensor.Float16: "Half", tensor.Float32: "Float", tensor.Float64: "Double", tensor.BFloat16: "BFloat16",
	tensor.Bool: "Bool", tensor.Complex64: "ComplexFloat", tensor.Complex128: "ComplexDouble",
	tensor.Uint16: "UInt16", tensor.Uint32: "UInt32", tensor.Uint64: "UInt64",
	tensor.Float8E4M3: "Float8_e4m3fn", tensor.Float8E5M2: "Float8_e5m2",
}

func scalarType(d tensor.DType) string { return cmp.Or(scalarTypes[d], d.String()) }
