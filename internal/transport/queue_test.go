package transport_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

func TestQueue(t *testing.T) {
	var q transport.Requests
	rs := make([]*transport.Request, 5)
	fill := func() {
		for i := range rs {
			rs[i] = transport.NewRequest()
			rs[i].Peer = i
			q.Push(rs[i])
		}
	}
	peers := func() (ps []int) {
		for r := q.Front(); r != nil; r = r.Next {
			ps = append(ps, r.Peer)
		}
		return ps
	}
	require.True(t, q.Empty())
	require.Nil(t, q.Pop())
	require.False(t, q.Remove(transport.NewRequest()))
	fill()
	require.Equal(t, []int{0, 1, 2, 3, 4}, peers())
	for _, c := range []struct {
		peer int
		left []int
	}{{2, []int{0, 1, 3, 4}}, {0, []int{1, 3, 4}}, {4, []int{1, 3}}} {
		require.True(t, q.Remove(rs[c.peer]))
		require.False(t, q.Remove(rs[c.peer]))
		require.Nil(t, rs[c.peer].Next)
		require.Equal(t, c.left, peers())
	}
	q.Push(rs[0]) // behind the new last element
	require.Equal(t, []int{1, 3, 0}, peers())
	q.PushFront(rs[4])
	require.Equal(t, []int{4, 1, 3, 0}, peers())
	require.Equal(t, rs[4], q.Pop())
	require.Equal(t, rs[1], q.Pop())
	why := errors.New("enough")
	q.Complete(why)
	require.True(t, q.Empty())
	for _, i := range []int{3, 0} {
		<-rs[i].Done()
		require.Equal(t, why, rs[i].Err())
	}
	q.PushFront(rs[1])
	require.True(t, q.Remove(rs[1]))
	require.True(t, q.Empty())
}
