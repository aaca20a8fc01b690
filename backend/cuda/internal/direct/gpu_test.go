package direct_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// Tests of two GPUs. They run the ranks as goroutines of this process and as processes of their
// own. For these the test binary starts itself again, with the rank in the environment. Pipes
// carry the bytes of exchange.

const (
	childRank = "C10D_DIRECT_RANK"
	childJob  = "C10D_DIRECT_JOB"
)

// gpuRanks is how many ranks tests on GPUs have.
var gpuRanks = number("C10D_DIRECT_RANKS", 2)

// setup is what ranks of a test have in common.
type setup struct {
	ranks  int
	window window.Options
	direct direct.Options
	most   int // bytes of an operation
	rounds int
}

// onGPUs is a rank for each GPU.
func onGPUs() setup {
	return setup{
		ranks: gpuRanks,
		window: window.Options{
			LaneChannels: 256, RingChannels: 1024,
			Channels: number("C10D_DIRECT_CHANNELS", 0), Depth: number("C10D_DIRECT_DEPTH", 0),
		},
		direct: direct.Straight(direct.Options{Limit: 20 * time.Second, Blocks: number("C10D_DIRECT_BLOCKS", 0)}, 1),
		most:   2 << 20, rounds: number("C10D_DIRECT_ROUNDS", 40),
	}
}

// jobs are what ranks do in tests.
var jobs = map[string]func(m *member) error{
	"check":  func(m *member) error { return check(m, m.rounds, m.most) },
	"large":  func(m *member) error { return check(m, 2, 96<<20) },
	"fail":   fail,
	"graph":  func(m *member) error { return errors.Join(replay(m, 1<<20, 30), replayMixed(m, 20, 100)) },
	"bench":  bench,
	"shapes": shapes,
	"moves":  moves,
	"reads":  func(m *member) error { return reads(m, 8*m.rounds, m.most) },
}

// number is a test's size, from the environment.
func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

func TestMain(m *testing.M) {
	if r := os.Getenv(childRank); r != "" {
		rank, err := strconv.Atoi(r)
		if err == nil {
			err = child(rank, os.Getenv(childJob))
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "rank %s: %v\n", r, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// gpus skips the test where there are not two GPUs.
func gpus(t testing.TB) driver.Driver {
	t.Helper()
	d, err := nvidia.Open()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	if d.Count() < gpuRanks {
		t.Skipf("%d GPU, want %d", d.Count(), gpuRanks)
	}
	return d
}

func child(rank int, job string) error {
	d, err := nvidia.Open()
	if err != nil {
		return err
	}
	in, out := bufio.NewReader(os.Stdin), os.Stdout
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	u := onGPUs()
	if job == "bench" || job == "moves" {
		u.direct = direct.Straight(u.direct, 0)
	}
	err = with(ctx, u, d, rank, rank, func(_ context.Context, mine []byte) (_ [][]byte, err error) {
		defer must.Catch(&err)
		must.Do(send(out, mine))
		all := make([][]byte, gpuRanks)
		for r := range all {
			all[r] = must.Get(receive(in))
		}
		return all, nil
	}, jobs[job])
	return errors.Join(err, d.Close())
}

func send(w io.Writer, b []byte) error {
	return must.Err(w.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)))
}

func receive(r io.Reader) ([]byte, error) {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.LittleEndian.Uint32(n[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

// processes runs a job with a process for each rank.
func processes(t testing.TB, job string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var wait sync.WaitGroup
	defer wait.Wait()
	type end struct {
		in  io.WriteCloser
		out *bufio.Reader
	}
	var ends []end
	errs := make([]error, gpuRanks)
	for r := range gpuRanks {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childRank+"="+strconv.Itoa(r), childJob+"="+job)
		cmd.Stderr = os.Stderr
		in := must.Get(cmd.StdinPipe())
		out := must.Get(cmd.StdoutPipe())
		require.NoError(t, cmd.Start())
		ends = append(ends, end{in, bufio.NewReader(out)})
		defer func() { require.NoError(t, errors.Join(cmd.Wait(), errs[r])) }()
	}
	for {
		all := make([][]byte, 0, gpuRanks)
		for r := range ends {
			b, err := receive(ends[r].out)
			if err != nil {
				for _, e := range ends {
					e.in.Close()
				}
				return // Wait says how the processes ended
			}
			all = append(all, b)
		}
		for r := range ends {
			for _, b := range all {
				errs[r] = errors.Join(errs[r], send(ends[r].in, b))
			}
		}
	}
}

// threads runs a job with all ranks in this process. Drivers has one for each rank; rank r is
// on device r, or on those that there are in turn.
func threads(t *testing.T, u setup, drivers []driver.Driver, job func(m *member) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	exchange := exchanges(u.ranks)
	errs := make([]error, u.ranks)
	var wait sync.WaitGroup
	for r := range u.ranks {
		wait.Go(func() {
			errs[r] = with(ctx, u, drivers[r], r%drivers[r].Count(), r, exchange(r), job)
			if errs[r] != nil {
				cancel()
			}
		})
	}
	wait.Wait()
	require.NoError(t, errors.Join(errs...))
}

// ended returns the error of a job, whether it is returned or given to must.
func ended(job func(m *member) error, m *member) (err error) {
	defer must.Catch(&err)
	return job(m)
}

// one is the same driver for all ranks.
func one(d driver.Driver, ranks int) (all []driver.Driver) {
	for range ranks {
		all = append(all, d)
	}
	return all
}

// exchange gathers what all ranks give.
type exchange func(ctx context.Context, mine []byte) (all [][]byte, err error)

// tell is the window.Exchange of a rank.
func (m *member) tell(why error, mine []byte) (reason error, all [][]byte, err error) {
	text := ""
	if why != nil {
		text = why.Error()
	}
	all, err = m.exchange(m.ctx, append(fmt.Appendf(nil, "%-200.200s", text), mine...))
	for r, b := range all {
		if text := bytes.TrimSpace(b[:200]); len(text) > 0 && reason == nil {
			reason = fmt.Errorf("%s", text)
		}
		all[r] = b[200:]
	}
	return reason, all, err
}

// exchanges returns the ranks' exchange functions for ranks of one process.
func exchanges(ranks int) func(rank int) exchange {
	type round struct {
		all  [][]byte
		left int
		done chan struct{}
	}
	var mu sync.Mutex
	newRound := func() *round { return &round{make([][]byte, ranks), ranks, make(chan struct{})} }
	current := newRound()
	return func(rank int) exchange {
		return func(ctx context.Context, mine []byte) ([][]byte, error) {
			mu.Lock()
			r := current
			r.all[rank] = bytes.Clone(mine)
			if r.left--; r.left == 0 {
				current = newRound()
				close(r.done)
			}
			mu.Unlock()
			select {
			case <-r.done:
				return append([][]byte(nil), r.all...), nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}

// member is a rank of a test.
type member struct {
	setup
	ctx      context.Context
	rank     int
	d        driver.Driver
	v        driver.Device
	s        driver.Stream
	w        *window.Window
	c        *direct.Comm
	memory   *registered.Registry
	exchange exchange
	delay    driver.Function
}

// with makes a rank, runs a job, and takes the rank down.
func with(ctx context.Context, u setup, d driver.Driver, device, rank int, exchange exchange, job func(m *member) error) (err error) {
	m := &member{setup: u, ctx: ctx, rank: rank, d: d, exchange: exchange}
	var closers []func() error
	closes := func(f func() error) { closers = append(closers, f) }
	defer func() {
		if err != nil && m.w != nil {
			// The others may still be there.
			m.w.Abort()
			late, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			m.ctx = late
			_ = m.sync()
		}
		for _, f := range slices.Backward(closers) {
			err = errors.Join(err, f())
		}
	}()
	if m.v, err = d.Device(device); err != nil {
		return err
	}
	if m.s, err = m.v.NewStream(driver.StreamOptions{Name: fmt.Sprint("rank ", rank)}); err != nil {
		return err
	}
	closes(m.s.Close)
	// Simulated devices have delays of their own.
	var delays driver.Module
	if d.Name() != "sim" {
		if delays, err = m.v.Load([]byte(drivertest.PTX)); err != nil {
			return err
		}
		closes(delays.Close)
		if m.delay, err = delays.Function(drivertest.Delay); err != nil {
			return err
		}
	}
	o := u.window
	o.Driver, o.Device, o.Rank, o.Ranks = d, m.v, rank, u.ranks
	if m.w, err = window.New(ctx, o); err != nil {
		return err
	}
	closes(m.w.Close)
	if reason, err := m.w.Connect(ctx, m.tell); cmp.Or(reason, err) != nil {
		return cmp.Or(reason, err)
	}
	begin := time.Now()
	if m.c, err = direct.New(m.w, u.direct); err != nil {
		// All detach before one of them frees its memory.
		if m.w.Detach() == nil {
			_, _ = exchange(ctx, make([]byte, 1))
		}
		return err
	}
	closes(m.c.Close)
	if !m.w.NextOnly() {
		if err = m.register(closes); err != nil {
			return err
		}
	}
	if rank == 0 && m.delay != nil {
		fmt.Fprintf(os.Stderr, "kernels loaded in %v\n", time.Since(begin).Round(time.Millisecond))
	}
	// The ranks of a process must not compile kernels while others of theirs wait.
	if err = m.meet(); err != nil {
		return err
	}
	if err = ended(job, m); err != nil {
		return err
	}
	err = m.sync()
	if m.memory != nil {
		err = errors.Join(err, m.memory.Close())
	}
	return errors.Join(err, m.w.Detach(), m.meet())
}

// register makes the rank's registry.
func (m *member) register(closes func(func() error)) error {
	own, err := region.New(registered.Bytes)
	if err != nil {
		return err
	}
	closes(own.Leave)
	names, err := m.exchange(m.ctx, []byte(own.Name))
	if err != nil {
		return err
	}
	pages := make([]*region.Region, len(names))
	for r, name := range names {
		if pages[r] = own; r == m.rank {
			continue
		}
		if pages[r], err = region.Open(string(name), registered.Bytes); err != nil {
			return err
		}
		closes(pages[r].Leave)
	}
	m.memory, err = registered.New(m.w, pages, 0)
	return err
}

// into registers memory on all ranks, and waits until the peers have mapped it.
func (m *member) into(mem driver.Memory) (to direct.Into, err error) {
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		m.memory.Look()
		to = m.memory.Use(mem, registered.Everyone, false)
		all, err := m.exchange(m.ctx, []byte{byte(to.Region)})
		if err != nil {
			return to, err
		}
		if !slices.ContainsFunc(all, func(b []byte) bool { return b[0] == 0 }) {
			return to, nil
		}
		if time.Now().After(until) {
			return to, fmt.Errorf("the ranks have regions %v", all)
		}
	}
}

// meet waits for the other ranks.
func (m *member) meet() error {
	return must.Err(m.exchange(m.ctx, []byte{1}))
}

// sync waits for the stream.
func (m *member) sync() (err error) {
	defer must.Catch(&err)
	e := must.Get(m.s.Record())
	defer e.Release()
	must.Do(e.Sync(m.ctx))
	return m.w.Err()
}

func TestThreads(t *testing.T) { threads(t, onGPUs(), one(gpus(t), gpuRanks), jobs["check"]) }

// TestManyRanks has more ranks than GPUs, each with so few blocks that all of them run at the
// same time.
func TestManyRanks(t *testing.T) {
	d := gpus(t)
	for _, ranks := range []int{2, 3, 4, 8} {
		t.Run(strconv.Itoa(ranks), func(t *testing.T) {
			u := onGPUs()
			u.ranks, u.most = ranks, 1<<20
			u.direct.Blocks = 4
			u.direct = direct.ShareDevices(u.direct)
			threads(t, u, one(d, ranks), jobs["check"])
		})
	}
}

func TestProcesses(t *testing.T) {
	gpus(t)
	processes(t, "check")
}

func TestLarge(t *testing.T) {
	gpus(t)
	processes(t, "large")
}

func TestFailures(t *testing.T) {
	gpus(t)
	processes(t, "fail")
}

// TestReads has roots that read inputs which are overwritten right after the calls.
func TestReads(t *testing.T) {
	gpus(t)
	if gpuRanks > 2 {
		t.Skip("one of two ranks reads")
	}
	processes(t, "reads")
	threads(t, onGPUs(), one(gpus(t), gpuRanks), jobs["reads"])
}

// TestReadsFreed has a root that comes to a call when the other rank has failed in it, and has freed its input. They
// share a process, so an access of that memory would be the end of the root's device.
func TestReadsFreed(t *testing.T) {
	gpus(t)
	if gpuRanks > 2 {
		t.Skip("one of two ranks reads")
	}
	threads(t, onGPUs(), one(gpus(t), gpuRanks), readsFreed)
}

func TestGraph(t *testing.T) { threads(t, onGPUs(), one(gpus(t), gpuRanks), jobs["graph"]) }

type kind uint8

const (
	allReduce kind = iota
	reduceScatter
	allGather
	allToAll
	reduce
	broadcast
	scatter
	gather
	gatherV
	allToAllV
	barrier
	kinds
)

// moves reports whether some ranks have longer tensors than others.
func (k kind) moves() bool { return k >= reduce }

var (
	dtypes = []tensor.DType{
		tensor.Float32, tensor.BFloat16, tensor.Float16, tensor.Float64,
		tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64,
	}
	ops = []backend.ReduceOp{
		backend.Sum(), backend.Avg(), backend.Product(), backend.Min(), backend.Max(),
		backend.PreMulSum(-1.5), backend.PreMulSum(3), backend.BAnd(), backend.BOr(), backend.BXor(),
	}
)

// operation is one random call, the same on all ranks.
type operation struct {
	kind    kind
	d       tensor.DType
	op      backend.ReduceOp
	n       int // elements that a rank gets from another one
	skew    int // elements before dst and src within a vector
	inPlace bool
	form    direct.Form
	seed    uint64
	order   []int // of the ring, if it goes round one
}

func (o operation) String() string {
	return fmt.Sprintf("kind %d, %v, %v, %d elements, skew %d, in place %v, %+v, seed %d", o.kind, o.d, o.op, o.n, o.skew, o.inPlace, o.form, o.seed)
}

// of returns a rank's operator: factors differ between ranks.
func (o operation) of(rank int) backend.ReduceOp {
	if f := o.op.Factor(); f != 0 {
		return backend.PreMulSum(f * float64(rank+1))
	}
	return o.op
}

// root is the rank that has more than the others.
func (o operation) root(ranks int) int { return int(o.seed>>8) % ranks }

// length returns how many bytes one rank sends to another, at most those of n elements.
func (o operation) length(from, to, ranks int) int {
	n, root := o.n*o.d.Size(), o.root(ranks)
	switch o.kind {
	case broadcast:
		return n * number01(from == root && to != root)
	case scatter:
		return n * number01(from == root)
	case gather:
		return n * number01(to == root)
	case gatherV:
		return o.n * int((o.seed>>(4*from)+uint64(from))%5) / 4 * o.d.Size() * number01(to == root)
	case allToAllV:
		return o.n * int((o.seed>>(3*from)+o.seed>>(5*to))%5) / 4 * o.d.Size()
	}
	return 0
}

func number01(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// spans returns the spans that a rank sends to each rank, and those that it receives.
func (o operation) spans(rank, ranks int) (send, take []direct.Span, in, out int) {
	for r := range ranks {
		send = append(send, direct.Span{Off: in, N: o.length(rank, r, ranks)})
		take = append(take, direct.Span{Off: out, N: o.length(r, rank, ranks)})
		in, out = in+send[r].N, out+take[r].N
	}
	return send, take, in, out
}

// sizes returns the bytes of a rank's input and output.
func (o operation) sizes(rank, ranks int) (in, out int) {
	in = o.n * o.d.Size()
	out = in
	switch o.kind {
	case reduceScatter:
		in *= ranks
	case allGather:
		out *= ranks
	case allToAll:
		in, out = in*ranks, out*ranks
	case broadcast, reduce:
	case scatter, gather, gatherV, allToAllV, barrier:
		_, _, in, out = o.spans(rank, ranks)
	}
	return in, out
}

// randomOperation returns one of at most so many bytes. Order is that of the ring, nil if there is none. Only is
// whether there is nothing else.
func randomOperation(g *rand.Rand, most int, order []int, only bool) operation {
	o := operation{kind: kind(g.IntN(int(kinds))), d: dtypes[g.IntN(len(dtypes))], seed: g.Uint64()}
	if g.IntN(4) == 0 {
		o.kind = allReduce
	}
	if only {
		o.kind %= allGather + 1
	}
	for {
		o.op = ops[g.IntN(len(ops))]
		if direct.Supports(o.op, o.d) == nil {
			break
		}
	}
	// As many small ones as large ones.
	bytes := 1 << g.IntN(len(strconv.FormatInt(int64(most), 2)))
	o.n = (bytes + g.IntN(bytes)) / o.d.Size() % (most/o.d.Size() + 1)
	if g.IntN(2) == 0 {
		o.skew = g.IntN(16 / o.d.Size())
	}
	o.inPlace = o.kind == broadcast || g.IntN(3) == 0 && o.kind != allToAll && o.kind <= reduce
	o.form = direct.Form{TwoShot: g.IntN(2) == 0, Blocks: []int{0, 0, 1, 16}[g.IntN(4)]}
	if order != nil && o.kind <= allGather && (only || g.IntN(2) == 0) {
		o.form.Ring, o.order = true, order
	}
	if o.kind >= broadcast && g.IntN(4) == 0 {
		// With 256 channels, some have 8 tiles of a span and some 9. Up to 8 tiles a channel go through the rings.
		border := 8 * 256 * []int{1024, 2048}[g.IntN(2)]
		if n := border + g.IntN(border/8); n <= 4*most {
			o.n, o.skew, o.form.Blocks = n/o.d.Size(), 0, 16
		}
	}
	return o
}

// fill makes a rank's input: any bits, and often those that the protocol or the arithmetic
// could get wrong.
func fill(b []byte, d tensor.DType, seed uint64) {
	g := rand.New(rand.NewPCG(seed, 1))
	var special []byte
	for _, w := range []uint32{0xffffffff, 0x80000000, 0, 0x7fffffff, 0x7f800000, 0xff800000, 1, 0x80008000, 0xffff0000, 0x0000ffff} {
		special = binary.LittleEndian.AppendUint32(special, w)
	}
	for i := range uint32(8) {
		special = binary.LittleEndian.AppendUint32(special, ^((i + 1) * 0x9e3779b1)) // what keys of tiles make all ones
	}
	x := g.Uint64() | 1
	for i := 0; i+8 <= len(b); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		v := x
		switch {
		case d == tensor.Float32 && x>>60 != 0:
			v = v&0x00ffffff00ffffff | 0x3f0000003f000000 // numbers near 1
		case d == tensor.BFloat16 && x>>60 != 0:
			v = v&0x01ff01ff01ff01ff | 0x3e003e003e003e00
		}
		binary.LittleEndian.PutUint64(b[i:], v)
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		b[i] = byte(g.Uint32())
	}
	for range len(b) / 64 {
		copy(b[4*g.IntN(len(b)/4):], special[4*g.IntN(len(special)/4):][:4])
	}
	// Tiles that begin with the word that tells of a key, among others or alone.
	marked := binary.LittleEndian.AppendUint32(nil, 0xffb4d2e1)
	each := 512
	switch g.IntN(8) {
	case 0:
		each = 4
	case 1, 2:
		each = len(b) + 1
	}
	for i := 0; i+4 <= len(b); i += each {
		if each == 4 || g.IntN(2) == 0 {
			copy(b[i:], marked)
		}
	}
	if len(b) >= 4 && g.IntN(4) == 0 {
		for i := range b {
			b[i] = 0xff
		}
	}
}

// expect returns what a rank gets.
func (o operation) expect(rank int, in [][]byte) (_ []byte, err error) {
	defer must.Catch(&err)
	n, ranks := o.n*o.d.Size(), len(in)
	switch o.kind {
	case reduce:
		if rank != o.root(ranks) {
			return nil, nil // no outcome
		}
	case broadcast:
		return in[o.root(ranks)], nil
	case scatter, gather, gatherV, allToAllV, barrier:
		var out []byte
		for r := range in {
			send, _, _, _ := o.spans(r, ranks)
			out = append(out, in[r][send[rank].Off:][:send[rank].N]...)
		}
		return out, nil
	}
	part := func(b []byte) []byte {
		if o.kind == reduceScatter || o.kind == allToAll {
			return b[rank*n:][:n]
		}
		return b
	}
	if o.kind == allGather || o.kind == allToAll {
		var out []byte
		for _, b := range in {
			out = append(out, part(b)...)
		}
		return out, nil
	}
	if o.order == nil {
		all := make([]int, ranks)
		for r := range all {
			all[r] = r
		}
		return o.combined(all, in, part)
	}
	// A part is combined from the rank after its owner on, round the ring.
	from := func(owner int) []int {
		i := slices.Index(o.order, owner) + 1
		return slices.Concat(o.order[i:], o.order[:i])
	}
	if o.kind == reduceScatter {
		return o.combined(from(rank), in, part)
	}
	var out []byte
	each := (n + 16*ranks - 1) / (16 * ranks) * 16
	for r := range ranks {
		x := must.Get(o.combined(from(r), in, func(b []byte) []byte { return b[min(r*each, n):min((r+1)*each, n)] }))
		out = append(out, x...)
	}
	return out, nil
}

// combined returns what becomes of parts of the ranks' inputs, in an order of the ranks.
func (o operation) combined(order []int, in [][]byte, part func(b []byte) []byte) (out []byte, err error) {
	var red backend.Reduction
	for i, r := range order {
		if red, err = o.of(r).Reduction(o.d, len(in)); err != nil {
			return nil, err
		}
		x := bytes.Clone(part(in[r]))
		if red.Before != nil {
			red.Before(x)
		}
		if i == 0 {
			out = x
			continue
		}
		red.Combine(out, x)
	}
	if red.After != nil {
		red.After(out)
	}
	return out, nil
}

// same reports whether a and b are the same elements. Two NaNs are.
func same(d tensor.DType, a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	if !d.IsFloat() {
		return false
	}
	n := d.Size()
	for i := 0; i < len(a); i += n {
		x, y := a[i:i+n], b[i:i+n]
		if !bytes.Equal(x, y) && !(isNaN(d, x) && isNaN(d, y)) {
			return false
		}
	}
	return true
}

func isNaN(d tensor.DType, b []byte) bool {
	switch d {
	case tensor.Float32:
		return binary.LittleEndian.Uint32(b)&0x7fffffff > 0x7f800000
	case tensor.Float64:
		return binary.LittleEndian.Uint64(b)&0x7fffffffffffffff > 0x7ff0000000000000
	case tensor.BFloat16:
		return binary.LittleEndian.Uint16(b)&0x7fff > 0x7f80
	}
	return binary.LittleEndian.Uint16(b)&0x7fff > 0x7c00
}

// check runs random operations, a few at a time, and compares what they make with the CPU's
// arithmetic, and all ranks' bits with each other.
func check(m *member, rounds, most int) error {
	var err error
	const atOnce, guard = 8, 256
	room := atOnce * (2*m.ranks*(most+64) + 2*guard)
	if most > 16<<20 {
		room /= atOnce
	}
	mem := must.Get(m.v.Alloc(room))
	defer mem.Close()
	host := must.Get(m.d.AllocHost(room))
	defer host.Close()
	// To make memory may wait for the device, and with it for a rank of this process.
	var into direct.Into
	if m.memory != nil {
		into = must.Get(m.into(mem))
	}
	seed := uint64(number("C10D_DIRECT_SEED", 1))
	g := rand.New(rand.NewPCG(seed, 7)) // the same on all ranks
	mine := rand.New(rand.NewPCG(seed, uint64(m.rank)))
	done := 0
	var moved int
	for range rounds {
		type placed struct {
			operation
			in       [][]byte
			src, dst int
			out      int
		}
		var list []placed
		used := 0
		for range 1 + g.IntN(atOnce) {
			o := placed{operation: randomOperation(g, most, m.c.Order(), m.w.NextOnly())}
			in, out := o.sizes(m.rank, m.ranks)
			o.out = out
			if o.kind.moves() {
				in = o.n * o.d.Size() * m.ranks // all ranks have the same places
				out = in
			}
			size, skew := o.d.Size(), 0
			if o.skew > 0 {
				skew = o.skew * size
			}
			if used+in+out+2*guard+64 > room {
				break
			}
			o.src = (used+guard+15)/16*16 + skew
			o.dst = o.src
			switch n := o.n * size; {
			case !o.inPlace:
				o.dst = (o.src+in+guard+15)/16*16 + skew
				used = o.dst + out
			case o.kind == allGather:
				o.src = o.dst + m.rank*n
				used = o.dst + out
			case o.kind == reduceScatter:
				o.dst = o.src + m.rank*n
				used = o.src + in
			default:
				used = o.src + in
			}
			if o.kind == reduce {
				used = (o.src+in+guard+15)/16*16 + skew + out
			}
			for r := range m.ranks {
				n, _ := o.sizes(r, m.ranks)
				b := make([]byte, n)
				fill(b, o.d, o.seed+uint64(r))
				o.in = append(o.in, b)
			}
			list = append(list, o)
			moved += in
		}
		used += guard
		b := host.Bytes()[:min(used, room)]
		for i := range b {
			b[i] = 0xa5
		}
		for _, o := range list {
			copy(b[o.src:], o.in[m.rank])
		}
		before := bytes.Clone(b)
		must.Do(m.s.Copy(mem.Ptr(), host.Ptr(), len(b)))
		if mine.IntN(2) == 0 && m.delay != nil {
			l := driver.Launch{Function: m.delay, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Uint64(uint64(mine.IntN(200000)))}
			must.Do(m.s.Launch(&l))
		}
		for _, o := range list {
			dst, src := mem.Ptr()+driver.Ptr(o.dst), mem.Ptr()+driver.Ptr(o.src)
			if mine.IntN(4) != 0 {
				o.form.Into = into
			}
			err = m.do(o.operation, dst, src)
			if err != nil {
				return fmt.Errorf("%v: %w", o, err)
			}
		}
		must.Do(m.s.Copy(host.Ptr(), mem.Ptr(), len(b)))
		if err := m.sync(); err != nil {
			return fmt.Errorf("%v: %w", list, err)
		}
		sums := fnv.New64a()
		for _, o := range list {
			want := must.Get(o.expect(m.rank, o.in))
			got := b[o.dst:][:o.out]
			if o.kind == reduce && want == nil {
				want = before[o.dst:][:o.out] // it is not used
			}
			if !same(o.d, want, got) {
				for i := range want {
					if want[i] != got[i] {
						return fmt.Errorf("rank %d after %d operations: %v: byte %d of %d: %#x, want %#x", m.rank, done, o, i, len(want), got[i:min(i+8, len(got))], want[i:min(i+8, len(got))])
					}
				}
			}
			if o.kind == allReduce || o.kind == allGather || o.kind == broadcast {
				sums.Write(got)
			}
			copy(before[o.dst:], got)
			done++
		}
		if !bytes.Equal(before, b) {
			for i := range b {
				if b[i] != before[i] {
					return fmt.Errorf("rank %d: %v: byte %d of the memory was written", m.rank, list, i)
				}
			}
		}
		all := must.Get(m.exchange(m.ctx, sums.Sum(nil)))
		for r := range all {
			if !bytes.Equal(all[r], all[0]) {
				return fmt.Errorf("%v: ranks 0 and %d have other bits", list, r)
			}
		}
	}
	if m.rank == 0 && m.delay != nil {
		fmt.Fprintf(os.Stderr, "%d operations on %d MiB were right\n", done, moved>>20)
	}
	return nil
}

// reads has random sums of floats to a root of two, of up to so many bytes. Some inputs are not registered, and some
// roots have no aligned memory.
func reads(m *member, rounds, most int) error {
	mem := must.Get(m.v.Alloc(2*most + 16))
	defer mem.Close()
	host := must.Get(m.d.AllocHost(most))
	defer host.Close()
	into := must.Get(m.into(mem))
	shape := direct.Shape{Blocks: 4, Threads: 128, Large: true}
	if most, _ := m.w.Shape(); most < shape.Channels() {
		shape = direct.Shape{Blocks: 1, Threads: 32, Large: true}
	}
	direct.SetShape(m.c, shape)
	least := shape.Channels() * window.SlotBytes(2)
	g := rand.New(rand.NewPCG(uint64(number("C10D_DIRECT_SEED", 1)), 9)) // the same on all ranks
	mine := rand.New(rand.NewPCG(1, uint64(m.rank)))
	pulled := 0
	for i := range rounds {
		o := operation{kind: reduce, d: dtypes[g.IntN(3)], op: ops[g.IntN(2)], seed: g.Uint64()}
		o.n = (least + g.IntN(most-least)) / o.d.Size()
		n, root := o.n*o.d.Size(), o.root(2)
		if i%4 != 0 {
			o.form.Into = into
		}
		var in [][]byte
		for r := range m.ranks {
			in = append(in, make([]byte, n))
			fill(in[r], o.d, o.seed+uint64(r))
		}
		copy(host.Bytes(), in[m.rank])
		src := mem.Ptr()
		if m.rank == root && mine.IntN(4) == 0 {
			src += driver.Ptr(o.d.Size())
		}
		dst := src + driver.Ptr(most)
		if g.IntN(2) == 0 {
			dst = src
		}
		err := m.s.Copy(src, host.Ptr(), n)
		if mine.IntN(2) == 0 && m.delay != nil {
			l := driver.Launch{Function: m.delay, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Uint64(uint64(mine.IntN(200000)))}
			err = errors.Join(err, m.s.Launch(&l))
		}
		if m.c.ReduceSpreads(o.n, o.d, o.op, 1-m.rank, o.form) && i%4 != 0 {
			pulled++
		}
		err = errors.Join(err, m.do(o, dst, src))
		if m.rank != root {
			dst = src
			err = errors.Join(err, m.s.Memset(src, 0xee, n))
		}
		if err = errors.Join(err, m.s.Copy(host.Ptr(), dst, n), m.sync()); err != nil {
			return fmt.Errorf("%v: %w", o, err)
		}
		want := must.Get(o.expect(m.rank, in))
		if m.rank == root && !same(o.d, want, host.Bytes()[:n]) {
			return fmt.Errorf("the root %d of reduce %d has a wrong result: %v", root, i, o)
		}
	}
	if pulled < rounds/2 {
		return fmt.Errorf("roots could read in %d of %d calls", pulled, rounds)
	}
	return nil
}

// readsFreed has a root read nothing of a rank that has failed.
func readsFreed(m *member) error {
	const root = 1
	mem := must.Get(m.v.Alloc(m.most))
	defer mem.Close()
	into := must.Get(m.into(mem))
	direct.SetShape(m.c, direct.Shape{Blocks: 1, Threads: 32, Large: true})
	must.Do(errors.Join(m.s.Memset(mem.Ptr(), 0, m.most), m.sync(), m.meet()))
	for r := range m.ranks {
		if m.rank == r {
			if err := m.c.Reduce(m.s, mem.Ptr(), mem.Ptr(), m.most/4, tensor.Float32, backend.Sum(), root, direct.Form{Into: into}); err != nil {
				return err
			}
			if r != root {
				m.w.Abort()
			}
			var f *window.Failure
			if err := m.sync(); !errors.As(err, &f) || f.Rank != r || f.Peer != 1-r || !f.Aborted {
				return fmt.Errorf("rank %d: %w", r, err)
			}
			if r != root {
				must.Do(mem.Close())
			}
		}
		must.Do(m.meet())
	}
	return m.w.Reset(m.ctx, m.tell)
}

// do makes a call.
func (m *member) do(o operation, dst, src driver.Ptr) error {
	n, root := o.n*o.d.Size(), o.root(m.ranks)
	send, take, _, _ := o.spans(m.rank, m.ranks)
	switch o.kind {
	case allReduce:
		return m.c.AllReduce(m.s, dst, src, o.n, o.d, o.of(m.rank), o.form)
	case reduceScatter:
		return m.c.ReduceScatter(m.s, dst, src, o.n, o.d, o.of(m.rank), o.form)
	case allGather:
		return m.c.AllGather(m.s, dst, src, n, o.form)
	case allToAll:
		return m.c.AllToAllV(m.s, dst, src, equal(n, m.ranks), equal(n, m.ranks), o.form)
	case reduce:
		return m.c.Reduce(m.s, dst, src, o.n, o.d, o.of(m.rank), root, o.form)
	case broadcast:
		return m.c.Broadcast(m.s, dst, n, root, o.form)
	case scatter:
		return m.c.Scatter(m.s, dst, src, n, root, o.form)
	case gather:
		return m.c.Gather(m.s, dst, src, n, root, o.form)
	case gatherV:
		return m.c.GatherV(m.s, dst, src, send[root].N, take, root, o.form)
	case allToAllV:
		return m.c.AllToAllV(m.s, dst, src, take, send, o.form)
	default:
		return m.c.Barrier(m.s)
	}
}

// fail has calls that end early: a peer that does not come, an abort, and what comes after.
func fail(m *member) error {
	mem := must.Get(m.v.Alloc(8 << 20))
	defer mem.Close()
	must.Do(m.s.Memset(mem.Ptr(), 1, 8<<20))
	must.Do(m.sync())
	quick := must.Get(direct.New(m.w, direct.Options{Limit: 100 * time.Millisecond}))
	defer quick.Close()
	for i, n := range []int{1, 1 << 20} {
		for _, aborts := range []bool{false, true} {
			if m.rank == i {
				begin := time.Now()
				c := quick
				if aborts {
					c = m.c
				}
				must.Do(c.AllReduce(m.s, mem.Ptr(), mem.Ptr(), n, tensor.Int32, backend.Sum(), direct.Form{}))
				// A second call finds that the first one has failed.
				must.Do(c.AllReduce(m.s, mem.Ptr(), mem.Ptr(), n, tensor.Int32, backend.Sum(), direct.Form{}))
				if aborts {
					m.w.Abort()
				}
				err := m.sync()
				var f *window.Failure
				if !errors.As(err, &f) || f.Peer != 1-m.rank || f.Rank != m.rank || f.Aborted != aborts {
					return fmt.Errorf("rank %d alone, abort %v: %w", m.rank, aborts, err)
				}
				if d := time.Since(begin); d > 5*time.Second {
					return fmt.Errorf("it took %v to end", d)
				}
				if err := c.AllReduce(m.s, mem.Ptr(), mem.Ptr(), n, tensor.Int32, backend.Sum(), direct.Form{}); !errors.As(err, &f) {
					return fmt.Errorf("a call after a failure: %w", err)
				}
			}
			must.Do(m.w.Reset(m.ctx, m.tell))
			if err := check(m, 3, 1<<20); err != nil {
				return fmt.Errorf("after Reset: %w", err)
			}
		}
	}
	return nil
}

// equal returns a span of n bytes for each rank, one after the other.
func equal(n, ranks int) (all []direct.Span) {
	for r := range ranks {
		all = append(all, direct.Span{Off: r * n, N: n})
	}
	return all
}
