package transporttest_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestF34Mem: every mesh passes the same suite. The other TestF34 are in the packages of the meshes.
func TestF34Mem(t *testing.T) {
	f := mem.NewFabric()
	groups := make(map[transport.Mesh]string)
	var n atomic.Int64
	transporttest.Run(t, transporttest.Config{
		New: func(t testing.TB, size int) []transport.Mesh {
			name := fmt.Sprint(n.Add(1))
			ms := make([]transport.Mesh, size)
			for r := range ms {
				m := must.Get(f.Join(name, r, size))
				ms[r] = m
				groups[m] = name
			}
			return ms
		},
		Kill: func(_ testing.TB, ms []transport.Mesh, rank int) { f.Kill(groups[ms[rank]], rank) },
		No:   []transporttest.Feature{transporttest.Misuse, transporttest.Allocations, transporttest.Early},
	})
}
