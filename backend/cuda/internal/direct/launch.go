package direct

import (
	"bytes"
	"embed"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

//go:embed ptx/*.ptx
var texts embed.FS

// gathers is the text with the kernels of all_gather, of all_to_all with equal parts, and of one-shot broadcasts of more
// than two ranks. Moves is that of all other calls that combine nothing.
const (
	gathers = "gather"
	moves   = "move"
)

var dtypes = []tensor.DType{
	tensor.Float32, tensor.BFloat16, tensor.Float16, tensor.Float64,
	tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64,
}

// operators are the kernels' numbers of what two operands become.
var operators = []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor()}

// images has the PTX texts by name, for two ranks and for more. Nobody changes them.
var images = sync.OnceValue(func() map[string][]byte {
	all := make(map[string][]byte)
	for _, name := range append(names(), gathers, moves) {
		for _, ranks := range []int{2, window.MostRanks} {
			file := name
			if name == tensor.Uint8.String() {
				file = tensor.Int8.String()
			}
			b, err := texts.ReadFile("ptx/" + file + group(ranks) + ".ptx")
			if err != nil {
				panic(err)
			}
			if file != name {
				b = unsigned(b)
			}
			all[name+group(ranks)] = b
		}
	}
	b, err := texts.ReadFile("ptx/" + rings + ".ptx")
	if err != nil {
		panic(err)
	}
	all[rings] = b
	return all
})

// signs is how kernels of int8 compare two bytes of words. Nothing else of their text depends on the sign.
var signs = regexp.MustCompile(`shl\.b32 \t(\S+ \S+) 24;\n\tshl\.b32 \t(\S+ \S+) 24;\n\tsetp\.lt\.s32 \t`)

// unsigned returns the text for uint8: what the compiler makes of it.
func unsigned(int8 []byte) []byte {
	b := signs.ReplaceAll(int8, []byte("and.b32  \t$1 255;\n\tand.b32  \t$2 255;\n\tsetp.lt.u32 \t"))
	return bytes.ReplaceAll(b, []byte("_int8_"), []byte("_uint8_"))
}

// group is what names of texts and kernels for so many ranks end in.
func group(ranks int) string {
	if ranks == 2 {
		return "_2"
	}
	return "_n"
}

// image returns the PTX text for a dtype, of gathers or of moves, for so many ranks.
func image(name string, ranks int) []byte { return images()[name+group(ranks)] }

// kernels returns the names of the kernels for so many ranks, of small and of large calls.
func kernels(name string, ranks int) (small, large string) {
	return "c10d_direct_" + name + "_small" + group(ranks), "c10d_direct_" + name + "_large" + group(ranks)
}

// gradients reports whether gradients have a dtype. Such dtypes have kernels of forms that others do without.
func gradients(d tensor.DType) bool {
	return d == tensor.Float32 || d == tensor.Float16 || d == tensor.BFloat16
}

// sums returns the name under which kernels finds those for sums and averages, "" if there are none.
func sums(d tensor.DType, ranks int) string {
	if ranks == 2 && gradients(d) {
		return d.String() + "_sum"
	}
	return ""
}

// spreads returns the name of the kernel for an all_reduce whose ranks write straight to each other, "" if there is
// none. With two ranks it is for sums and averages, also for those of a reduce whose root reads.
func spreads(d tensor.DType, ranks int) string {
	if !gradients(d) {
		return ""
	}
	return spreadOf(d.String(), ranks)
}

func spreadOf(name string, ranks int) string { return "c10d_direct_" + name + "_spread" + group(ranks) }

// boths returns the name under which kernels finds those of two shots in one launch, of a dtype or of moves. They
// are for more than two ranks.
func boths(name string) string { return name + "_both" }

// Images calls f with each PTX text that combines one of some dtypes, and the names of its kernels for so many ranks.
// Nil means all dtypes. The texts are for devices of compute capability 8.0 and later.
func Images(ranks int, some []tensor.DType, f func(image []byte, kernels ...string)) {
	for _, d := range listed(some) {
		small, large := kernels(d.String(), ranks)
		list := []string{small, large}
		if name := sums(d, ranks); name != "" {
			small, large := kernels(name, ranks)
			list = append(list, small, large)
		}
		if name := spreads(d, ranks); name != "" {
			list = append(list, name)
		}
		if ranks > 2 {
			small, large := kernels(boths(d.String()), ranks)
			list = append(list, small, large)
		}
		f(image(d.String(), ranks), list...)
	}
}

// MoveImages calls f in the same way with the texts that combine nothing.
func MoveImages(ranks int, f func(image []byte, kernels ...string)) {
	rest := func(name string, ranks int) {
		small, large := kernels(name, ranks)
		list := []string{small, large}
		if name == moves && ranks > 2 {
			small, large := kernels(boths(name), ranks)
			list = append(list, small, large, spreadOf(name, ranks))
		}
		f(image(name, ranks), list...)
	}
	rest(gathers, ranks)
	rest(moves, ranks)
	if ranks > 2 {
		rest(moves, 2) // of lanes
	}
}

// listed returns some dtypes. Nil means all.
func listed(some []tensor.DType) []tensor.DType {
	if some == nil {
		return dtypes
	}
	return some
}

func names() (all []string) {
	for _, d := range dtypes {
		all = append(all, d.String())
	}
	return all
}

// Supports returns nil if there is a kernel for the operator and the dtype.
func Supports(op backend.ReduceOp, d tensor.DType) error {
	_, err := reduction(op, d, 1)
	return err
}

// reduced is how kernels are told of an operator.
type reduced struct {
	op, by, scaled uint32
	factor         uint64
}

// adds reports whether an operator is a sum or an average.
func (r reduced) adds() bool { return r.op == 0 && r.scaled == 0 }

func reduction(op backend.ReduceOp, d tensor.DType, ranks int) (r reduced, err error) {
	kind, ok := op.Kind(), slices.Contains(dtypes, d)
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

	// DTypes are those whose kernels New loads. Nil means all that have kernels. Comm.Load loads others.
	DTypes []tensor.DType

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
//   - More ranks have large tiles of 1 KiB: a reduce_scatter above 2 MiB, and two shots above 32 MiB. Gathers have none.
//     Moves have them from 512 KiB on, because only large tiles go straight to the peers.
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

// forms are the kernels of a dtype. Sum is for sums and averages; it may be the same as all. Both is there with more
// than two ranks. Spread is there for some dtypes.
type forms struct {
	all, sum, both pair
	spread         driver.Function
}

// Comm has the collectives of one window. Its methods may be called from many goroutines;
// the launches are in the order of the calls.
type Comm struct {
	w           *window.Window
	o           Options
	rank, ranks int
	channels    int
	modules     []driver.Module
	functions   atomic.Pointer[map[tensor.DType]forms] // replaced by Load
	gathers     pair
	moves       pair
	broadcasts  forms                                                 // of two shots, with more than two ranks
	lanes       pair                                                  // moves of two ranks
	ring        *ring                                                 // nil if the window has none
	shape       func(n, blocks, channels, ranks int, kind Kind) Shape // ShapeOf, but for measurements

	mu     sync.Mutex // of what launches use
	quiet  bool       // launches have no number
	number uint32     // of the last launch that had one, never 0
	last   uint32     // what the last launch had
	call   [moveBytes]byte
	both   [spreadBytes]byte // of an all_reduce of two ranks that spreads
	args   driver.Args
	launch driver.Launch
}

// What kernels get as their parameter: struct Call of direct.cu.
const (
	callSrc = 8 * iota
	callDst
	callPart
	callSrcStep
	callSrcBytes
	callDstStep
	callDstBytes
	callSlots
	callKeys
	callState
	callCredit
	callFailed
	callHost
	callFactor
	callLimit
	callRanks // two numbers of 4 bytes each from here on
	callChannels
	callOp
	callScaled
	callNumber
	callPeers
	callBytes = callPeers + 3*8*window.MostRanks

	// struct Move: a Call, spans of 16 bytes, and what straight stores need.
	moveSend    = callBytes
	moveTake    = moveSend + 16*window.MostRanks
	moveInto    = moveTake + 16*window.MostRanks
	moveMaps    = moveInto + 8*window.MostRanks
	moveFailed  = moveMaps + 8*window.MostRanks
	moveOpen    = moveFailed + 8*window.MostRanks
	moveWriters = moveOpen + 8
	moveBytes   = moveWriters + 8

	// struct Spread: two Calls, and what straight stores need.
	spreadTwo    = callBytes
	spreadInto   = 2 * callBytes
	spreadMaps   = spreadInto + 8
	spreadFailed = spreadMaps + 8
	spreadOpen   = spreadFailed + 8
	spreadBytes  = spreadOpen + 8
)

// Call is what a kernel is told: the parts of struct Call in direct.cu that kernels in Go need.
type Call struct {
	Src, Dst                                     driver.Ptr
	Part, SrcStep, SrcBytes, DstStep, DstBytes   int
	Slots, Keys, State, Credit, Failed, Host     driver.Ptr
	Factor                                       uint64
	Limit                                        time.Duration
	Ranks, Rank, Channels, Depth, Op, By, Scaled int
	Number                                       uint32
	Givers, Owners, Takers                       uint32 // sets of ranks
	Peers                                        [window.MostRanks]window.Peer
}

// ParseCall reads the parameter of a kernel, for kernels in Go.
func ParseCall(b []byte) (c Call) {
	long := func(at int) int { return int(binary.NativeEndian.Uint64(b[at:])) }
	ptr := func(at int) driver.Ptr { return driver.Ptr(binary.NativeEndian.Uint64(b[at:])) }
	pair := func(at int) (int, int) {
		return int(binary.NativeEndian.Uint32(b[at:])), int(binary.NativeEndian.Uint32(b[at+4:]))
	}
	c.Src, c.Dst = ptr(callSrc), ptr(callDst)
	c.Part, c.SrcStep, c.SrcBytes, c.DstStep, c.DstBytes = long(callPart), long(callSrcStep), long(callSrcBytes), long(callDstStep), long(callDstBytes)
	c.Slots, c.Keys, c.State = ptr(callSlots), ptr(callKeys), ptr(callState)
	c.Credit, c.Failed, c.Host = ptr(callCredit), ptr(callFailed), ptr(callHost)
	c.Factor, c.Limit = uint64(long(callFactor)), time.Duration(long(callLimit))
	c.Ranks, c.Rank = pair(callRanks)
	c.Channels, c.Depth = pair(callChannels)
	c.Op, c.By = pair(callOp)
	c.Scaled, _ = pair(callScaled)
	c.Number = binary.NativeEndian.Uint32(b[callNumber:])
	r := parseRoles(binary.NativeEndian.Uint32(b[callNumber+4:]))
	c.Givers, c.Owners, c.Takers = r.givers, r.owners, r.takers
	for r := range c.Peers {
		at := callPeers + 24*r
		c.Peers[r] = window.Peer{Slots: ptr(at), Keys: ptr(at + 8), Credit: ptr(at + 16)}
	}
	return c
}

// Operator returns what a call does with operands of a dtype, as package backend has it.
func (c Call) Operator(d tensor.DType) backend.ReduceOp {
	switch {
	case c.By > 1:
		return backend.Avg()
	case c.Scaled == 0:
		return operators[c.Op]
	case d.IsInteger():
		return backend.PreMulSum(float64(int64(c.Factor)))
	case d == tensor.Float64:
		return backend.PreMulSum(math.Float64frombits(c.Factor))
	}
	return backend.PreMulSum(float64(math.Float32frombits(uint32(c.Factor))))
}

// Move is what the kernels of moves are told, and those of two shots in one launch that spread.
type Move struct {
	Call
	Send, Take   [window.MostRanks]Span
	Into         [window.MostRanks]Place
	Maps, Failed [window.MostRanks]driver.Ptr
	Open         bool
}

// Place is where a peer may write or read: an offset in a region of this rank. Regions are numbered from 1 on. 0
// means nowhere.
type Place struct{ Region, Off int }

// offsetBits are those of a Place's offset, as kernels tell it.
const offsetBits = 48

// Word is how kernels tell a place.
func (p Place) Word() uint64 { return uint64(p.Region)<<offsetBits | uint64(p.Off) }

// ParsePlace reads what a kernel has told of a place.
func ParsePlace(word uint64) Place {
	return Place{Region: int(word >> offsetBits), Off: int(word & (1<<offsetBits - 1))}
}

// ParseMove reads the parameter of a kernel of moves, for kernels in Go.
func ParseMove(b []byte) Move {
	m := Move{Call: ParseCall(b)}
	for r := range m.Send {
		m.Send[r], m.Take[r] = parseSpan(b[moveSend+16*r:]), parseSpan(b[moveTake+16*r:])
		m.Into[r] = ParsePlace(binary.NativeEndian.Uint64(b[moveInto+8*r:]))
		m.Maps[r] = driver.Ptr(binary.NativeEndian.Uint64(b[moveMaps+8*r:]))
		m.Failed[r] = driver.Ptr(binary.NativeEndian.Uint64(b[moveFailed+8*r:]))
	}
	m.Open = b[moveOpen] != 0
	return m
}

// Spread is what a kernel of two ranks is told. The ranks write straight to each other, or one reads from the other.
type Spread struct {
	One, Two     Call
	Into         Place
	Maps, Failed driver.Ptr
	Open         bool
}

// ParseSpread reads the parameter of such a kernel, for kernels in Go.
func ParseSpread(b []byte) Spread {
	return Spread{
		One: ParseCall(b), Two: ParseCall(b[spreadTwo:]), Into: ParsePlace(binary.NativeEndian.Uint64(b[spreadInto:])),
		Maps: driver.Ptr(binary.NativeEndian.Uint64(b[spreadMaps:])), Failed: driver.Ptr(binary.NativeEndian.Uint64(b[spreadFailed:])),
		Open: b[spreadOpen] != 0,
	}
}

// EachSpread calls f for every kernel whose ranks write to each other's memory or read it. The dtype is as in EachBoth.
// With two ranks the kernel's parameter is a Spread, with more a Move.
func EachSpread(f func(name string, d tensor.DType, two bool)) {
	for _, d := range dtypes {
		for _, ranks := range []int{2, window.MostRanks} {
			if name := spreads(d, ranks); name != "" {
				f(name, d, ranks == 2)
			}
		}
	}
	f(spreadOf(moves, window.MostRanks), tensor.Invalid, false)
}

// EachBoth calls f for every kernel that does two shots in one launch, with its dtype; Invalid for those that combine
// nothing.
func EachBoth(f func(name string, d tensor.DType)) {
	both := func(name string, d tensor.DType) {
		small, large := kernels(boths(name), window.MostRanks)
		f(small, d)
		f(large, d)
	}
	for _, d := range dtypes {
		both(d.String(), d)
	}
	both(moves, tensor.Invalid)
}

func parseSpan(b []byte) Span {
	return Span{Off: int(binary.NativeEndian.Uint64(b)), N: int(binary.NativeEndian.Uint64(b[8:]))}
}

// EachMove calls f for every kernel of moves.
func EachMove(f func(name string)) {
	for _, ranks := range []int{2, window.MostRanks} {
		small, large := kernels(moves, ranks)
		f(small)
		f(large)
	}
}

// Each calls f for every other kernel, with the dtype that it combines; Invalid for those that
// gather.
func Each(f func(name string, d tensor.DType)) {
	all := func(name string, ranks int, d tensor.DType) {
		small, large := kernels(name, ranks)
		f(small, d)
		f(large, d)
	}
	for _, ranks := range []int{2, window.MostRanks} {
		for _, d := range dtypes {
			all(d.String(), ranks, d)
			if name := sums(d, ranks); name != "" {
				all(name, ranks, d)
			}
		}
		all(gathers, ranks, tensor.Invalid)
	}
}

// New makes the collectives of a connected window. It loads kernels, which may wait for the
// device. Its memory is the window's, which has to stay until the Comm is closed.
func New(w *window.Window, o Options) (_ *Comm, err error) {
	rank, ranks := w.Rank()
	if a, b, shared := w.SharedDevice(); shared && !o.shareDevices {
		return nil, fmt.Errorf("direct: ranks %d and %d share a device: kernels that wait for each other need one each", a, b)
	}
	dev := w.Device().ID().Index
	if o.Blocks < 0 || o.Limit < 0 {
		return nil, fmt.Errorf("direct: Options.Blocks %d, Limit %v: none may be negative", o.Blocks, o.Limit)
	}
	if i := w.Device().Info(); i.Major < 8 {
		return nil, fmt.Errorf("direct: device %d has compute capability %d.%d, want 8.0 or later", dev, i.Major, i.Minor)
	}
	if o.Blocks == 0 {
		o.Blocks = 128
	}
	if o.Limit == 0 {
		o.Limit = 10 * time.Minute
	}
	if o.straight == 0 {
		o.straight = StraightBytes
	}
	if o.rootReduces == 0 {
		o.rootReduces = rootReducesUpTo
	}
	channels, depth := w.Shape()
	c := &Comm{w: w, o: o, rank: rank, ranks: ranks, channels: channels, shape: ShapeOf}
	c.functions.Store(new(map[tensor.DType]forms))
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.openRing(); err != nil {
		return nil, err
	}
	if w.NextOnly() {
		c.setLaunch()
		return c, nil
	}
	for _, d := range listed(o.DTypes) {
		if err := c.Load(d); err != nil {
			return nil, err
		}
	}
	for name, p := range map[string]*pair{gathers: &c.gathers, moves: &c.moves} {
		m, err := c.load(name, ranks)
		if err != nil {
			return nil, err
		}
		if *p, err = functions(m, name, ranks); err != nil {
			return nil, err
		}
		if name == moves && ranks > 2 {
			if c.broadcasts.both, err = functions(m, boths(name), ranks); err != nil {
				return nil, err
			}
			if c.broadcasts.spread, err = m.Function(spreadOf(name, ranks)); err != nil {
				return nil, err
			}
		}
	}

	if _, ok := w.HasLanes(); ok {
		c.lanes = c.moves
		if ranks > 2 {
			m, err := c.load(moves, 2)
			if err != nil {
				return nil, err
			}
			if c.lanes, err = functions(m, moves, 2); err != nil {
				return nil, err
			}
		}
	}
	c.setUp(w.Own(), depth, w.Peer, func(r int) int { return r })
	return c, nil
}

// setUp writes what all calls have in common. Of is the rank of the window that a rank stands for.
func (c *Comm) setUp(own window.Own, depth int, peer func(rank int) window.Peer, of func(rank int) int) {
	for at, p := range map[int]driver.Ptr{
		callSlots: own.Slots, callKeys: own.Keys, callState: own.State, callCredit: own.Credit, callFailed: own.Failed, callHost: own.Host,
	} {
		c.put(at, uint64(p))
	}
	c.put(callLimit, uint64(c.o.Limit.Nanoseconds()))
	c.put2(callRanks, uint32(c.ranks), uint32(c.rank))
	c.put2(callChannels, uint32(c.channels), uint32(depth))
	for r := range c.ranks {
		if r == c.rank {
			continue
		}
		p := peer(r)
		c.put(callPeers+24*r, uint64(p.Slots))
		c.put(callPeers+24*r+8, uint64(p.Keys))
		c.put(callPeers+24*r+16, uint64(p.Credit))
		c.put(moveMaps+8*r, uint64(c.w.Maps(of(r))))
		c.put(moveFailed+8*r, uint64(c.w.Failed(of(r))))
	}
	c.setLaunch()
}

// setLaunch writes what all launches have in common. Two places are for what a call reads and writes.
func (c *Comm) setLaunch() {
	c.launch = driver.Launch{Args: &c.args, Access: c.w.Access(make([]driver.Access, 2, 2+2+window.MostRanks))}
}

// Load loads the kernels that combine a dtype, unless they are there. It may wait for the device, as New.
func (c *Comm) Load(d tensor.DType) (err error) {
	if !slices.Contains(dtypes, d) {
		return fmt.Errorf("direct: there are no kernels for %v", d)
	}
	if c.w.NextOnly() {
		return nil // a ring has one kernel for all
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.forms(d); ok {
		return nil
	}
	m, err := c.load(d.String(), c.ranks)
	if err != nil {
		return err
	}
	var f forms
	if f.all, err = functions(m, d.String(), c.ranks); err != nil {
		return err
	}
	f.sum = f.all
	if name := sums(d, c.ranks); name != "" {
		if f.sum, err = functions(m, name, c.ranks); err != nil {
			return err
		}
	}
	if name := spreads(d, c.ranks); name != "" {
		if f.spread, err = m.Function(name); err != nil {
			return err
		}
	}
	if c.ranks > 2 {
		if f.both, err = functions(m, boths(d.String()), c.ranks); err != nil {
			return err
		}
	}
	all := map[tensor.DType]forms{d: f}
	maps.Copy(all, *c.functions.Load())
	c.functions.Store(&all)
	return nil
}

// Loaded reports whether the kernels that combine a dtype are loaded.
func (c *Comm) Loaded(d tensor.DType) bool {
	_, ok := c.forms(d)
	return ok || c.w.NextOnly() && slices.Contains(dtypes, d)
}

// forms returns the kernels of a dtype, false if they are not loaded.
func (c *Comm) forms(d tensor.DType) (f forms, ok bool) {
	f, ok = (*c.functions.Load())[d]
	return f, ok
}

func (c *Comm) load(name string, ranks int) (driver.Module, error) {
	return c.loadImage(image(name, ranks))
}

func (c *Comm) loadImage(image []byte) (driver.Module, error) {
	m, err := c.w.Device().Load(image)
	if err == nil {
		c.modules = append(c.modules, m)
	}
	return m, err
}

func functions(m driver.Module, name string, ranks int) (p pair, err error) {
	small, large := kernels(name, ranks)
	if p.small, err = m.Function(small); err == nil {
		p.large, err = m.Function(large)
	}
	return p, err
}

func (c *Comm) put(at int, v uint64) { binary.NativeEndian.PutUint64(c.call[at:], v) }

func (c *Comm) put2(at int, a, b uint32) {
	binary.NativeEndian.PutUint32(c.call[at:], a)
	binary.NativeEndian.PutUint32(c.call[at+4:], b)
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
	dst, src           driver.Ptr
	part               int
	srcStep, srcBytes  int
	dstStep, dstBytes  int
	srcRange, dstRange int // what is read from src and written to dst
	r                  reduced
	f                  pair
	blocks             int // see Form
	kind               Kind
	roles              roles // everyone does everything if there are none
}

// describe puts a step into c.call.
func (c *Comm) describe(x step) {
	c.put(callSrc, uint64(x.src))
	c.put(callDst, uint64(x.dst))
	c.put(callPart, uint64(x.part))
	c.put(callSrcStep, uint64(x.srcStep))
	c.put(callSrcBytes, uint64(x.srcBytes))
	c.put(callDstStep, uint64(x.dstStep))
	c.put(callDstBytes, uint64(x.dstBytes))
	c.put(callFactor, x.r.factor)
	c.put2(callOp, x.r.op, x.r.by)
	c.put2(callScaled, x.r.scaled, uint32(x.src|x.dst|driver.Ptr(x.srcStep|x.dstStep)))
	if x.roles == (roles{}) {
		x.roles = allRoles(c.ranks)
	}
	c.put2(callNumber, 0, x.roles.word())
}

// enqueue launches a step. The caller holds c.mu.
func (c *Comm) enqueue(s Launcher, x step) error {
	c.describe(x)
	return c.start(s, x.f, c.shape(x.part, c.blocks(x.blocks), c.channels, c.ranks, x.kind), callBytes, driver.Reads(x.src, x.srcRange), driver.Writes(x.dst, x.dstRange))
}

// blocks returns the most blocks of a launch; see Form.
func (c *Comm) blocks(form int) int {
	if form > 0 {
		return min(c.o.Blocks, form)
	}
	return c.o.Blocks
}

// start launches a kernel, whose parameter is the first bytes of c.call. The caller holds c.mu.
func (c *Comm) start(s Launcher, p pair, shape Shape, bytes int, reads, writes driver.Access) error {
	f := p.small
	if shape.Large {
		f = p.large
	}
	binary.NativeEndian.PutUint32(c.call[callNumber:], c.next(s))
	return c.run(s, f, shape, c.call[:bytes], reads, writes)
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

// kernel returns the kernels of a dtype, those of a call of one shot, and what they are told of the operator. A ring
// has a kernel for all dtypes.
func (c *Comm) kernel(what string, op backend.ReduceOp, d tensor.DType, ring bool) (forms, pair, reduced, error) {
	r, err := reduction(op, d, c.ranks)
	if err != nil || ring {
		return forms{}, pair{}, r, err
	}
	f, ok := c.forms(d)
	if !ok {
		return f, pair{}, r, fmt.Errorf("direct: %s of %v: its kernels are not loaded: call Load, or set Options.DTypes", what, d)
	}
	if r.adds() {
		return f, f.sum, r, nil
	}
	return f, f.all, r, nil
}

// AllReduce combines n elements at src of all ranks, to dst.
func (c *Comm) AllReduce(s Launcher, dst, src driver.Ptr, n int, d tensor.DType, op backend.ReduceOp, form Form) error {
	all, f, r, err := c.kernel("all_reduce", op, d, form.Ring)
	if err != nil {
		return err
	}
	if ok, err := c.begin("all_reduce", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes := n * d.Size()
	if form.Ring {
		return c.ringReduce(s, dst, src, bytes, r, d, form)
	}
	if c.ranks == 2 && c.Spreads(n, d, op, form) {
		return c.spreadSum(s, dst, src, bytes, r, all.spread, form)
	}
	if !twoShots(bytes, c.ranks, form) {
		return c.enqueue(s, step{
			dst: dst, src: src, part: bytes, srcBytes: bytes, dstBytes: bytes, srcRange: bytes, dstRange: bytes, r: r, f: f, blocks: form.Blocks,
		})
	}
	if c.ranks > 2 {
		return c.bothShots(s, dst, src, bytes, r, allRoles(c.ranks), all, form)
	}
	part := partOf(bytes, c.ranks)
	at := part * c.rank
	mine := min(part, bytes-at)
	err = c.enqueue(s, step{
		dst: dst + driver.Ptr(at), src: src, part: part, srcStep: part, srcBytes: bytes, dstBytes: mine, srcRange: bytes, dstRange: mine, r: r, f: f,
		blocks: form.Blocks,
	})
	if err != nil {
		return err
	}
	return c.spread(s, dst, bytes, form)
}

// twoShots reports whether a call of so many bytes takes two shots, in so many parts. It does not if one of them would
// be empty.
func twoShots(bytes, parts int, form Form) bool {
	return form.TwoShot && partOf(bytes, parts)*(parts-1) < bytes
}

// roles are three sets of ranks. Givers have operands, owners combine a part
// each, in the order of the ranks, and takers get the results.
type roles struct{ givers, owners, takers uint32 }

// everyone is the set of so many ranks.
func everyone(ranks int) uint32 { return 1<<ranks - 1 }

// allRoles has every rank do everything.
func allRoles(ranks int) roles { return roles{everyone(ranks), everyone(ranks), everyone(ranks)} }

// word is how kernels are told of roles: 8 bits a set.
func (x roles) word() uint32 {
	return x.givers | x.owners<<window.MostRanks | x.takers<<(2*window.MostRanks)
}

func parseRoles(word uint32) roles {
	const set = 1<<window.MostRanks - 1
	return roles{word & set, word >> window.MostRanks & set, word >> (2 * window.MostRanks) & set}
}

// bothShots is two shots in one launch: an all_reduce, a reduce or a broadcast. The caller holds c.mu.
func (c *Comm) bothShots(s Launcher, dst, src driver.Ptr, bytes int, r reduced, who roles, f forms, form Form) error {
	part := partOf(bytes, bits.OnesCount32(who.owners))
	in, out := bytes, bytes
	if who.givers>>c.rank&1 == 0 {
		src, in = dst, 0
	}
	takes := who.takers>>c.rank&1 != 0
	if !takes {
		dst, out = src, 0
	}
	c.describe(step{dst: dst, src: src, part: part, srcStep: part, srcBytes: bytes, dstStep: part, dstBytes: bytes, r: r, roles: who})
	kind := TwoShots
	if bits.OnesCount32(who.givers) == 1 {
		kind = Gathers // a broadcast
	}
	shape, spreads := c.bothShape(part, form, kind, f)
	reads, writes := driver.Reads(src, in), driver.Writes(dst, out)
	if !spreads {
		return c.start(s, f.both, shape, callBytes, reads, writes)
	}
	open, next := !takes || form.Into.Region != 0 && dst%16 == 0, 0
	for p := range c.ranks {
		var into Place
		if who.owners>>p&1 != 0 {
			if open && takes {
				into = Place{form.Into.Region, int(dst-form.Into.At) + next*part}
			}
			next++
		}
		c.put(moveInto+8*p, into.Word())
	}
	c.put2(moveOpen, flag(open), flag(open && takes))
	return c.start(s, pair{large: f.spread}, shape, moveBytes, reads, writes)
}

// bothShape returns the shape of two shots in one launch, and whether results go straight to the peers.
func (c *Comm) bothShape(part int, form Form, kind Kind, f forms) (s Shape, spreads bool) {
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
		f, _ := c.forms(d)
		_, spreads := c.bothShape(part, form, TwoShots, f)
		return spreads && twoShots(n*d.Size(), c.ranks, form)
	}
	_, ok := c.spreadShape(part, d, op, form)
	return ok && c.few(form, part)
}

// spreadShape returns the shape of a Spread with so long parts, and whether there can be one.
func (c *Comm) spreadShape(part int, d tensor.DType, op backend.ReduceOp, form Form) (s Shape, ok bool) {
	r, err := reduction(op, d, c.ranks)
	if err != nil || !r.adds() {
		return s, false
	}
	if f, _ := c.forms(d); f.spread == nil {
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
		into = Place{form.Into.Region, int(dst - form.Into.At)}
	}
	shape := c.shape(part, c.blocks(form.Blocks), c.channels, c.ranks, Reduces)
	return c.launchSpread(s, f, shape, one, two, into, open, driver.Reads(src, bytes), driver.Writes(dst, bytes))
}

// launchSpread launches the kernel of a Spread. The peer may write or read at a place if this rank is open. The caller
// holds c.mu.
func (c *Comm) launchSpread(s Launcher, f driver.Function, shape Shape, one, two step, into Place, open bool, reads, writes driver.Access) error {
	b, peer, number := c.both[:], 1-c.rank, c.next(s)
	for i, x := range []step{one, two} {
		c.describe(x)
		binary.NativeEndian.PutUint32(c.call[callNumber:], number)
		copy(b[i*callBytes:], c.call[:callBytes])
	}
	binary.NativeEndian.PutUint64(b[spreadInto:], into.Word())
	copy(b[spreadMaps:], c.call[moveMaps+8*peer:][:8])
	copy(b[spreadFailed:], c.call[moveFailed+8*peer:][:8])
	binary.NativeEndian.PutUint32(b[spreadOpen:], flag(open))
	return c.run(s, f, shape, b, reads, writes)
}

// ReduceScatter combines the ranks' parts of n elements each: src has one for each rank, in
// order, and dst gets this rank's.
func (c *Comm) ReduceScatter(s Launcher, dst, src driver.Ptr, n int, d tensor.DType, op backend.ReduceOp, form Form) error {
	_, f, r, err := c.kernel("reduce_scatter", op, d, form.Ring)
	if err != nil {
		return err
	}
	if ok, err := c.begin("reduce_scatter", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	part := n * d.Size()
	all := part * c.ranks
	x := step{
		dst: dst, src: src, part: part, srcStep: part, srcBytes: all, dstBytes: part, srcRange: all, dstRange: part,
		r: r, f: f, blocks: form.Blocks,
	}
	if form.Ring {
		return c.ringScatter(s, x, d)
	}
	return c.enqueue(s, x)
}

// AllGather brings n bytes at src of each rank to dst, in the order of the ranks. Src may be
// this rank's part of dst.
func (c *Comm) AllGather(s Launcher, dst, src driver.Ptr, n int, form Form) error {
	if form.Ring {
		var take [window.MostRingRanks]Span
		for r := range c.ranks {
			take[r] = Span{r * n, n}
		}
		return c.ringGather(s, dst, src, take[:c.ranks], form)
	}
	if ok, err := c.begin("all_gather", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	all := n * c.ranks
	return c.enqueue(s, step{
		dst: dst, src: src, part: n, srcBytes: n, dstStep: n, dstBytes: all, srcRange: n, dstRange: all, f: c.gathers, kind: Gathers, blocks: form.Blocks,
	})
}

// AllToAll brings part r of src, of n bytes, to rank r's dst, where it is part number rank.
func (c *Comm) AllToAll(s Launcher, dst, src driver.Ptr, n int) error {
	if ok, err := c.begin("all_to_all", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	all := n * c.ranks
	return c.enqueue(s, step{dst: dst, src: src, part: n, srcStep: n, srcBytes: all, dstStep: n, dstBytes: all, srcRange: all, dstRange: all, f: c.gathers, kind: Gathers})
}
