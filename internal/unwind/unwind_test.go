package unwind_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/unwind"
)

type closer struct{ told *bool }

func (c closer) Close() error { *c.told = unwind.ByPanic(); return nil }

func deep(n int, f func()) {
	if n == 0 {
		f()
		return
	}
	deep(n-1, f)
}

func TestByPanic(t *testing.T) {
	var none []int
	var nothing *struct{ x int }
	for _, tc := range []struct {
		name string
		run  func(c closer)
		want bool
	}{
		{"no panic", func(c closer) { defer c.Close() }, false},
		{"a plain call", func(c closer) { c.Close() }, false},
		{"an index error, deferred directly", func(c closer) { defer c.Close(); none[3] = 1 }, true},
		{"a nil pointer", func(c closer) { defer c.Close(); nothing.x = 1 }, true},
		{"panic", func(c closer) { defer c.Close(); panic(errors.New("x")) }, true},
		{"deferred through a function", func(c closer) {
			defer func() { deep(200, func() { c.Close() }) }()
			panic("x")
		}, true},
		{"a panic further down", func(c closer) {
			defer c.Close()
			deep(200, func() { panic("x") })
		}, true},
		{"recovered by the same function", func(c closer) {
			defer func() { recover(); c.Close() }()
			panic("x")
		}, true},
		{"recovered before", func(c closer) {
			defer c.Close()
			func() {
				defer func() { recover() }()
				panic("x")
			}()
		}, false},
		{"a panic while another is recovered", func(c closer) {
			defer c.Close()
			defer func() { recover(); panic("y") }()
			panic("x")
		}, true},
		{"Goexit", func(c closer) { defer c.Close(); runtime.Goexit() }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var told bool
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { recover() }()
				tc.run(closer{&told})
			}()
			<-done
			require.Equal(t, tc.want, told)
		})
	}
}
