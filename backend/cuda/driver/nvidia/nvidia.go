package nvidia

import (
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Open loads the driver and returns it, with the devices that the process may
// use (CUDA_VISIBLE_DEVICES counts). Where there is none, or no device, the
// error matches driver.ErrNoDevice. A Driver may be opened more than once in a
// process; its devices share their contexts, not their memory.
func Open() (driver.Driver, error) {
	d, err := open()
	if err != nil {
		return nil, err
	}
	return d, nil
}

// noDevice returns an error for a machine without a driver.
func noDevice(format string, args ...any) error {
	return &driver.Error{Call: "Open", Device: -1, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrNoDevice}, args...)...)}
}

// Default is Open for backends whose options have no Driver: all of the process have the same one. It is opened on the
// first call that finds a device, and stays open.
func Default() (driver.Driver, error) {
	process.Lock()
	defer process.Unlock()
	if process.d == nil {
		d, err := Open()
		if err != nil {
			return nil, err
		}
		process.d = d
	}
	return process.d, nil
}

var process struct {
	sync.Mutex
	d driver.Driver
}
