package weights

import (
	"fmt"
	"math"
	"runtime/debug"

	"github.com/c10d-go/c10d/internal/hostmem"
)

// host has /proc and /sys.
var host = hostmem.Host

// room returns an error if the host has no memory for two copies of l and their deltas. The copies that r has make room.
func (r *Receiver) room(l *layout) error {
	if l.bytes > r.options.MaxBytes {
		return fmt.Errorf("weights: the parameters have %d bytes, at most %d are allowed (ReceiverOptions.MaxBytes)", l.bytes, r.options.MaxBytes)
	}
	active := r.active.size() // it stays until the first of the two is whole
	need := min(l.bytes, math.MaxInt64/4)/8*17 + max(active-l.bytes, 0) - active - r.standby.size()
	left := hostmem.Available(host)
	if need > left {
		debug.FreeOSMemory() // of copies that are no longer used
		left = hostmem.Available(host)
	}
	if need > left {
		return fmt.Errorf("weights: two versions of %d bytes and their deltas need %d more bytes of memory, and this host has %d", l.bytes, need, left)
	}
	return nil
}

// size returns the bytes of the parameters for which c has memory.
func (c *copyOf) size() (n int64) {
	if c != nil {
		for _, m := range c.memory {
			n += int64(len(m))
		}
	}
	return n
}

// part returns a bucket's memory. In a first copy a parameter grows as it comes: to 64 MiB, a few buckets, or 4 times what came.
func (c *copyOf) part(b bucket) []byte {
	m := &c.memory[b.param]
	if b.to > len(*m) {
		size := c.layout.sizes[b.param]
		for !c.second && size/4 >= max(b.to, 16<<20) {
			size /= 4
		}
		more := alignedBytes(size)
		hostmem.LargePages(more)
		copy(more, *m)
		*m = more
	}
	return (*m)[b.from:b.to]
}
