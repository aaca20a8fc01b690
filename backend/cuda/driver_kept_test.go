package cuda_test

import (
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
)

// TestNothingKeepsADriver: once groups and driver are closed, the process holds neither them nor their memory.
func TestNothingKeepsADriver(t *testing.T) {
	var d weak.Pointer[sim.Driver]
	t.Run("groups", func(t *testing.T) {
		w := newWorld(t, directly(2))
		w.each((*rank).meetDirectly)
		d = weak.Make(w.ranks[0].d.(*sim.Driver))
		w.end()
	})
	require.Eventually(t, func() bool {
		runtime.GC()
		return d.Value() == nil
	}, time.Minute, 10*time.Millisecond)
}
