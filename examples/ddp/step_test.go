package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/pg"
)

// Variables of BenchmarkStep. bench/step.sh sets them, and has the list of cases for both systems.
const (
	stepDevice  = "C10D_STEP_DEVICE"  // value of -device
	stepCases   = "C10D_STEP_CASES"   // list of cases, see parseStepCase; empty means the demo's model
	stepCount   = "C10D_STEP_COUNT"   // number of steps of each kind
	stepRecords = "C10D_STEP_RECORDS" // file for the records of rank 0
)

// A round has stepRound measured steps of each kind. stepWarmUp steps come before the first round;
// the buckets are rebuilt in the second of them. bench/ddp_step.py has the same numbers.
const (
	stepRound  = 20
	stepWarmUp = 20
)

// BenchmarkStep measures the communication of a training step that computation does not hide. Each
// rank is a process that c10d run starts:
//
//	go test -c -o ddp.test ./examples/ddp
//	C10D_STEP_DEVICE=cuda c10d run -n 2 -- ./ddp.test -test.run '^$' -test.bench Step -test.benchtime 1x
//
// Steps with an exchange of gradients and steps of each rank alone come in rounds. Both are
// trainer.trainOn on the same engine. The exposed communication is the difference of their times.
func BenchmarkStep(b *testing.B) {
	device := os.Getenv(stepDevice)
	if device == "" {
		b.Skipf("needs ranks that c10d run has started, and %s", stepDevice)
	}
	if b.N != 1 {
		b.Fatal("needs -test.benchtime 1x")
	}
	count, err := strconv.Atoi(cmp.Or(os.Getenv(stepCount), "300"))
	require.NoError(b, err)
	ctx := b.Context()
	base := demoConfig(b, "-device", device)
	devices, err := openDriver(base)
	require.NoError(b, err)
	require.NotNil(b, devices, "a device for the model")
	g, err := pg.Init(ctx, base.init, pg.InitOptions{Options: groupOptions(base, devices)})
	require.NoError(b, err)
	for _, name := range strings.Fields(cmp.Or(os.Getenv(stepCases), "128,64/16")) {
		b.Run(name, func(b *testing.B) {
			c, err := parseStepCase(name)
			require.NoError(b, err)
			s := stepper{config: demoConfig(b, append(c.args, "-device", device)...), stepCase: c, group: g, devices: devices}
			r, err := s.measure(ctx, max(count/stepRound, 1))
			require.NoError(b, err)
			b.ReportMetric(r.With, "us/with")
			b.ReportMetric(r.Alone, "us/alone")
			b.ReportMetric(r.Exposed, "us/exposed")
			b.ReportMetric(0, "ns/op")
			if file := os.Getenv(stepRecords); file != "" && g.Rank() == 0 {
				require.NoError(b, r.appendTo(file))
			}
		})
	}
	require.NoError(b, leave(ctx, g))
	if device == onSim {
		require.NoError(b, devices.Close())
	}
}

// leave leaves the group. After the barrier no other rank needs this one.
func leave(ctx context.Context, g *pg.ProcessGroup) error {
	if err := barrier(ctx, g); err != nil {
		return err
	}
	return g.Close()
}

func barrier(ctx context.Context, g *pg.ProcessGroup) error {
	return g.Barrier(ctx)
}

// demoConfig is the demo's configuration with flags.
func demoConfig(tb testing.TB, args ...string) *config {
	tb.Helper()
	c, err := parseFlags(args, os.Stderr)
	require.NoError(tb, err)
	return c
}

// stepCase is a model and the limits of its buckets in bytes. Zeros are ddp's defaults, which are
// PyTorch's: 1 MiB for the first bucket and 25 MiB for the others.
type stepCase struct {
	name                   string
	args                   []string // the demo's flags
	firstBucket, bucketCap int
}

// parseStepCase reads a case: the sizes of the hidden layers with commas, where 1024x9 means nine
// layers of 1024. /16 at the end means buckets of 16 KiB.
func parseStepCase(name string) (c stepCase, err error) {
	c.name = name
	layers, kib, limited := strings.Cut(name, "/")
	if limited {
		n, err := strconv.Atoi(kib)
		if err != nil || n < 1 {
			return c, fmt.Errorf("case %q: %q is not a number of KiB", name, kib)
		}
		c.firstBucket, c.bucketCap = n<<10, n<<10
	}
	var hidden []string
	for _, group := range strings.Split(layers, ",") {
		size, times, many := strings.Cut(group, "x")
		n := 1
		if many {
			if n, err = strconv.Atoi(times); err != nil || n < 1 {
				return c, fmt.Errorf("case %q: %q is not a number of layers", name, times)
			}
		}
		hidden = append(hidden, slices.Repeat([]string{size}, n)...)
	}
	c.args = []string{"-hidden", strings.Join(hidden, ",")}
	return c, nil
}

// stepper measures one case.
type stepper struct {
	stepCase
	config  *config
	group   *pg.ProcessGroup
	devices driver.Driver
	engine  *device
	*trainer
	next int // step of the epoch
}

// stepRecord is the result of a case. Times are in microseconds. bench/ddp_step.py writes the same
// record.
type stepRecord struct {
	System  string  `json:"system"`
	Version string  `json:"version"`
	Op      string  `json:"op"`
	Case    string  `json:"case"`
	DType   string  `json:"dtype"`
	Size    int     `json:"size"` // bytes of all gradients
	World   int     `json:"world"`
	Batch   int     `json:"batch"`   // images of a rank in a step
	Buckets []int   `json:"buckets"` // bytes of each, in the order in which they are reduced
	Iters   int     `json:"iters"`   // measured steps of each kind
	Repeat  int     `json:"repeat"`  // rounds
	With    float64 `json:"time_us_with"`
	Alone   float64 `json:"time_us_alone"`
	Exposed float64 `json:"time_us_exposed"`
	// Quartiles of the rounds' exposed times.
	P25    float64 `json:"time_us_exposed_p25"`
	P75    float64 `json:"time_us_exposed_p75"`
	Device string  `json:"device"`
	GPUs   int     `json:"gpus"`
	GPU    string  `json:"gpu"`
	Work   string  `json:"work"`
}

func (r *stepRecord) appendTo(file string) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return cmp.Or(err, f.Close())
}

// measure trains in the given number of rounds. Every rank returns the same times.
func (s *stepper) measure(ctx context.Context, rounds int) (*stepRecord, error) {
	data, err := dataset.Digits()
	if err != nil {
		return nil, err
	}
	if s.trainer, err = newTrainer(s.config, data, s.group.Rank(), s.group.Size()); err != nil {
		return nil, err
	}
	if s.engine, err = newDevice(s.devices, s.trainer, s.most(s.config)); err != nil {
		return nil, err
	}
	s.trainer.engine = s.engine
	if err := s.engine.push(ctx); err != nil {
		return nil, err
	}
	params, o, err := s.engine.params()
	if err != nil {
		return nil, err
	}
	o.FirstBucket, o.BucketCap = s.firstBucket, s.bucketCap
	d, err := ddp.New(ctx, s.group, params, o)
	if err != nil {
		return nil, err
	}
	s.engine.reduced(d)
	s.sampler.SetEpoch(0)

	if _, err := s.steps(ctx, d, stepWarmUp); err != nil {
		return nil, err
	}
	if _, err := s.steps(ctx, alone{}, stepWarmUp); err != nil {
		return nil, err
	}
	var with, without []float64           // of all measured steps
	var withRound, withoutRound []float64 // medians of the rounds
	for round := range rounds {
		for k := range 2 {
			var r reducer = d
			all, medians := &with, &withRound
			if (round+k)%2 == 1 {
				r, all, medians = alone{}, &without, &withoutRound
			}
			times, err := s.steps(ctx, r, stepRound)
			if err != nil {
				return nil, err
			}
			*all, *medians = append(*all, times...), append(*medians, median(times))
		}
	}
	mine := append(append([]float64{median(with), median(without)}, withRound...), withoutRound...)
	slowest, err := s.slowest(ctx, mine)
	if err != nil {
		return nil, err
	}
	r := s.record(d, params)
	r.Iters, r.Repeat = len(with), rounds
	r.With, r.Alone = slowest[0], slowest[1]
	r.Exposed = r.With - r.Alone
	exposed := make([]float64, rounds)
	for k := range exposed {
		exposed[k] = slowest[2+k] - slowest[2+rounds+k]
	}
	slices.Sort(exposed)
	r.P25, r.P75 = exposed[rounds/4], exposed[rounds*3/4]
	if err := d.Wait(ctx); err != nil {
		return nil, err
	}
	return r, s.engine.close(ctx)
}

// steps trains and returns n times in microseconds. The ranks begin together. A time
// begins with the loss of one step and ends with the loss of the next. Between the two are the first
// step's backward pass, exchange and optimizer, and the next one's forward pass.
func (s *stepper) steps(ctx context.Context, r reducer, n int) ([]float64, error) {
	if err := s.engine.model.Sync(ctx); err != nil {
		return nil, err
	}
	if err := barrier(ctx, s.group); err != nil {
		return nil, err
	}
	s.reducer = r
	times := make([]float64, 0, n)
	var last time.Time
	for k := range n + 1 {
		// The last batch of an epoch has fewer images.
		batch := s.sampler.Batch(s.next % max(s.sampler.Steps()-1, 1))
		s.next++
		if _, err := s.trainOn(ctx, batch); err != nil {
			return nil, err
		}
		now := time.Now()
		if k > 0 {
			times = append(times, float64(now.Sub(last).Nanoseconds())/1e3)
		}
		last = now
	}
	return times, nil
}

// slowest returns the largest of the ranks' values, each by itself.
func (s *stepper) slowest(ctx context.Context, mine []float64) ([]float64, error) {
	all := make([]float64, s.group.Size()*len(mine))
	if err := pg.Wait(s.group.AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice(mine))); err != nil {
		return nil, err
	}
	most := all[:len(mine)]
	for ranks := range slices.Chunk(all, len(mine)) {
		for k, v := range ranks {
			most[k] = max(most[k], v)
		}
	}
	return most, nil
}

// record describes the case, without times.
func (s *stepper) record(d *ddp.DDP, params []ddp.Param) *stepRecord {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = cmp.Or(info.Main.Version, "(devel)")
	}
	r := &stepRecord{
		System: "c10d-go", Version: fmt.Sprintf("c10d %s %s %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH),
		Op: "ddp_step", Case: s.name, DType: "float32", World: s.size, Batch: len(s.sampler.Batch(0).Indices),
		Device: s.config.device, GPUs: min(s.devices.Count(), s.size), GPU: s.engine.name, Work: allReduceWork(s.group),
	}
	for _, bucket := range d.Buckets() {
		bytes := 0
		for _, p := range bucket {
			bytes += params[p].Value.ByteLen()
		}
		r.Buckets, r.Size = append(r.Buckets, bytes), r.Size+bytes
	}
	return r
}

func median(times []float64) float64 {
	s := slices.Sorted(slices.Values(times))
	return s[len(s)/2]
}

func TestParseStepCase(t *testing.T) {
	c, err := parseStepCase("128,64/16")
	require.NoError(t, err)
	require.Equal(t, stepCase{"128,64/16", []string{"-hidden", "128,64"}, 16 << 10, 16 << 10}, c)
	c, err = parseStepCase("8x3,4")
	require.NoError(t, err)
	require.Equal(t, stepCase{"8x3,4", []string{"-hidden", "8,8,8,4"}, 0, 0}, c)
	for _, wrong := range []string{"8x", "8x0", "8/", "8/0", "8/x"} {
		_, err = parseStepCase(wrong)
		require.ErrorContains(t, err, wrong)
	}
}

// TestStep runs the benchmark on simulated GPUs. The times mean nothing there.
func TestStep(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	records := filepath.Join(t.TempDir(), "records.jsonl")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var out bytes.Buffer
	s, err := agent.Run(ctx, agent.Job{
		Procs: 2, Command: []string{self, "-test.run", "^$", "-test.bench", "^BenchmarkStep$", "-test.benchtime", "1x"},
		Env:    append(os.Environ(), stepDevice+"="+onSim, stepCases+"=24,8/1 16x2", stepCount+"=40", stepRecords+"="+records),
		Stdout: &out, Stderr: &out,
	})
	require.NoError(t, err)
	require.True(t, s.OK, "%s", out.String())
	text, err := os.ReadFile(records)
	require.NoError(t, err)
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	for _, want := range []stepRecord{
		// In the order of the backward pass: a bucket is full with the weight that brings it to 1 KiB.
		{Case: "24,8/1", Buckets: []int{4 * (10 + 8*10 + 8 + 24*8), 4 * (24 + 64*24)}},
		{Case: "16x2", Buckets: []int{4 * (10 + 16*10 + 16 + 16*16 + 16 + 64*16)}},
	} {
		var r stepRecord
		require.NoError(t, d.Decode(&r), "%s", text)
		require.Equal(t, want.Case, r.Case)
		require.Equal(t, want.Buckets, r.Buckets)
		require.Equal(t, []int{2, 32, 40, 2}, []int{r.World, r.Batch, r.Iters, r.Repeat})
		require.Equal(t, []string{"c10d-go", "ddp_step", onSim}, []string{r.System, r.Op, r.Device})
		require.Positive(t, r.Alone)
		require.InDelta(t, r.With-r.Alone, r.Exposed, 1e-6)
		require.LessOrEqual(t, r.P25, r.P75)
	}
	require.False(t, d.More())
}
