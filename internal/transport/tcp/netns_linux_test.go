package tcp

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Ranks in network namespaces of their own, joined by veth whose ends tbf shapes.

type namespaces struct {
	*processes
	names []string
}

func ip(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// newNamespaces joins two ranks by a link with a rate ("" for no limit).
func newNamespaces(t testing.TB, rate string) *namespaces {
	if _, err := exec.LookPath("ip"); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" && os.Geteuid() == 0 {
			t.Fatal("no ip command (Debian: iproute2)")
		}
		t.Skip("no ip command (Debian: iproute2)")
	}
	n := &namespaces{processes: &processes{}}
	base := fmt.Sprintf("c10d%d", os.Getpid())
	t.Cleanup(func() {
		n.stop()
		for _, name := range n.names {
			if err := ip("ip", "netns", "del", name); err != nil {
				t.Error(err)
			}
		}
	})
	for _, suffix := range []string{"a", "b"} {
		if err := ip("ip", "netns", "add", base+suffix); err != nil {
			t.Skipf("network namespaces are not permitted here: %v", err)
		}
		n.names = append(n.names, base+suffix)
	}
	a, b := n.names[0], n.names[1]
	if err := ip("ip", "link", "add", "ve0", "netns", a, "type", "veth", "peer", "name", "ve0", "netns", b); err != nil {
		t.Skipf("veth is not permitted here: %v", err)
	}
	for i, ns := range n.names {
		for _, c := range []string{
			"ip -n " + ns + " link set lo up",
			fmt.Sprintf("ip -n %s addr add 10.77.0.%d/24 dev ve0", ns, i+1),
			"ip -n " + ns + " link set ve0 up",
		} {
			require.NoError(t, ip(strings.Fields(c)...))
		}
		if rate != "" {
			require.NoError(t, ip("tc", "-n", ns, "qdisc", "add", "dev", "ve0", "root", "tbf", "rate", rate, "burst", "1m", "latency", "20ms"))
		}
	}
	commands := make([][]string, len(n.names))
	for i, ns := range n.names {
		commands[i] = []string{"ip", "netns", "exec", ns}
	}
	n.processes = startProcesses(t, commands)
	for i, a := range n.addrs {
		require.Contains(t, a, fmt.Sprintf(";10.77.0.%d:", i+1), "the address of the link comes before loopback")
	}
	return n
}

// Everything arrives between hosts, over links of several speeds and with several
// connections.
func TestNamespaces(t *testing.T) {
	t.Parallel()
	for _, rate := range []string{"", "1gbit", "5gbit"} {
		t.Run("rate "+rate, func(t *testing.T) {
			n := newNamespaces(t, rate)
			for _, o := range []order{{Bytes: 0, Times: 10}, {Bytes: 10_000, Times: 500}, {Bytes: 100_000, Times: 50}, {Bytes: 4 << 20, Times: 6}, {Bytes: 5<<20 + 1, Times: 3}} {
				n.run(t, o)
			}
		})
	}
}
