package detail_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// control is the second group of rank 0 of 2. Rank 1 says the same as rank 0, but for the length.
type control struct {
	fake
	longer int64 // by which rank 1's fingerprint is longer
	fails  string
	late   bool // it fails in Wait, not at the call
	err    error
	calls  int
}

// answer is the end of a call.
func (c *control) answer(name string) (*work.Work, error) {
	switch {
	case name != c.fails:
		return work.Completed(work.Info{}, nil), nil
	case c.late:
		return work.Completed(work.Info{}, c.err), nil
	}
	return nil, c.err
}

func (c *control) AllGather(_ context.Context, out []*tensor.Tensor, in *tensor.Tensor, _ backend.AllGatherOptions) (_ *work.Work, err error) {
	defer must.Catch(&err)
	c.calls++
	for _, t := range out {
		must.Do(t.CopyFrom(in))
	}
	if c.calls == 1 { // the lengths
		n := must.Get(tensor.Data[int64](out[1]))
		n[0] += c.longer
	}
	return c.answer(fmt.Sprint("all_gather ", c.calls))
}

func (c *control) Send(context.Context, *tensor.Tensor, int, backend.P2POptions) (*work.Work, error) {
	return c.answer("send")
}

func (c *control) Recv(context.Context, *tensor.Tensor, int, backend.P2POptions) (*work.Work, error) {
	return c.answer("recv")
}

// inner counts the operations that were found to be right.
type inner struct {
	fake
	ran int
	ctx context.Context // of the last one
}

func (i *inner) Broadcast(ctx context.Context, _ []*tensor.Tensor, _ backend.BroadcastOptions) (*work.Work, error) {
	i.ran++
	i.ctx = ctx
	return work.Completed(work.Info{}, nil), nil
}

// TestABrokenCheck lets each step of a check fail. The group ends, the error names the operation,
// and the operation does not run.
func TestABrokenCheck(t *testing.T) {
	const rank1 = 1
	for _, tc := range []struct {
		fails  string
		longer int64
	}{
		{"all_gather 1", 0}, {"all_gather 2", 0}, {"send", 1}, {"recv", 1},
		{"nothing", 0}, {"nothing but the length", 1},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, in Wait %v", tc.fails, late), func(t *testing.T) {
				lost := errors.New("the connection is lost")
				c := &control{fails: tc.fails, longer: tc.longer, late: late,
					err: &work.Error{Info: work.Info{Op: work.AllGather}, Peer: rank1, Err: lost}}
				i := &inner{}
				st := store.NewHash()
				defer st.Close()
				require.NoError(t, store.Prefix("pg_wrapper:g", st).Set(t.Context(), "c10d-go/1", []byte("1")))
				b, err := detail.New(t.Context(), i, func(context.Context, backend.Options) (backend.Backend, error) { return c, nil },
					backend.Options{Store: st, Group: "g", Size: 2})
				require.NoError(t, err)
				before := time.Now()
				_, err = b.Broadcast(t.Context(), []*tensor.Tensor{zeros(tensor.Float32, 3)}, backend.BroadcastOptions{})
				switch tc.fails {
				case "nothing":
					require.NoError(t, err)
					require.Equal(t, 1, i.ran)
					c, ok := i.ctx.(*begun.Context)
					require.True(t, ok, "the operation has the time that the check has left")
					require.False(t, c.Since.Before(before))
					return
				case "nothing but the length":
					require.ErrorIs(t, err, work.ErrMismatch)
					require.Zero(t, i.ran)
					require.NotContains(t, i.called, "Abort", "the group goes on")
					return
				}
				require.ErrorIs(t, err, lost)
				require.ErrorContains(t, err, "before broadcast of float32 [3] on cpu")
				e := must.As[*work.Error](t, err)
				require.Equal(t, work.Broadcast, e.Op)
				require.Equal(t, rank1, e.Peer)
				require.Zero(t, i.ran)
				require.Contains(t, i.called, "Abort", "the group ends")
				require.Contains(t, c.called, "Abort")
			})
		}
	}
}
