package gloo

import (
	"os"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Patience bounds what the tests wait for. After it a test fails and says what it waited for.
const Patience = time.Minute

// GroupTimeout is the timeout of the groups in these tests. It is less than Patience: an operation
// that times out names the missing rank, and the test that waits for it does not.
const GroupTimeout = 15 * time.Second

// Await returns what c delivers. If that takes longer than Patience, the test fails with the
// stacks of all goroutines.
func Await[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(Patience)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
	}
	t.Fatalf("still waiting for %s after %v\n%s", what, Patience, stacks())
	panic("unreachable")
}

// Finish waits for the goroutines of wg, as Await does.
func Finish(t testing.TB, what string, wg *sync.WaitGroup) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	Await(t, what, done)
}

// VirtualTime is synctest.Test, and ends the process if that takes longer than Patience: virtual
// time stands still while a goroutine waits for a lock.
func VirtualTime(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	name := t.Name()
	defer time.AfterFunc(Patience, func() {
		os.Stderr.Write(stacks())
		panic(name + " still runs after " + Patience.String())
	}).Stop()
	synctest.Test(t, f)
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}
