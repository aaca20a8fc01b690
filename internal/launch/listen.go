package launch

import (
	"net"

	"github.com/c10d-go/c10d/store"
)

// ListenAddr returns the address to listen on, given the address "host:port" to which
// others connect. It is the same address if that is loopback or an address of this host.
// Otherwise it is the port on all interfaces: a name may mean another address on this host
// (127.0.1.1 on Debian), and the address may be that of a router.
func ListenAddr(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || store.IsLoopback(host) || ownAddr(net.ParseIP(host)) {
		return addr
	}
	return ":" + port
}

// ownAddr reports whether an interface of this host has the address ip.
func ownAddr(ip net.IP) bool {
	if ip == nil {
		return false
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.Equal(ip) {
			return true
		}
	}
	return false
}
