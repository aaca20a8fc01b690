package direct_test

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkNCCL measures the collectives of two processes, or of C10D_DIRECT_RANKS, and then NCCL's through PyTorch
// with testdata/nccl.py, and prints both. Rows whose names begin with "ring_" go round the ring. With more than two
// ranks there are rows "other_form": all_reduces of the form that the backend would not choose. -benchtime 1x is
// enough: each row repeats its calls.
// C10D_DIRECT_ITERATIONS is how many, C10D_DIRECT_BLOCKS limits the blocks of a call. C10D_DIRECT_LEAST and
// C10D_DIRECT_MOST are the bytes.
//
// The columns are us a call on the slower rank, the least of some rounds:
//
//   - graph: calls in a CUDA graph, without the host's launches
//   - queued: calls launched one after the other, and one wait at the end
//   - wait: one call and a wait for its number, the median
func BenchmarkNCCL(t *testing.B) {
	gpus(t)
	file := t.TempDir() + "/ours"
	t.Setenv("C10D_DIRECT_OUT", file)
	processes(t, "bench")
	ours := must.Get(os.ReadFile(file))
	cmd := exec.Command("python3", "testdata/nccl.py")
	cmd.Env = append(os.Environ(), fmt.Sprintf("SIZES=%s", strings.Trim(fmt.Sprint(sizes()), "[]")), fmt.Sprintf("RANKS=%d", gpuRanks))
	cmd.Stderr = os.Stderr
	theirs, err := cmd.Output()
	require.NoError(t, err, "%s", theirs)
	type key struct {
		name, dtype string
		n           int
	}
	read := func(b []byte) (rows []key, by map[key][3]float64) {
		by = make(map[key][3]float64)
		for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
			var k key
			var v [3]float64
			if _, err := fmt.Sscan(lines.Text(), &k.name, &k.dtype, &k.n, &v[0], &v[1], &v[2]); err == nil {
				rows = append(rows, k)
				by[k] = v
			} else {
				fmt.Println(lines.Text())
			}
		}
		return rows, by
	}
	rows, us := read(ours)
	_, nccl := read(theirs)
	fmt.Printf("%34s | %26s | %26s | %s\n", "", "ours graph   queued     wait", "NCCL graph   queued     wait", "ours / NCCL")
	for _, k := range rows {
		a, r := us[k], fmt.Sprintf("%-14s %-8s %10d", k.name, k.dtype, k.n)
		k.name = strings.TrimPrefix(k.name, "ring_")
		b := nccl[k]
		if b[0] == 0 {
			fmt.Printf("%s | %8.2f %8.2f %8.2f |\n", r, a[0], a[1], a[2])
			continue
		}
		fmt.Printf("%s | %8.2f %8.2f %8.2f | %8.2f %8.2f %8.2f | %.2f %.2f %.2f\n",
			r, a[0], a[1], a[2], b[0], b[1], b[2], a[0]/b[0], a[1]/b[1], a[2]/b[2])
	}
}

// BenchmarkShapes prints us a call in a graph for shapes of a launch: what ShapeOf was made
// from. C10D_DIRECT_SHAPES="reduce_scatter all_gather" names other operations than all_reduce: see member.shaped.
// C10D_DIRECT_LEAST and C10D_DIRECT_MOST are the bytes, C10D_DIRECT_CHANNELS and C10D_DIRECT_DEPTH those of the window.
func BenchmarkShapes(t *testing.B) {
	gpus(t)
	processes(t, "shapes")
}

func shapes(m *member) error {
	room := max(number("C10D_DIRECT_MOST", 64<<20), 256<<20)
	mem := must.Get(m.v.Alloc(2 * room))
	defer mem.Close()
	must.Do(m.s.Memset(mem.Ptr(), 0x3f, 2*room))
	into := must.Get(m.into(mem))
	in, out := mem.Ptr(), mem.Ptr()+driver.Ptr(room)
	most, _ := m.w.Shape()
	for _, kind := range strings.Fields(cmp.Or(os.Getenv("C10D_DIRECT_SHAPES"), "all_reduce")) {
		for n := number("C10D_DIRECT_LEAST", 64<<10); n <= number("C10D_DIRECT_MOST", 64<<20); n *= 4 {
			line := fmt.Sprintf("%-14s %9d", kind, n)
			for _, large := range []bool{false, true} {
				tile, form := 512, "small"
				if large {
					tile, form = 2048, "large"
				}
				if large && m.ranks > 2 {
					tile = 1024
				}
				for _, threads := range []int{128, 256, 512} {
					for _, blocks := range []int{8, 16, 32, 64, 128} {
						shape := direct.Shape{Blocks: blocks, Threads: threads, Large: large}
						channels := shape.Channels()
						// What a channel has of the shortest and of the longest part.
						if channels > most || n/tile < channels || n > 4<<20 && channels < 512 || n/m.ranks/tile > 16*channels && n <= 4<<20 {
							continue
						}
						direct.SetShape(m.c, shape)
						us := must.Get(m.inGraph(n, func() error { return m.shaped(kind, out, in, n, into) }))
						line += fmt.Sprintf("  %s %dx%d %.2f", form, blocks, threads, us)
					}
				}
			}
			if m.rank == 0 {
				fmt.Fprintln(os.Stderr, line)
			}
		}
	}
	return nil
}

// shaped does a call of BenchmarkShapes. The longer one of input and output has n bytes.
func (m *member) shaped(kind string, out, in driver.Ptr, n int, into direct.Into) error {
	switch kind {
	case "reduce_scatter":
		return m.c.ReduceScatter(m.s, out, in, n/4/m.ranks, tensor.Float32, backend.Sum(), direct.Form{})
	case "all_gather":
		return m.c.AllGather(m.s, out, in, n/m.ranks, direct.Form{})
	case "all_to_all", "all_to_all_straight":
		if kind == "all_to_all" {
			into = direct.Into{}
		}
		spans := make([]direct.Span, m.ranks)
		for r := range spans {
			spans[r] = direct.Span{Off: n / m.ranks * r, N: n / m.ranks}
		}
		return m.c.AllToAllV(m.s, out, in, spans, spans, direct.Form{Into: into})
	case "broadcast", "reduce", "broadcast_straight", "reduce_straight", "broadcast_one_shot", "reduce_one_shot":
		form := direct.Form{TwoShot: !strings.HasSuffix(kind, "_one_shot")}
		if strings.HasSuffix(kind, "_straight") {
			form.Into, form.Blocks = into, 32
		}
		if strings.HasPrefix(kind, "broadcast") {
			return m.c.Broadcast(m.s, out, n, 0, form)
		}
		return m.c.Reduce(m.s, out, in, n/4, tensor.Float32, backend.Sum(), 0, form)
	case "two_shot", "two_shot_straight":
		form := direct.Form{TwoShot: true}
		if kind == "two_shot_straight" {
			form.Into, form.Blocks = into, 32 // ranks write straight to each other if they have few blocks
		}
		return m.c.AllReduce(m.s, out, in, n/4, tensor.Float32, backend.Sum(), form)
	}
	return m.c.AllReduce(m.s, out, in, n/4, tensor.Float32, backend.Sum(), direct.Form{})
}

func moves(m *member) error {
	room := number("C10D_DIRECT_MOST", 256<<20)
	mem := must.Get(m.v.Alloc(room))
	defer mem.Close()
	must.Do(m.s.Memset(mem.Ptr(), 0x3f, room))
	into := must.Get(m.into(mem))
	for n := number("C10D_DIRECT_LEAST", 1<<20); n <= room; n *= 4 {
		for _, way := range []direct.Into{{}, into} {
			line := fmt.Sprintf("broadcast %9d straight %5v", n, way.Region != 0)
			for root := range m.ranks {
				for _, blocks := range []int{8, 16, 32, 64, 128} {
					form := direct.Form{Blocks: blocks, Into: way}
					us := must.Get(m.inGraph(n, func() error { return m.c.Broadcast(m.s, mem.Ptr(), n, root, form) }))
					line += fmt.Sprintf("  from %d, %d blocks %.1f", root, blocks, us)
				}
			}
			if m.rank == 0 {
				fmt.Fprintln(os.Stderr, line)
			}
		}
	}
	return nil
}

func sizes() []int {
	all := []int{8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30}
	least, most := number("C10D_DIRECT_LEAST", 0), number("C10D_DIRECT_MOST", 1<<30)
	return slices.DeleteFunc(all, func(n int) bool { return n < least || n > most })
}

func bench(m *member) error {
	room := 1 << 30
	mem := must.Get(m.v.Alloc(2 * room))
	defer mem.Close()
	must.Do(m.s.Memset(mem.Ptr(), 0x3f, 2*room))
	in, out := mem.Ptr(), mem.Ptr()+driver.Ptr(room)
	into := must.Get(m.into(mem))
	var table bytes.Buffer
	row := func(name string, d tensor.DType, n int, call func() error) error {
		v, err := m.measure(n, call)
		if err != nil {
			return err
		}
		fmt.Fprintf(&table, "%s %v %d %.2f %.2f %.2f\n", name, d, n, v[0], v[1], v[2])
		return nil
	}
	for _, d := range []tensor.DType{tensor.Float32, tensor.BFloat16} {
		for _, n := range sizes() {
			form := direct.Form{Into: into, TwoShot: int64(n) > ways.OneShotUpTo(m.ranks)}
			all := func() error { return m.c.AllReduce(m.s, out, in, n/d.Size(), d, backend.Sum(), form) }
			must.Do(row("all_reduce", d, n, all))
			must.Do(row("ring_all_reduce", d, n, func() error {
				return m.c.AllReduce(m.s, out, in, n/d.Size(), d, backend.Sum(), direct.Form{Ring: true})
			}))
			if m.ranks == 2 {
				continue
			}
			if form.TwoShot = !form.TwoShot; n <= 4<<20 || form.TwoShot {
				must.Do(row("other_form", d, n, all))
			}
		}
	}
	d := tensor.Float32
	for _, n := range sizes() {
		// n bytes is the longer one of input and output.
		if n < 64<<10 {
			continue
		}
		for _, ring := range []bool{false, true} {
			name, form := "", direct.Form{Ring: ring}
			if ring {
				name = "ring_"
			}
			must.Do(row(name+"reduce_scatter", d, n, func() error {
				return m.c.ReduceScatter(m.s, out, in, n/d.Size()/m.ranks, d, backend.Sum(), form)
			}))
			gather := func() error { return m.c.AllGather(m.s, out, in, n/m.ranks, form) }
			must.Do(row(name+"all_gather", d, n, gather))
		}
		parts := equal(n/m.ranks, m.ranks)
		must.Do(row("all_to_all", d, n, func() error { return m.c.AllToAllV(m.s, out, in, parts, parts, direct.Form{}) }))
		form := direct.Form{TwoShot: int64(n) > ways.OneShotUpTo(m.ranks)}
		if m.c.BroadcastSpreads(n, form) {
			form.Into = into
		}
		must.Do(row("broadcast", d, n, func() error { return m.c.Broadcast(m.s, out, n, 0, form) }))
		must.Do(row("reduce", d, n, func() error {
			return m.c.Reduce(m.s, out, out, n/d.Size(), d, backend.Sum(), 0, form)
		}))
	}
	for _, d := range []tensor.DType{tensor.Float16, tensor.Float64, tensor.Int32, tensor.Int8} {
		for _, n := range []int{8 << 10, 1 << 20, 64 << 20} {
			form := direct.Form{Into: into, TwoShot: int64(n) > ways.OneShotUpTo(m.ranks)}
			if err := row("all_reduce", d, n, func() error { return m.c.AllReduce(m.s, out, in, n/d.Size(), d, backend.Sum(), form) }); err != nil {
				return err
			}
		}
	}
	if m.rank == 0 {
		return os.WriteFile(os.Getenv("C10D_DIRECT_OUT"), table.Bytes(), 0o600)
	}
	return nil
}

// times returns us a call of f, k of which are in a row.
func (m *member) times(f func() error, k int) (float64, error) {
	best := math.Inf(1)
	for range 4 {
		if err := cmp.Or(m.sync(), m.meet()); err != nil {
			return 0, err
		}
		begin := time.Now()
		for range k {
			if err := f(); err != nil {
				return 0, err
			}
		}
		if err := m.spin(); err != nil {
			return 0, err
		}
		t, err := m.slowest(float64(time.Since(begin).Nanoseconds()) / 1e3 / float64(k))
		if err != nil {
			return 0, err
		}
		best = min(best, t)
	}
	return best, nil
}

// iterations is how many calls of n bytes are in a row.
func iterations(n int) int { return number("C10D_DIRECT_ITERATIONS", max(min(200, 1<<30/n), 10)) }

// inGraph returns us a call in a graph.
func (m *member) inGraph(n int, call func() error) (float64, error) {
	const calls = 20
	g, err := driver.Capture(m.s, func() error {
		for range calls {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	defer g.Close()
	t, err := m.times(func() error { return g.Launch(m.s) }, max(iterations(n)/calls, 1))
	return t / calls, err
}

// measure returns us a call: in a graph, queued, and one call and a wait.
func (m *member) measure(n int, call func() error) (us [3]float64, err error) {
	if us[0], err = m.inGraph(n, call); err != nil {
		return us, err
	}
	m.c.Quiet(true)
	us[1], err = m.times(call, iterations(n))
	m.c.Quiet(false)
	if err != nil {
		return us, err
	}
	var waits []float64
	if err := m.meet(); err != nil {
		return us, err
	}
	for range max(iterations(n), 20) {
		begin := time.Now()
		if err := call(); err != nil {
			return us, err
		}
		for number := m.c.Number(); !m.c.Ended(number); {
			if err := m.c.Err(); err != nil {
				return us, err
			}
		}
		waits = append(waits, float64(time.Since(begin).Nanoseconds())/1e3)
	}
	slices.Sort(waits)
	us[2], err = m.slowest(waits[len(waits)/2])
	return us, err
}

// spin waits for the stream as fast as the host can.
func (m *member) spin() error {
	e := must.Get(m.s.Record())
	defer e.Release()
	for {
		if done, err := e.Done(); done || err != nil {
			return cmp.Or(err, m.c.Err())
		}
	}
}

// slowest returns the greatest time of all ranks.
func (m *member) slowest(t float64) (_ float64, err error) {
	defer must.Catch(&err)
	all := must.Get(m.exchange(m.ctx, binary.LittleEndian.AppendUint64(nil, math.Float64bits(t))))
	for _, b := range all {
		t = max(t, math.Float64frombits(binary.LittleEndian.Uint64(b)))
	}
	return t, nil
}
