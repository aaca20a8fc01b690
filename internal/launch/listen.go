package launch

import (
	"net"

	"github.com/c10d-go/c10d/store"
)

// ListenAddr returns where to listen for those who connect to addr, "host:port".
// That is addr itself if it names this host alone ("localhost", 127.0.0.1) or is an
// address that this host has. Anything else is the port on all interfaces: a name
// may mean another address here than elsewhere (127.0.1.1 on Debian), and the
// address may be that of a router in front.
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
