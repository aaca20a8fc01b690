package nccl_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// begin connects the ranks and has all but one begin an all-reduce.
func (w *world) begin(missing int, ctx func(x *rank) context.Context, limit time.Duration) []*work.Work {
	works := make([]*work.Work, len(w.ranks))
	w.each(func(x *rank) error {
		x.wait(x.b.Barrier(x.context(), backend.BarrierOptions{}))
		if x.r != missing {
			works[x.r] = must.Get(x.b.AllReduce(ctx(x), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{Timeout: limit}))
		}
		return nil
	})
	return works
}

// blames checks that a work's error names its operation and the rank at fault.
func blames(t *testing.T, w *work.Work, peer int, kind error) {
	t.Helper()
	err := w.Wait(context.Background())
	e := must.As[*work.Error](t, err)
	require.ErrorIs(t, err, kind)
	require.Equal(t, peer, e.Peer, err)
	require.Equal(t, w.Info(), e.Info, err)
}

// TestCancel ends an operation on all ranks. Its kernels end too, or the machine could not close.
func TestCancel(t *testing.T) {
	w := newWorld(t, setup{size: 3})
	ctx, cancel := context.WithCancel(w.ranks[1].context())
	works := w.begin(2, func(x *rank) context.Context {
		if x.r == 1 {
			return ctx
		}
		return x.context()
	}, 0)
	began := time.Now()
	cancel()
	blames(t, works[1], 1, work.ErrCanceled)
	blames(t, works[0], 1, work.ErrCanceled)
	require.Less(t, time.Since(began), 5*time.Second)
	err := must.Err(w.ranks[2].b.Barrier(w.ctx, backend.BarrierOptions{}))
	require.ErrorIs(t, err, work.ErrCanceled, "a rank that has not called hears of it")
	require.ErrorIs(t, must.Err(w.ranks[0].b.Barrier(w.ctx, backend.BarrierOptions{})), work.ErrCanceled)
	w.end()
}

// TestTimeout names the rank that has not made the call.
func TestTimeout(t *testing.T) {
	defer nccl.SetAskLimit(patience)()
	w := newWorld(t, setup{size: 3})
	works := w.begin(2, (*rank).context, 100*time.Millisecond)
	blames(t, works[0], 2, work.ErrTimeout)
	blames(t, works[1], 2, work.ErrTimeout)
	require.ErrorContains(t, errors.Join(works[0].Err(), works[1].Err()), "rank 2 has issued 1 operations, not this one")
	w.end()
}

// TestTimeoutBesidePyTorch: nobody can be asked.
func TestTimeoutBesidePyTorch(t *testing.T) {
	w := newWorld(t, setup{size: 2, torch: true})
	works := w.begin(1, (*rank).context, 100*time.Millisecond)
	blames(t, works[0], -1, work.ErrTimeout)
	w.end()
}

// TestAbort ends operations with a cause of the program.
func TestAbort(t *testing.T) {
	w := newWorld(t, setup{size: 2})
	works := w.begin(1, (*rank).context, 0)
	cause := errors.New("enough")
	works[0].Abort(cause)
	blames(t, works[0], 0, work.ErrAborted)
	require.ErrorIs(t, works[0].Err(), cause)
	require.ErrorIs(t, must.Err(w.ranks[1].b.Barrier(w.ctx, backend.BarrierOptions{})), work.ErrAborted)
	w.end()
}

// TestPeerLeft: a rank closes its group while another one waits for it.
func TestPeerLeft(t *testing.T) {
	w := newWorld(t, setup{size: 2})
	works := w.begin(1, (*rank).context, 0)
	require.NoError(t, w.ranks[1].b.Close())
	blames(t, works[0], 1, work.ErrPeerLeft)
	w.end()
}

// later takes no lines before the ranks have met: one may have to wait for another one.
type later struct {
	slog.Handler
	met *atomic.Bool
}

func (h later) Enabled(ctx context.Context, l slog.Level) bool {
	return h.met.Load() && h.Handler.Enabled(ctx, l)
}

func (h later) WithAttrs(a []slog.Attr) slog.Handler { return later{h.Handler.WithAttrs(a), h.met} }

// TestIdle: a group without operations writes no lines about its ranks that wait for each other's questions.
func TestIdle(t *testing.T) {
	var log bytes.Buffer
	var met atomic.Bool
	w := newWorld(t, setup{size: 2, wait: 5 * time.Millisecond, log: slog.New(later{slog.NewTextHandler(&log, nil), &met})})
	met.Store(true)
	w.each(func(x *rank) error { x.wait(x.b.Barrier(x.context(), backend.BarrierOptions{})); return nil })
	time.Sleep(100 * time.Millisecond) // nothing is to happen
	w.end()
	require.Empty(t, log.String())
}

// TestClose ends what is pending, and finalizes together with the other ranks.
func TestClose(t *testing.T) {
	w := newWorld(t, setup{size: 2})
	works := w.begin(1, (*rank).context, 0)
	require.NoError(t, w.ranks[0].b.Close())
	require.ErrorIs(t, works[0].Err(), work.ErrClosed)
	require.ErrorIs(t, must.Err(w.ranks[0].b.Barrier(w.ctx, backend.BarrierOptions{})), work.ErrClosed)
	w.end()
}

// TestCloseAlone: the other ranks do not close, as PyTorch 2.6 does not.
func TestCloseAlone(t *testing.T) {
	w := newWorld(t, setup{size: 2, torch: true})
	w.each(func(x *rank) error { x.wait(x.b.Barrier(x.context(), backend.BarrierOptions{})); return nil })
	require.NoError(t, w.ranks[0].b.Close())
	require.NoError(t, w.ranks[1].b.Close())
	w.end()
}

// slowAborts is NCCL whose aborts take a while, and are counted at their end.
type slowAborts struct {
	libnccl.API
	ended *atomic.Int32
}

func (a slowAborts) CommAbort(c libnccl.Comm) libnccl.Result {
	r := a.API.CommAbort(c)
	time.Sleep(300 * time.Millisecond)
	a.ended.Add(1)
	return r
}

// TestCloseWaitsForItsAbort: a rank that closes alone aborts. It frees nothing before NCCL has done that.
func TestCloseWaitsForItsAbort(t *testing.T) {
	var ended atomic.Int32
	w := newWorld(t, setup{size: 2, torch: true, api: func(a libnccl.API) libnccl.API { return slowAborts{a, &ended} }})
	w.each(func(x *rank) error { x.wait(x.b.Barrier(x.context(), backend.BarrierOptions{})); return nil })
	require.NoError(t, w.ranks[0].b.Close())
	require.EqualValues(t, 1, ended.Load())
	w.end()
}

// unblocked is NCCL whose calls do not block, as NCCL_COMM_BLOCKING=0 has it.
type unblocked struct{ libnccl.API }

func (unblocked) AllReduce(_, _ driver.Ptr, _ int, _ libnccl.DataType, _ libnccl.RedOp, _ libnccl.Comm, _ driver.Stream) libnccl.Result {
	return libnccl.InProgress
}

// TestCallsThatDoNotBlock are errors: nobody would know when they have ended.
func TestCallsThatDoNotBlock(t *testing.T) {
	w := newWorld(t, setup{size: 2, api: func(a libnccl.API) libnccl.API { return unblocked{a} }})
	w.each(func(x *rank) error {
		got, err := x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{})
		if err == nil {
			err = got.Wait(x.ctx)
		}
		require.ErrorContains(x, err, "do not set NCCL_COMM_BLOCKING to 0")
		return nil
	})
	w.end()
}

// TestDeath: a rank's process ends, or is stopped. The error of the other ranks names it, at once or at the timeout.
func TestDeath(t *testing.T) {
	defer nccl.SetAskLimit(5 * time.Second)() // which a rank that is stopped does not answer within
	for kind, limit := range map[error]time.Duration{work.ErrPeerDied: 0, work.ErrTimeout: 100 * time.Millisecond} {
		w := newWorld(t, setup{size: 3})
		works := w.begin(1, (*rank).context, limit)
		if limit == 0 {
			w.fabric.Kill("g/0", 1)
		} else {
			w.fabric.Freeze("g/0", 1)
		}
		blames(t, works[0], 1, kind)
		blames(t, works[2], 1, kind)
		w.end()
	}
}

// TestShutdown waits for what was issued.
func TestShutdown(t *testing.T) {
	w := newWorld(t, setup{size: 2})
	w.each(func(x *rank) error {
		got := must.Get(x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{}))
		must.Do(x.b.Shutdown(x.ctx))
		require.True(t, got.IsSuccess())
		return nil
	})
	w.end()
}

// TestExceptionDump: a rank of PyTorch has told the store that it has failed.
func TestExceptionDump(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	w := newWorld(t, setup{size: 2, torch: true, store: store.Prefix("default_pg", store.Prefix("0/", st))})
	works := w.begin(1, (*rank).context, 0)
	require.NoError(t, st.Set(w.ctx, "exception_dump", binary.LittleEndian.AppendUint32(nil, 1)))
	blames(t, works[0], 1, work.ErrAborted)
	require.ErrorContains(t, works[0].Err(), "rank 1 of the job says in the store (exception_dump) that it has failed")
	w.end()
}

// TestDumpPyTorch writes it, if that is asked for.
func TestDumpPyTorch(t *testing.T) {
	for _, asked := range []bool{true, false} {
		st := store.NewHash()
		w := newWorld(t, setup{size: 2, torch: true, store: store.Prefix("default_pg", st), options: nccl.Options{DumpPyTorch: asked}})
		works := w.begin(1, (*rank).context, 0)
		works[0].Abort(nil)
		require.ErrorIs(t, works[0].Wait(w.ctx), work.ErrAborted)
		there := must.Get(st.Check(w.ctx, "exception_dump"))
		require.Equal(t, asked, there)
		w.end()
		st.Close()
	}
}
