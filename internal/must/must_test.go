package must_test

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func TestCatch(t *testing.T) {
	wrong := errors.New("wrong")
	run := func(f func()) (err error) {
		defer must.Catch(&err)
		f()
		return nil
	}
	require.NoError(t, run(func() { require.Equal(t, 3, must.Get(3, nil)) }))
	require.ErrorIs(t, run(func() { must.Do(wrong) }), wrong)
	require.ErrorIs(t, run(func() { must.Get(0, wrong) }), wrong)
	require.Same(t, wrong, must.Err(3, wrong))
	require.PanicsWithValue(t, "another", func() { _ = run(func() { panic("another") }) })
	require.PanicsWithError(t, "wrong", func() { must.Do(wrong) })
}

func TestAs(t *testing.T) {
	e := must.As[*net.AddrError](t, fmt.Errorf("wrong: %w", &net.AddrError{Addr: "a"}))
	require.Equal(t, "a", e.Addr)
}

func TestEnd(t *testing.T) {
	c := make(chan int, 1)
	must.End(t, "a send", func() { c <- 3 })
	require.Equal(t, 3, must.Receive(t, "a number", c))
}

// stopped is a test that notes its failure.
type stopped struct {
	testing.TB
	text string
}

func (s *stopped) Helper() {}
func (s *stopped) Fatalf(format string, args ...any) {
	s.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestReceiveEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stopped{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			must.Receive(s, "nothing", make(chan int))
		}()
		<-done
		require.Contains(t, s.text, "still waiting for nothing\ngoroutine ")
	})
}
