package debug

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
)

// flood is a listener to which strangers connect as fast as it accepts.
type flood struct{ net.Listener }

func (flood) Accept() (net.Conn, error) {
	near, _ := net.Pipe()
	return near, nil
}

// TestFlood: who has connected has some time until strangers close it.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &door{Listener: flood{}, strangers: strangers.Apart(mostStrangers)}
		accept := func(n int) {
			for range n {
				must.Get(d.Accept())
			}
		}
		begun := time.Now()
		accept(mostStrangers - 1)
		require.Zero(t, time.Since(begun), "there is room")
		for range 100 {
			c := must.Get(d.Accept())
			came := time.Now()
			accept(mostStrangers - 1)
			require.True(t, d.strangers.Remove(c))
			accept(1)
			require.GreaterOrEqual(t, time.Since(came), 15*time.Millisecond)
		}
	})
}
