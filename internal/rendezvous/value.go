package rendezvous

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
)

const (
	blobLen = 136 // struct sockaddr_storage and a sequence number
	noSeq   = -1

	familyIPv4 = 2
	familyIPv6 = 10 // Linux's

	// maxHost is the longest host name in DNS.
	maxHost = 255
)

// endpoint is an address blob: where a rank listens.
type endpoint struct {
	at  netip.AddrPort
	seq int64
}

// notListening is published by a rank that does not listen: no rank can connect to it.
var notListening = endpoint{netip.AddrPortFrom(netip.IPv4Unspecified(), 0), noSeq}

// appendBlob appends the 136 bytes of e.
func (e endpoint) appendBlob(b []byte) []byte {
	var blob [blobLen]byte
	le := binary.LittleEndian
	binary.BigEndian.PutUint16(blob[2:], e.at.Port())
	if addr := e.at.Addr(); addr.Is4() {
		le.PutUint16(blob[0:], familyIPv4)
		copy(blob[4:], addr.AsSlice())
	} else {
		le.PutUint16(blob[0:], familyIPv6)
		copy(blob[8:], addr.AsSlice())
		le.PutUint32(blob[24:], scopeID(addr.Zone()))
	}
	le.PutUint64(blob[128:], uint64(e.seq))
	return append(b, blob[:]...)
}

func scopeID(zone string) uint32 {
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n)
	}
	if i, err := net.InterfaceByName(zone); err == nil {
		return uint32(i.Index)
	}
	return 0
}

// parseBlob reads the 136 bytes of an endpoint. PyTorch leaves unused bytes uninitialised, so
// they are not checked.
func parseBlob(b []byte) (endpoint, error) {
	le := binary.LittleEndian
	var addr netip.Addr
	switch family := le.Uint16(b); family {
	case familyIPv4:
		addr = netip.AddrFrom4([4]byte(b[4:8]))
	case familyIPv6:
		addr = netip.AddrFrom16([16]byte(b[8:24]))
		if scope := le.Uint32(b[24:]); scope != 0 && addr.IsLinkLocalUnicast() {
			addr = addr.WithZone(strconv.FormatUint(uint64(scope), 10))
		}
	default:
		return endpoint{}, fmt.Errorf("address family %d, want %d or %d", family, familyIPv4, familyIPv6)
	}
	e := endpoint{netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[2:])), int64(le.Uint64(b[128:]))}
	if e == notListening {
		return e, nil
	}
	if e.at.Port() == 0 || addr.IsUnspecified() || addr.IsMulticast() {
		return endpoint{}, fmt.Errorf("address %v, at which no rank can listen", e.at)
	}
	return e, nil
}

// compare tells which of two endpoints connects: a if the result is positive.
func compare(a, b endpoint) (int, error) {
	x, y := a.at.Addr(), b.at.Addr()
	if x.Is4() != y.Is4() {
		return 0, errors.New("one rank listens on an IPv4 address and the other on an IPv6 one")
	}
	c := x.WithZone("").Compare(y.WithZone(""))
	if c == 0 {
		c = cmp.Compare(bits.ReverseBytes16(a.at.Port()), bits.ReverseBytes16(b.at.Port()))
	}
	if c == 0 {
		c = cmp.Compare(a.seq, b.seq)
	}
	if c == 0 {
		return 0, errors.New("two ranks published one address")
	}
	return c, nil
}

// value is what a rank publishes under its number.
type value struct {
	perRank bool       // there is an address for each other rank, and nothing else; see perRank
	host    string     // its name
	at      []endpoint // one, or one for each other rank, ascending
	ids     []int64    // one for each rank, or none
}

// valueNotListening is the value of a rank that does not listen. It is complete: a PyTorch rank
// that reads it fails to connect, and does not read past its end.
func valueNotListening(perRank bool, host string, size int) value {
	if perRank {
		return value{perRank: true, at: slices.Repeat([]endpoint{notListening}, size-1)}
	}
	return value{host: host, at: []endpoint{notListening}, ids: newIDs(size)}
}

// newIDs makes numbers that cannot be guessed: a process that says one has read it in the
// store.
func newIDs(n int) []int64 {
	ids := make([]int64, n)
	var b [8]byte
	for i := range ids {
		rand.Read(b[:])
		ids[i] = int64(binary.LittleEndian.Uint64(b[:]) >> 1)
	}
	return ids
}

// forPeer returns the endpoint for rank in the value of rank owner.
func (v value) forPeer(owner, rank int) endpoint {
	switch {
	case len(v.at) == 1:
		return v.at[0]
	case rank < owner:
		return v.at[rank]
	}
	return v.at[rank-1]
}

func (v value) encode() []byte {
	var b []byte
	le := binary.LittleEndian
	if !v.perRank {
		b = le.AppendUint64(b, uint64(len(v.host)))
		b = append(b, v.host...)
		b = le.AppendUint64(b, blobLen)
	}
	for _, e := range v.at {
		b = e.appendBlob(b)
	}
	for _, id := range v.ids {
		b = le.AppendUint64(b, uint64(id))
	}
	return b
}

// parseValue reads a value in a group of size ranks.
func parseValue(b []byte, size int) (value, error) {
	if v, ok, err := parseFramed(b, size); ok {
		return v, err
	}
	return parsePerRank(b, size)
}

// parseFramed reads a value with one address. ok is false if b does not have its frame.
func parseFramed(b []byte, size int) (v value, ok bool, err error) {
	le := binary.LittleEndian
	if len(b) < 8+8+blobLen {
		return v, false, nil
	}
	n := le.Uint64(b)
	if n > maxHost || len(b) < 8+int(n)+8+blobLen {
		return v, false, nil
	}
	host, b := b[8:8+n], b[8+n:]
	if le.Uint64(b) != blobLen {
		return v, false, nil
	}
	v.host = string(host)
	b = b[8:]
	e, err := parseBlob(b)
	if err != nil {
		return v, true, err
	}
	v.at = []endpoint{e}
	b = b[blobLen:]
	if len(b) != 0 && len(b) != 8*size {
		return v, true, fmt.Errorf("%d bytes of pair numbers, where a group of %d ranks has %d or none", len(b), size, 8*size)
	}
	for ; len(b) > 0; b = b[8:] {
		v.ids = append(v.ids, int64(le.Uint64(b)))
	}
	return v, true, nil
}
