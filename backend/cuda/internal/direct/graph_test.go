package direct_test

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/tensor"
)

// replay mixes replays of a graph of all_reduces, of up to n elements, with calls of other sizes.
func replay(m *member, n, rounds int) error {
	mem, err := m.v.Alloc(8 * n)
	if err != nil {
		return err
	}
	defer mem.Close()
	host, err := m.d.AllocHost(4 * n)
	if err != nil {
		return err
	}
	defer host.Close()
	dst := mem.Ptr() + driver.Ptr(4*n)
	sum := func(elements int) error {
		return m.c.AllReduce(m.s, dst, mem.Ptr(), elements, tensor.Int32, backend.Sum(), direct.Form{})
	}
	g, err := driver.Capture(m.s, func() error {
		for _, e := range []int{n, 3, n / 10, 1} {
			if err := sum(e); err != nil {
				return err
			}
		}
		return sum(n)
	})
	if err != nil {
		return err
	}
	defer g.Close()
	// To make a graph may wait for the device, and with it for a rank of this process.
	if err := m.meet(); err != nil {
		return err
	}
	for i := range rounds {
		for j := range n {
			binary.NativeEndian.PutUint32(host.Bytes()[4*j:], uint32(i*j+m.rank))
		}
		if err := m.s.Copy(mem.Ptr(), host.Ptr(), 4*n); err != nil {
			return err
		}
		if err := m.s.Memset(dst, 0xee, 4*n); err != nil {
			return err
		}
		if i%3 == 1 {
			if err := sum(1 + i*9999%n); err != nil {
				return err
			}
		}
		if err := g.Launch(m.s); err != nil {
			return err
		}
		if err := m.s.Copy(host.Ptr(), dst, 4*n); err != nil {
			return err
		}
		if err := m.sync(); err != nil {
			return err
		}
		want := make([]byte, 0, 4*n)
		for j := range n {
			want = binary.NativeEndian.AppendUint32(want, uint32(m.ranks*i*j+m.ranks*(m.ranks-1)/2))
		}
		if !bytes.Equal(want, host.Bytes()) {
			return fmt.Errorf("rank %d: replay %d is wrong", m.rank, i)
		}
	}
	return nil
}
