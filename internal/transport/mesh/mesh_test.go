package mesh

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

// TestDrainWaitsForCheck: a check of Close may run after the time that it would extend. What comes
// until then is read, or the peer's connection would be reset.
func TestDrainWaitsForCheck(t *testing.T) {
	for name, end := range map[string]func(b *Base, theirs net.Conn){
		"the peer closes":           func(_ *Base, theirs net.Conn) { theirs.Close() },
		"check cuts the connection": func(b *Base, _ net.Conn) { b.Mu.Lock(); b.cut = true; b.Mu.Unlock() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b Base
				b.Init(0, 2, Limits{Close: time.Second}, func() {})
				b.end(transport.ErrClosed, nil)
				b.checking.Stop() // it is late
				ours, theirs := net.Pipe()
				defer ours.Close()
				defer theirs.Close()
				done := make(chan struct{})
				go func() {
					(&Peer{base: &b}).Drain(ours)
					close(done)
				}()
				time.Sleep(2 * b.Limits.Close)
				synctest.Wait()
				select {
				case <-done:
					t.Fatal("Drain has not waited")
				default:
				}
				must.Get(theirs.Write([]byte("credit")))
				end(&b, theirs)
				<-done
			})
		})
	}
}
