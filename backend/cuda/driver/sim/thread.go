package sim

import (
	"bytes"
	"errors"
	"runtime"
	"strconv"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Thread is the thread of a goroutine that is tied to it.
type Thread uint64

// OwnThread returns the thread of the calling goroutine, false if the goroutine may change its thread.
func OwnThread() (Thread, bool) {
	var buf [128]byte
	head, _, _ := bytes.Cut(buf[:runtime.Stack(buf[:], false)], []byte("]"))
	number, state, _ := bytes.Cut(bytes.TrimPrefix(head, []byte("goroutine ")), []byte(" "))
	n, err := strconv.ParseUint(string(number), 10, 64)
	return Thread(n), err == nil && bytes.Contains(state, []byte("locked to thread"))
}

// current has the device of each thread that has one.
var current sync.Map

// Current returns the device that is current on the calling goroutine's thread, nil if none is.
func Current() *Device {
	t, tied := OwnThread()
	if v, ok := current.Load(t); tied && ok {
		return v.(*Device)
	}
	return nil
}

// Enter makes the device current on the thread of the calling goroutine, until leave.
func (v *Device) Enter() (leave func(), err error) {
	const call = "Enter"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	t, tied := OwnThread()
	if !tied {
		runtime.UnlockOSThread()
		return nil, &driver.Error{Call: call, Device: v.index, Err: errors.New("the runtime does not say which goroutines are tied to their threads")}
	}
	before, had := current.Swap(t, v)
	return func() {
		if had {
			current.Store(t, before)
		} else {
			current.Delete(t)
		}
		runtime.UnlockOSThread()
	}, nil
}

var _ driver.Enterer = (*Device)(nil)
