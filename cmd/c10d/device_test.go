//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// runOnSim calls f for each of so many ranks, which share a simulated host.
func runOnSim(t *testing.T, ranks int, flag, work string, stream string, f func(g *pg.ProcessGroup, at *gpu) error) {
	t.Helper()
	var d devices
	require.NoError(t, d.Set(flag))
	m, err := sim.New(sim.Config{Devices: max(ranks, 4), NoDelays: true, Kernels: simkernels.All()})
	require.NoError(t, err)
	j := pgtest.NewJob(ranks)
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() {
			errs[r] = func() (err error) {
				defer must.Catch(&err)
				p := must.Get(m.Process(fmt.Sprint("rank ", r)))
				at := &gpu{devices: d, driver: p, close: p.Close}
				o := j.Options()
				o.Backend = at.backends()
				o.BackendOptions = append(o.BackendOptions, cuda.Options{Driver: p, Chunk: 1 << 10, AllReduce: work, CPUOptions: o.BackendOptions[0]})
				g, err := pg.New(t.Context(), j.Store, r, ranks, o)
				if err != nil {
					return err
				}
				if err = at.take(t.Context(), g, stream); err == nil {
					err = f(g, at)
				}
				if err != nil {
					g.Abort(err)
				}
				if closed := g.Close(); err == nil {
					err = closed
				}
				if freed := at.free(); err == nil {
					err = freed
				}
				return err
			}()
		})
	}
	wg.Wait()
	for r, err := range errs {
		assert.NoError(t, err, "rank %d", r)
	}
	require.NoError(t, m.Close(), "what the simulator found")
	require.NoError(t, j.Close())
}

// TestBenchOnDevices measures each operation, its results checked, on tensors in
// the memory of simulated GPUs, some of which two ranks share.
func TestBenchOnDevices(t *testing.T) {
	for i, stream := range []string{besideStream, noStream, inStream} {
		for _, inPlace := range []bool{i == 1, i != 1}[:testsize.Of(1, 1, 2)] {
			work, device := cuda.HostWork, "sim:2,0"
			if stream == inStream || (i == 0) != inPlace {
				work, device = cuda.DirectWork, "sim:2,0,1"
			}
			t.Run(fmt.Sprintf("stream %s, in place %t, %s", stream, inPlace, work), func(t *testing.T) {
				b := bench{
					tensors: coalesced,
					ops:     list{"all"}, sizes: sizeList{4, 5000}, factor: 2, iters: 1, repeat: 1,
					json: true, check: true, inPlace: inPlace, device: devices{kind: onSim}, stream: stream,
				}
				require.NoError(t, b.complete())
				require.NotContains(t, b.ops, sparseOp)
				var out bytes.Buffer
				runOnSim(t, 3, device, work, stream, func(g *pg.ProcessGroup, at *gpu) error {
					if work == cuda.HostWork {
						assert.Equal(t, []int{2, 0, 2}[g.Rank()], at.device.ID().Index)
					}
					std := stdio{out: new(bytes.Buffer)}
					if g.Rank() == 0 {
						std.out = &out
					}
					return b.series(t.Context(), g, at, tensor.Float32, pg.Sum(), std)
				})
				lines := strings.Split(strings.TrimSpace(out.String()), "\n")
				require.Len(t, lines, 2*(len(b.ops)-1)+1)
				for _, l := range lines {
					var r record
					require.NoError(t, json.Unmarshal([]byte(l), &r))
					require.Equal(t, "sim", r.Device)
					require.Equal(t, strings.Count(device, ",")+1, r.GPUs)
					require.NotEmpty(t, r.Work, r.Op)
					if r.Op == "all_reduce" {
						require.Equal(t, work, r.Work)
					}
					require.Positive(t, r.P50)
					require.Equal(t, stream != noStream, r.Queued > 0)
					require.Equal(t, stream != noStream, r.Call > 0)
					require.Equal(t, inPlace && (strings.HasPrefix(r.Op, "all_gather") || strings.HasPrefix(r.Op, "reduce_scatter")), r.InPlace)
				}
			})
		}
	}
}

// TestBenchOnDeviceFindsWrongResults lets one rank contribute what it should not,
// in a type of two bytes and in a later piece of a large tensor.
func TestBenchOnDeviceFindsWrongResults(t *testing.T) {
	runOnSim(t, 2, "sim", "", besideStream, func(g *pg.ProcessGroup, at *gpu) (err error) {
		defer must.Catch(&err)
		c := must.Get(newCase(at.tensor, "all_reduce", g, at, tensor.BFloat16, pg.Sum(), 64, false, coalesced))
		err = c.check(at.context(t.Context()), 2*g.Rank())
		assert.ErrorContains(t, err, "wrong result: element 0 is 4, want 3")

		c = must.Get(newCase(at.tensor, "broadcast", g, at, tensor.Uint8, pg.Sum(), stageBytes+100, false, coalesced))
		assert.NoError(t, c.check(at.context(t.Context()), g.Rank()))
		of := must.Get(c.out[0].Slice(0, stageBytes+20, stageBytes+21))
		must.Do(at.poison(t.Context(), of))
		seen := 0
		s := must.Get(newSeries(tensor.Uint8, 1, 1, c.period))
		err = at.pieces(t.Context(), c.out[0], false, func(b []byte, first int) error {
			i, got, _, err := s.check(b, first)
			if i >= 0 {
				seen = first + i
				assert.Equal(t, 255.0, got)
			}
			return err
		})
		assert.Equal(t, stageBytes+20, seen)
		return err
	})
}

// TestBenchDeviceProcesses goes the whole way: a launcher, ranks of their own, one
// simulated host.
func TestBenchDeviceProcesses(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "bench", "-device", "sim", "-world", "2", "-op", "all_reduce", "-sizes", "4,5000", "-n", "3",
		"-repeat", "1", "-json", "-work", "host", "-sums", "")
	require.Zero(t, p.wait(), p.stderr.String())
	lines := strings.Split(strings.TrimSpace(p.output()), "\n")
	require.Len(t, lines, 2)
	for _, l := range lines {
		var r record
		require.NoError(t, json.Unmarshal([]byte(l), &r))
		require.Equal(t, "sim", r.Device)
		require.Equal(t, 2, r.GPUs)
		require.Equal(t, cuda.HostWork, r.Work)
	}
	p = start(t, nil, "bench", "-device", "sim", "-world", "2", "-sizes", "100", "-n", "2", "-repeat", "1", "-work", "direct", "-dtype", "bfloat16", "-json")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), `"work":"direct"`, "across processes")
	p = start(t, nil, "bench", "-device", "sim:1", "-world", "2", "-sizes", "4", "-n", "2", "-repeat", "1")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Regexp(t, `(?s)# rank 0, .*: sim:1 .*# rank 1, .*: sim:1 .*# all_reduce of float32 on sim, 2 ranks.*# \w+: .* queued +call +work\n`, p.output())
}

// TestBenchWithoutDevices: no rank is started where there is no GPU for it.
func TestBenchWithoutDevices(t *testing.T) {
	p := start(t, []string{"CUDA_VISIBLE_DEVICES=-1"}, "bench", "-device", "cuda", "-world", "2")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "c10d bench: -device cuda: ")
	require.Contains(t, p.stderr.String(), "no usable device")
	require.NotContains(t, p.stderr.String(), "rank")
	require.Empty(t, p.output())
}

func TestDevices(t *testing.T) {
	for _, text := range []string{"cpu", "cuda", "cuda:0", "cuda:3,1", "sim", "sim:0,1,2"} {
		var d devices
		require.NoError(t, d.Set(text))
		require.Equal(t, text, d.String())
	}
	for text, want := range map[string]string{
		"": "is not cpu", "gpu": "is not cpu", "cpu:0": "is not cpu", "cuda:": "not the number", "cuda:-1": "not the number",
		"sim:0,,1": "not the number", "sim:1,1": "twice", "cuda:9999999999": "not the number",
	} {
		var d devices
		require.ErrorContains(t, d.Set(text), want, "%q", text)
	}
	all := devices{kind: onCUDA}
	list := must.Get(all.list(3))
	require.Equal(t, []int{0, 1, 2}, list)
	some := devices{onCUDA, []int{3, 1}}
	list = must.Get(some.list(4))
	require.Equal(t, []int{3, 1}, list)
	require.ErrorContains(t, must.Err(some.list(3)), "-device cuda:3,1: no device 3, the driver has 3")
	require.Equal(t, 4, some.simulated())
}

// TestBenchTuneDevices measures a table of ways on simulated devices, and uses it.
func TestBenchTuneDevices(t *testing.T) {
	t.Parallel() // it waits for processes
	file := filepath.Join(t.TempDir(), "table")
	ops := testsize.Of("reduce,gather", "reduce,gather", "all")
	p := start(t, nil, "bench", "-world", "2", "-device", "sim", "-tune", file, "-op", ops, "-sizes", "1K", "-n", "2", "-w", "1", "-repeat", "1")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "use it with cuda.Options.Table or C10D_CUDA_TABLE")
	table := must.Get(ways.Catalog.Load(file))
	found := map[string]int{}
	for _, r := range table.Rows() {
		require.Equal(t, string(ways.Peers), r.Wire)
		require.Equal(t, 2, r.Ranks)
		require.Positive(t, r.Time)
		found[fmt.Sprint(r.Op, " ", r.Bytes)]++
	}
	want := map[string]int{"reduce 1024": 3, "gather 512": 2}
	if ops == "all" {
		want = map[string]int{
			"all_reduce 1024": 5, "broadcast 1024": 6, "all_gather 512": 3, "reduce_scatter 512": 3, "reduce 1024": 3, "gather 512": 2, "scatter 512": 2,
			"all_to_all 512": 2,
		}
	}
	require.Equal(t, want, found)

	// The ranks take the fastest way of a table.
	for _, c := range []struct{ row, work string }{{"one-shot 1", "direct"}, {"host 1", "host"}} {
		text := "c10d-table 1\ncommand x\nmachine y\nall_reduce peers 2 1 4 " + c.row + "\n"
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
		p = start(t, []string{"C10D_CUDA_TABLE=" + file}, "bench", "-world", "2", "-device", "sim", "-sizes", "1K", "-n", "2", "-repeat", "1", "-json")
		require.Zero(t, p.wait(), p.stderr.String())
		require.Contains(t, p.output(), `"work":"`+c.work+`"`)
	}
}

func TestBenchDeviceFlags(t *testing.T) {
	for want, args := range map[string][]string{
		`unknown -work "telepathy" (known: `: {"-device", "sim", "-work", "telepathy"},
		"-work is for -device cuda or sim":   {"-work", "host"},
		"for tensors in CPU memory":          {"-device", "sim", "-op", sparseOp},
		"leave out -work":                    {"-device", "sim", "-tune", "x", "-work", "host"},
		"-lanes is for tensors in CPU":       {"-lanes", "2", "-device", "sim"},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{out: &out, err: &errs}, append([]string{"bench"}, args...)), "%v: %s", args, &errs)
		require.Contains(t, errs.String(), want)
	}
}

// TestSeries holds the numbers of the check to the rule, wherever a piece begins,
// and finds the first that is wrong.
func TestSeries(t *testing.T) {
	rng := must.Rand(t)
	for range 200 {
		d := tensor.DTypes()[rng.IntN(len(tensor.DTypes()))]
		period := periods[rng.IntN(len(periods))]
		if d == tensor.Bool {
			period = 1
		}
		s := must.Get(newSeries(d, 1, 1, period))
		n, first := 1+rng.IntN(3*seriesBytes), rng.IntN(100)
		b := make([]byte, n*d.Size())
		s.fill(b, first)
		got := must.Get(tensor.FromBytes(d, b, n))
		for range 20 {
			i := rng.IntN(n)
			want := must.Get(tensor.New(d, 1))
			require.NoError(t, want.SetFloat64(1+float64((first+i)%period), 0))
			x := must.Get(element(d, want.Bytes()))
			y := must.Get(element(d, b[i*d.Size():(i+1)*d.Size()]))
			require.Equal(t, x, y, "%v, period %d, element %d of %d from %d", d, period, i, n, first)
		}
		i, _, _, err := s.check(b, first)
		require.NoError(t, err)
		require.Equal(t, -1, i)
		wrong := rng.IntN(n)
		require.NoError(t, got.SetFloat64(0, wrong))
		i, _, _, err = s.check(b, first)
		require.NoError(t, err)
		require.Equal(t, wrong, i)
	}
}

// TestReduction: what is expected can be held exactly, or nothing is.
func TestReduction(t *testing.T) {
	for _, d := range tensor.DTypes() {
		for n := 1; n <= 64; n++ {
			for _, op := range []pg.ReduceOp{pg.Sum(), pg.Avg(), pg.Max(), pg.Min()} {
				want, period, ok := reduction(op, d, n)
				if !ok {
					continue
				}
				for i := range period {
					sum := 0.0
					for r := range n {
						sum += baseOf(r) + float64(i)
					}
					require.LessOrEqual(t, want.base+want.slope*float64(i), exactTo(d))
					switch op.Kind() {
					case pg.Sum().Kind():
						require.Equal(t, sum, want.base+want.slope*float64(i))
						require.LessOrEqual(t, sum, exactTo(d))
					case pg.Avg().Kind():
						require.InDelta(t, sum/float64(n), want.base+want.slope*float64(i), 1e-9)
					case pg.Max().Kind():
						require.Equal(t, float64(n+i), want.base+want.slope*float64(i))
					case pg.Min().Kind():
						require.Equal(t, float64(1+i), want.base+want.slope*float64(i))
					}
				}
			}
		}
	}
	_, period, ok := reduction(pg.Sum(), tensor.Float32, 8)
	require.True(t, ok)
	require.Equal(t, 13, period)
	_, _, ok = reduction(pg.Product(), tensor.Float32, 2)
	require.False(t, ok)
	_, _, ok = reduction(pg.Sum(), tensor.Int8, 16)
	require.False(t, ok)
}
