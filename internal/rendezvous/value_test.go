package rendezvous

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func unhex(t testing.TB, s string) []byte {
	return must.Get(hex.DecodeString(strings.NewReplacer(" ", "", "\n", "", "\t", "").Replace(s)))
}

func at(s string) endpoint { return endpoint{netip.MustParseAddrPort(s), noSeq} }

// What PyTorch 2.6 published as rank 1 of 2 on host "vm", and 1.13 as rank 0.
// The bytes in the middle stand for those that PyTorch does not initialise.
const (
	goldenG2 = "0200000000000000 766d 8800000000000000 02008dab7f000001"
	goldenG1 = "02009f4d7f000001"
	noSeqHex = "ffffffffffffffff"
	idsHex   = "0000000000000000 0100000000000000"
)

func TestGoldenValues(t *testing.T) {
	for _, fill := range []string{"00", "a5"} {
		rest := strings.Repeat(fill, 120)

		b := unhex(t, goldenG2+rest+noSeqHex+idsHex)
		require.Len(t, b, 170)
		v := must.Get(parseValue(b, 2))
		want := value{host: "vm", at: []endpoint{at("127.0.0.1:36267")}, ids: []int64{0, 1}}
		require.Equal(t, want, v)
		if fill == "00" {
			require.Equal(t, b, v.encode())
		}

		b = unhex(t, goldenG1+rest+noSeqHex)
		require.Len(t, b, 136)
		v = must.Get(parseValue(b, 2))
		require.Equal(t, value{perRank: true, at: []endpoint{at("127.0.0.1:40781")}}, v)
		if fill == "00" {
			require.Equal(t, b, v.encode())
		}
	}

	// The address of a rank of PyTorch 2.6 that listens on ::1.
	b := unhex(t, "0a009507 00000000 00000000000000000000000000000001 00000000"+strings.Repeat("00", 100)+noSeqHex)
	e := must.Get(parseBlob(b))
	require.Equal(t, at("[::1]:38151"), e)
	require.Equal(t, b, e.appendBlob(nil))

	lazy := value{host: "vm", at: []endpoint{at("127.0.0.1:1")}}
	require.Len(t, lazy.encode(), 154)
	require.Equal(t, lazy, must.Get(parseValue(lazy.encode(), 3)))
}

func TestWhoConnects(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"127.0.0.1:36447", "127.0.0.1:40781", 1}, // 0x8e5f over 0x9f4d, swapped 0x5f8e and 0x4d9f
		{"127.0.0.1:33207", "127.0.0.1:36267", 1}, // as rank 0 connected to rank 1 in the capture
		{"127.0.0.2:1", "127.0.0.1:65535", 1},
		{"10.0.0.1:1", "9.255.255.255:2", 1},
		{"200.0.0.1:1", "100.0.0.1:1", 1},
		{"[::2]:1", "[::1]:9", 1},
		{"[fe80::1%1]:512", "[fe80::1%2]:1", -1},
	} {
		a, b := at(c.a), at(c.b)
		n := must.Get(compare(a, b))
		require.Equal(t, c.want, n, "%s and %s", c.a, c.b)
		n = must.Get(compare(b, a))
		require.Equal(t, -c.want, n)
	}
	require.ErrorContains(t, must.Err(compare(at("127.0.0.1:1"), at("[::1]:1"))), "IPv6")
	require.ErrorContains(t, must.Err(compare(at("127.0.0.1:1"), at("127.0.0.1:1"))), "one address")
	a, b := at("127.0.0.1:1"), at("127.0.0.1:1")
	a.seq = 5
	require.Equal(t, 1, must.Get(compare(a, b)))
}

func TestForPeer(t *testing.T) {
	v := value{perRank: true, at: []endpoint{at("127.0.0.1:10"), at("127.0.0.1:11"), at("127.0.0.1:13")}}
	for peer, port := range map[int]uint16{0: 10, 1: 11, 3: 13} {
		require.Equal(t, port, v.forPeer(2, peer).at.Port())
	}
}

func TestBadValues(t *testing.T) {
	good := value{host: "h", at: []endpoint{at("127.0.0.1:7")}, ids: []int64{0, 1, 2}}.encode()
	one := at("127.0.0.1:7")
	numbered := one
	numbered.seq = 4
	change := func(offset int, with byte) []byte {
		b := bytes.Clone(good)
		b[offset] = with
		return b
	}
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"empty":                  {nil, "not the form of a Gloo address"},
		"text":                   {[]byte("hello"), "not the form of a Gloo address"},
		"short":                  {good[:100], "not the form of a Gloo address"},
		"cut in ids":             {good[:len(good)-1], "pair numbers"},
		"ids of another group":   {good[:len(good)-8], "pair numbers"},
		"host length":            {change(2, 1), "not the form of a Gloo address"},
		"address length":         {change(9, 128), "not the form of a Gloo address"},
		"family":                 {change(17, 1), "family 1"},
		"port 0":                 {change(20, 0), "no rank can listen"},
		"G1 of another group":    {one.appendBlob(nil), "group of 2 ranks"},
		"G1 numbered":            {numbered.appendBlob(numbered.appendBlob(nil)), "macOS"},
		"G1 of unknown family":   {make([]byte, 2*blobLen), "family 0"},
		"G1 address unspecified": {at("0.0.0.0:5").appendBlob(one.appendBlob(nil)), "no rank can listen"},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, must.Err(parseValue(c.b, 3)), c.want)
		})
	}
}

func FuzzValue(f *testing.F) {
	f.Add(unhex(f, goldenG2+strings.Repeat("00", 120)+noSeqHex+idsHex), 2)
	f.Add(unhex(f, goldenG1+strings.Repeat("00", 120)+noSeqHex), 2)
	f.Add(value{at: []endpoint{at("[fe80::1%3]:9")}}.encode(), 5)
	f.Add([]byte("rank"), 1)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size < 2 || size > 64 {
			return
		}
		v, err := parseValue(b, size)
		if err != nil {
			return
		}
		require.Equal(t, v, must.Get(parseValue(v.encode(), size)))
		for i := 1; i < size; i++ {
			v.forPeer(0, i)
			v.forPeer(i, 0)
		}
	})
}
