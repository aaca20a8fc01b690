package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/store"
)

// TestMissingRankIsLogged: ranks 0 and 2 of 3 say that they wait for rank 1, and what is known
// of it. They do not name each other.
func TestMissingRankIsLogged(t *testing.T) {
	for name, tc := range map[string]struct {
		native     bool
		generation generation
	}{"Gloo's wire": {false, G2}, "native": {true, G2}, "Gloo's wire, PyTorch 1": {false, G1}, "native, PyTorch 1": {true, G1}} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithCancel(waiting.WithFirst(context.Background(), 20*time.Millisecond))
			defer cancel()
			logs := make([]waitingtest.Log, 3)
			out := start(ctx, st, 3, func(c *Config) {
				tc.generation.set(c)
				c.Logger = logs[c.Rank].Logger()
				c.LastSeen = func(_ context.Context, rank int) string {
					return fmt.Sprintf("rank %d has not joined the store", rank)
				}
				if tc.native {
					c.Native = &Native{Record: []byte("x"), Connect: func(context.Context, [][]byte) (transport.Mesh, error) { return nil, nil }}
				}
			}, 0, 2)
			for _, r := range []int{0, 2} {
				require.Eventually(t, func() bool {
					s := logs[r].String()
					return strings.Contains(s, `msg="c10d: waiting for rank 1 to connect" missing="rank 1 published no address (rank 1 has not joined the store)" waited=`) &&
						strings.Contains(s, "until=")
				}, 20*time.Second, time.Millisecond, "rank %d: %s", r, &logs[r])
			}
			cancel()
			for range 2 {
				o := <-out
				e := must.As[*Error](t, o.err)
				require.Contains(t, e.Error(), "rank 1 published no address (rank 1 has not joined the store)")
			}
		})
	}
}

// checks counts the calls of Check.
type checks struct {
	store.Store
	n int
}

func (c *checks) Check(ctx context.Context, keys ...string) (bool, error) {
	c.n++
	return c.Store.Check(ctx, keys...)
}

// TestFewQuestionsFindTheMissing: hundreds of ranks that wait for a few others do not ask the store for each.
func TestFewQuestionsFindTheMissing(t *testing.T) {
	const size = 256
	for _, missing := range [][]int{nil, {77}, {3, 255}} {
		st := &checks{Store: store.NewHash()}
		defer st.Close()
		for r := range size {
			if !slices.Contains(missing, r) {
				require.NoError(t, st.Set(t.Context(), strconv.Itoa(r), nil))
			}
		}
		m := &meeting{cfg: Config{Rank: 1, Size: size, Store: st}, peers: make([]peer, size)}
		var found []int
		for _, x := range m.missing(t.Context()) {
			if x.What == "published no address" {
				found = append(found, x.Rank)
			}
		}
		require.Equal(t, missing, found)
		require.LessOrEqual(t, st.n, 1+2*8*len(missing))
	}
}

// TestStoreThatEnds: a rank whose store ends while it waits still says whom it waited for.
func TestStoreThatEnds(t *testing.T) {
	st := store.NewHash()
	var log waitingtest.Log
	ctx := waiting.WithFirst(t.Context(), 10*time.Millisecond)
	out := start(ctx, st, 2, func(c *Config) { c.Logger = log.Logger() }, 0)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "rank 1") }, 20*time.Second, time.Millisecond)
	require.NoError(t, st.Close())
	require.ErrorContains(t, (<-out).err, "rank 1 published no address: ")
}

// asked is a Meeting whose answer is known.
type asked struct {
	silent  []int
	lacks   func() []int
	lacking []int
}

func (a *asked) Lacks(f func() []int) {
	if f != nil {
		a.lacks = f
	}
}

func (a *asked) Silent(lacking []int) []int {
	a.lacking = lacking
	return a.silent
}

// A rank whose time runs out names the ranks that do not answer, and not those that wait for them.
func TestSilentRanksAreNamed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		silent []int
		want   string
		broken []int // it has tried to connect with them
	}{
		{"stopped", []int{2}, "rank 2 (host host2, 127.0.0.2:5) published its address and does not answer: it has stopped, or its host is away within", []int{1}},
		{"never came", []int{3}, "rank 3 published no address within", []int{1, 2}},
		{"is slow", nil, "rank 3 published no address within", []int{1, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			st := store.NewHash()
			defer st.Close()
			for r := 1; r < 3; r++ { // they listen at a greater address, so they are to connect
				at := endpoint{netip.MustParseAddrPort("127.0.0.2:5"), noSeq}
				v := value{host: fmt.Sprint("host", r), at: []endpoint{at}, ids: newIDs(4)}
				require.NoError(t, st.Set(t.Context(), fmt.Sprint(r), v.encode()))
			}
			m := &asked{silent: c.silent}
			o := <-start(t.Context(), st, 4, func(c *Config) {
				G2.set(c)
				c.Meeting, c.Timeout = m, 5*time.Second
				c.Address = netip.MustParseAddr("127.0.0.1")
			}, 0)
			e := must.As[*Error](t, o.err)
			require.Len(t, e.Missing, 1)
			require.ErrorContains(t, o.err, c.want)
			require.Equal(t, c.broken, e.Unconnected())
			require.Contains(t, m.lacking, 3)
			require.NotNil(t, m.lacks)
		})
	}
}

// TestToldOfATimeout: a rank whose time has not run out learns from a fault that another's has.
func TestToldOfATimeout(t *testing.T) {
	m := &meeting{cfg: Config{Rank: 1, Size: 4}}
	for kind, late := range map[transport.FaultKind]bool{transport.FaultTimeout: true, transport.FaultPeerDied: false} {
		e, _ := m.explain(t.Context(), transport.NewFault(kind, 2, 0, errors.New("why")))
		require.Equal(t, late, errors.Is(e, context.DeadlineExceeded), "%v", kind)
	}
}
