package run

import (
	"os"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/c10d-go/c10d/internal/must"
)

// Patience bounds what the tests wait for. After it a test fails and says what it waited for.
const Patience = 3 * time.Minute

// GroupTimeout is the timeout of the groups in these tests. It is less than Patience: an operation
// that times out names the missing rank, and the test that waits for it does not.
const GroupTimeout = time.Minute

// Finish waits for the goroutines of wg.
func Finish(t testing.TB, what string, wg *sync.WaitGroup) {
	t.Helper()
	must.End(t, what, wg.Wait)
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
