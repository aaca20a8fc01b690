package run_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// rerouting is a store in which rank 0 has the address of a relay.
type rerouting struct {
	store.Store
	relay string // host:port
	rank0 chan string
}

func (s rerouting) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	values = append([][]byte(nil), values...)
	for i, k := range keys {
		var record map[string]any
		if !strings.HasSuffix(k, "/native_0") || json.Unmarshal(values[i], &record) != nil {
			continue
		}
		// The last field has the places, the others prove who the rank is.
		fields := strings.Split(record["tcp"].(string), ";")
		s.rank0 <- strings.Split(fields[len(fields)-1], ",")[0]
		fields[len(fields)-1] = s.relay
		record["tcp"] = strings.Join(fields, ";")
		values[i], _ = json.Marshal(record)
	}
	return s.Store.MultiSet(ctx, keys, values)
}

// A bit of a tensor flips on the way to rank 0. Every rank gets an error that names the link and the
// operation, and the result of none is taken for right.
func TestFlippedBitEndsTheOperation(t *testing.T) {
	const size, flipAt = 3, 150_000
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	st := rerouting{Store: store.NewHash(), relay: l.Addr().String(), rank0: make(chan string, 1)}
	var relay sync.WaitGroup
	pass := func(from, to net.Conn, flips bool) {
		defer to.Close()
		if flips {
			io.CopyN(to, from, flipAt)
			var b [1]byte
			io.ReadFull(from, b[:])
			to.Write([]byte{b[0] ^ 4})
		}
		io.Copy(to, from)
	}
	relay.Go(func() {
		target := <-st.rank0
		for n := 0; ; n++ {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil {
				in.Close()
				continue
			}
			relay.Go(func() { pass(in, out, n == 0) })
			relay.Go(func() { pass(out, in, false) })
		}
	})

	errs := make([]error, size)
	var ranks, connected sync.WaitGroup
	connected.Add(size)
	for r := range size {
		ranks.Go(func() {
			o := gloo.Options{Wire: gloo.WireTCP, Checksum: r == 0}
			b, err := gloo.New(t.Context(), backend.Options{Store: st, Rank: r, Size: size, Timeout: 20 * time.Second, Specific: o})
			connected.Done()
			if errs[r] = err; err != nil {
				return
			}
			defer b.Close()
			connected.Wait()
			ones := make([]float32, 1<<18)
			for i := range ones {
				ones[i] = 1
			}
			x, err := tensor.Of(ones, len(ones))
			if errs[r] = err; err == nil {
				errs[r] = wait(b.AllReduce(t.Context(), list(x), backend.AllReduceOptions{Op: backend.Sum()}))
			}
			if errs[r] == nil {
				// Rank r may be done before another rank notices; a later operation tells it.
				errs[r] = barrier(b)
			}
		})
	}
	run.Finish(t, "all ranks to fail", &ranks)
	l.Close()
	run.Finish(t, "the relay", &relay)

	link := regexp.MustCompile(`link between 0 and [12]: bytes of a (header|message) were changed on the way`)
	for r, err := range errs {
		require.ErrorIs(t, err, work.ErrCorrupted, "rank %d", r)
		require.ErrorContains(t, err, "all_reduce", "rank %d", r)
		require.Regexp(t, link, err.Error(), "rank %d", r)
		require.Equal(t, link.FindString(errs[0].Error()), link.FindString(err.Error()), "rank %d", r)
		at := must.As[*work.LinkError](t, err, "rank %d", r)
		require.Zero(t, at.Ranks[0], "rank %d", r)
	}
	t.Log(errs)
}
