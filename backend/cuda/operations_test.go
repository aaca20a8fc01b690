package cuda_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var (
	operations = flag.Int("operations", 0,
		"how many random operations a group of TestGPUOperations or TestSimulatedOperations does; 0: by testsize")
	operationSeed = flag.Uint64("operation-seed", 0, "seed of random operations; 0 takes one from the clock")
)

// What a rank in a process of its own is told of random operations.
const (
	envOperations = "C10D_CUDA_TEST_OPERATIONS"
	envSeed       = "C10D_CUDA_TEST_SEED"
	envTable      = "C10D_CUDA_TEST_TABLE"
)

// randomOperations runs random operations of 2 and of 4 ranks in processes of their own: with the
// table in the program, and with one by which calls take all ways.
func randomOperations(t *testing.T, dir func() string) {
	for _, ranks := range []int{2, 4} {
		for _, table := range []string{"", allWays(ranks)} {
			t.Run(fmt.Sprintf("%d ranks, all ways %v", ranks, table != ""), func(t *testing.T) {
				seed := *operationSeed
				if seed == 0 {
					seed = uint64(time.Now().UnixNano())
				}
				n := cmp.Or(*operations, testsize.Of(50, 100, 1000))
				t.Logf("%d operations; repeat with -operation-seed %d", n, seed)
				t.Setenv(envOperations, strconv.Itoa(n))
				t.Setenv(envSeed, strconv.FormatUint(seed, 10))
				if table != "" {
					table = tableOf(t, table)
				}
				t.Setenv(envTable, table)
				runApart(t, operationsApart, ranks, dir())
			})
		}
	}
}

// allWays returns the rows of a table in which each way is the fastest for some sizes.
func allWays(ranks int) string {
	var b strings.Builder
	for op, names := range map[string][]string{
		"all_reduce":     {"one-shot", "two-shot", "host-shared", "one-shot:16", "host", "two-shot:16"},
		"all_gather":     {"direct", "host", "direct:16"},
		"reduce_scatter": {"direct", "host", "direct:16"},
		"reduce":         {"one-shot", "host", "two-shot"},
		"gather":         {"direct", "host", "direct:16"},
		"scatter":        {"direct", "host", "direct:16"},
		"broadcast":      {"one-shot", "flat", "two-shot", "tree", "chain", "host", "two-shot:16"},
	} {
		for at := range names {
			for i, name := range names {
				// From 16 bytes on, each way at 8 times as many as the one before.
				fmt.Fprintf(&b, "%s peers %d 1 %d %s %d\n", op, ranks, 16<<(3*at), name, 1+min(50*max(i-at, at-i), 90))
			}
		}
	}
	return b.String()
}

// TestGPUOperations compares random operations on GPUs with the CPU's arithmetic. It does any number of
// them: -operations 100000 -timeout 2h.
func TestGPUOperations(t *testing.T) {
	require.NoError(t, openGPU(t).Close())
	randomOperations(t, noDir)
}

// TestSimulatedOperations is TestGPUOperations on simulated devices, with smaller tensors.
func TestSimulatedOperations(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("simulated devices of several processes are not promised here")
	}
	randomOperations(t, t.TempDir)
}

// operation is a random operation. It is the same on all ranks.
type operation struct {
	kind string
	d    tensor.DType
	op   backend.ReduceOp
	n    int // elements of a tensor, or of a rank's part
	skew int // elements between a tensor and a border of 16 bytes
	root int
	seed uint64 // of the inputs

	in, out int // where the tensors are in the rank's memory
	lo, hi  int // what is copied there, and back
}

func (o *operation) String() string {
	return fmt.Sprintf("%s of %d x %v, %v, root %d, skew %d, input seed %d", o.kind, o.n, o.d, o.op, o.root, o.skew, o.seed)
}

var operationKinds = []string{"all_reduce", "all_reduce", "all_reduce", "all_reduce_coalesced", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce", "gather", "scatter", "all_to_all_single", "barrier"}

// drawOperation draws an operation with tensors of up to most bytes.
func drawOperation(g *rand.Rand, ranks, most int) *operation {
	o := &operation{kind: operationKinds[g.IntN(len(operationKinds))], d: deviceTypes[g.IntN(len(deviceTypes))], root: g.IntN(ranks), seed: g.Uint64()}
	if g.IntN(8) == 0 { // no kernel has these
		o.d = []tensor.DType{tensor.Bool, tensor.Int16, tensor.Uint64, tensor.Complex64}[g.IntN(4)]
	}
	all := append(slices.Clone(deviceOps), backend.PreMulSum(2))
	for {
		o.op = all[g.IntN(len(all))]
		if _, err := o.op.Reduction(o.d, ranks); err == nil {
			break
		}
	}
	// As many of 1 to 2 bytes as of 2 to 4, and so on; some are empty. The largest take the time of
	// many others, so there are few of them.
	if g.IntN(8) > 0 {
		most /= 64
	}
	n := 1 << g.IntN(bits.Len(uint(most)))
	n = min(n+g.IntN(n), most)
	if o.whole() {
		n /= ranks
	}
	o.n = n / o.d.Size()
	o.skew = g.IntN(16/min(o.d.Size(), 16) + 1)
	return o
}

// whole reports whether one of two tensors has the parts of all ranks.
func (o *operation) whole() bool {
	switch o.kind {
	case "all_gather_into_tensor", "reduce_scatter_tensor", "gather", "scatter", "all_to_all_single":
		return true
	}
	return false
}

// lens returns the bytes of the input and the output, which are one tensor unless o.whole.
func (o *operation) lens(ranks int) (in, out int) {
	in = o.n * o.d.Size()
	switch o.kind {
	case "all_gather_into_tensor", "gather":
		return in, in * ranks
	case "reduce_scatter_tensor", "scatter":
		return in * ranks, in
	case "all_to_all_single":
		return in * ranks, in * ranks // at most
	}
	return in, in
}

// split returns how many elements one rank sends another in an all_to_all.
func (o *operation) split(from, to int) int {
	return o.n * int((o.seed>>(3*from)+o.seed>>(5*to))%3) / 2
}

// place gives the operation memory from at on, and returns where it ends.
func (o *operation) place(at, ranks int) int {
	in, out := o.lens(ranks)
	o.lo = at
	o.in = (at+guard+15)&^15 + o.skew*o.d.Size()
	o.out = o.in
	if o.whole() {
		o.out = (o.in+in+guard+15)&^15 + o.skew*o.d.Size()
	}
	o.hi = (max(o.in+in, o.out+out) + guard + 15) &^ 15
	return o.hi
}

// bitsOf has two masks for 8 bytes of an input: of the bits that are random, and of the others that are
// 1. Floats are from 1 to 2, of either sign. What Min and Max make of NaNs and of the signs of zeros
// depends on the way.
var bitsOf = map[tensor.DType][2]uint64{
	tensor.Float32:   {0x807fffff807fffff, 0x3f8000003f800000},
	tensor.Complex64: {0x807fffff807fffff, 0x3f8000003f800000},
	tensor.Float64:   {0x800fffffffffffff, 0x3ff0000000000000},
	tensor.Float16:   {0x83ff83ff83ff83ff, 0x3c003c003c003c00},
	tensor.BFloat16:  {0x807f807f807f807f, 0x3f803f803f803f80},
	tensor.Bool:      {0x0101010101010101, 0},
}

// input makes a rank's input.
func (o *operation) input(rank, ranks int) []byte {
	n, _ := o.lens(ranks)
	drawn, set := ^uint64(0), uint64(0)
	if m, ok := bitsOf[o.d]; ok {
		drawn, set = m[0], m[1]
	}
	b := make([]byte, (n+7)&^7)
	pieces(len(b), func(lo, hi int) {
		x := (o.seed+uint64(rank)+uint64(lo))*0x9e3779b97f4a7c15 | 1
		for i := lo; i < hi; i += 8 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			binary.LittleEndian.PutUint64(b[i:], x&drawn|set)
		}
	})
	return b[:n]
}

// pieces calls f for pieces of n bytes, all at the same time.
func pieces(n int, f func(lo, hi int)) {
	const piece = 512 << 10
	var all sync.WaitGroup
	for lo := 0; lo < n; lo += piece {
		all.Go(func() { f(lo, min(lo+piece, n)) })
	}
	all.Wait()
}

// expect returns what a rank gets, by the CPU's arithmetic, in the order of the ranks.
func (o *operation) expect(rank, ranks int) (_ []byte, err error) {
	defer must.Catch(&err)
	n := o.n * o.d.Size()
	switch o.kind {
	case "broadcast":
		return o.input(o.root, ranks), nil
	case "all_gather_into_tensor":
		var all []byte
		for r := range ranks {
			all = append(all, o.input(r, ranks)...)
		}
		return all, nil
	case "gather":
		if rank != o.root {
			return nil, nil
		}
		return (&operation{kind: "all_gather_into_tensor", d: o.d, n: o.n, seed: o.seed}).expect(rank, ranks)
	case "scatter":
		return o.input(o.root, ranks)[rank*n:][:n], nil
	case "all_to_all_single":
		var all []byte
		for from := range ranks {
			at := 0
			for to := range rank {
				at += o.split(from, to)
			}
			all = append(all, o.input(from, ranks)[at*o.d.Size():][:o.split(from, rank)*o.d.Size()]...)
		}
		return all, nil
	case "barrier":
		return o.input(rank, ranks), nil
	case "reduce":
		if rank != o.root {
			return o.input(rank, ranks), nil
		}
	}
	red := must.Get(o.op.Reduction(o.d, ranks))
	var sum []byte
	for r := range ranks {
		x := o.input(r, ranks)
		if o.kind == "reduce_scatter_tensor" {
			x = x[rank*n:][:n]
		}
		if red.Before != nil {
			red.Before(x)
		}
		if r == 0 {
			sum = x
		} else {
			pieces(len(x), func(lo, hi int) { red.Combine(sum[lo:hi], x[lo:hi]) })
		}
	}
	if red.After != nil {
		red.After(sum)
	}
	return sum, nil
}

// operator is a rank that does random operations.
type operator struct {
	*member
	streams []driver.Stream // of the caller
	own     *rand.Rand      // of this rank: how it calls
	image   []byte          // what the operations' memory is to be
	first   []byte          // what the first run has made of it
}

// operate runs random operations, a few at a time and each twice.
func (a *apart) operate(t *testing.T) {
	count := must.Get(strconv.Atoi(os.Getenv(envOperations)))
	seed := must.Get(strconv.ParseUint(os.Getenv(envSeed), 10, 64))
	ctx, cancel := context.WithTimeout(t.Context(), operationsLimit(count))
	defer cancel()
	most, room := 64<<20, 300<<20
	if a.simulated {
		most, room = 64<<10, 1<<20
	}
	x := &operator{own: rand.New(rand.NewPCG(seed, 2+uint64(a.rank)))}
	x.member = must.Get(newOperator(ctx, a, room))
	second := must.Get(x.v.NewStream(driver.StreamOptions{Name: fmt.Sprint("second caller ", a.rank)}))
	x.streams = []driver.Stream{x.s, second}
	plan := rand.New(rand.NewPCG(seed, 1))
	for done := 0; done < count; {
		var list []*operation
		used := 0
		for len(list) < 1+plan.IntN(8) && done < count {
			o := drawOperation(plan, a.size, most)
			end := o.place(used, a.size)
			if end > room {
				break // the next one may be smaller
			}
			list, used, done = append(list, o), end, done+1
		}
		for run := range 2 {
			require.NoError(t, x.together(list, used, run), "operation %d and those before it, run %d, rank %d, -operation-seed %d", done, run, a.rank, seed)
		}
	}
	require.NoError(t, errors.Join(x.b.Close(), x.s.Close(), second.Close(), x.mem.Close(), x.h.Close(), x.delay.Close()))
}

// operationsLimit is how long random operations may take.
func operationsLimit(count int) time.Duration {
	return 5*patience + time.Duration(count)*100*time.Millisecond
}

// newOperator makes a member of a group of any size, which chooses its ways.
func newOperator(ctx context.Context, a *apart, room int) (m *member, err error) {
	m = &member{ctx: ctx, d: a.d, rank: a.rank, size: a.size, dev: a.rank % a.d.Count()}
	if m.v, err = a.d.Device(m.dev); err != nil {
		return nil, err
	}
	if m.s, err = m.v.NewStream(driver.StreamOptions{Name: fmt.Sprint("caller ", a.rank)}); err != nil {
		return nil, err
	}
	if m.mem, err = m.v.Alloc(room); err != nil {
		return nil, err
	}
	if m.h, err = a.d.AllocHost(2 * room); err != nil {
		return nil, err
	}
	if m.delay, err = newDelay(a.d, m.v); err != nil {
		return nil, err
	}
	host := loopback("")
	host.Sums = gloo.SumsInRankOrder
	m.b, err = cuda.New(ctx, backend.Options{
		Store: a.st, Rank: a.rank, Size: a.size, Timeout: 2 * patience, Group: "operations",
		Specific: cuda.Options{Driver: a.d, Table: os.Getenv(envTable), CPUOptions: host},
	})
	return m, err
}

// together runs operations of which several are on their way at a time. Inputs come by the stream of
// a call, results leave by it.
func (x *operator) together(list []*operation, used, run int) (err error) {
	defer must.Catch(&err)
	host := x.h.Bytes()
	in, out := host[:used], host[x.mem.Len():][:used]
	driver.HostAccess(x.d, "filling", driver.Writes(x.h.Ptr(), used), driver.Writes(x.h.Ptr()+driver.Ptr(x.mem.Len()), used))
	clear(out)
	if run == 0 {
		x.image = slices.Grow(x.image[:0], used)[:used]
		must.Do(atOnce(list, func(o *operation) error { return x.prepare(o, in) }))
	}
	var works []*work.Work
	for _, o := range list {
		w, err := x.call(o)
		if err != nil {
			return fmt.Errorf("%v: %w", o, err)
		}
		works = append(works, w)
	}
	must.Do(work.WaitAll(x.ctx, works...))
	for _, s := range x.streams {
		e := must.Get(s.Record())
		err := e.Sync(x.ctx)
		e.Release()
		if err != nil {
			return err
		}
	}
	driver.HostAccess(x.d, "comparing", driver.Reads(x.h.Ptr()+driver.Ptr(x.mem.Len()), used))
	err = atOnce(list, func(o *operation) error {
		if err := same(out[o.lo:o.hi], x.image[o.lo:o.hi]); err != nil {
			return fmt.Errorf("%v at byte %d: %w", o, o.out-o.lo, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if run == 0 {
		x.first = append(x.first[:0], out...)
	} else if !bytes.Equal(x.first, out) {
		return errors.New("the second run has other bits")
	}
	return nil
}

// prepare makes an operation's input, and what its memory is to be afterwards.
func (x *operator) prepare(o *operation, in []byte) error {
	pieces(o.hi-o.lo, func(lo, hi int) {
		for i := range in[o.lo:][lo:hi] {
			in[o.lo+lo+i] = poison
		}
	})
	copy(in[o.in:], o.input(x.rank, x.size))
	copy(x.image[o.lo:o.hi], in[o.lo:])
	want, err := o.expect(x.rank, x.size)
	copy(x.image[o.out:], want)
	return err
}

// atOnce calls f for all operations at the same time.
func atOnce(list []*operation, f func(o *operation) error) error {
	var g errgroup.Group
	for _, o := range list {
		g.Go(func() error { return f(o) })
	}
	return g.Wait()
}

// How a rank calls.
const (
	byMemory = iota // the tensors' memory has the stream
	beside          // WithStreams
	inside          // InStream
	alone           // no stream: waits before and after
	modes
)

// call issues an operation in one of the ways of calling, between the copies of its memory.
func (x *operator) call(o *operation) (w *work.Work, err error) {
	mode, s := x.own.IntN(modes), x.streams[x.own.IntN(len(x.streams))]
	if x.own.IntN(2) == 0 {
		if err := x.delay.hold(s, uint64(x.own.IntN(100_000))); err != nil {
			return nil, err
		}
	}
	dev, n := x.mem.Ptr()+driver.Ptr(o.lo), o.hi-o.lo
	if err := s.Copy(dev, x.h.Ptr()+driver.Ptr(o.lo), n); err != nil {
		return nil, err
	}
	ctx, m := x.ctx, driver.Memory(x.mem)
	switch mode {
	case byMemory:
		m = cuda.OnStream(m, s)
	case beside:
		ctx = cuda.WithStreams(ctx, s)
	case inside:
		ctx = cuda.InStream(ctx, s)
	case alone:
		e, err := s.Record()
		if err != nil {
			return nil, err
		}
		err = e.Sync(x.ctx)
		e.Release()
		if err != nil {
			return nil, err
		}
	}
	if w, err = x.issue(ctx, o, m); err != nil {
		return nil, err
	}
	switch mode {
	case byMemory, beside:
		err = w.Synchronize(s)
	case alone:
		err = w.Wait(x.ctx)
	}
	return w, cmp.Or(err, s.Copy(x.h.Ptr()+driver.Ptr(x.mem.Len()+o.lo), dev, n))
}

func (x *operator) issue(ctx context.Context, o *operation, m driver.Memory) (*work.Work, error) {
	all, err := tensor.OnDevice(o.d, m, m.Len()/o.d.Size())
	if err != nil {
		return nil, err
	}
	slice := func(at, bytes int) *tensor.Tensor {
		t, failed := all.Slice(0, at/o.d.Size(), (at+bytes)/o.d.Size())
		err = cmp.Or(err, failed)
		return t
	}
	nin, nout := o.lens(x.size)
	var sends, takes []int
	if o.kind == "all_to_all_single" {
		nin, nout = 0, 0
		for r := range x.size {
			sends, takes = append(sends, o.split(x.rank, r)), append(takes, o.split(r, x.rank))
			nin, nout = nin+sends[r]*o.d.Size(), nout+takes[r]*o.d.Size()
		}
	}
	in, out := slice(o.in, nin), slice(o.out, nout)
	if err != nil {
		return nil, err
	}
	switch o.kind {
	case "all_reduce_coalesced":
		half := o.n / 2 * o.d.Size()
		a, b := slice(o.in, half), slice(o.in+half, nin-half)
		if err != nil {
			return nil, err
		}
		return x.b.AllReduceCoalesced(ctx, []*tensor.Tensor{a, b}, backend.AllReduceOptions{Op: o.op})
	case "barrier":
		return x.b.Barrier(ctx, backend.BarrierOptions{})
	case "reduce":
		return x.b.Reduce(ctx, in, backend.ReduceOptions{Op: o.op, Root: o.root})
	case "gather", "scatter":
		parts := make([]*tensor.Tensor, x.size)
		n := o.n * o.d.Size()
		for r := range parts {
			parts[r] = slice(map[string]int{"gather": o.out, "scatter": o.in}[o.kind]+r*n, n)
		}
		if err != nil {
			return nil, err
		}
		if x.rank != o.root {
			parts = nil
		}
		if o.kind == "gather" {
			return x.b.Gather(ctx, parts, in, backend.GatherOptions{Root: o.root})
		}
		return x.b.Scatter(ctx, out, parts, backend.ScatterOptions{Root: o.root})
	case "all_to_all_single":
		return x.b.AllToAllSingle(ctx, out, in, takes, sends, backend.AllToAllOptions{})
	case "broadcast":
		return x.b.Broadcast(ctx, []*tensor.Tensor{in}, backend.BroadcastOptions{Root: o.root})
	case "all_gather_into_tensor":
		return x.b.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{})
	case "reduce_scatter_tensor":
		return x.b.ReduceScatterTensor(ctx, out, in, backend.ReduceScatterOptions{Op: o.op})
	}
	return x.b.AllReduce(ctx, []*tensor.Tensor{in}, backend.AllReduceOptions{Op: o.op})
}
