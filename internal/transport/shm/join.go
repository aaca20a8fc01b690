package shm

import (
	"errors"
	"fmt"
	"strings"
)

// ErrOtherHost says that ranks cannot share memory. They run on different hosts, in different
// virtual machines, or in containers that do not see each other's sockets.
var ErrOtherHost = errors.New("shm: not all ranks are on one host")

// An address is a version, the host and network namespace, the name of a socket, and a secret:
//
//	shm1;<boot id>/<network namespace>;<socket>;<token>
const version = "shm1"

type address struct{ host, socket, token string }

func (a address) String() string {
	return strings.Join([]string{version, a.host, a.socket, a.token}, ";")
}

func parseAddress(s string) (address, error) {
	f := strings.Split(s, ";")
	if len(f) != 4 || f[0] != version || f[1] == "" || len(f[2]) != 32 || len(f[3]) != 32 {
		return address{}, fmt.Errorf("shm: %d bytes that are no address", len(s)) // s may have a token
	}
	return address{host: f[1], socket: f[2], token: f[3]}, nil
}

// checkAddresses returns rank 0's address. All ranks have the same list, so all get the same
// result.
func checkAddresses(rank int, own string, addrs []string) (first address, err error) {
	if len(addrs) == 0 || len(addrs) > MaxRanks || rank < 0 || rank >= len(addrs) {
		return address{}, fmt.Errorf("shm: rank %d of %d ranks, want at most %d", rank, len(addrs), MaxRanks)
	}
	for r, s := range addrs {
		a, err := parseAddress(s)
		if err != nil {
			return address{}, fmt.Errorf("%w (rank %d)", err, r)
		}
		if r == 0 {
			first = a
		}
		if a.host != first.host {
			return address{}, fmt.Errorf("%w: rank 0 is on %s, rank %d on %s", ErrOtherHost, first.host, r, a.host)
		}
	}
	if addrs[rank] != own {
		return address{}, fmt.Errorf("shm: the address of rank %d is not that of this endpoint", rank)
	}
	return first, nil
}
