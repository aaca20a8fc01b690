package rendezvous

import (
	"context"
	"encoding/binary"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/store"
)

// Two Go ranks and a PyTorch rank meet through a file, exchange messages of
// all kinds, and part in both ways. HELLO, BYE and ABORT do the PyTorch rank no
// harm: it ends with an exception that it can catch.
func TestWithPyTorch(t *testing.T) {
	torchtest.Need(t)
	for torch := range 3 {
		t.Run(strconv.Itoa(torch), func(t *testing.T) { withPyTorch(t, torch) })
	}
}

func withPyTorch(t *testing.T, torch int) {
	const size = 3
	path := filepath.Join(t.TempDir(), "store")
	st := must.Get(store.NewFile(path, -1))
	defer st.Close()
	first, second := (torch+1)%size, (torch+2)%size

	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := torchtest.Command(ctx, t, "testdata/torch_rank.py", path,
		strconv.Itoa(torch), strconv.Itoa(first), strconv.Itoa(second))
	log := must.Get(os.Create(filepath.Join(t.TempDir(), "log")))
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	output := func() string {
		b, _ := os.ReadFile(log.Name())
		return string(b)
	}
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { cancel(); <-ended }()

	ms := make([]transport.Mesh, size)
	edit := func(c *Config) { c.Address, c.Timeout = netip.Addr{}, 2*time.Minute; G1.set(c) }
	out := start(ctx, store.Prefix("0", store.Prefix("0", st)), size, edit, first, second)
	for range 2 {
		o := <-out
		require.NoError(t, o.err, output())
		ms[o.rank] = o.mesh
		defer o.mesh.Close()
	}
	if torch != 0 {
		require.NoError(t, st.Set(ctx, "0/SEQ_NUM_STORE_KEY", make([]byte, 8)))
	}
	must.Get(st.Add(ctx, "store_based_barrier_key:1", 2))

	post := func(op func(transport.Mesh, *transport.Request), m transport.Mesh, peer int, slot uint64, buf []byte) *transport.Request {
		r := transport.NewRequest()
		r.Peer, r.Slot, r.Buf = peer, slot, buf
		op(m, r)
		return r
	}
	finish := func(r *transport.Request) {
		t.Helper()
		select {
		case <-r.Done():
			require.NoError(t, r.Err(), output())
		case <-ctx.Done():
			require.FailNow(t, "request does not end", output())
		}
	}
	send, recv := transport.Mesh.Send, transport.Mesh.Recv

	for _, n := range []int{0, 1, 1000, 3000000} {
		for _, g := range []int{first, second} {
			buf := make([]byte, 4*n)
			finish(post(recv, ms[g], torch, uint64(n+5), buf))
			for i := range n {
				if got := math.Float32frombits(binary.LittleEndian.Uint32(buf[4*i:])); got != float32(i+g) {
					require.Equal(t, float32(i+g), got, "element %d of %d", i, n)
				}
			}
			finish(post(send, ms[g], torch, uint64(n+6), buf))
		}
	}
	for _, g := range []int{second, first} {
		finish(post(send, ms[g], torch, 1, binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(g)))))
	}

	// Gloo's barrier: at distance 1 and 2 a message of no bytes. It is the
	// first collective of the group: tag 0.
	for d := 1; d < size; d *= 2 {
		var open []*transport.Request
		for _, g := range []int{first, second} {
			open = append(open,
				post(recv, ms[g], (g-d+size)%size, 7<<56, nil),
				post(send, ms[g], (g+d)%size, 7<<56, nil))
		}
		for _, r := range open {
			finish(r)
		}
	}

	require.NoError(t, ms[second].Close())
	for !ms[first].Diagnose(time.Second)[second].Departed {
		require.NoError(t, ctx.Err())
	}
	buf := make([]byte, 4)
	finish(post(send, ms[first], torch, 2, buf))
	finish(post(recv, ms[first], torch, 3, buf))
	h := ms[first].Diagnose(10 * time.Millisecond)[torch]
	require.Equal(t, transport.Health{Rank: torch}, h)

	f := &transport.Fault{Kind: transport.FaultAborted, Rank: first, Reporter: first}
	ms[first].Abort(f)
	err := <-ended
	ended <- nil
	require.NoError(t, err, output())
	require.Contains(t, output(), "OK ")
}
