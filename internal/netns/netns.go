// Package netns makes hosts in network namespaces on one bridge, and breaks the network between
// them. It is for tests of what happens when links and hosts fail. It needs Linux, root, and the
// programs ip and tc (iproute2) and nft (nftables).
package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// Network is a bridge and a namespace for each host. Host Bridge is the bridge itself.
type Network struct {
	base  string
	hosts int
}

// Bridge is the number of the bridge. Every host reaches it.
const Bridge = -1

// Programs has the programs that a Network needs, and Debian's packages with them.
var Programs = map[string]string{"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}

// ErrNotPermitted is matched by the error of New on a machine that does not permit namespaces.
var ErrNotPermitted = errors.New("network namespaces are not permitted here")

// New makes a network. Its namespaces are named after base and this process. Close removes the network.
func New(base string, hosts int) (*Network, error) {
	n := &Network{fmt.Sprintf("c10d%d%s", os.Getpid(), base), hosts}
	if err := n.build(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Network) build() error {
	for h := Bridge; h < n.hosts; h++ {
		if err := run("ip netns add " + n.Name(h)); err != nil {
			return err
		}
	}
	commands := []func() error{
		func() error { return n.in(Bridge, "ip link add br0 address "+mac(Bridge)+" type bridge") },
		func() error { return n.in(Bridge, "ip addr add "+n.Address(Bridge)+"/24 dev br0") },
		func() error { return n.in(Bridge, "ip link set br0 up") },
	}
	for h := range n.hosts {
		commands = append(commands, func() error { return n.connect(h) })
	}
	for _, c := range commands {
		if err := c(); err != nil {
			return err
		}
	}
	return nil
}

// connect gives a new namespace its address and connects it with the bridge.
func (n *Network) connect(h int) error {
	cable := fmt.Sprintf("ip link add p%d netns %s type veth peer name ve0 netns %s address %s", h, n.Name(Bridge), n.Name(h), mac(h))
	for _, c := range []func() error{
		func() error { return run(cable) },
		func() error { return n.in(Bridge, fmt.Sprintf("ip link set p%d master br0 up", h)) },
		func() error { return n.in(h, "ip link set lo up") },
		func() error { return n.in(h, "ip addr add "+n.Address(h)+"/24 dev ve0") },
		func() error { return n.in(h, "ip link set ve0 up") },
		func() error { return n.in(h, "nft add table ip c10d") },
		func() error { return n.in(h, "nft add chain ip c10d in { type filter hook input priority 0 ; }") },
	} {
		if err := c(); err != nil {
			return err
		}
	}
	return nil
}

// Close removes the namespaces.
func (n *Network) Close() {
	for h := Bridge; h < n.hosts; h++ {
		run("ip netns del " + n.Name(h))
	}
}

// Name returns the name of a host's namespace.
func (n *Network) Name(host int) string {
	if host == Bridge {
		return n.base + "br"
	}
	return n.base + "h" + strconv.Itoa(host)
}

// Address returns a host's address. The interface is ve0.
func (n *Network) Address(host int) string {
	if host == Bridge {
		return "10.78.0.254"
	}
	return fmt.Sprintf("10.78.0.%d", host+1)
}

// mac returns a host's hardware address, which stays when a host restarts. The others remember it.
func mac(host int) string { return fmt.Sprintf("02:c1:0d:00:00:%02x", byte(host)) }

// Command returns a command that runs on a host.
func (n *Network) Command(host int, program string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", n.Name(host), program}, args...)...)
}

// Cut drops all packets between two hosts.
func (n *Network) Cut(i, j int) error {
	if err := n.in(i, "nft add rule ip c10d in ip saddr "+n.Address(j)+" drop"); err != nil {
		return err
	}
	return n.in(j, "nft add rule ip c10d in ip saddr "+n.Address(i)+" drop")
}

// Vanish drops all packets to and from a host.
func (n *Network) Vanish(host int) error {
	return n.in(Bridge, fmt.Sprintf("ip link set p%d down", host))
}

// Restart restarts a host as a loss of power does. The host vanishes, halt ends its processes, and the
// host is back without its connections. The other hosts are told nothing of all that.
func (n *Network) Restart(host int, halt func() error) error {
	if err := n.in(Bridge, fmt.Sprintf("ip link del p%d", host)); err != nil {
		return err
	}
	if err := halt(); err != nil {
		return err
	}
	for _, verb := range []string{"del", "add"} {
		if err := run("ip netns " + verb + " " + n.Name(host)); err != nil {
			return err
		}
	}
	return n.connect(host)
}

// limit is the rate of slow hosts and links.
const limit = "tbf rate 2mbit burst 16k latency 50ms"

// Slow limits what a host sends and takes to 2 Mbit/s each.
func (n *Network) Slow(host int) error {
	if err := n.in(host, "tc qdisc add dev ve0 root "+limit); err != nil {
		return err
	}
	return n.in(Bridge, fmt.Sprintf("tc qdisc add dev p%d root %s", host, limit))
}

// SlowLink limits what two hosts send each other to 2 Mbit/s in each direction. Their packets take
// a cable of their own, because not every kernel can tell packets apart on one interface.
func (n *Network) SlowLink(i, j int) error {
	if err := run(fmt.Sprintf("ip link add slow%d netns %s type veth peer name slow%d netns %s", j, n.Name(i), i, n.Name(j))); err != nil {
		return err
	}
	for _, ends := range [][2]int{{i, j}, {j, i}} {
		for _, command := range []string{"ip link set slow%d up", "tc qdisc add dev slow%d root " + limit, "ip route add " + n.Address(ends[1]) + " dev slow%d"} {
			if err := n.in(ends[0], fmt.Sprintf(command, ends[1])); err != nil {
				return err
			}
		}
	}
	return nil
}

// Heal undoes all faults.
func (n *Network) Heal() {
	for h := range n.hosts {
		n.in(h, "nft flush chain ip c10d in")
		n.in(h, "tc qdisc del dev ve0 root")
		n.in(Bridge, fmt.Sprintf("tc qdisc del dev p%d root", h))
		n.in(Bridge, fmt.Sprintf("ip link set p%d up", h))
		for other := range n.hosts {
			n.in(h, fmt.Sprintf("ip link del slow%d", other))
		}
	}
}

// in runs a command on a host.
func (n *Network) in(host int, command string) error {
	return run("ip netns exec " + n.Name(host) + " " + command)
}

func run(command string) error {
	words := strings.Fields(command)
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
	if text := strings.TrimSpace(string(out)); err != nil {
		if strings.Contains(text, "not permitted") || strings.Contains(text, "Permission denied") {
			err = ErrNotPermitted
		}
		return fmt.Errorf("netns: %s: %w: %s", command, err, text)
	}
	return nil
}
