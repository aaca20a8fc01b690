package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/wire"
	"github.com/c10d-go/c10d/store"
)

// TestNative: every rank gets the records of all, and takes the mesh that they lead to, or Gloo's.
func TestNative(t *testing.T) {
	const size = 3
	for _, tc := range []struct {
		name    string
		without int // which rank has none, -1 if all have one
		takes   bool
	}{
		{"all have one and take it", -1, true},
		{"all have one and take Gloo's wire", -1, false},
		{"one has none", 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := mem.NewFabric()
			var meshes [size]transport.Mesh
			var got [size][][]byte
			ms := connect(t, store.NewHash(), size, func(c *Config) {
				G2.set(c)
				r := c.Rank
				if r == tc.without {
					return
				}
				c.Native = &Native{Record: fmt.Appendf(nil, "record %d", r), Connect: func(_ context.Context, records [][]byte) (transport.Mesh, error) {
					got[r] = records
					if !tc.takes {
						return nil, nil
					}
					m, err := f.Join("native", r, size)
					meshes[r] = m
					return m, err
				}}
			})
			var want [][]byte
			for r := range size {
				if r == tc.without {
					want = append(want, nil)
				} else {
					want = append(want, fmt.Appendf(nil, "record %d", r))
				}
			}
			for r, m := range ms {
				if r != tc.without {
					require.Equal(t, want, got[r], "rank %d", r)
				}
				if tc.takes {
					require.Same(t, meshes[r], m, "rank %d", r)
				} else {
					require.IsType(t, &wire.Mesh{}, m, "rank %d", r)
				}
			}
			everyPair(t, ms)
		})
	}
}

// withoutMultiSet is a store that cannot set two keys at once.
type withoutMultiSet struct {
	store.Store
	err error
}

func (s withoutMultiSet) MultiSet(context.Context, []string, [][]byte) error { return s.err }

// TestNativeFails: a rank that cannot publish its record, or connect by the others', says why.
func TestNativeFails(t *testing.T) {
	no := errors.New("no room")
	native := func(c *Config) {
		G2.set(c)
		c.Native = &Native{Connect: func(context.Context, [][]byte) (transport.Mesh, error) { return nil, no }}
	}
	e := failure(t, start(context.Background(), withoutMultiSet{store.NewHash(), no}, 2, native, 0))
	require.ErrorIs(t, e, no)
	out := start(context.Background(), store.NewHash(), 2, native, 0, 1)
	for range 2 {
		require.ErrorIs(t, failure(t, out), no)
	}
}

// TestNativeOutOfTime: the native wire notices the end of time later than the meeting. Its error
// counts, which names the rank that did not connect.
func TestNativeOutOfTime(t *testing.T) {
	t.Parallel()
	out := start(context.Background(), store.NewHash(), 3, func(c *Config) {
		G2.set(c)
		c.Timeout = 5 * time.Second
		c.Native = &Native{Connect: func(ctx context.Context, _ [][]byte) (transport.Mesh, error) {
			<-ctx.Done()
			<-time.After(20 * time.Millisecond)
			return nil, transport.NewFault(transport.FaultTimeout, 2, c.Rank, ctx.Err())
		}}
	}, 0, 1, 2)
	for range 3 {
		e := failure(t, out)
		require.Equal(t, 2, e.fault.Rank, e.Error())
		require.Empty(t, e.Missing)
	}
}

// F-32: a rank that gives up tells connected ranks why, and who is at fault, in both forms of
// addresses. TestDeathsWhileMeeting in package pg kills ranks at random moments.
func TestF32FailuresAreTold(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		timeout time.Duration
		kind    transport.FaultKind
		rank    int // who is at fault
		words   string
		end     func(t *testing.T, st store.Store, cancel func())
	}{
		{"cancelled", patience, transport.FaultCanceled, 0, "context canceled", func(_ *testing.T, _ store.Store, cancel func()) { cancel() }},
		{"an address is unusable", patience, transport.FaultMismatch, 2, "rank 2 published 10 bytes, which is not the form of a Gloo address", func(t *testing.T, st store.Store, _ func()) {
			require.NoError(t, st.Set(t.Context(), "2", []byte("no address")))
		}},
		{"a rank does not come", 5 * time.Second, transport.FaultTimeout, 2, "rank 2 published no address within", func(*testing.T, store.Store, func()) {}},
	} {
		for _, gen := range []generation{G1, G2} {
			t.Run(fmt.Sprint(tc.name, ", ", gen), func(t *testing.T) {
				t.Parallel()
				st := store.NewHash()
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				own := peerValue(3, listen(t, "127.0.0.9:0")) // greater: rank 1 connects
				if gen == G1 {
					own = value{perRank: true, at: []endpoint{own.at[0], own.at[0]}}
				}
				set(t, st, "1", own.encode())
				out := start(ctx, st, 3, func(c *Config) {
					gen.set(c)
					c.Timeout = tc.timeout
				}, 0)
				v := published(t, st, 0, 3)
				conn := must.Get(net.Dial("tcp", v.at[0].at.String()))
				if gen == G2 {
					must.Get(conn.Write(words(uint64(v.ids[1]))))
				}
				peer := wire.New(1, 3, wire.Options{})
				defer peer.Close()
				require.NoError(t, peer.Attach(0, conn))
				for limit := time.Now().Add(patience); !peer.Diagnose(time.Second)[0].Answered; {
					require.True(t, time.Now().Before(limit), "rank 0 does not answer")
				}
				tc.end(t, st, cancel)
				failure(t, out)
				select {
				case <-peer.Failed():
				case <-time.After(patience):
					require.FailNow(t, "rank 1 hears nothing")
				}
				f := peer.Fault()
				require.Equal(t, tc.kind, f.Kind, "%v", f)
				require.Equal(t, tc.rank, f.Rank, "%v", f)
				require.Equal(t, 0, f.Reporter, "%v", f)
				require.ErrorContains(t, f, tc.words)
			})
		}
	}
}

// TestSilentRanksAreTold: a rank that gives up says so on the connections of ranks that have said nothing, too.
func TestSilentRanksAreTold(t *testing.T) {
	st := store.NewHash()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	at := peerValue(3, listen(t, "127.0.0.9:0")).at[0]
	set(t, st, "1", value{perRank: true, at: []endpoint{at, at}}.encode())
	out := start(ctx, st, 3, func(c *Config) { G1.set(c) }, 0)
	silent := must.Get(net.Dial("tcp", published(t, st, 0, 3).at[0].at.String()))
	defer silent.Close()
	awaitHello(t, silent)
	cancel()
	failure(t, out)
	abort := 0xC103<<48 | uint64(transport.FaultCanceled)<<8 | transport.NoOp
	require.Equal(t, words(48, 2, abort, 0, 0, 0), take(t, silent, 48))
	closed(t, silent)
}
