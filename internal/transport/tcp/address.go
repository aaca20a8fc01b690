package tcp

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// An address is a version, plain or tls, a secret, and the places to connect to, in the order
// in which to try them:
//
//	tcp1;plain;<token>;192.0.2.7:40001,[2001:db8::7]:40001,127.0.0.1:40001
const addressVersion = "tcp1"

const (
	tokenLen = 32

	// maxPlaces bounds the places of an address, and maxAddress its length.
	maxPlaces  = 16
	maxAddress = 2048
)

type token [tokenLen]byte

type address struct {
	secure bool
	token  token
	places []netip.AddrPort
}

func newToken() (t token) {
	rand.Read(t[:])
	return t
}

func (a address) String() string {
	mode := "plain"
	if a.secure {
		mode = "tls"
	}
	places := make([]string, len(a.places))
	for i, p := range a.places {
		places[i] = p.String()
	}
	return strings.Join([]string{addressVersion, mode, hex.EncodeToString(a.token[:]), strings.Join(places, ",")}, ";")
}

func parseAddress(s string) (address, error) {
	bad := func(why string) (address, error) { // without s, which may have a token
		return address{}, fmt.Errorf("tcp: %d bytes that are no address of this version: %s", len(s), why)
	}
	if len(s) > maxAddress {
		return bad("too long")
	}
	f := strings.Split(s, ";")
	if len(f) != 4 || f[0] != addressVersion {
		return bad("want " + addressVersion + ";mode;token;places")
	}
	var a address
	switch f[1] {
	case "plain":
	case "tls":
		a.secure = true
	default:
		return bad("want plain or tls")
	}
	t, err := hex.DecodeString(f[2])
	if err != nil || len(t) != tokenLen {
		return bad("want a token of 64 hexadecimal digits")
	}
	copy(a.token[:], t)
	places := strings.Split(f[3], ",")
	if len(places) > maxPlaces {
		return bad("too many places")
	}
	for _, p := range places {
		ap, err := netip.ParseAddrPort(p)
		if err != nil || ap.Port() == 0 {
			return bad("want places as host:port")
		}
		a.places = append(a.places, ap)
	}
	return a, nil
}

// listen opens the socket for host and returns where others reach it.
func listen(host string) (net.Listener, []netip.AddrPort, error) {
	if host == "" {
		l, err := net.Listen("tcp", ":0")
		if err != nil {
			return nil, nil, err
		}
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			l.Close()
			return nil, nil, err
		}
		return l, places(addrs, l.Addr().(*net.TCPAddr)), nil
	}
	if ifc, err := net.InterfaceByName(host); err == nil {
		addrs, err := ifc.Addrs()
		if err != nil {
			return nil, nil, err
		}
		found := places(addrs, &net.TCPAddr{})
		if len(found) == 0 {
			return nil, nil, fmt.Errorf("interface %s has no address", host)
		}
		host = found[0].Addr().String()
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, nil, err
	}
	ap := l.Addr().(*net.TCPAddr).AddrPort()
	return l, []netip.AddrPort{netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())}, nil
}

// places returns where others can reach a listener on all of addrs: global addresses first,
// IPv4 before IPv6, loopback last.
func places(addrs []net.Addr, at *net.TCPAddr) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		ip = ip.Unmap()
		if !ok || ip.IsLinkLocalUnicast() || ip.IsMulticast() {
			continue
		}
		if ip.Is6() && at.IP != nil && at.IP.To4() != nil {
			continue // the system has no version 6
		}
		out = append(out, netip.AddrPortFrom(ip, uint16(at.Port)))
	}
	class := func(p netip.AddrPort) int {
		c := 0
		if p.Addr().IsLoopback() {
			c = 2
		}
		if p.Addr().Is6() {
			c++
		}
		return c
	}
	slices.SortStableFunc(out, func(a, b netip.AddrPort) int { return class(a) - class(b) })
	return out[:min(len(out), maxPlaces)]
}

// checkAddresses parses all addresses. All ranks have the same list, so all get the same
// result.
func checkAddresses(rank int, own address, addrs []string) ([]address, error) {
	if len(addrs) == 0 || rank < 0 || rank >= len(addrs) {
		return nil, fmt.Errorf("tcp: rank %d of %d ranks", rank, len(addrs))
	}
	all := make([]address, len(addrs))
	for r, s := range addrs {
		a, err := parseAddress(s)
		if err != nil {
			return nil, fmt.Errorf("%w (rank %d)", err, r)
		}
		if a.secure != own.secure {
			with, without := rank, r
			if a.secure {
				with, without = r, rank
			}
			return nil, fmt.Errorf("tcp: rank %d has TLS and rank %d has none: set it on every rank or on none", with, without)
		}
		all[r] = a
	}
	if all[rank].token != own.token {
		return nil, fmt.Errorf("tcp: the address of rank %d is not that of this endpoint", rank)
	}
	return all, nil
}
