package pg_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store/tcp"
)

// cut is the store of a rank that reaches some others no more: what it reads is that they listen where nobody answers.
type cut struct {
	*tcp.Store
	from []int // in epoch 1
	mute string
}

var (
	recordOf = regexp.MustCompile(`/epoch/0/1/.*native_(\d+)$`)
	port     = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

func (c cut) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	values, err := c.Store.MultiGet(ctx, keys)
	for i := range values {
		if m := recordOf.FindStringSubmatch(keys[i]); m != nil {
			if r, _ := strconv.Atoi(m[1]); slices.Contains(c.from, r) {
				values[i] = port.ReplaceAll(values[i], []byte(c.mute))
			}
		}
	}
	return values, err
}

// TestTwoHostsThatDoNotReachEachOther: both reach the store. One Reconfigure ends the smaller one, or the one without rank
// 0, and the errors name a link between them.
func TestTwoHostsThatDoNotReachEachOther(t *testing.T) {
	for _, c := range []struct {
		size, stay, end int // ranks up to end are on the first host
		goes            func(r int) bool
	}{
		{size: 4, end: 2, stay: 2, goes: func(r int) bool { return r >= 2 }},
		{size: 5, end: 2, stay: 3, goes: func(r int) bool { return r < 2 }},
	} {
		t.Run(fmt.Sprintf("%d and %d ranks", c.end, c.size-c.end), func(t *testing.T) {
			t.Parallel()
			server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
			defer server.Close()
			mute := must.Get(net.Listen("tcp", "127.0.0.1:0"))
			defer mute.Close()
			const limit = 8 * time.Second
			errs := make([]error, c.size)
			var all sync.WaitGroup
			for r := range c.size {
				all.Go(func() {
					errs[r] = func() (err error) {
						defer must.Catch(&err)
						st := cut{Store: must.Get(tcp.New(t.Context(), server.Addr().String())), mute: mute.Addr().String()}
						defer st.Close()
						for other := range c.size {
							if (other < c.end) != (r < c.end) {
								st.from = append(st.from, other)
							}
						}
						g := must.Get(pg.New(t.Context(), st, r, c.size, pg.Options{
							Elastic: true, BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.WireTCP, Address: "127.0.0.1"}},
						}))
						defer g.Close()
						v, err := g.Reconfigure(t.Context(), pg.ReconfigureOptions{Timeout: limit})
						if c.goes(r) {
							if !errors.Is(err, pg.ErrEvicted) || !strings.Contains(err.Error(), "the link with member ") {
								return fmt.Errorf("no link is named: %w", err)
							}
							return nil
						}
						if err != nil {
							return err
						}
						if v.Epoch != 2 || g.Size() != c.stay || len(v.Left) != c.size-c.stay || !strings.HasPrefix(v.Left[0].Why, "the link with member ") {
							return fmt.Errorf("%+v", v)
						}
						return g.Barrier(t.Context())
					}()
				})
			}
			all.Wait()
			for r, err := range errs {
				require.NoError(t, err, "rank %d", r)
			}
		})
	}
}
