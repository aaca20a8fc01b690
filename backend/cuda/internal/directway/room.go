package directway

import (
	"fmt"
	"os"
	"strconv"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// directPlace is a device on which kernels of this process wait for others.
type directPlace struct {
	d   driver.Driver
	dev int
}

// directPlaces has how many blocks the kernels of this process's groups take, by device. A multiprocessor
// may have room for one block only. All kernels but the largest collective must fit on the device at once.
//
// That is enough for every kernel to end. A block waits for the block of the same number of the peers'
// kernels, and a device starts the blocks of a kernel in order. So nothing goes on only if each kernel that
// is on a device waits for one that is not on another device. The largest is missing on one of these, and the
// others cannot fill that.
var directPlaces = struct {
	sync.Mutex
	of map[directPlace]map[*Group]taken
}{of: make(map[directPlace]map[*Group]taken)}

// taken is what a group has: the blocks of its collectives, and those of all its lanes together.
type taken struct{ blocks, lanes int }

// beside returns how many blocks all kernels but the largest collective take, if a group takes n more.
func beside(all map[*Group]taken, n int) int {
	most := 0
	for _, t := range all {
		n += t.blocks + t.lanes
		most = max(most, t.blocks)
	}
	return n - most
}

// Blocks of a group's kernels, of 512 threads. The first group on a device has mostBlocks. Another one has
// someBlocks, which leaves half of the device to others. Later ones have fewBlocks.
const (
	mostBlocks = direct.MostThreads / 512
	someBlocks = 32
	fewBlocks  = 16
)

// multiprocessors returns how many of a device's the kernels of this process have: MPS may give it a part.
func multiprocessors(v driver.Device) int {
	all := v.Info().Multiprocessors
	percentage, err := strconv.ParseFloat(os.Getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), 64)
	if err != nil || percentage <= 0 || percentage >= 100 {
		return all
	}
	return max(int(float64(all)*percentage/100), 1)
}

// takePlace reserves room for the group's kernels on its device.
func (d *Group) takePlace(v driver.Device) error {
	room := multiprocessors(v)
	directPlaces.Lock()
	defer directPlaces.Unlock()
	place := directPlace{d.B.Driver, v.ID().Index}
	all := directPlaces.of[place]
	switch {
	case len(all) == 0:
		d.blocks = mostBlocks
	case beside(all, someBlocks) < room/2:
		d.blocks = someBlocks
	case beside(all, fewBlocks) < room:
		d.blocks = fewBlocks
	default:
		return fmt.Errorf("kernels of other groups of this process, but the largest, take %d blocks, and those of one more might not fit beside it on the %d multiprocessors of device %d",
			beside(all, 0), room, place.dev)
	}
	if all == nil {
		all = make(map[*Group]taken)
		directPlaces.of[place] = all
	}
	all[d] = taken{blocks: d.blocks}
	d.place = place
	return nil
}

// keepPlace keeps room for so many blocks; with 0 the group leaves.
func (d *Group) keepPlace(blocks int) {
	directPlaces.Lock()
	defer directPlaces.Unlock()
	if d.blocks > blocks {
		d.blocks = blocks
		d.note()
	}
}

// note brings directPlaces up to date, whose lock the caller holds.
func (d *Group) note() {
	all := directPlaces.of[d.place]
	if all[d] = (taken{d.blocks, d.lanes.blocks}); all[d] == (taken{}) {
		delete(all, d)
	}
	if len(all) == 0 {
		delete(directPlaces.of, d.place) // and with it the driver
	}
}

// A window has as many channels as package window chooses, or fewer on a device with less memory.
// Its rings take at most 1/directShare of that memory, and so do its lanes.
const (
	directMostChannels = 2048
	directShare        = 1 << 8
)

// directChannels returns how many channels a window on a device has.
func directChannels(v driver.Device, ranks int) uint32 {
	return uint32(min(max(int(v.Info().Memory/directShare)/window.ChannelBytes(ranks), 1), directMostChannels))
}

// ringMostChannels is how many channels a ring has at most: 128 blocks of 8 warps. It was not measured on GPUs.
const ringMostChannels = 1024

// ringChannels returns how many channels a ring on a device has.
func ringChannels(v driver.Device, ranks int) uint32 {
	return uint32(min(max(int(v.Info().Memory/directShare)/window.RingChannelBytes(ranks), 1), ringMostChannels))
}
