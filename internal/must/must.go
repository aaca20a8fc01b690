// Package must is for tests whose functions end at their first error. Only tests import it.
//
//	x := must.Get(tensor.New(tensor.Float32, 4))
//	must.Do(x.Fill(1))
//
// Both panic with the error. Use them for what a test needs but is not about, and within a function whose caller has
// deferred [Catch]: there the error becomes the function's.
package must

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// failure is what Do and Get panic with.
type failure struct{ error }

// Do panics with an error that is not nil.
func Do(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Get returns v, or panics with an error that is not nil.
func Get[T any](v T, err error) T {
	Do(err)
	return v
}

// Catch is to be deferred. It sets err to the error that Do or Get has panicked with. Other panics go on.
func Catch(err *error) {
	switch p := recover().(type) {
	case nil:
	case failure:
		*err = p.error
	default:
		panic(p)
	}
}

// As returns the first error in err's tree that is an E. The test fails if there is none.
func As[E error](t testing.TB, err error, about ...any) E {
	t.Helper()
	var e E
	require.ErrorAs(t, err, &e, about...)
	return e
}

// Err returns the error of a call without its value.
func Err[T any](_ T, err error) error { return err }

// limit is far more than anything takes that tests wait for. It turns a hang into a failure.
const limit = 3 * time.Minute

// Receive returns what comes from c. The test fails, with the stacks of all goroutines, if nothing comes within limit.
func Receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(limit):
		all := make([]byte, 1<<20)
		t.Fatalf("still waiting for %s\n%s", what, all[:runtime.Stack(all, true)])
		panic("unreachable")
	}
}

// End waits until f returns, no longer than Receive does.
func End(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	Receive(t, what, done)
}

// Seed returns the seed of a random test, and logs it: that of C10D_SEED, or one that differs each time.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("C10D_SEED"); s != "" {
		seed = Get(strconv.ParseUint(s, 10, 64))
	}
	t.Logf("C10D_SEED=%d", seed)
	return seed
}

// Rand returns random numbers of Seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}
