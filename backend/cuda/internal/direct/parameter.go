package direct

import (
	"math"
	"structs"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// The structures here are the parameters of kernels. They lie as those of the same name in direct.cu and ring.cu, which
// say what the fields are. Devices with such kernels are those of 64-bit machines.

// Call is the parameter of a launch.
type Call struct {
	_                                          structs.HostLayout
	Src, Dst                                   driver.Ptr
	Part, SrcStep, SrcBytes, DstStep, DstBytes int
	Slots, Keys, State, Credit, Failed, Host   driver.Ptr
	Factor                                     uint64
	Limit                                      time.Duration
	Ranks, Rank, Channels, Depth               uint32
	Op, Type                                   uint16
	By, Scaled, Align, Number                  uint32
	Roles                                      Roles
	Peers                                      [window.MostRanks]window.Peer
}

// Roles are three sets of ranks. Givers have operands, owners combine a part
// each, in the order of the ranks, and takers get the results.
type Roles struct{ Givers, Owners, Takers, _ uint8 }

// Span is a range of bytes.
type Span struct{ Off, N int }

// Place is where a peer may write or read: a region of this rank, from 1 on, and an offset. 0 means nowhere.
type Place uint64

// offsetBits are those of a Place's offset.
const offsetBits = 48

// At returns a place.
func At(region, off int) Place { return Place(region)<<offsetBits | Place(off) }

// Region returns the number of the region.
func (p Place) Region() int { return int(p >> offsetBits) }

// Off returns the offset.
func (p Place) Off() int { return int(p & (1<<offsetBits - 1)) }

// Move is the parameter of a launch that moves spans, and of two shots in one launch whose results go straight to the
// peers.
type Move struct {
	_ structs.HostLayout
	Call
	Send, Take       [window.MostRanks]Span
	Into             [window.MostRanks]Place
	Maps, Failed     [window.MostRanks]driver.Ptr
	Open, Told       uint32
	Writers, padding uint32
}

// Spread is the parameter of a launch of two ranks. They write straight to each other, or one reads from the other.
type Spread struct {
	_             structs.HostLayout
	One, Two      Call
	Into          Place
	Maps, Failed  driver.Ptr
	Open, padding uint32
}

// Ring is the parameter of a launch round a ring.
type Ring struct {
	_                                          structs.HostLayout
	Src, Dst                                   driver.Ptr
	Part                                       int
	Slots, Flags, NextSlots, NextFlags         driver.Ptr
	State, Failed, Host                        driver.Ptr
	Factor                                     uint64
	Limit                                      time.Duration
	Ranks, Place, Before, Channels, Depth      uint32
	Op, By, Scaled, Align, Number, Shots, Type uint32
	From, To                                   [window.MostRingRanks]Span
}

// What a call round a ring does with the parts.
const (
	Combines = 1 << iota
	Collects
)

// raw returns the bytes of a parameter.
func raw[T any](x *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(x)), unsafe.Sizeof(*x)) }

// Read returns the parameter of a launch, for kernels in Go.
func Read[T Call | Move | Spread | Ring](b []byte) (x T) {
	copy(raw(&x), b)
	return x
}

// operation returns what a kernel is told to do with operands, as package backend has it. Invalid means that it combines
// nothing.
func operation(op, dtype, by, scaled uint32, factor uint64) (tensor.DType, backend.ReduceOp) {
	d := dtypes[dtype]
	switch {
	case op == uint32(len(operators)):
		return tensor.Invalid, backend.Sum()
	case by > 1:
		return d, backend.Avg()
	case scaled == 0:
		return d, operators[op]
	case d.IsInteger():
		return d, backend.PreMulSum(float64(int64(factor)))
	case d == tensor.Float64:
		return d, backend.PreMulSum(math.Float64frombits(factor))
	}
	return d, backend.PreMulSum(float64(math.Float32frombits(uint32(factor))))
}

// Reduction returns the dtype of a call's elements, and the operator. Invalid means that it combines nothing.
func (c *Call) Reduction() (tensor.DType, backend.ReduceOp) {
	return operation(uint32(c.Op), uint32(c.Type), c.By, c.Scaled, c.Factor)
}

// Reduction is that of a Call.
func (c *Ring) Reduction() (tensor.DType, backend.ReduceOp) {
	return operation(c.Op, c.Type, c.By, c.Scaled, c.Factor)
}
