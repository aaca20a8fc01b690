package run_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/testcerts"
	"github.com/c10d-go/c10d/store"
)

// TestTLSMeansTheNativeWire has groups with TLS take the native wire, or end with an
// error on every rank that names the rank at fault, long before their timeout.
func TestTLSMeansTheNativeWire(t *testing.T) {
	secure := gloo.Options{TLS: testcerts.Config(t)}
	plain, onGloo := gloo.Options{}, gloo.Options{Wire: gloo.WireGloo}
	const notGloo = "takes only the native wire"
	for name, tc := range map[string]struct {
		options []gloo.Options
		want    []string // in each rank's error; none means that the group comes about
	}{
		"all have it": {[]gloo.Options{secure, secure, secure}, nil},
		"one has none": {[]gloo.Options{secure, plain, secure}, []string{
			"rank 0 has TLS and rank 1 has none", "rank 0 has TLS and rank 1 has none", "rank 2 has TLS and rank 1 has none",
		}},
		"one has Gloo's wire": {[]gloo.Options{secure, secure, onGloo}, []string{
			"rank 2 has not, and TLS allows no other", "rank 2 has not, and TLS allows no other", notGloo,
		}},
		"one has none and one Gloo's wire": {[]gloo.Options{secure, plain, onGloo}, []string{
			"rank 2 has not, and TLS allows no other", "rank 2 has not, and rank 0 takes no other", notGloo,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			bs, errs := connectWith(t, time.Minute, tc.options...)
			for r, err := range errs {
				if tc.want == nil {
					require.NoError(t, err)
					require.Equal(t, string(gloo.WireNative), bs[r].Explain().Wire)
					require.Contains(t, bs[r].Explain().Why, "TLS")
					continue
				}
				assert.ErrorContains(t, err, tc.want[r], "rank %d", r)
			}
			require.Less(t, time.Since(begun), 20*time.Second)
		})
	}
	_, errs := connectWith(t, time.Minute, gloo.Options{Wire: gloo.WireGloo, TLS: secure.TLS})
	require.ErrorContains(t, errs[0], "whose wire has no TLS")
}

// TestARecordThatIsOverwritten has somebody who can write one key of the store not
// put a group with TLS on another wire.
func TestARecordThatIsOverwritten(t *testing.T) {
	o := gloo.Options{TLS: testcerts.Config(t)}
	for _, forged := range []string{`{"version":1}`, `{"version":1,"only":true}`, `{}`, ``, `null`} {
		st := &forging{Store: store.NewHash(), key: "0/native_1", value: []byte(forged)}
		var wg sync.WaitGroup
		for r := range 2 {
			wg.Go(func() {
				b, err := gloo.New(context.Background(), backend.Options{
					Store: st, Rank: r, Size: 2, Timeout: 20 * time.Second, Specific: o,
				})
				if assert.Error(t, err) {
					assert.Contains(t, err.Error(), "rank 1")
					return
				}
				b.Close()
			})
		}
		wg.Wait()
	}
}

// forging is a store in which one key has another value than was set.
type forging struct {
	store.Store
	key   string
	value []byte
}

func (f *forging) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	values = append([][]byte(nil), values...)
	for i, k := range keys {
		if k == f.key {
			values[i] = f.value
		}
	}
	return f.Store.MultiSet(ctx, keys, values)
}

// TestTheGroupsTLS has a backend take the group's TLS if it has none of its own.
func TestTheGroupsTLS(t *testing.T) {
	t.Parallel()
	st := store.NewHash()
	group, own := testcerts.Config(t), testcerts.Config(t)
	connect := func(timeout time.Duration, specific func(rank int) gloo.Options) []error {
		errs := make([]error, 2)
		var wg sync.WaitGroup
		st := store.Prefix(fmt.Sprint(time.Now().UnixNano()), st)
		for r := range errs {
			wg.Go(func() {
				b, err := gloo.New(context.Background(), backend.Options{
					Store: st, Rank: r, Size: 2, Timeout: timeout, TLS: group, Specific: specific(r),
				})
				if errs[r] = err; err == nil {
					assert.Contains(t, b.Explain().Why, "TLS")
					defer b.Close()
					errs[r] = barrier(b)
				}
			})
		}
		wg.Wait()
		return errs
	}
	require.Equal(t, make([]error, 2), connect(time.Minute, func(int) gloo.Options { return gloo.Options{} }))
	require.Equal(t, make([]error, 2), connect(time.Minute, func(int) gloo.Options { return gloo.Options{TLS: own} }))
	for _, err := range connect(2*time.Second, func(r int) gloo.Options {
		if r == 0 {
			return gloo.Options{TLS: own}
		}
		return gloo.Options{}
	}) {
		require.Error(t, err, "ranks with certificates of other authorities")
	}
}
