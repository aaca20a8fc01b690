package run

import (
	"strconv"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// TestSizes: what a call leaves to the collector. One word more, and the allocator takes the next larger size.
func TestSizes(t *testing.T) {
	if strconv.IntSize < 64 {
		t.Skip("words are shorter here")
	}
	require.LessOrEqual(t, unsafe.Sizeof(future{}), uintptr(128))
	require.LessOrEqual(t, unsafe.Sizeof(message{}), uintptr(352))
}
