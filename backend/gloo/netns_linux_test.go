package gloo_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/store"
)

// Ranks in network namespaces of their own, on one bridge. nftables cuts links and tc slows ranks
// down. Each rank is this test binary, started again with a netRank in its environment.

const netRankVariable = "C10D_TEST_NET_RANK"

type netRank struct {
	File, Address string
	Rank, Size    int
	Wire          gloo.Wire
	Bytes         int
	Timeout       time.Duration // of an operation
	Silence       time.Duration
}

// netReport is what a rank says in the end.
type netReport struct {
	Blames, Error string
	Seconds       float64 // from the fault
}

func init() {
	if text := os.Getenv(netRankVariable); text != "" {
		var r netRank
		err := json.Unmarshal([]byte(text), &r)
		if err == nil {
			err = r.run()
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func (r *netRank) run() error {
	st, err := store.NewFile(r.File, r.Size+1)
	if err != nil {
		return err
	}
	defer st.Close()
	b, err := gloo.New(context.Background(), backend.Options{
		Store: st, Rank: r.Rank, Size: r.Size, Timeout: time.Minute, Dialect: store.DialectV2,
		Specific: gloo.Options{Wire: r.Wire, Interfaces: []string{"ve0"}, Host: r.Address, TCP: gloo.TCPOptions{Silence: r.Silence}},
	})
	if err != nil {
		return err
	}
	defer b.Close()
	if err := barrier(b); err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	begun := time.Now()
	for err == nil {
		err = work20(b, r.Bytes, r.Timeout)
	}
	return json.NewEncoder(os.Stdout).Encode(netReport{blamed(err), err.Error(), time.Since(begun).Seconds()})
}

// network is a bridge and a namespace for each rank.
type network struct {
	base string
	size int
}

// newNetwork makes a network. On a machine that does not permit one the test is skipped.
func newNetwork(t testing.TB, base string, size int) *network {
	n := &network{fmt.Sprintf("c10d%d%s", os.Getpid(), base), size}
	for program, from := range map[string]string{"ip": "iproute2", "tc": "iproute2", "nft": "nftables"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("C10D_REQUIRE_SERVICES") == "1" && os.Geteuid() == 0 {
				t.Fatalf("no %s command (Debian: %s)", program, from)
			}
			t.Skipf("no %s command (Debian: %s)", program, from)
		}
	}
	t.Cleanup(func() {
		for r := -1; r < size; r++ {
			exec.Command("ip", "netns", "del", n.name(r)).Run()
		}
	})
	for r := -1; r < size; r++ {
		if err := n.command("ip", "netns", "add", n.name(r)); err != nil {
			t.Skipf("network namespaces are not permitted here: %v", err)
		}
	}
	if err := n.in(-1, "ip link add br0 type bridge"); err != nil {
		t.Skipf("bridges are not permitted here: %v", err)
	}
	require.NoError(t, n.in(-1, "ip link set br0 up"))
	for r := range size {
		port := fmt.Sprintf("p%d", r)
		for _, err := range []error{
			n.command("ip", "link", "add", port, "netns", n.name(-1), "type", "veth", "peer", "name", "ve0", "netns", n.name(r)),
			n.in(-1, "ip link set "+port+" master br0 up"),
			n.in(r, "ip link set lo up"),
			n.in(r, "ip addr add "+n.address(r)+"/24 dev ve0"),
			n.in(r, "ip link set ve0 up"),
		} {
			require.NoError(t, err)
		}
		for _, command := range []string{"nft add table ip c10d", "nft add chain ip c10d in { type filter hook input priority 0 ; }"} {
			if err := n.in(r, command); err != nil {
				t.Skipf("nftables are not permitted here: %v", err)
			}
		}
	}
	return n
}

// name is the namespace of a rank, -1 for the bridge.
func (n *network) name(rank int) string {
	if rank < 0 {
		return n.base + "br"
	}
	return n.base + "r" + strconv.Itoa(rank)
}

func (n *network) address(rank int) string { return fmt.Sprintf("10.78.0.%d", rank+1) }

func (n *network) command(words ...string) error {
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// in runs a command in the namespace of a rank.
func (n *network) in(rank int, command string) error {
	return n.command(append([]string{"ip", "netns", "exec", n.name(rank)}, strings.Fields(command)...)...)
}

// cut drops all packets between two ranks.
func (n *network) cut(i, j int) error {
	if err := n.in(i, "nft add rule ip c10d in ip saddr "+n.address(j)+" drop"); err != nil {
		return err
	}
	return n.in(j, "nft add rule ip c10d in ip saddr "+n.address(i)+" drop")
}

// vanish drops all packets to and from a rank.
func (n *network) vanish(rank int) error { return n.in(-1, fmt.Sprintf("ip link set p%d down", rank)) }

// slow limits what a rank sends and takes to 2 Mbit/s.
func (n *network) slow(rank int) error {
	if err := n.in(rank, "tc qdisc add dev ve0 root tbf rate 2mbit burst 16k latency 50ms"); err != nil {
		return err
	}
	return n.in(-1, fmt.Sprintf("tc qdisc add dev p%d root tbf rate 2mbit burst 16k latency 50ms", rank))
}

// heal undoes all faults.
func (n *network) heal() {
	for r := range n.size {
		n.in(r, "nft flush chain ip c10d in")
		n.in(r, "tc qdisc del dev ve0 root")
		n.in(-1, fmt.Sprintf("tc qdisc del dev p%d root", r))
		n.in(-1, fmt.Sprintf("ip link set p%d up", r))
	}
}

// run starts the ranks, lets fault happen once they are connected, and returns what they say.
func (n *network) run(t testing.TB, how netRank, fault func() error) []netReport {
	defer n.heal()
	how.File, how.Size = t.TempDir()+"/store", n.size
	outs, ins := make([]*bufio.Reader, n.size), make([]io.Writer, n.size)
	for r := range n.size {
		me := how
		me.Rank, me.Address = r, n.address(r)
		text, err := json.Marshal(me)
		require.NoError(t, err)
		c := exec.Command("ip", "netns", "exec", n.name(r), os.Args[0])
		c.Env = append(os.Environ(), netRankVariable+"="+string(text))
		c.Stderr = os.Stderr
		in, err := c.StdinPipe()
		require.NoError(t, err)
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		limit := time.AfterFunc(90*time.Second, func() { c.Process.Kill() })
		defer func() {
			in.Close()
			c.Wait()
			limit.Stop()
		}()
		outs[r], ins[r] = bufio.NewReader(out), in
	}
	for r, out := range outs {
		line, err := out.ReadString('\n')
		require.NoError(t, err, "rank %d", r)
		require.Equal(t, "ready\n", line, "rank %d", r)
	}
	require.NoError(t, fault())
	for _, in := range ins {
		_, err := io.WriteString(in, "go\n")
		require.NoError(t, err)
	}
	reports := make([]netReport, n.size)
	for r, out := range outs {
		line, err := out.ReadBytes('\n')
		require.NoError(t, err, "rank %d", r)
		require.NoError(t, json.Unmarshal(line, &reports[r]), "rank %d: %s", r, line)
	}
	return reports
}

// times is how often each fault is tried: C10D_NET_RUNS, or once.
func times() int {
	n, _ := strconv.Atoi(os.Getenv("C10D_NET_RUNS"))
	return max(n, 1)
}

// TestNetworkFaultsAreNamed cuts every link and slows down every rank of groups of three to five, on
// both wires. All ranks name the link or the rank. C10D_NET_RUNS=10 tries each fault ten times;
// without it, only groups of three are tried.
func TestNetworkFaultsAreNamed(t *testing.T) {
	for size := 3; size <= 5 && (size == 3 || os.Getenv("C10D_NET_RUNS") != ""); size++ {
		for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP} {
			t.Run(fmt.Sprintf("%d ranks, %s", size, wire), func(t *testing.T) {
				t.Parallel()
				n := newNetwork(t, string(wire)[:1]+strconv.Itoa(size), size)
				check := func(want string, bytes int, fault func() error) {
					t.Run(want, func(t *testing.T) {
						for range times() {
							for r, got := range n.run(t, netRank{Wire: wire, Bytes: bytes, Timeout: 2 * time.Second}, fault) {
								if got.Blames != want {
									t.Errorf("rank %d blames %s: %s", r, got.Blames, got.Error)
								}
							}
						}
					})
				}
				for i := range size {
					for j := range i {
						check(fmt.Sprintf("link between %d and %d", j, i), 64<<10, func() error { return n.cut(j, i) })
					}
					check(fmt.Sprintf("rank %d", i), 8<<20, func() error { return n.slow(i) })
				}
			})
		}
	}
}

// TestVanishedHostIsNamed: all packets of a rank are lost. The others name it when TCP gives up, long
// before the operation's time is over.
func TestVanishedHostIsNamed(t *testing.T) {
	for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP} {
		for name, cut := range map[string]bool{"host": false, "link": true} {
			t.Run(string(wire)+", "+name, func(t *testing.T) {
				t.Parallel()
				n := newNetwork(t, string(wire)[:1]+name[:1], 3)
				want, fault := "rank 1", func() error { return n.vanish(1) }
				if cut {
					want, fault = "link between 0 and 1", func() error { return n.cut(0, 1) }
				}
				reports := n.run(t, netRank{Wire: wire, Bytes: 64 << 10, Timeout: 10 * time.Minute, Silence: 5 * time.Second}, fault)
				for r, got := range reports {
					require.Equal(t, want, got.Blames, "rank %d: %s", r, got.Error)
					require.Less(t, got.Seconds, 30.0)
				}
			})
		}
	}
}
