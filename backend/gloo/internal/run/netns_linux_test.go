package run_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/netns"
	"github.com/c10d-go/c10d/internal/testsize"
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

func (r *netRank) run() (err error) {
	defer must.Catch(&err)
	st := must.Get(store.NewFile(r.File, r.Size+1))
	defer st.Close()
	b, err := gloo.New(context.Background(), backend.Options{
		Store: st, Rank: r.Rank, Size: r.Size, Timeout: time.Minute,
		Specific: gloo.Options{Wire: r.Wire, Interfaces: []string{"ve0"}, Host: r.Address, Silence: r.Silence},
	})
	if err != nil {
		return err
	}
	defer b.Close()
	must.Do(barrier(b))
	fmt.Println("ready")
	must.Get(bufio.NewReader(os.Stdin).ReadString('\n'))
	begun := time.Now()
	for err == nil {
		err = work20(b, r.Bytes, r.Timeout)
	}
	return json.NewEncoder(os.Stdout).Encode(netReport{blamed(err), err.Error(), time.Since(begun).Seconds()})
}

// newNetwork makes a network. On a machine that does not permit one the test is skipped.
func newNetwork(t testing.TB, base string, size int) *netns.Network {
	for program, from := range netns.Programs {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("C10D_REQUIRE_SERVICES") == "1" && os.Geteuid() == 0 {
				t.Fatalf("no %s command (Debian: %s)", program, from)
			}
			t.Skipf("no %s command (Debian: %s)", program, from)
		}
	}
	n, err := netns.New(base, size)
	if errors.Is(err, netns.ErrNotPermitted) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(n.Close)
	return n
}

// runOn starts ranks, lets fault happen once they are connected, and returns what they say.
func runOn(t testing.TB, n *netns.Network, size int, how netRank, fault func() error) []netReport {
	defer n.Heal()
	how.File, how.Size = t.TempDir()+"/store", size
	outs, ins := make([]*bufio.Reader, size), make([]io.Writer, size)
	for r := range size {
		me := how
		me.Rank, me.Address = r, n.Address(r)
		text := must.Get(json.Marshal(me))
		c := n.Command(r, os.Args[0])
		c.Env = append(os.Environ(), netRankVariable+"="+string(text))
		c.Stderr = os.Stderr
		in := must.Get(c.StdinPipe())
		out := must.Get(c.StdoutPipe())
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
		must.Get(io.WriteString(in, "go\n"))
	}
	reports := make([]netReport, size)
	for r, out := range outs {
		line, err := out.ReadBytes('\n')
		require.NoError(t, err, "rank %d", r)
		require.NoError(t, json.Unmarshal(line, &reports[r]), "rank %d: %s", r, line)
	}
	return reports
}

// TestNetworkFaultsAreNamed cuts links and slows down links and ranks of groups, on both wires. All ranks name the link
// that was cut. Nobody is blamed for a slow one. Only make nightly tries every link and rank, groups of more than three,
// and each fault ten times.
func TestNetworkFaultsAreNamed(t *testing.T) {
	for size := 3; size <= testsize.Of(3, 3, 5); size++ {
		for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP} {
			check := func(fault, want string, i, j, bytes int, happen func(n *netns.Network) error) {
				t.Run(fmt.Sprintf("%d ranks, %s, %s %s", size, wire, fault, want), func(t *testing.T) {
					t.Parallel()
					n := newNetwork(t, fmt.Sprintf("%.1s%d%.1s%d%d", wire, size, fault, i, j), size)
					for range testsize.Of(1, 1, 10) {
						how := netRank{Wire: wire, Bytes: bytes, Timeout: 8 * time.Second}
						for r, got := range runOn(t, n, size, how, func() error { return happen(n) }) {
							if got.Blames != want {
								t.Errorf("rank %d blames %s: %s", r, got.Blames, got.Error)
							}
						}
					}
				})
			}
			for i := range size {
				for j := range i {
					link := fmt.Sprintf("link between %d and %d", j, i)
					if testsize.Long() || j == 0 {
						check("cut", link, i, j, 64<<10, func(n *netns.Network) error { return n.Cut(j, i) })
					}
					if testsize.Long() || j == 1 {
						check("slow "+link, "rank -1", i, j, 8<<20, func(n *netns.Network) error { return n.SlowLink(j, i) })
					}
				}
				if testsize.Long() || i == 1 {
					check(fmt.Sprintf("slow rank %d", i), "rank -1", i, i, 8<<20, func(n *netns.Network) error { return n.Slow(i) })
				}
			}
		}
	}
}

// TestVanishedHostIsNamed: all packets of a rank are lost. The others name it when TCP gives up, long
// before the operation's time is over. Those of one link: both ranks name the link. Only make nightly has both faults on
// each wire.
func TestVanishedHostIsNamed(t *testing.T) {
	for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP} {
		for name, cut := range map[string]bool{"host": false, "link": true} {
			if cut != (wire == gloo.WireTCP) && !testsize.Long() {
				continue
			}
			t.Run(string(wire)+", "+name, func(t *testing.T) {
				t.Parallel()
				n := newNetwork(t, string(wire)[:1]+name[:1], 3)
				want, fault := "rank 1", func() error { return n.Vanish(1) }
				if cut {
					want, fault = "link between 0 and 1", func() error { return n.Cut(0, 1) }
				}
				reports := runOn(t, n, 3, netRank{Wire: wire, Bytes: 64 << 10, Timeout: 10 * time.Minute, Silence: 5 * time.Second}, fault)
				for r, got := range reports {
					require.Equal(t, want, got.Blames, "rank %d: %s", r, got.Error)
					require.Less(t, got.Seconds, 30.0)
				}
			})
		}
	}
}
