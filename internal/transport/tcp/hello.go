package tcp

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// The connecting rank sends a hello and the accepting rank an answer, of 96 bytes each:
//
//	 0  "c10dtcp3"
//	 8  lane: 0 for the first connection of a pair, 1 and up for others
//	12  rank of the sender
//	16  size of the group
//	20  verdict, 0 in a hello
//	24  eager limit
//	32  window
//	40  1 if the sender has Options.Checksum, else 0
//	44  zero
//	60  CRC-32C of the other 92 bytes
//	64  token of the receiver
//
// So both prove that they know the other's address.
const (
	helloLen   = 96
	helloMagic = "c10dtcp3"
)

// Verdicts of an answer.
const (
	verdictOK = iota
	verdictSize
	verdictRank
	verdictTwice
	verdictEnded
	verdictEnd
)

var verdicts = [verdictEnd]string{
	verdictSize:  "it is in a group of another size",
	verdictRank:  "it does not expect this rank",
	verdictTwice: "it is connected to this rank already",
	verdictEnded: "it has closed or failed",
}

type hello struct {
	lane, rank, size, verdict uint32
	eager, window             uint64
	checksums                 bool
	token                     token
}

// helloSum returns the checksum of a hello.
func helloSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:60], castagnoli), castagnoli, b[64:])
}

var errHelloCorrupted = errors.New("tcp: its hello was changed on the way: the checksum does not fit")

func (h *hello) encode() []byte {
	b := make([]byte, helloLen)
	copy(b, helloMagic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], h.lane)
	le.PutUint32(b[12:], h.rank)
	le.PutUint32(b[16:], h.size)
	le.PutUint32(b[20:], h.verdict)
	le.PutUint64(b[24:], h.eager)
	le.PutUint64(b[32:], h.window)
	if h.checksums {
		b[40] = 1
	}
	copy(b[64:], h.token[:])
	le.PutUint32(b[60:], helloSum(b))
	return b
}

// parseHello reads a hello or an answer that has to contain token want.
func parseHello(b []byte, want token) (hello, error) {
	le := binary.LittleEndian
	if len(b) != helloLen || string(b[:8]) != helloMagic {
		return hello{}, fmt.Errorf("tcp: bytes that are no hello of this protocol: %.16q", b)
	}
	h := hello{
		lane: le.Uint32(b[8:]), rank: le.Uint32(b[12:]), size: le.Uint32(b[16:]), verdict: le.Uint32(b[20:]),
		eager: le.Uint64(b[24:]), window: le.Uint64(b[32:]), checksums: b[40] == 1, token: token(b[64:96]),
	}
	switch {
	case subtle.ConstantTimeCompare(h.token[:], want[:]) != 1:
		return hello{}, fmt.Errorf("tcp: its token is not that of this group")
	case le.Uint32(b[60:]) != helloSum(b):
		return hello{}, errHelloCorrupted
	case h.verdict >= verdictEnd:
		return hello{}, fmt.Errorf("tcp: unknown verdict %d", h.verdict)
	case h.lane > maxLanes:
		return hello{}, fmt.Errorf("tcp: connection number %d, want at most %d", h.lane, maxLanes)
	case h.eager == 0 || h.eager > maxEager || h.window < minWindow || h.window > maxWindow || h.window < 4*h.eager:
		return hello{}, fmt.Errorf("tcp: an eager limit of %d with a window of %d", h.eager, h.window)
	}
	return h, nil
}
