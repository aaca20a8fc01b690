package run_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/rendezvous"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onHosts stands for the native wire between hosts of two ranks, onOtherHosts for such of
// which the first has one.
const (
	onHosts      gloo.Wire = "native, two ranks and one"
	onOtherHosts gloo.Wire = "native, one rank and two"
)

// connect makes a group over a store, rank i with wires[i], and closes it in the end.
func connect(t *testing.T, timeout time.Duration, wires ...gloo.Wire) ([]*gloo.Backend, []error) {
	t.Helper()
	options := make([]gloo.Options, len(wires))
	for r, w := range wires {
		options[r].Wire = w
		switch w {
		case onHosts:
			options[r] = gloo.Options{Wire: gloo.WireNative, Host: fmt.Sprint(r / 2)}
		case onOtherHosts:
			options[r] = gloo.Options{Wire: gloo.WireNative, Host: fmt.Sprint((r + 1) / 2)}
		}
	}
	return connectWith(t, timeout, options...)
}

func connectWith(t testing.TB, timeout time.Duration, options ...gloo.Options) ([]*gloo.Backend, []error) {
	t.Helper()
	st := store.NewHash()
	bs, errs := make([]*gloo.Backend, len(options)), make([]error, len(options))
	var wg sync.WaitGroup
	for r, o := range options {
		wg.Go(func() {
			bs[r], errs[r] = gloo.New(context.Background(), backend.Options{
				Store: st, Rank: r, Size: len(options), Timeout: timeout, Specific: o,
			})
		})
	}
	run.Finish(t, "all ranks to join", &wg)
	t.Cleanup(func() {
		for _, b := range bs {
			if b != nil {
				wg.Go(func() { b.Close() })
			}
		}
		run.Finish(t, "all ranks to close", &wg)
		st.Close()
	})
	return bs, errs
}

// grouped is connectWith for groups that come about.
func grouped(t testing.TB, options ...gloo.Options) []*gloo.Backend {
	t.Helper()
	bs, errs := connectWith(t, run.GroupTimeout, options...)
	require.NoError(t, errors.Join(errs...))
	return bs
}

// connected is connect for groups that come about.
func connected(t *testing.T, timeout time.Duration, wires ...gloo.Wire) []*gloo.Backend {
	t.Helper()
	bs, errs := connect(t, timeout, wires...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	return bs
}

func onLinux(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("memory is shared on Linux only")
	}
}

// in64Bits skips a test of what takes addresses or sizes of 64 bits, which a program of "make 386" has not.
func in64Bits(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("an int has 32 bits")
	}
}

func TestWhichWire(t *testing.T) {
	onLinux(t)
	for _, tc := range []struct {
		name  string
		wires []gloo.Wire
		want  gloo.Wire
		why   string
	}{
		{"all have it", []gloo.Wire{"", gloo.WireAuto, gloo.WireNative}, gloo.WireNative, "all ranks have it, and share memory"},
		{"all want Gloo's", []gloo.Wire{gloo.WireGloo, gloo.WireGloo}, gloo.WireGloo, "as asked for"},
		{"one wants TCP", []gloo.Wire{"", "", gloo.WireTCP}, gloo.WireNative, "all ranks have it; the ranks do not share memory: rank 2: asked for TCP"},
		{"one does not have it", []gloo.Wire{"", "", gloo.WireGloo}, gloo.WireGloo, "rank 2 has not"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bs := connected(t, run.GroupTimeout, tc.wires...)
			for r, b := range bs {
				e := b.Explain()
				assert.Equal(t, string(tc.want), e.Wire, "rank %d", r)
				if tc.wires[r] != gloo.WireGloo {
					assert.Contains(t, e.Why, tc.why)
				}
				assert.Len(t, e.Links, len(bs)-1)
				assert.Contains(t, e.String(), "all_reduce")
			}
			onAll(t, bs, func(r int, b *gloo.Backend) {
				x := vec(float32(r), 1)
				assert.NoError(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})))
				n := len(bs)
				assert.Equal(t, vec(float32(n*(n-1)/2), float32(n)).Bytes(), x.Bytes())
			})
		})
	}
}

func TestTwoLevels(t *testing.T) {
	onLinux(t)
	a, b := gloo.Options{Host: "a"}, gloo.Options{Host: "b"}
	bs, errs := connectWith(t, run.GroupTimeout, a, b, a, b)
	for r, err := range errs {
		require.NoError(t, err)
		e := bs[r].Explain()
		require.Contains(t, e.Why, "share memory in each cluster")
		for _, l := range e.Links {
			want := "tcp"
			if l.Rank%2 == r%2 {
				want = "shm"
			}
			require.Equal(t, want, l.Transport, "rank %d: %+v", r, l)
			require.NotContains(t, l.Detail, "tcp")
		}
		for _, op := range plan.Ops() {
			i := slices.IndexFunc(e.Choices, func(c backend.Choice) bool { return c.Op == op.String() })
			require.Equal(t, "clusters", e.Choices[i].Algorithm, "%v", op)
		}
		gather := slices.IndexFunc(e.Choices, func(c backend.Choice) bool { return c.Op == "gather" })
		require.Contains(t, e.Choices[gather].Why, "one message for each")
		require.Contains(t, e.Choices[gather+1].Why, "a message for each rank")
	}
}

// TestTwoLevelsInRankOrder has sums that do not go in two levels, and says so.
func TestTwoLevelsInRankOrder(t *testing.T) {
	onLinux(t)
	o := func(host string) gloo.Options { return gloo.Options{Host: host, Sums: gloo.SumsInRankOrder} }
	bs, errs := connectWith(t, run.GroupTimeout, o("a"), o("a"), o("b"))
	for r, err := range errs {
		require.NoError(t, err)
		for _, c := range bs[r].Explain().Choices {
			switch {
			case c.Op == "all_reduce" || c.Op == "reduce" || c.Op == "reduce_scatter":
				require.NotEqual(t, "clusters", c.Algorithm, "%s", c.Op)
			case c.Op == "all_gather":
				require.Equal(t, "clusters", c.Algorithm)
			}
		}
	}
	require.Contains(t, bs[0].Explain().Links[0].Detail, "reductions in rank order over tcp")
}

func TestOptionsThatRanksHaveToShare(t *testing.T) {
	_, errs := connectWith(t, run.GroupTimeout, gloo.Options{}, gloo.Options{Sums: gloo.SumsInRankOrder})
	require.ErrorContains(t, errs[0], `Options.Sums is "rank-order" on rank 1`)
	file := filepath.Join(t.TempDir(), "table")
	require.NoError(t, os.WriteFile(file, []byte("c10d-table 1\ncommand none\nmachine none\nall_reduce tcp 2 1 1024 ring 1\n"), 0o600))
	_, errs = connectWith(t, run.GroupTimeout, gloo.Options{}, gloo.Options{Tuning: gloo.Tuning{Table: file}})
	require.ErrorContains(t, errs[0], "rank 1 has another table of algorithms")
	_, errs = connectWith(t, run.GroupTimeout, gloo.Options{Tuning: gloo.Tuning{Table: file + ".not"}})
	require.ErrorIs(t, errs[0], os.ErrNotExist)
}

func TestTheNativeWireOrNone(t *testing.T) {
	for _, wire := range []gloo.Wire{gloo.WireNative, gloo.WireTCP} {
		_, errs := connect(t, run.GroupTimeout, wire, gloo.WireGloo, gloo.WireAuto)
		require.ErrorContains(t, errs[0], "not every rank has the native wire: rank 1 has not")
		require.ErrorIs(t, errs[1], rendezvous.ErrWire)
		require.ErrorContains(t, errs[1], "takes only the native wire")
		require.ErrorContains(t, errs[2], "rank 1 has not, and rank 0 takes no other")
	}
	_, errs := connect(t, run.GroupTimeout, "carrier pigeon")
	require.ErrorContains(t, errs[0], `unknown wire "carrier pigeon"`)
}

// TestNativeFaults ends operations in every way, and wants all
// ranks to say the same.
func TestNativeFaults(t *testing.T) {
	for _, wire := range []gloo.Wire{gloo.WireNative, onHosts, onOtherHosts, gloo.WireTCP} {
		t.Run(string(wire), func(t *testing.T) {
			if wire != gloo.WireTCP {
				onLinux(t)
			}
			t.Parallel()
			testNativeFaults(t, wire)
		})
	}
}

func testNativeFaults(t *testing.T, wire gloo.Wire) {
	const size = 3
	zeros := func(n int) []*tensor.Tensor {
		return list(must.Get(tensor.New(tensor.Float32, n)))
	}
	reduce := func(ctx context.Context, b *gloo.Backend, n int) (err error) {
		defer must.Catch(&err)
		return must.Get(b.AllReduce(ctx, zeros(n), backend.AllReduceOptions{})).Wait(ctx)
	}
	canceled, cancel := context.WithCancelCause(context.Background())
	for _, tc := range []struct {
		name string
		is   error
		peer int
		text string
		run  func(r int, b *gloo.Backend) error // nil for a rank without an operation
	}{
		{"one does not come", work.ErrTimeout, 1, "has not called it", func(r int, b *gloo.Backend) error {
			if r == 1 {
				return nil
			}
			return reduce(context.Background(), b, 1<<20)
		}},
		{"another size", work.ErrMismatch, -1, "ranks disagree on", func(r int, b *gloo.Backend) error {
			n := 1
			if r == 1 {
				n = 2
			}
			return reduce(context.Background(), b, n)
		}},
		{"another operation", work.ErrMismatch, -1, "ranks disagree on the operation", func(r int, b *gloo.Backend) error {
			if r == 1 {
				return barrier(b)
			}
			return reduce(context.Background(), b, 1)
		}},
		{"cancelled", work.ErrCanceled, 2, "enough", func(r int, b *gloo.Backend) (err error) {
			defer must.Catch(&err)
			switch r {
			case 1:
				return nil
			case 2:
				w := must.Get(b.AllReduce(canceled, zeros(1), backend.AllReduceOptions{}))
				time.AfterFunc(10*time.Millisecond, func() { cancel(errors.New("enough")) })
				return w.Wait(canceled)
			}
			return reduce(context.Background(), b, 1)
		}},
		{"aborted", work.ErrAborted, 1, "", func(r int, b *gloo.Backend) error {
			if r == 1 {
				b.Abort(errors.New("of no use"))
				return nil
			}
			return reduce(context.Background(), b, 1)
		}},
		{"one has left", work.ErrPeerLeft, 1, "", func(r int, b *gloo.Backend) error {
			if r == 1 {
				return b.Close()
			}
			return reduce(context.Background(), b, 1)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bs := connected(t, run.GroupTimeout, wire, wire, wire)
			if tc.is == work.ErrTimeout {
				for _, b := range bs {
					b.SetTimeout(2 * time.Second)
				}
			}
			var wg sync.WaitGroup
			said := make([]*work.Error, size)
			for r, b := range bs {
				wg.Go(func() {
					err := tc.run(r, b)
					if err == nil && r == 1 {
						return
					}
					assert.ErrorIs(t, err, tc.is, "rank %d", r)
					assert.ErrorAs(t, err, &said[r])
				})
			}
			run.Finish(t, "all ranks", &wg)
			var whys []string
			for _, e := range said {
				if e != nil {
					whys = append(whys, e.Error())
				}
			}
			why := strings.Join(whys, "\n")
			if tooBusy(t, why) {
				return
			}
			assert.Contains(t, why, tc.text, "some rank says why")
			for r, e := range said {
				if e != nil && tc.peer >= 0 {
					assert.Equal(t, tc.peer, e.Peer, "rank %d: %v", r, e)
				}
			}
			for r, b := range bs {
				if r != 1 {
					assert.Error(t, barrier(b), "the group has ended")
				}
			}
		})
	}
}

// tooBusy reports whether an error says that answers were late, or that its own rank waited for a CPU. Then another rank
// than the culprit may be named, or none. In virtual time, where nobody is late, other tests prove who is.
func tooBusy(t *testing.T, why string) bool {
	for _, says := range []string{"does not answer", "answers take", "waited for a CPU", "no other rank answers"} {
		if strings.Contains(why, says) {
			t.Log("not all ranks answered in time: ", why)
			return true
		}
	}
	return false
}
