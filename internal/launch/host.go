package launch

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
)

// Host returns the host name or the address in text, without blanks around it and without the
// brackets of an IPv6 address. Its error says that the value called name cannot be one, and why.
func Host(name, text string) (string, error) {
	host := strings.TrimSpace(text)
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		host = strings.TrimSuffix(inner, "]")
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		zone := addr.Zone()
		if _, no := net.InterfaceByName(zone); zone != "" && no != nil {
			if _, no := strconv.Atoi(zone); no != nil {
				return "", fmt.Errorf("%s=%q: this host has no interface %q", name, text, zone)
			}
		}
		return host, nil
	}
	alone := "give the host alone, and the port as MASTER_PORT"
	if name == "-master-addr" {
		alone = "give the host alone, and the port with -master-port"
	}
	if strings.Contains(host, "://") {
		return "", fmt.Errorf("%s=%q is a URL: %s", name, text, alone)
	}
	if _, _, err := net.SplitHostPort(strings.TrimSpace(text)); err == nil {
		return "", fmt.Errorf("%s=%q has a port: %s", name, text, alone)
	}
	digits := true // and dots alone
	for label := range strings.SplitSeq(strings.TrimSuffix(host, "."), ".") {
		strange := strings.ContainsFunc(label, func(r rune) bool {
			digits = digits && '0' <= r && r <= '9'
			return r != '-' && r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
		})
		if label == "" || label[0] == '-' || len(label) > 63 || strange {
			return "", fmt.Errorf("%s=%q is no host name and no IP address", name, text)
		}
	}
	if len(host) > 253 || digits && strings.Contains(host, ".") {
		return "", fmt.Errorf("%s=%q is no host name and no IP address", name, text)
	}
	return host, nil
}
