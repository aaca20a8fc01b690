package driver

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/internal/pause"
)

// invalid is the error of a call whose argument was wrong.
func invalid(call string, device int, format string, args ...any) error {
	return &Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)}
}

// CheckCopy returns what is wrong with the arguments of a Stream's Copy, for
// implementations.
func CheckCopy(device int, dst, src Ptr, n int) error {
	switch {
	case n < 0:
		return invalid("Copy", device, "%d bytes", n)
	case n == 0:
		return nil
	case dst == 0 || src == 0:
		return invalid("Copy", device, "%d bytes from %v to %v", n, src, dst)
	case dst < src+Ptr(n) && src < dst+Ptr(n):
		return invalid("Copy", device, "%d bytes from %v to %v overlap", n, src, dst)
	}
	return nil
}

// CheckMemset returns what is wrong with the arguments of a Stream's Memset.
func CheckMemset(device int, dst Ptr, n int) error {
	if n < 0 || n > 0 && dst == 0 {
		return invalid("Memset", device, "%d bytes at %v", n, dst)
	}
	return nil
}

// CheckWord checks the address and condition of a Stream's WaitValue or WriteValue; call is its
// name.
func CheckWord(call string, device int, p Ptr, c Condition) error {
	if p == 0 || p%4 != 0 {
		return invalid(call, device, "no word at %v: want a multiple of 4", p)
	}
	if !c.Valid() {
		return invalid(call, device, "%v", c)
	}
	return nil
}

// CheckLaunch returns what is wrong with a launch on a device, as far as it can
// be seen without the driver.
func CheckLaunch(device int, l *Launch) error {
	const call = "Launch"
	if l == nil || l.Function == nil {
		return invalid(call, device, "no function")
	}
	name := l.Function.Name()
	if on := l.Function.Device().Index; on != device {
		return invalid(call, device, "%s was loaded for device %d", name, on)
	}
	g, b := l.Grid.Full(), l.Block.Full()
	if l.Grid.X == 0 || g.X > math.MaxInt32 || g.Y > math.MaxUint16 || g.Z > math.MaxUint16 {
		return invalid(call, device, "%s: a grid of %dx%dx%d blocks", name, l.Grid.X, l.Grid.Y, l.Grid.Z)
	}
	if l.Block.X == 0 || b.X > 1024 || b.Y > 1024 || b.Z > 64 || b.Len() > 1024 {
		return invalid(call, device, "%s: blocks of %dx%dx%d threads", name, l.Block.X, l.Block.Y, l.Block.Z)
	}
	if l.Shared < 0 {
		return invalid(call, device, "%s: %d bytes of shared memory", name, l.Shared)
	}
	if n := len(l.Args.Bytes()); n > MaxArgs {
		return invalid(call, device, "%s: %d bytes of parameters, want at most %d", name, n, MaxArgs)
	}
	for _, a := range l.Access {
		if a.Len < 0 || a.Len > 0 && a.Ptr == 0 || a.Mode != Read && a.Mode != Write && a.Mode != Shared {
			return invalid(call, device, "%s %v", name, a)
		}
	}
	return nil
}

// LoadWord is HostMemory.Load32 for implementations whose memory is b.
func LoadWord(b []byte, offset int) uint32 {
	return atomic.LoadUint32(word(b, offset))
}

// StoreWord is HostMemory.Store32 for implementations whose memory is b.
func StoreWord(b []byte, offset int, v uint32) {
	atomic.StoreUint32(word(b, offset), v)
}

func word(b []byte, offset int) *uint32 {
	if offset&3 != 0 {
		panic(fmt.Sprintf("driver: no word at offset %d: want a multiple of 4", offset))
	}
	return (*uint32)(unsafe.Pointer(unsafe.SliceData(b[offset : offset+4])))
}

// Pause lets other goroutines run. It is for loops that ask since start whether something has happened on
// a device. It only yields for the first 8 ms, and then sleeps. It reports whether it slept.
func Pause(start time.Time) (slept bool) {
	if time.Since(start) < pause.Yield {
		runtime.Gosched()
		return false
	}
	time.Sleep(200 * time.Microsecond)
	return true
}

// AwaitWord blocks the host until the word at an offset of m fulfils c, or
// until ctx ends. It polls: first as fast as it can, then letting others run,
// then with pauses, so that a long wait costs little.
func AwaitWord(ctx context.Context, m HostMemory, offset int, v uint32, c Condition) error {
	const often = 256 // polls before it asks ctx, which may ask the device
	slept := false
	for i, start := 1, time.Now(); !c.Holds(m.Load32(offset), v); i++ {
		if (slept || i%often == 0) && ctx.Err() != nil {
			return &Error{Call: "AwaitWord", Device: -1, Err: fmt.Errorf(
				"the word at offset %d is %d, waited for %v %d: %w", offset, m.Load32(offset), c, v, context.Cause(ctx))}
		}
		slept = Pause(start)
	}
	return nil
}
