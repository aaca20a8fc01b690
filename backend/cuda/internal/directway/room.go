package directway

import (
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
)

// directPlace is a device on which kernels of this process wait for others.
type directPlace struct {
	d   driver.Driver
	dev int
}

// directPlaces has how many threads the kernels of this process's groups take, by device. All of
// them must fit on the device at once. Otherwise group A's kernel could keep group B's from starting
// on one device, and B's keep A's on another.
var directPlaces = struct {
	sync.Mutex
	of map[directPlace]int
}{of: make(map[directPlace]int)}

// Blocks of a group's kernels: most for the first groups on a device, few for later ones.
const (
	mostBlocks   = direct.MostThreads / blockThreads
	fewBlocks    = 16
	blockThreads = 512
)

// takePlace reserves room for the group's kernels on its device. Where another group of mostBlocks
// would leave less than that, a group gets fewBlocks, and many of them have room.
func (d *Group) takePlace(v driver.Device) error {
	i, threads := v.Info(), 2048 // per multiprocessor
	if i.Minor != 0 {
		threads = 1536
	}
	all := i.Multiprocessors * threads
	directPlaces.Lock()
	defer directPlaces.Unlock()
	place := directPlace{d.B.Driver, v.ID().Index}
	taken := directPlaces.of[place]
	d.blocks = mostBlocks
	if taken > 0 && taken+2*direct.MostThreads > all {
		d.blocks = fewBlocks
	}
	if taken > 0 && taken+d.blocks*blockThreads > all {
		d.blocks = 0
		return fmt.Errorf("kernels of other groups of this process take %d of the %d threads of device %d, and those of one more might not fit", taken, all, place.dev)
	}
	directPlaces.of[place] += d.blocks * blockThreads
	d.place = place
	return nil
}

// keepPlace keeps room for so many blocks; with 0 the group leaves.
func (d *Group) keepPlace(blocks int) {
	directPlaces.Lock()
	defer directPlaces.Unlock()
	if d.blocks > blocks {
		if directPlaces.of[d.place] -= (d.blocks - blocks) * blockThreads; directPlaces.of[d.place] == 0 {
			delete(directPlaces.of, d.place) // and with it the driver
		}
		d.blocks = blocks
	}
}

// A window has as many channels as package window chooses, or fewer on a device with less memory:
// it takes at most a part in directShare of it.
const (
	directMostChannels = 2048
	directChannelBytes = 17 << 10 // for each other rank, with 8 slots
	directShare        = 1 << 10
)

// directChannels returns how many channels a window on a device has.
func directChannels(v driver.Device, ranks int) uint32 {
	each := directChannelBytes * (ranks - 1)
	most := directMostChannels
	if ranks == 2 {
		each *= 2 // 16 slots
	} else {
		most /= 2
	}
	return uint32(min(max(int(v.Info().Memory/directShare)/each, 1), most))
}
