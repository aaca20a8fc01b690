package script_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
					st := store.NewHash()
					defer st.Close()
					got := make([][]script.Result, size)
					errs := make([]error, size)
					lines, err := script.Parse(strings.NewReader(everything), size)
					require.NoError(t, err)
					o := pg.Options{Dialect: d, Timeout: time.Minute, BackendOptions: map[string]any{
						gloo.Name: gloo.Options{Interfaces: make([]string, devices)},
					}}
					var wg sync.WaitGroup
					for r := range size {
						wg.Go(func() {
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
					require.Equal(t, want, got)
				})
			}
		}
	}
}
