package weights

// Each side of a TCP connection sends frames. Numbers are little-endian. A frame has a header of 24 bytes:
//
//	 0  4 bytes "c10w"
//	 4  u32 kind
//	 8  u32 number of the bucket
//	12  u32 count: changed units of a delta, protocol version 2 in a hello, otherwise 0
//	16  u32 bytes of the payload that follows
//	20  u32 checksum of the payload that follows
//
// The checksum is a CRC-32 (IEEE, zlib's). A payload of 16 KiB and more is divided into blocks of 16 KiB. The blocks are
// added as 2048 u64 each, word by word, modulo 2^64. The CRC-32 is that of the 2048 sums and then of the bytes after the last
// block. So an error within 16 KiB has the effect that it has on a CRC-32. Errors 16 KiB apart can cancel each other.
//
// The kinds, in the order of an update:
//
//   - 1 hello, of the receiver: its name, UTF-8, at most 1024 bytes. The first frame
//   - 2 init, of the publisher: u32 bytes of a bucket, u32 number of parameters; for each of them u16 length and name,
//     u8 length and PyTorch's dtype, u8 dimensions, and u64 for each. Before the first update and whenever
//     something of this changes
//   - 3 start, of the publisher: u64 version, u64 version that deltas refer to; 0 if there are no deltas
//   - 4 full, of the publisher: all bytes of a bucket, row-major
//   - 5 delta, of the publisher: count indices (u32, increasing), then count values
//   - 6 finish, of the publisher: u64 version, u32 digest
//   - 7 ack, of the receiver: u64 version that is now in use
//   - 8 refuse, of the receiver: why it leaves, UTF-8, at most 1024 bytes
//
// A bucket is a range of one parameter: the first "bytes of a bucket", the next, and so on; the last may be shorter. Buckets
// are numbered over all parameters from 0 and sent in this order, each once. Bytes of a bucket are a multiple of 64 from 64
// KiB to 256 MiB. An index counts units within the bucket. A unit is an element, or half of a complex128. A delta is always
// shorter than the bucket. The digest begins with 0; each frame of kind 4 or 5 replaces it by the CRC-32 of the frame's CRC
// (4 bytes), begun with the digest before: zlib.crc32(pack("<I", crc), digest). A start or init in the middle of an update
// begins anew.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"runtime"
	"strings"
	"sync"
	"unicode"

	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/tensor"
)

const (
	headerSize = 24
	magic      = "c10w"
	protocol   = 2          // in the count of a hello
	block      = 16 << 10   // bytes that a checksum adds up
	piece      = 16 * block // bytes after which a receiver lets other goroutines run
	workers    = 4          // goroutines of a receiver that check buckets and apply deltas
	congestion = "reno"     // within a host; the system's choice may send at a rate that it has measured, as bbr does
	buffer     = 1 << 20    // bytes of a socket's buffer within a host; the system's own grows beyond the processor's caches
)

type kind uint32

const (
	kindHello  kind = 1 // receiver: its name
	kindInit   kind = 2 // publisher: the layout
	kindStart  kind = 3 // publisher: version, and the version that deltas are relative to; 0 for a full update
	kindFull   kind = 4 // publisher: all bytes of a bucket
	kindDelta  kind = 5 // publisher: a bucket's changed elements
	kindFinish kind = 6 // publisher: version, and the CRC-32 of the buckets' CRC-32
	kindAck    kind = 7 // receiver: the version is in use
	kindRefuse kind = 8 // receiver: why it leaves
)

// maxName is the greatest length of a receiver's name and of a refusal, in bytes.
const maxName = 1 << 10

type header struct {
	kind          kind
	bucket, count uint32
	length, crc   uint32
}

func (h header) append(b []byte) []byte {
	b = append(b, magic...)
	for _, v := range []uint32{uint32(h.kind), h.bucket, h.count, h.length, h.crc} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

// shown is an error with texts from the network, safe for a terminal and one line of a log.
type shown struct{ error }

func (s shown) Error() string { return printable(s.error.Error()) }
func (s shown) Unwrap() error { return s.error }

// printable replaces what a terminal would obey, and ends texts of more than 4 KiB.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s[:min(len(s), 4<<10)])
}

var errWire = errors.New("weights: the other side does not speak this protocol")

func readHeader(r io.Reader, scratch *[headerSize]byte) (header, error) {
	if _, err := io.ReadFull(r, scratch[:]); err != nil {
		return header{}, err
	}
	if string(scratch[:4]) != magic {
		return header{}, fmt.Errorf("%w: it sent %q", errWire, scratch[:4])
	}
	at := func(i int) uint32 { return binary.LittleEndian.Uint32(scratch[i:]) }
	return header{kind(at(4)), at(8), at(12), at(16), at(20)}, nil
}

// frame returns a whole frame with a short payload.
func frame(k kind, payload []byte) []byte {
	return header{kind: k}.withPayload(payload)
}

func (h header) withPayload(payload []byte) []byte {
	h.length, h.crc = uint32(len(payload)), checksum(payload)
	return append(h.append(make([]byte, 0, headerSize+len(payload))), payload...)
}

// sum makes a payload's checksum. The payload's whole blocks are added up, word by word. The checksum is the CRC-32 of
// these sums and of the bytes after the last block. In Python this is 4 times as fast as a CRC-32 of all bytes.
type sum struct {
	words [block]byte // 2048 sums
	some  bool
	rest  []byte
}

// addWords adds up little-endian words, as all hosts of this library have them.
var addWords, _ = reduce.Kernel(reduce.Sum, tensor.Int64)

var sums = sync.Pool{New: func() any { return new(sum) }}

// add adds the next part. All parts but the last are whole blocks.
func (s *sum) add(b []byte) {
	for len(b) >= block {
		addWords(s.words[:], b[:block])
		b, s.some = b[block:], true
	}
	s.rest = b
}

// crc returns the checksum and makes s ready for another payload.
func (s *sum) crc() (crc uint32) {
	if s.some {
		crc = crc32.ChecksumIEEE(s.words[:])
		clear(s.words[:])
	}
	crc = crc32.Update(crc, crc32.IEEETable, s.rest)
	s.some, s.rest = false, nil
	return crc
}

func checksum(b []byte) uint32 {
	s := sums.Get().(*sum)
	defer sums.Put(s)
	s.add(b)
	return s.crc()
}

// readBytes fills b.
func readBytes(r io.Reader, b []byte) error {
	for at := 0; at < len(b); at += piece {
		if _, err := io.ReadFull(r, b[at:min(at+piece, len(b))]); err != nil {
			return err
		}
		runtime.Gosched()
	}
	return nil
}

// check compares the checksum of the payload b with the one that h says.
func (h header) check(b []byte) error {
	s := sums.Get().(*sum)
	defer sums.Put(s)
	for at := 0; at < len(b); at += piece {
		s.add(b[at:min(at+piece, len(b))])
		runtime.Gosched()
	}
	if crc := s.crc(); crc != h.crc {
		return fmt.Errorf("weights: a frame of bucket %d has checksum %08x, %08x was sent: check the network and the memory of both hosts", h.bucket, crc, h.crc)
	}
	return nil
}

// readSmall returns the payload of a frame of kind k with at most limit bytes.
func readSmall(r io.Reader, h header, k kind, limit uint32) ([]byte, error) {
	if h.kind != k || h.length > limit {
		return nil, fmt.Errorf("%w: a frame of kind %d with %d bytes where kind %d with at most %d was expected", errWire, h.kind, h.length, k, limit)
	}
	b := make([]byte, h.length)
	if err := readBytes(r, b); err != nil {
		return nil, err
	}
	return b, h.check(b)
}

func startFrame(version, base uint64) []byte {
	return frame(kindStart, binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, version), base))
}

func finishFrame(version uint64, digest uint32) []byte {
	return frame(kindFinish, binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(nil, version), digest))
}

// chain returns the digest of the buckets so far and the next one.
func chain(digest, crc uint32) uint32 {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], crc)
	return crc32.Update(digest, crc32.IEEETable, b[:])
}
