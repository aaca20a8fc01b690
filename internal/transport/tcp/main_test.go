package tcp

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come at once.
const patience = time.Minute

// What the conformance suite has of requests.
var (
	req, send, recv          = transporttest.Request, transporttest.Send, transporttest.Recv
	wait, failed, eventually = transporttest.Wait, transporttest.Failed, transporttest.Eventually
)

// local is how tests reach ranks.
var local = Options{Host: "127.0.0.1"}

// join makes a group over loopback, rank r with opts[r] or the last of them.
func join(t testing.TB, size int, opts ...Options) []*Mesh {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es := make([]*Endpoint, size)
	addrs := make([]string, size)
	for r := range es {
		o := local
		if len(opts) > 0 {
			o = opts[min(r, len(opts)-1)]
		}
		e := must.Get(Listen(o))
		es[r], addrs[r] = e, e.Addr()
	}
	ms := make([]*Mesh, size)
	errs := make([]error, size)
	var wg sync.WaitGroup
	for r := range es {
		wg.Go(func() { ms[r], errs[r] = es[r].Join(ctx, r, addrs) })
	}
	wg.Wait()
	for r, err := range errs {
		require.NoError(t, err)
		t.Cleanup(func() { ms[r].Close() })
	}
	return ms
}
