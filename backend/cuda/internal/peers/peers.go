// Package peers counts the users of each connection from one device of this process to another
// one. Access between devices belongs to the process; its last user takes it back.
package peers

import (
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

type access struct {
	d        driver.Driver
	from, to int
}

var users = struct {
	sync.Mutex
	of map[access]int
}{of: make(map[access]int)}

// Enable lets kernels of a device, of d, use memory of device number to.
func Enable(d driver.Driver, from driver.Device, to int) error {
	users.Lock()
	defer users.Unlock()
	if err := from.EnablePeer(to); err != nil {
		return err
	}
	users.of[access{d, from.ID().Index, to}]++
	return nil
}

// Disable takes one Enable back.
func Disable(d driver.Driver, from driver.Device, to int) error {
	users.Lock()
	defer users.Unlock()
	a := access{d, from.ID().Index, to}
	if users.of[a]--; users.of[a] > 0 {
		return nil
	}
	delete(users.of, a)
	return from.DisablePeer(to)
}
