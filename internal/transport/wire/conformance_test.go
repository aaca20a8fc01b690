package wire

import (
	"testing"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

func TestF34Conformance(t *testing.T) {
	transporttest.Run(t, transporttest.Config{
		New: func(t testing.TB, size int) []transport.Mesh {
			ms := make([]transport.Mesh, size)
			for i, m := range changed(t, size, func(m *Mesh) { m.Limits = patient }) {
				ms[i] = m
			}
			return ms
		},
		Kill: func(_ testing.TB, ms []transport.Mesh, rank int) {
			m := ms[rank].(*Mesh)
			m.Mu.Lock()
			defer m.Mu.Unlock()
			for _, p := range m.pairs {
				if p != nil {
					p.conn.Close()
				}
			}
		},
		Sizes: []int{47, 48, 49, readBuffer - headerLen, readBuffer, readBuffer + 1, gatherBytes + 1},
		No:    []transporttest.Feature{transporttest.Early},
	})
}
