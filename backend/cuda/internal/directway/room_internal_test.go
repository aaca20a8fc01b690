package directway

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/tensor"
)

// processor is a device with some multiprocessors.
type processor struct {
	driver.Device
	n int
}

func (p processor) ID() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (p processor) Info() driver.Info { return driver.Info{Multiprocessors: p.n} }

// TestPlacesUnderMPS has groups share a device of which MPS gives the process a part.
func TestPlacesUnderMPS(t *testing.T) {
	for _, c := range []struct {
		percentage string
		blocks     int // of the second group
	}{{"", someBlocks}, {"100", someBlocks}, {"40", fewBlocks}, {"40.5", fewBlocks}, {"10", 0}, {"no number", someBlocks}, {"0", someBlocks}} {
		t.Run(c.percentage, func(t *testing.T) {
			t.Setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", c.percentage)
			var all [2]Group
			for i := range all {
				d := &all[i]
				d.B = &group.Engine{}
				err := d.takePlace(processor{n: 132})
				defer d.keepPlace(0)
				if i == 1 && c.blocks == 0 {
					require.ErrorContains(t, err, "on the 13 multiprocessors of device 0")
					return
				}
				require.NoError(t, err)
			}
			require.Equal(t, c.blocks, all[1].blocks)
		})
	}
}
