package ddp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// mixed is a group in which rank 1 seems to be PyTorch's.
type mixed struct{ *pg.ProcessGroup }

func (m mixed) Backend(d tensor.DeviceType) (backend.Backend, error) {
	b, err := m.ProcessGroup.Backend(d)
	return foreign{b}, err
}

type foreign struct{ backend.Backend }

func (foreign) Foreign() []int { return []int{1} }

// TestForeignRanksNeedAnOption: New refuses a group with ranks of PyTorch, and ends it, unless it
// is told of them.
func TestForeignRanksNeedAnOption(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		params := func() []ddp.Param {
			return []ddp.Param{{Value: zeros(t, tensor.Float32, 2), Grad: zeros(t, tensor.Float32, 2)}}
		}
		_, err := ddp.New(soon(t), mixed{g}, params(), ddp.Options{PyTorch: true})
		require.NoError(t, err)
		_, err = ddp.New(soon(t), mixed{g}, params())
		require.EqualError(t, err, "ddp: rank 1 is PyTorch's: set Options.PyTorch on every Go rank")
		require.Error(t, must.Get(g.Backend(tensor.CPU)).(interface{ Err() error }).Err(), "the group goes on")
	})
}
