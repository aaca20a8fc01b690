package reduce

import (
	"fmt"
	"os"
	"runtime/debug"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// guarded returns a page between two that fault.
func guarded(t *testing.T) []byte {
	size := os.Getpagesize()
	b := must.Get(syscall.Mmap(-1, 0, 3*size, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE))
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(b)) })
	page := b[size : 2*size]
	require.NoError(t, syscall.Mprotect(page, syscall.PROT_READ|syscall.PROT_WRITE))
	return page
}

// TestGuardPages proves that no function reads or writes a byte outside of its
// slices: those begin where a page does, or end there.
func TestGuardPages(t *testing.T) {
	a, b := guarded(t), guarded(t)
	edges := func(t *testing.T, d tensor.DType, f func(dst, src []byte)) {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		at := ""
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("%s: %v", at, r)
			}
		}()
		for elements := range longest(d) + 1 {
			n := elements * d.Size()
			for i, dst := range [][]byte{a[:n], a[len(a)-n:]} {
				for j, src := range [][]byte{b[:n], b[len(b)-n:]} {
					at = fmt.Sprintf("%d bytes, of which dst is at edge %d and src at edge %d of a page", n, i, j)
					f(dst, src)
				}
			}
		}
	}
	eachKernel(t, func(t *testing.T, _ Kind, d tensor.DType, f Func) { edges(t, d, f) })
	t.Run("uncached", func(t *testing.T) { edges(t, tensor.Uint8, Uncached) })
	for _, d := range tensor.DTypes() {
		if f, err := Divide(d, 3); err == nil {
			t.Run(fmt.Sprintf("%v/divide", d), func(t *testing.T) { edges(t, d, func(dst, _ []byte) { f(dst) }) })
		}
		if f, err := PreMul(d, 3); err == nil {
			t.Run(fmt.Sprintf("%v/premul", d), func(t *testing.T) { edges(t, d, func(dst, _ []byte) { f(dst) }) })
		}
	}
}
