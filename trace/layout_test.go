package trace

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// TestLayout: what each call needs of a recorder is in one cache line, and nothing else is. The same holds for a group.
func TestLayout(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("lines are laid out for 64-bit systems")
	}
	var r Recorder
	var g Group
	// The runtime aligns what has 256 bytes to 256, and what has 320 to 64.
	require.EqualValues(t, 256, unsafe.Sizeof(r))
	require.EqualValues(t, 320, unsafe.Sizeof(g))
	require.Zero(t, unsafe.Offsetof(r.lock)%cacheLine)
	require.EqualValues(t, cacheLine, unsafe.Offsetof(r.observer)+unsafe.Sizeof(r.observer)-unsafe.Offsetof(r.lock))
	require.Zero(t, unsafe.Offsetof(g.recorder)%cacheLine)
	require.LessOrEqual(t, unsafe.Offsetof(g.messages)+8-unsafe.Offsetof(g.recorder), uintptr(cacheLine))
	var e entry
	require.EqualValues(t, 3*cacheLine, unsafe.Sizeof(e))
	require.EqualValues(t, cacheLine, unsafe.Offsetof(e.in))
	require.EqualValues(t, 2*cacheLine, unsafe.Offsetof(e.out))
}
