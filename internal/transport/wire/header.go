package wire

import (
	"encoding/binary"
	"fmt"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

const headerLen = 48

const (
	opSendBuffer = 0
	opData       = 1
	opSendReady  = 2
	opRecvReady  = 3
)

// header is a message's first 48 bytes.
type header struct {
	nbytes, opcode, slot, offset, length, roffset uint64
}

// put writes h to the first 48 bytes of b.
func (h *header) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], h.nbytes)
	le.PutUint64(b[8:], h.opcode)
	le.PutUint64(b[16:], h.slot)
	le.PutUint64(b[24:], h.offset)
	le.PutUint64(b[32:], h.length)
	le.PutUint64(b[40:], h.roffset)
}

// parseHeader reads the first 48 bytes of b. It checks all that does not depend on earlier
// messages.
func parseHeader(b []byte) (header, error) {
	le := binary.LittleEndian
	h := header{
		nbytes:  le.Uint64(b[0:]),
		opcode:  le.Uint64(b[8:]),
		slot:    le.Uint64(b[16:]),
		offset:  le.Uint64(b[24:]),
		length:  le.Uint64(b[32:]),
		roffset: le.Uint64(b[40:]),
	}
	switch {
	case h.opcode == opSendBuffer:
		return h, fmt.Errorf("wire: opcode 0, a write to a registered buffer, which is not supported")
	case h.opcode > opRecvReady:
		return h, fmt.Errorf("wire: opcode %#x, want 1 to 3", h.opcode)
	case h.nbytes < headerLen:
		return h, fmt.Errorf("wire: message of %d bytes, shorter than its header", h.nbytes)
	case h.opcode == opData && h.length != h.nbytes-headerLen:
		return h, fmt.Errorf("wire: DATA of %d bytes that claims a payload of %d", h.nbytes, h.length)
	case h.opcode != opData && h.nbytes != headerLen:
		return h, fmt.Errorf("wire: notification of %d bytes, want %d", h.nbytes, headerLen)
	}
	return h, nil
}

// Control messages are SEND_READY headers on slots whose top byte is
// controlPrefix; the next byte is one of the codes.
const (
	controlPrefix  = 0xC1
	controlVersion = 4 // 2: the rank reads WORDS, and uses slots of its own for monitored barriers; 3: it knows FaultLink; 4: it reads LINKS of today

	ctlHello = 1 // length: version
	ctlBye   = 2
	ctlAbort = 3 // slot, low 16 bits: kind and operation; offset: rank; length: reporter; roffset: seq
	ctlPing  = 4 // offset: round; length: the ranks it is about; roffset: whether it is deep
	ctlPong  = 5 // slot, low 8 bits: the oldest collective under way; offset: round; length: issued; roffset: completed
	ctlLinks = 7 // offset, length, roffset: links, three of those of the PONG that follows
	ctlWords = 6 // slot, low 16 bits: how many bytes; offset, length, roffset: part of the text of the ABORT that follows
)

func isControl(slot uint64) bool { return slot>>56 == controlPrefix }

func control(code uint64) header {
	return header{nbytes: headerLen, opcode: opSendReady, slot: controlPrefix<<56 | code<<48}
}

func controlCode(slot uint64) uint64 { return slot >> 48 & 0xff }

func helloHeader() header {
	h := control(ctlHello)
	h.length = controlVersion
	return h
}

// abortHeader returns an ABORT for a rank with a version. Ranks before version 3 do not know
// FaultLink and get a timeout of no rank.
func abortHeader(f *transport.Fault, version uint64) header {
	h := control(ctlAbort)
	kind, rank := f.Kind, f.Rank
	if kind == transport.FaultLink && version < 3 {
		kind, rank = transport.FaultTimeout, -1
	}
	h.slot |= uint64(kind)<<8 | uint64(f.Op)
	h.offset, h.length, h.roffset = uint64(int64(rank)), uint64(int64(f.Reporter)), f.Seq
	return h
}

// parseAbort returns the fault that an ABORT carries to a group of size ranks.
func parseAbort(h header, size int) (*transport.Fault, error) {
	f := &transport.Fault{Kind: transport.FaultKind(h.slot >> 8), Op: uint8(h.slot), Seq: h.roffset}
	if f.Kind == 0 || f.Kind > transport.FaultLast {
		return nil, fmt.Errorf("wire: ABORT of unknown kind %d", f.Kind)
	}
	rank, reporter := int64(h.offset), int64(h.length)
	if rank < -1 || rank >= int64(size) || reporter < -1 || reporter >= int64(size) {
		return nil, fmt.Errorf("wire: ABORT about rank %d by rank %d in a group of %d", rank, reporter, size)
	}
	f.Rank, f.Reporter = int(rank), int(reporter)
	if f.Kind.OfLink() && (rank < 0 || reporter < 0 || rank == reporter) {
		return nil, fmt.Errorf("wire: ABORT about a link between rank %d and rank %d", rank, reporter)
	}
	return f, nil
}

// linksHeaders returns the headers that carry the links of an answer.
func linksHeaders(a mesh.Pong) (all [2]header) {
	l := a.Pack()
	for i := range all {
		all[i] = control(ctlLinks)
	}
	all[0].offset, all[0].length, all[0].roffset = l[0], l[1], l[2]
	all[1].offset, all[1].length = l[3], l[4]
	return all
}

// wordsLen is how many bytes a WORDS header carries.
const wordsLen = 24

// wordsHeaders returns the headers that carry a text.
func wordsHeaders(words string) []header {
	var all []header
	for len(words) > 0 {
		var b [wordsLen]byte
		n := copy(b[:], words)
		words = words[n:]
		le := binary.LittleEndian
		h := control(ctlWords)
		h.slot |= uint64(n)
		h.offset, h.length, h.roffset = le.Uint64(b[0:]), le.Uint64(b[8:]), le.Uint64(b[16:])
		all = append(all, h)
	}
	return all
}

// parseWords appends the text that a header carries.
func parseWords(words []byte, h header) ([]byte, error) {
	n := int(h.slot & 0xffff)
	if n == 0 || n > wordsLen || len(words)+n > transport.MaxWords {
		return nil, fmt.Errorf("wire: WORDS of %d bytes after %d", n, len(words))
	}
	var b [wordsLen]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], h.offset)
	le.PutUint64(b[8:], h.length)
	le.PutUint64(b[16:], h.roffset)
	return append(words, b[:n]...), nil
}
