package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

// headerLen is the size of every frame's header; EAGER, DATA and ABORT have a
// payload behind it.
const headerLen = 80

// The places of the checksums in a header.
const (
	payloadSumAt = 72
	headerSumAt  = 76
)

// castagnoli selects CRC-32C, for which CPUs have an instruction: 64 bytes take 8 ns, 1 MiB 55 us.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maxWords bounds the text in an ABORT.
const maxWords = transport.MaxWords

// The kinds of frames.
const (
	kEager  = iota + 1 // slot, length, credit, call; payload: the whole message
	kOffer             // slot, length, credit, call: a message that waits for a GRANT
	kStart             // slot, length, credit, call, handle: a message that has a GRANT begins
	kGrant             // slot, length, credit, call, handle: where a message may be written
	kData              // handle, offset (in slot), length; payload: a piece of a message
	kCredit            // credit
	kBye               // the last frame of a rank that closes the group
	kAbort             // handle: kind, operation; slot: rank; length: reporter; credit: sequence number; call: length of the payload, a text that says why
	kPing              // slot: round; length: the ranks it is about; handle: whether it is deep
	kPong              // slot: round; length: issued; credit: completed; handle: the oldest collective under way; call: links
	kCall              // handle: callTold, callAsked or callAnswered; slot, credit, call: the call of the sender
	kindEnd
)

var kindNames = [kindEnd]string{
	kEager: "EAGER", kOffer: "OFFER", kStart: "START", kGrant: "GRANT", kData: "DATA",
	kCredit: "CREDIT", kBye: "BYE", kAbort: "ABORT", kPing: "PING", kPong: "PONG", kCall: "CALL",
}

// frame is a header: 80 bytes, little endian.
//
//	0   kind, and three bytes of zero
//	4   handle
//	8   slot
//	16  length
//	24  credit
//	32  call, in five words
//	72  CRC-32C of the payload, if the pair has payload checksums (see pair.checksums), else 0
//	76  CRC-32C of the 76 bytes before
type frame struct {
	kind   uint8
	handle uint32
	slot   uint64
	length uint64
	credit uint64
	call   transport.Call
	sum    uint32 // of the payload
}

// put writes the header to b, with its checksum.
func (f *frame) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b[0:], uint32(f.kind))
	le.PutUint32(b[4:], f.handle)
	le.PutUint64(b[8:], f.slot)
	le.PutUint64(b[16:], f.length)
	le.PutUint64(b[24:], f.credit)
	le.PutUint64(b[32:], f.call.What[0])
	le.PutUint64(b[40:], f.call.What[1])
	le.PutUint64(b[48:], f.call.Before[0])
	le.PutUint64(b[56:], f.call.Before[1])
	le.PutUint64(b[64:], f.call.History)
	le.PutUint32(b[payloadSumAt:], f.sum)
	le.PutUint32(b[headerSumAt:], crc32.Checksum(b[:headerSumAt], castagnoli))
}

// seal adds the checksum of the payload to a header that put has written.
func seal(header, payload []byte) {
	le := binary.LittleEndian
	le.PutUint32(header[payloadSumAt:], crc32.Checksum(payload, castagnoli))
	le.PutUint32(header[headerSumAt:], crc32.Checksum(header[:headerSumAt], castagnoli))
}

// What was changed on the way.
var (
	errHeaderCorrupted  = errors.New("bytes of a header were changed on the way, its checksum does not fit: check the network cards, the cables and the memory of both hosts")
	errMessageCorrupted = errors.New("bytes of a message were changed on the way, its checksum does not fit: check the network cards, the cables and the memory of both hosts")
)

// parseFrame reads the first 80 bytes of b. It checks all that does not depend on earlier
// frames. If the header was changed on the way, the error is errHeaderCorrupted.
func parseFrame(b []byte) (frame, error) {
	le := binary.LittleEndian
	if le.Uint32(b[headerSumAt:]) != crc32.Checksum(b[:headerSumAt], castagnoli) {
		return frame{}, errHeaderCorrupted
	}
	kind := le.Uint32(b[0:])
	f := frame{
		kind:   uint8(kind),
		handle: le.Uint32(b[4:]),
		slot:   le.Uint64(b[8:]),
		length: le.Uint64(b[16:]),
		credit: le.Uint64(b[24:]),
		call: transport.Call{
			What:    [2]uint64{le.Uint64(b[32:]), le.Uint64(b[40:])},
			Before:  [2]uint64{le.Uint64(b[48:]), le.Uint64(b[56:])},
			History: le.Uint64(b[64:]),
		},
		sum: le.Uint32(b[payloadSumAt:]),
	}
	if kind == 0 || kind >= kindEnd {
		return f, fmt.Errorf("tcp: frame of kind %#x, want 1 to %d", kind, kindEnd-1)
	}
	bad := false
	switch f.kind {
	case kEager, kOffer:
		bad = f.handle != 0
	case kData:
		bad = f.length == 0 || f.credit != 0
	case kCredit:
		bad = f.handle != 0 || f.slot != 0 || f.length != 0
	case kBye:
		bad = f.handle != 0 || f.slot != 0 || f.length != 0 || f.credit != 0
	case kPing:
		bad = f.credit != 0
	case kPong:
		bad = f.handle > math.MaxUint8
	case kCall:
		bad = f.handle > callAnswered || f.length != 0
	}
	switch f.kind {
	case kEager, kOffer, kStart, kGrant, kCall, kPong:
	case kAbort:
		bad = bad || f.call.What[0] > maxWords || f.call != transport.Call{What: [2]uint64{f.call.What[0]}}
	default:
		bad = bad || f.call != transport.Call{}
	}
	switch f.kind {
	case kEager, kData, kAbort:
	default:
		bad = bad || f.sum != 0
	}
	if bad {
		return f, fmt.Errorf("tcp: %v frame with values in unused fields: %+v", kindNames[f.kind], f)
	}
	return f, nil
}

func abortFrame(f *transport.Fault) frame {
	return frame{
		kind: kAbort, handle: uint32(f.Kind)<<8 | uint32(f.Op),
		slot: uint64(int64(f.Rank)), length: uint64(int64(f.Reporter)), credit: f.Seq,
	}
}

// pongFrame returns the answer to a PING.
func pongFrame(a mesh.Pong) frame {
	l := a.Pack()
	return frame{
		kind: kPong, handle: uint32(a.Op), slot: a.Round, length: a.Issued, credit: a.Completed,
		call: transport.Call{What: [2]uint64{l[0], l[1]}, Before: [2]uint64{l[2], l[3]}, History: l[4]},
	}
}

// parsePong returns the answer that a frame carries to a group of size ranks.
func parsePong(f frame, size int) (mesh.Pong, error) {
	a := mesh.Pong{Round: f.slot, Issued: f.length, Completed: f.credit, Op: uint8(f.handle)}
	c := f.call
	return a, a.Unpack([mesh.MaxLinks]uint64{c.What[0], c.What[1], c.Before[0], c.Before[1], c.History}, size)
}

// abortItem is abortFrame with its text: why the mesh failed, in the words of the rank that
// noticed it.
func abortItem(f *transport.Fault) item {
	it := item{f: abortFrame(f)}
	if words := f.Words(); words != "" {
		it.f.call.What[0] = uint64(len(words))
		it.req = transport.NewRequest()
		it.req.Buf = []byte(words)
	}
	return it
}

// parseAbort returns the fault that an ABORT carries to a group of size ranks.
func parseAbort(h frame, words []byte, size int) (*transport.Fault, error) {
	kind := h.handle >> 8
	if kind == 0 || kind > uint32(transport.FaultLast) {
		return nil, fmt.Errorf("tcp: ABORT of unknown kind %d", kind)
	}
	rank, reporter := int64(h.slot), int64(h.length)
	if rank < -1 || rank >= int64(size) || reporter < -1 || reporter >= int64(size) {
		return nil, fmt.Errorf("tcp: ABORT about rank %d by rank %d in a group of %d", rank, reporter, size)
	}
	f := &transport.Fault{Kind: transport.FaultKind(kind), Rank: int(rank), Reporter: int(reporter), Op: uint8(h.handle), Seq: h.credit}
	f.Err = transport.RemoteCause(words)
	if f.Kind.OfLink() && (rank < 0 || reporter < 0 || rank == reporter) {
		return nil, fmt.Errorf("tcp: ABORT about a link between rank %d and rank %d", rank, reporter)
	}
	return f, nil
}
