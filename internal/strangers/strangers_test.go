package strangers_test

import (
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
)

// patience bounds what must come at once.
const patience = 20 * time.Second

// pipe returns both ends of a connection, the stranger's second.
func pipe(t *testing.T) (near, far net.Conn) {
	near, far = net.Pipe()
	t.Cleanup(func() { near.Close(); far.Close() })
	far.SetDeadline(time.Now().Add(patience))
	return near, far
}

// fill adds n silent strangers to l.
func fill(t *testing.T, l *strangers.List, n int) {
	for range n {
		near, _ := pipe(t)
		require.True(t, l.Add(near, patience))
	}
}

// ended waits until the other side has closed a connection.
func ended(t *testing.T, far net.Conn) {
	require.ErrorIs(t, must.Err(far.Read(make([]byte, 1))), io.EOF)
}

func TestList(t *testing.T) {
	t.Run("one too many closes the oldest", func(t *testing.T) {
		l := strangers.New(2)
		defer l.Close()
		var near, far [2]net.Conn
		for i := range near {
			near[i], far[i] = pipe(t)
			require.True(t, l.Add(near[i], patience))
		}
		require.True(t, l.Remove(near[0]), "it has said who it is")
		fill(t, l, strangers.Limit(2))
		ended(t, far[1])
		require.False(t, l.Remove(near[1]))
		require.Equal(t, strangers.Limit(2), l.Len())
		go far[0].Write([]byte("x"))
		require.NoError(t, must.Err(near[0].Read(make([]byte, 1))), "who has been taken out stays open")
	})
	t.Run("a silent one runs out of time", func(t *testing.T) {
		l := strangers.New(0)
		defer l.Close()
		near, _ := pipe(t)
		require.True(t, l.Add(near, time.Millisecond))
		require.ErrorIs(t, must.Err(near.Read(make([]byte, 1))), os.ErrDeadlineExceeded)
		l.Refuse(near)
		require.Zero(t, l.Len())
	})
	t.Run("closed", func(t *testing.T) {
		l := strangers.New(0)
		near, _ := pipe(t)
		require.True(t, l.Add(near, patience))
		l.Close()
		require.ErrorIs(t, must.Err(near.Read(make([]byte, 1))), os.ErrDeadlineExceeded)
		require.False(t, l.Remove(near))
		late, _ := pipe(t)
		require.False(t, l.Add(late, patience))
	})
	t.Run("lists share the room", func(t *testing.T) {
		first, second := strangers.New(1), strangers.New(1)
		oldest, far := pipe(t)
		require.True(t, first.Add(oldest, patience))
		fill(t, second, strangers.Limit(1+1))
		ended(t, far)
		require.Zero(t, first.Len())
		first.Close()
		fill(t, second, 1)
		require.Equal(t, strangers.Limit(1+1), second.Len(), "one closed, one new")
		second.Close()
	})
}

// A listener pauses while most connections are refused, and only then.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := strangers.New(0)
		defer l.Close()
		// accept takes 64 connections, of which so many are refused, and returns how long that took, and in
		// how many pauses.
		accept := func(refused int) (took time.Duration, pauses int) {
			begun := time.Now()
			for i := range 64 {
				before := time.Now()
				l.Pace()
				if time.Since(before) > 0 {
					pauses++
				}
				near, far := net.Pipe()
				far.Close()
				require.True(t, l.Add(near, patience))
				if i < refused {
					l.Refuse(near)
				} else {
					require.True(t, l.Remove(near))
					near.Close()
				}
			}
			return time.Since(begun), pauses
		}
		for _, c := range []struct{ refused, pauses int }{{0, 0}, {32, 0}, {64, 1}, {64, 4}, {0, 3}, {0, 0}} {
			took, pauses := accept(c.refused)
			require.Equal(t, c.pauses, pauses, "%+v", c)
			require.Equal(t, time.Duration(pauses)*1600*time.Microsecond, took)
		}
	})
}
