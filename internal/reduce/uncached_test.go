package reduce

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestUncached copies from and to every alignment, in sizes around the loop's step.
func TestUncached(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	src, dst := make([]byte, piece+3*step), make([]byte, piece+3*step)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	sizes := []int{0, 1, 31, 127, 128, 129, 255, 256, 300, 4096, piece, piece + 1, piece + 2*step - 1}
	for to := range 2 * uncachedAlign {
		for i, n := range sizes {
			if n > 4096 && to > 1 {
				continue
			}
			from := (7*to + i) % uncachedAlign
			clear(dst)
			Uncached(dst[to:to+n], src[from:from+n])
			require.Equal(t, src[from:from+n], dst[to:to+n], "%d bytes from %d to %d", n, from, to)
			require.Zero(t, total(dst[:to])+total(dst[to+n:]), "%d bytes from %d to %d: beside them", n, from, to)
		}
	}
	require.Panics(t, func() { Uncached(dst[:1], src[:2]) })
}

func total(b []byte) (n int) {
	for _, x := range b {
		n += int(x)
	}
	return n
}
