package run_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/work"
)

// questions counts the questions of a rank.
type questions struct {
	transport.Mesh
	asked atomic.Int64
}

func (q *questions) Diagnose(limit time.Duration, about ...int) []transport.Health {
	q.asked.Add(1)
	return q.Mesh.Diagnose(limit, about...)
}

// TestTimeoutsTogether: messages that time out together ask the other ranks no more often than one does. With the
// questions of all of them, answers would come late, and a rank or a link that is not slow would be blamed.
func TestTimeoutsTogether(t *testing.T) {
	asked := func(messages int) (n int64) {
		ranks(t, mem.NewFabric(), 3, 1, 0, func(t *testing.T, b *gloo.Backend) {
			if b.Rank() != 0 {
				time.Sleep(time.Minute)
				return
			}
			var q questions
			b.WrapMesh(func(m transport.Mesh) transport.Mesh {
				q.Mesh = m
				return &q
			})
			var works []*work.Work
			for i := range messages {
				w := must.Get(b.Recv(context.Background(), vec(0), 1, backend.P2POptions{Tag: uint32(i), Timeout: time.Second}))
				works = append(works, w)
			}
			for _, w := range works {
				err := w.Wait(context.Background())
				require.ErrorIs(t, err, work.ErrTimeout)
				require.ErrorContains(t, err, "rank 1 did not send or receive what was expected")
			}
			n = q.asked.Load()
		})
		return n
	}
	one := asked(1)
	require.Positive(t, one)
	require.Equal(t, one, asked(500))
}

// TestCloseWhileAsking: Close ends messages that wait for the answers to another one's questions. They ask no more.
func TestCloseWhileAsking(t *testing.T) {
	ranks(t, mem.NewFabric(), 3, 1, 0, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() != 0 {
			time.Sleep(time.Hour)
			return
		}
		b.WrapMesh(func(m transport.Mesh) transport.Mesh { return &unsure{m} })
		for i := range 100 {
			must.Get(b.Recv(context.Background(), vec(0), 1, backend.P2POptions{Tag: uint32(i), Timeout: time.Second}))
		}
		time.Sleep(time.Second + time.Millisecond)
		start := time.Now()
		require.NoError(t, b.Close())
		require.Less(t, time.Since(start), 10*time.Second)
	})
}

// unsure is a mesh whose ranks do not answer for some time.
type unsure struct{ transport.Mesh }

func (u *unsure) Diagnose(limit time.Duration, about ...int) []transport.Health {
	time.Sleep(limit)
	health := u.Mesh.Diagnose(limit, about...)
	for i := range health {
		health[i].Answered = i == u.Rank()
	}
	return health
}
