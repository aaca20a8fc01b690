package direct

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

//go:embed ptx/*.ptx
var texts embed.FS

var dtypes = []tensor.DType{
	tensor.Float32, tensor.BFloat16, tensor.Float16, tensor.Float64,
	tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64,
}

// operators are the kernels' numbers of what two operands become. The next number is that of calls that combine
// nothing, for kernels in Go.
var operators = []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor()}

// Job is what a kernel is told, and so what it does.
type Job int

const (
	OneShotJob  Job = iota // struct Call
	TwoShotsJob            // struct Call: two shots in one launch
	StraightJob            // struct Move: two shots whose results go straight to the peers
	SpreadJob              // struct Spread: the same of two ranks
	MoveJob                // struct Move: moves of spans
)

// The texts. Dtypes of a family share kernels, because most of a kernel moves bytes: those of gradients, and the
// others. Gathers has the kernels of all_gather and of one-shot broadcasts of more than
// two ranks. Moves has those of all other calls that combine nothing.
const (
	gradients = "gradients"
	others    = "others"
	gathers   = "gather"
	moves     = "move"
)

// kernel is one of a text. The names of both go on with the group.
type kernel struct {
	text, name string
	job        Job
}

// kernelsOf returns those for so many ranks.
func kernelsOf(ranks int) []kernel {
	all := []kernel{
		{gradients, "gradients_small", OneShotJob},
		{gradients, "gradients_large", OneShotJob},
		{others, "others_small", OneShotJob},
		{gathers, "gather_small", OneShotJob},
		{moves, "move_small", MoveJob},
		{moves, "move_large", MoveJob},
	}
	if ranks == 2 {
		return append(all,
			kernel{gradients, "gradients_spread", SpreadJob}, // sums and averages
			kernel{others, "others_large", OneShotJob},
			kernel{gathers, "gather_large", OneShotJob},
		)
	}
	return append(all,
		kernel{gradients, "gradients_both_small", TwoShotsJob},
		kernel{gradients, "gradients_both_large", TwoShotsJob},
		kernel{gradients, "gradients_spread", StraightJob},
		kernel{others, "others_both_small", TwoShotsJob},
		kernel{moves, "move_both_small", TwoShotsJob},
		kernel{moves, "move_spread", StraightJob},
	)
}

// group is what names of texts and kernels for so many ranks end in.
func group(ranks int) string {
	if ranks == 2 {
		return "_2"
	}
	return "_n"
}

// entry returns the name of a kernel for so many ranks.
func entry(name string, ranks int) string { return "c10d_direct_" + name + group(ranks) }

// image returns a PTX text. Nobody changes it.
func image(name string) []byte {
	b, err := texts.ReadFile("ptx/" + name + ".ptx")
	if err != nil {
		panic(err)
	}
	return b
}

// gradient reports whether gradients have a dtype.
func gradient(d tensor.DType) bool {
	return d == tensor.Float32 || d == tensor.Float16 || d == tensor.BFloat16
}

// eachImage calls f with some PTX texts for so many ranks, and the names of their kernels.
func eachImage(ranks int, f func(image []byte, kernels ...string), some ...string) {
	for _, text := range some {
		var names []string
		for _, k := range kernelsOf(ranks) {
			if k.text == text {
				names = append(names, entry(k.name, ranks))
			}
		}
		f(image(text+group(ranks)), names...)
	}
}

// Images calls f with each PTX text for so many ranks, and the names of its kernels. The texts are for devices of
// compute capability 8.0 and later.
func Images(ranks int, f func(image []byte, kernels ...string)) {
	eachImage(ranks, f, gradients, gathers, moves, others)
	if ranks > 2 {
		eachImage(2, f, moves) // of lanes
	}
}

// Each calls f for every kernel.
func Each(f func(name string, job Job)) {
	for _, ranks := range []int{2, window.MostRanks} {
		for _, k := range kernelsOf(ranks) {
			f(entry(k.name, ranks), k.job)
		}
	}
}

// Supports returns nil if there is a kernel for the operator and the dtype.
func Supports(op backend.ReduceOp, d tensor.DType) error {
	_, err := reduction(op, d, 1)
	return err
}

// reduced is how kernels are told of an operator.
type reduced struct {
	op, by, scaled uint32
	dtype          uint32
	factor         uint64
}

// none is what calls have that combine nothing.
var none = reduced{op: uint32(len(operators))}

// adds reports whether an operator is a sum or an average.
func (r reduced) adds() bool { return r.op == 0 && r.scaled == 0 }

func reduction(op backend.ReduceOp, d tensor.DType, ranks int) (r reduced, err error) {
	kind, ok := op.Kind(), slices.Contains(dtypes, d)
	r.dtype = uint32(slices.Index(dtypes, d))
	switch kind {
	case backend.Avg().Kind():
		r.by, kind, ok = uint32(ranks), backend.Sum().Kind(), ok && d.IsFloat()
		if ranks&(ranks-1) == 0 && ok {
			r.factor = bitsOf(1/float64(ranks), d)
		}
	case backend.PreMulSum(1).Kind():
		r.scaled, kind = 1, backend.Sum().Kind()
		f := op.Factor()
		ok = ok && (!d.IsInteger() || f == math.Trunc(f) && math.Abs(f) <= 1<<53)
		r.factor = bitsOf(f, d)
	case backend.BAnd().Kind(), backend.BOr().Kind(), backend.BXor().Kind():
		ok = ok && d.IsInteger()
	}
	for i, o := range operators {
		if ok && o.Kind() == kind {
			r.op = uint32(i)
			return r, nil
		}
	}
	return r, fmt.Errorf("direct: there is no kernel for %v of %v", op, d)
}

// bitsOf returns a factor as kernels for a dtype read it.
func bitsOf(f float64, d tensor.DType) uint64 {
	switch {
	case d.IsInteger():
		return uint64(int64(f))
	case d == tensor.Float64:
		return math.Float64bits(f)
	}
	return uint64(math.Float32bits(float32(f)))
}

// Options is how a Comm is made. All ranks need the same.
type Options struct {
	// Blocks is the most blocks that a call takes. 0 means 128. Fewer leave multiprocessors
	// to other kernels, and make large calls slower.
	Blocks int

	// Limit is how long a kernel may wait for a peer; 0 means 10 minutes. It ends a kernel if
	// nobody calls Abort, so it should be longer than the group's own timeout.
	Limit time.Duration

	shareDevices bool // tests have more ranks than devices, and few blocks
	straight     int  // for tests: StraightBytes, 0 means the usual. Other limits are multiples of it
	rootReduces  int  // for tests: rootReducesUpTo, 0 means the usual
}

// Form is how a call is done. All ranks need the same. The bits do not depend on it.
type Form struct {
	// TwoShot has an all_reduce be a reduce_scatter and an all_gather: in two launches with two ranks, in one with
	// more. With more than two ranks it has a broadcast be a scatter and an all_gather, and a reduce a reduce_scatter
	// and a gather, in one launch each. Else, and where a rank would have no part, each rank sends everything to all
	// that need it.
	TwoShot bool

	// Blocks is the most blocks of a launch. 0 and more than Options.Blocks mean Options.Blocks.
	Blocks int

	// Ring has an all_reduce, a reduce_scatter or an all_gather go round the window's ring, if it has one. The bits are
	// others then: see Bits.
	Ring bool

	// Into is where the output lies in memory that the peers' kernels may write. In a reduce of two ranks the root may
	// read the input of the other rank. Into is where that lies. Ranks may have any.
	Into Into
}

// Into is memory of this rank that the kernels of all peers have mapped: region Region of the window, whose
// first byte is at At. Region 0 means none.
type Into struct {
	Region int
	At     driver.Ptr
}

// MostThreads is how many threads a call takes at most, with the default Options.Blocks.
const MostThreads = 128 * 512

// Shape is how a call is launched.
type Shape struct {
	Blocks, Threads int
	Large           bool // tiles of more than one vector a lane
}

// Channels returns how many channels a launch has.
func (s Shape) Channels() int { return s.Blocks * s.Threads / 32 }

// Kind is what a launch does, as far as its shape depends on that.
type Kind int

const (
	Reduces  Kind = iota // it combines operands, in one shot
	Gathers              // it combines nothing
	TwoShots             // an all_reduce or a reduce
	Moves                // of spans
)

// ShapeOf returns the shape for a launch in which each rank gets n bytes from each peer. It depends on nothing else, so
// all ranks have the same.
//
// The figures are for two and four H100 (BenchmarkShapes):
//
//   - Up to 512 KiB each tile of 512 bytes has a warp. Longer parts have 2048 warps, or 1024 where these are faster.
//   - Two ranks have tiles of 2 KiB above 4 MiB. Up to there such tiles are 2 to 16 % slower.
//   - More ranks have large tiles of 1 KiB: a reduce_scatter above 2 MiB, and two shots above 32 MiB. Gathers and dtypes
//     that gradients do not have use small ones there. Moves have large ones from 512 KiB on, because only these go
//     straight to the peers.
func ShapeOf(n, blocks, channels, ranks int, kind Kind) Shape {
	s := Shape{Blocks: 128, Threads: 512, Large: true}
	switch {
	case n <= 512<<10:
		s = Shape{Blocks: max((n+4095)/4096, 1), Threads: 256}
	case ranks == 2:
		s.Large = n > 4<<20
		if s.Large && n <= 8<<20 {
			s.Threads = 256
		}
	case kind == Moves:
		if n <= 4<<20 {
			s.Threads = 256
		}
	case kind == Reduces:
		s.Large = n > 2<<20
	case kind == TwoShots:
		s.Large = n > 32<<20
	case kind == Gathers:
		s.Large = false
	}
	if s.Blocks > blocks {
		// Fewer blocks of more threads have the same channels.
		s = Shape{Blocks: blocks, Threads: 512, Large: n > blocks*16*512}
	}
	s.Blocks = min(s.Blocks, max(channels*32/s.Threads, 1))
	if channels < s.Threads/32 {
		s.Threads = channels * 32
	}
	return s
}

// pair is a kernel for small calls and one for large calls.
type pair struct{ small, large driver.Function }

// forms are the kernels of a family. Both is there with more than two ranks. Spread is there for gradients and for
// moves. Where a family has no large kernel, the small one does large calls too.
type forms struct {
	all, both pair
	spread    driver.Function
}

// Comm has the collectives of one window. Its methods may be called from many goroutines;
// the launches are in the order of the calls.
type Comm struct {
	w           *window.Window
	o           Options
	rank, ranks int
	channels    int
	modules     []driver.Module
	gradients   forms
	others      forms
	gathers     forms
	moves       forms
	lanes       forms                                                 // moves of two ranks
	ring        *ring                                                 // nil if the window has none
	shape       func(n, blocks, channels, ranks int, kind Kind) Shape // ShapeOf, but for measurements

	mu     sync.Mutex // of what launches use
	quiet  bool       // launches have no number
	number uint32     // of the last launch that had one, never 0
	last   uint32     // what the last launch had
	call   Move       // of which most calls use the Call
	both   Spread     // of an all_reduce of two ranks that spreads
	args   driver.Args
	launch driver.Launch
}

// setUp writes what all calls have in common. Of is the rank of the window that a rank stands for.
func (c *Comm) setUp(own window.Own, depth int, peer func(rank int) window.Peer, of func(rank int) int) {
	x := &c.call
	x.Slots, x.Keys, x.State, x.Credit, x.Call.Failed, x.Host = own.Slots, own.Keys, own.State, own.Credit, own.Failed, own.Host
	x.Limit, x.Ranks, x.Rank = c.o.Limit, uint32(c.ranks), uint32(c.rank)
	x.Channels, x.Depth = uint32(c.channels), uint32(depth)
	for r := range c.ranks {
		if r != c.rank {
			x.Peers[r], x.Maps[r], x.Failed[r] = peer(r), c.w.Maps(of(r)), c.w.Failed(of(r))
		}
	}
	c.setLaunch()
}

// setLaunch writes what all launches have in common. Two places are for what a call reads and writes.
func (c *Comm) setLaunch() {
	c.launch = driver.Launch{Args: &c.args, Access: c.w.Access(make([]driver.Access, 2, 2+2+window.MostRanks))}
}

// forms returns the kernels of a dtype.
func (c *Comm) forms(d tensor.DType) *forms {
	if gradient(d) {
		return &c.gradients
	}
	return &c.others
}

// loadAll loads the kernels for the ranks of the window.
func (c *Comm) loadAll() (err error) {
	c.gradients, err = c.load(gradients, c.ranks)
	if err == nil {
		c.gathers, err = c.load(gathers, c.ranks)
	}
	if err == nil {
		c.moves, err = c.load(moves, c.ranks)
	}
	if err == nil {
		c.others, err = c.load(others, c.ranks)
	}
	if c.lanes = c.moves; err != nil || c.ranks == 2 {
		return err
	}
	if _, ok := c.w.HasLanes(); ok {
		c.lanes, err = c.load(moves, 2)
	}
	return err
}

// load loads a text for so many ranks.
func (c *Comm) load(text string, ranks int) (f forms, err error) {
	var found map[string]driver.Function
	eachImage(ranks, func(image []byte, names ...string) { found, err = c.open(image, names...) }, text)
	of := func(form string) pair {
		small := found[entry(text+form+"_small", ranks)]
		return pair{small, cmp.Or(found[entry(text+form+"_large", ranks)], small)}
	}
	return forms{of(""), of("_both"), found[entry(text+"_spread", ranks)]}, err
}

func (c *Comm) open(image []byte, names ...string) (map[string]driver.Function, error) {
	m, all, err := kernels.Open(c.w.Device(), image, names...)
	if err == nil {
		c.modules = append(c.modules, m)
	}
	return all, err
}

// Err returns why calls fail, nil while they do not. See window.Window.Err.
func (c *Comm) Err() error { return c.w.Err() }

// Close unloads the kernels. Launches must have ended.
func (c *Comm) Close() error {
	var errs []error
	for _, m := range c.modules {
		errs = append(errs, m.Close())
	}
	c.modules = nil
	return errors.Join(errs...)
}

// Launcher takes launches, as a driver.Stream does. It keeps nothing of one after it returns.
type Launcher interface {
	Launch(l *driver.Launch) error
}

// step is one launch. Offsets and lengths are in bytes.
type step struct {
	dst, src          driver.Ptr
	part              int
	srcStep, srcBytes int
	dstStep, dstBytes int
	r                 reduced
	f                 pair
	blocks            int // see Form
	kind              Kind
	roles             Roles // everyone does everything if there are none
}

// describe puts a step into c.call.
func (c *Comm) describe(x step) {
	if x.roles == (Roles{}) {
		x.roles = allRoles(c.ranks)
	}
	p := &c.call.Call
	p.Src, p.Dst, p.Part = x.src, x.dst, x.part
	p.SrcStep, p.SrcBytes, p.DstStep, p.DstBytes = x.srcStep, x.srcBytes, x.dstStep, x.dstBytes
	p.Factor, p.Op, p.Type, p.By, p.Scaled = x.r.factor, uint16(x.r.op), uint16(x.r.dtype), x.r.by, x.r.scaled
	p.Align = uint32(x.src | x.dst | driver.Ptr(x.srcStep|x.dstStep))
	p.Number, p.Roles = 0, x.roles
}

// enqueue launches a step. The caller holds c.mu.
func (c *Comm) enqueue(s Launcher, x step) error {
	c.describe(x)
	return c.start(s, x.f, c.shape(x.part, c.blocks(x.blocks), c.channels, c.ranks, x.kind), raw(&c.call.Call), driver.Reads(x.src, x.srcBytes), driver.Writes(x.dst, x.dstBytes))
}

// blocks returns the most blocks of a launch; see Form.
func (c *Comm) blocks(form int) int {
	if form > 0 {
		return min(c.o.Blocks, form)
	}
	return c.o.Blocks
}

// start launches a kernel, whose parameter is that of c.call. The caller holds c.mu.
func (c *Comm) start(s Launcher, p pair, shape Shape, parameter []byte, reads, writes driver.Access) error {
	f := p.small
	if shape.Large {
		f = p.large
	}
	c.call.Number = c.next(s)
	return c.run(s, f, shape, parameter, reads, writes)
}

// run launches a kernel. The caller holds c.mu.
func (c *Comm) run(s Launcher, f driver.Function, shape Shape, parameter []byte, reads, writes driver.Access) error {
	l := &c.launch
	l.Function = f
	l.Grid, l.Block = driver.Dim{X: uint32(shape.Blocks)}, driver.Dim{X: uint32(shape.Threads)}
	l.Access[0], l.Access[1] = reads, writes
	c.args.StructIn(parameter)
	return s.Launch(l)
}

// Quiet sets whether the kernels of later launches tell the host that they have ended. At first they do. It
// takes them 1 to 3 us.
func (c *Comm) Quiet(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quiet = on
}

// next returns the number of a launch. It is 0 if that is quiet, and in a capture: a replay has the number
// of the first launch, and must not tell the host that. The caller holds c.mu.
func (c *Comm) next(s Launcher) uint32 {
	if c.last = 0; c.quiet {
		return 0
	}
	if x, ok := s.(driver.Capturer); ok && x.Capturing() {
		return 0
	}
	if c.number++; c.number == 0 {
		c.number++
	}
	c.last = c.number
	return c.last
}

// Number returns the number of the last launch; 0 if it had none.
func (c *Comm) Number() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// Ended reports whether the launch with a number has ended, and so the launches before it. It asks no
// driver. A launch that fails does not end; see Err.
func (c *Comm) Ended(number uint32) bool { return int32(c.w.Ended()-number) >= 0 }

// begin checks what all calls have in common; it returns false if there is nothing to do.
func (c *Comm) begin(what string, dst, src driver.Ptr, n int) (bool, error) {
	if n < 0 || n > 0 && (dst == 0 || src == 0) {
		return false, fmt.Errorf("direct: %s of %d elements from %v to %v", what, n, src, dst)
	}
	if err := c.w.Err(); err != nil {
		return false, fmt.Errorf("direct: %s: %w", what, err)
	}
	return n > 0, nil
}

// twoShots reports whether a call of so many bytes takes two shots, in so many parts. It does not if one of them would
// be empty.
func twoShots(bytes, parts int, form Form) bool {
	return form.TwoShot && partOf(bytes, parts)*(parts-1) < bytes
}

// everyone is the set of so many ranks.
func everyone(ranks int) uint8 { return uint8(1<<ranks - 1) }

// allRoles has every rank do everything.
func allRoles(ranks int) Roles {
	all := everyone(ranks)
	return Roles{Givers: all, Owners: all, Takers: all}
}

// bothShots is two shots in one launch: an all_reduce, a reduce or a broadcast. The caller holds c.mu.
func (c *Comm) bothShots(s Launcher, dst, src driver.Ptr, bytes int, r reduced, who Roles, f *forms, form Form) error {
	part := partOf(bytes, bits.OnesCount8(who.Owners))
	in, out := bytes, bytes
	if who.Givers>>c.rank&1 == 0 {
		src, in = dst, 0
	}
	takes := who.Takers>>c.rank&1 != 0
	if !takes {
		dst, out = src, 0
	}
	c.describe(step{dst: dst, src: src, part: part, srcStep: part, srcBytes: bytes, dstStep: part, dstBytes: bytes, r: r, roles: who})
	kind := TwoShots
	if bits.OnesCount8(who.Givers) == 1 {
		kind = Gathers // a broadcast
	}
	shape, spreads := c.bothShape(part, form, kind, f)
	reads, writes := driver.Reads(src, in), driver.Writes(dst, out)
	if !spreads {
		return c.start(s, f.both, shape, raw(&c.call.Call), reads, writes)
	}
	open, next := !takes || form.Into.Region != 0 && dst%16 == 0, 0
	for p := range c.ranks {
		var into Place
		if who.Owners>>p&1 != 0 {
			if open && takes {
				into = At(form.Into.Region, int(dst-form.Into.At)+next*part)
			}
			next++
		}
		c.call.Into[p] = into
	}
	c.call.Open, c.call.Told = flag(open), flag(open && takes)
	return c.start(s, pair{large: f.spread}, shape, raw(&c.call), reads, writes)
}

// bothShape returns the shape of two shots in one launch, and whether results go straight to the peers.
func (c *Comm) bothShape(part int, form Form, kind Kind, f *forms) (s Shape, spreads bool) {
	s = c.shape(part, c.blocks(form.Blocks), c.channels, c.ranks, kind)
	return s, s.Large && f.spread != nil && c.few(form, part)
}

// Spreads reports whether the ranks of an all_reduce write its result straight to each other, if they may.
// So Form.Into is of use.
func (c *Comm) Spreads(n int, d tensor.DType, op backend.ReduceOp, form Form) bool {
	if form.Ring {
		return false
	}
	part := partOf(n*d.Size(), c.ranks)
	if c.ranks > 2 {
		_, spreads := c.bothShape(part, form, TwoShots, c.forms(d))
		return spreads && twoShots(n*d.Size(), c.ranks, form)
	}
	_, ok := c.spreadShape(part, d, op, form)
	return ok && c.few(form, part)
}

// spreadShape returns the shape of a Spread with so long parts, and whether there can be one.
func (c *Comm) spreadShape(part int, d tensor.DType, op backend.ReduceOp, form Form) (s Shape, ok bool) {
	r, err := reduction(op, d, c.ranks)
	if err != nil || !r.adds() || !gradient(d) {
		return s, false
	}
	s = c.shape(part, c.blocks(form.Blocks), c.channels, c.ranks, Reduces)
	return s, s.Large && s.Channels() <= part/window.SlotBytes(2) // each channel needs a tile
}

// spreadSum is an all_reduce of two ranks with few blocks. The caller holds c.mu.
func (c *Comm) spreadSum(s Launcher, dst, src driver.Ptr, bytes int, r reduced, f driver.Function, form Form) error {
	part := partOf(bytes, c.ranks)
	at := part * c.rank
	one := step{dst: dst, src: src, part: bytes, srcBytes: bytes, dstBytes: bytes, r: r}
	two := step{dst: dst + driver.Ptr(at), src: src, part: part, srcStep: part, srcBytes: bytes, dstBytes: min(part, bytes-at), r: r}
	var into Place
	open := form.Into.Region != 0 && dst%16 == 0
	if open {
		into = At(form.Into.Region, int(dst-form.Into.At))
	}
	shape := c.shape(part, c.blocks(form.Blocks), c.channels, c.ranks, Reduces)
	return c.launchSpread(s, f, shape, one, two, into, open, driver.Reads(src, bytes), driver.Writes(dst, bytes))
}

// launchSpread launches the kernel of a Spread. The peer may write or read at a place if this rank is open. The caller
// holds c.mu.
func (c *Comm) launchSpread(s Launcher, f driver.Function, shape Shape, one, two step, into Place, open bool, reads, writes driver.Access) error {
	b, peer, number := &c.both, 1-c.rank, c.next(s)
	c.describe(one)
	b.One = c.call.Call
	c.describe(two)
	b.Two = c.call.Call
	b.One.Number, b.Two.Number = number, number
	b.Into, b.Maps, b.Failed, b.Open = into, c.call.Maps[peer], c.call.Failed[peer], flag(open)
	return c.run(s, f, shape, raw(b), reads, writes)
}

func flag(on bool) uint32 {
	if on {
		return 1
	}
	return 0
}

// partOf returns the length of each of so many parts of so many bytes: whole vectors. The last part may be
// shorter.
func partOf(bytes, parts int) int { return (bytes + 16*parts - 1) / (16 * parts) * 16 }

// few reports whether a call has few blocks and long parts. Then their path through the rings limits it,
// and not the link. Such parts had better go straight to where they are to be.
func (c *Comm) few(form Form, part int) bool {
	return part >= 16*c.o.straight && c.blocks(form.Blocks) <= fewBlocks
}

const fewBlocks = 32
