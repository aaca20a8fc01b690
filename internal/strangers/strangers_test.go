package strangers_test

import (
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

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

func TestList(t *testing.T) {
	t.Run("one too many closes the oldest", func(t *testing.T) {
		l := strangers.New(2)
		var near, far [4]net.Conn
		for i := range near {
			near[i], far[i] = pipe(t)
		}
		require.True(t, l.Add(near[0], patience))
		require.True(t, l.Add(near[1], patience))
		require.True(t, l.Remove(near[0]), "it has said who it is")
		require.True(t, l.Add(near[2], patience))
		require.True(t, l.Add(near[3], patience))
		_, err := far[1].Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.False(t, l.Remove(near[1]))
		require.Equal(t, 2, l.Len())
		go far[0].Write([]byte("x"))
		_, err = near[0].Read(make([]byte, 1))
		require.NoError(t, err, "who has been taken out stays open")
	})
	t.Run("a silent one runs out of time", func(t *testing.T) {
		l := strangers.New(1)
		near, _ := pipe(t)
		require.True(t, l.Add(near, time.Millisecond))
		_, err := near.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	})
	t.Run("closed", func(t *testing.T) {
		l := strangers.New(2)
		near, _ := pipe(t)
		require.True(t, l.Add(near, patience))
		l.Close()
		_, err := near.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.False(t, l.Remove(near))
		late, _ := pipe(t)
		require.False(t, l.Add(late, patience))
	})
}

// A listener pauses while most connections are refused, and only then.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := strangers.New(1000)
		// accept takes 64 connections, of which so many are refused, and returns how long that took.
		accept := func(refused int) time.Duration {
			begun := time.Now()
			for i := range 64 {
				l.Pace()
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
			return time.Since(begun)
		}
		require.Zero(t, accept(0))
		require.Zero(t, accept(32))
		accept(64)
		require.GreaterOrEqual(t, accept(64), 10*time.Millisecond)
		accept(0)
		require.Zero(t, accept(0))
	})
}
