package script_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

const everything = `
{"op":"all_reduce","shape":[1000003],"fill":"frac"}
{"op":"all_reduce","dtype":"bfloat16","shape":[77],"fill":"frac","reduce":"max"}
{"op":"reduce","dtype":"int64","shape":[5],"root":1,"reduce":"product"}
{"op":"broadcast","dtype":"uint8","shape":[3,3],"root":1}
{"op":"all_gather","dtype":"float64","shape":[2,2],"fill":"frac"}
{"op":"all_gather_into_tensor","shape":[0]}
{"op":"gather","shape":[70000],"root":0}
{"op":"scatter","shape":[7],"root":1}
{"op":"reduce_scatter","shape":[9]}
{"op":"reduce_scatter_tensor","dtype":"float16","shape":[9],"fill":"frac"}
{"op":"all_to_all","shape":[4]}
{"op":"all_to_all_single","shape":[4]}
{"op":"send_recv","shape":[100000],"src":0,"dst":1,"tag":4}
{"op":"recv_any","shape":[5],"src":1,"dst":0,"tag":5}
{"op":"all_reduce_coalesced","shapes":[[3],[4,5],[]]}
{"op":"new_group","ranks":[0,1],"name":"two"}
{"op":"all_reduce","shape":[17],"group":"two"}
{"op":"barrier"}
`

// TestOverTCP runs one script over memory and over real connections, under both
// of Gloo's rendezvous, and wants the same bits.
func TestOverTCP(t *testing.T) {
	for _, size := range []int{2, 3, 5} {
		want := run(t, size, everything)
		for _, d := range []store.Dialect{store.DialectV1, store.DialectV2} {
			for _, devices := range []int{1, 2} {
				t.Run(fmt.Sprintf("%d ranks, %v, %d devices", size, d, devices), func(t *testing.T) {
					o := gloo.Options{Interfaces: make([]string, devices), Wire: gloo.WireGloo}
					require.Equal(t, want, runOver(t, size, everything, d, all(o)))
				})
			}
		}
	}
}

// TestNativeWire runs the script where no sum depends on its order, and wants
// what Gloo's algorithms give.
func TestNativeWire(t *testing.T) {
	exact := strings.ReplaceAll(everything, "frac", "int")
	require.NotEqual(t, everything, exact)
	for _, size := range []int{2, 3, 5} {
		want := run(t, size, exact)
		for _, o := range []gloo.Options{
			{Wire: gloo.WireNative}, {Wire: gloo.WireTCP},
			{Wire: gloo.WireNative, Sums: gloo.SumsInRankOrder}, {Wire: gloo.WireTCP, Sums: gloo.SumsInRankOrder},
		} {
			t.Run(fmt.Sprintf("%d ranks, %s %s", size, o.Wire, o.Sums), func(t *testing.T) {
				require.Equal(t, want, runOver(t, size, exact, store.DialectV2, all(o)))
			})
		}
	}
}

// TestSums wants the same bits whatever carries the messages.
func TestSums(t *testing.T) {
	const text = `{"op":"all_reduce","dtype":"float32","shape":[100000],"reduce":"sum","seed":1,"fill":"frac"}
{"op":"reduce_scatter_tensor","dtype":"float32","shape":[1000],"reduce":"avg","seed":2,"fill":"frac"}
{"op":"reduce","dtype":"float64","shape":[33],"reduce":"sum","seed":3,"fill":"frac"}
`
	want := runOver(t, 5, text, store.DialectV2, all(gloo.Options{Wire: gloo.WireTCP, Sums: gloo.SumsInRankOrder}))
	got := runOver(t, 5, text, store.DialectV2, all(gloo.Options{Wire: gloo.WireNative, Sums: gloo.SumsInRankOrder}))
	require.Equal(t, want, got)
}

// TestHosts plays several hosts on this one.
func TestHosts(t *testing.T) {
	exact := strings.ReplaceAll(everything, "frac", "int")
	const more = `
{"op":"all_reduce","dtype":"int32","shape":[300001]}
{"op":"all_reduce","dtype":"complex64","shape":[70001],"fill":"int"}
{"op":"reduce","dtype":"int64","shape":[70001],"root":2}
{"op":"broadcast","shape":[70001],"root":3}
{"op":"barrier"}
`
	for _, hosts := range []string{"aabb", "abab", "aaab", "abcd", "aabbc", "aaabbbccc"} {
		size := len(hosts)
		want := run(t, size, exact+more)
		for _, sums := range []gloo.Sums{gloo.SumsFast, gloo.SumsInRankOrder} {
			t.Run(fmt.Sprint(hosts, " ", sums), func(t *testing.T) {
				got := runOver(t, size, exact+more, store.DialectV2, func(rank int) gloo.Options {
					return gloo.Options{Wire: gloo.WireNative, Host: hosts[rank : rank+1], Sums: sums}
				})
				require.Equal(t, want, got)
			})
		}
	}
}

// all gives every rank the same options.
func all(o gloo.Options) func(int) gloo.Options { return func(int) gloo.Options { return o } }

// runOver runs a script on ranks that meet over a store.
func runOver(t *testing.T, size int, text string, d store.Dialect, specific func(rank int) gloo.Options) [][]script.Result {
	st := store.NewHash()
	defer st.Close()
	got := make([][]script.Result, size)
	errs := make([]error, size)
	lines, err := script.Parse(strings.NewReader(text), size)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			o := pg.Options{Dialect: d, Timeout: time.Minute, BackendOptions: []backend.SpecificOptions{specific(r)}}
			g, err := pg.New(t.Context(), st, r, size, o)
			if err != nil {
				errs[r] = err
				return
			}
			errs[r] = script.Run(t.Context(), g, lines, func(x script.Result) { got[r] = append(got[r], x) })
			if err := g.Close(); errs[r] == nil {
				errs[r] = err
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	return got
}
