package direct_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// replay mixes replays of a graph of all_reduces, of up to n elements, with calls of other sizes.
func replay(m *member, n, rounds int) error {
	form := direct.Form{Ring: m.w.NextOnly()}
	mem := must.Get(m.v.Alloc(8 * n))
	defer mem.Close()
	host := must.Get(m.d.AllocHost(4 * n))
	defer host.Close()
	dst := mem.Ptr() + driver.Ptr(4*n)
	sum := func(elements int) error {
		return m.c.AllReduce(m.s, dst, mem.Ptr(), elements, tensor.Int32, backend.Sum(), form)
	}
	g := must.Get(driver.Capture(m.s, func() error {
		for _, e := range []int{n, 3, n / 10, 1} {
			if err := sum(e); err != nil {
				return err
			}
		}
		return sum(n)
	}))
	defer g.Close()
	// To make a graph may wait for the device, and with it for a rank of this process.
	must.Do(m.meet())
	for i := range rounds {
		for j := range n {
			binary.NativeEndian.PutUint32(host.Bytes()[4*j:], uint32(i*j+m.rank))
		}
		must.Do(m.s.Copy(mem.Ptr(), host.Ptr(), 4*n))
		must.Do(m.s.Memset(dst, 0xee, 4*n))
		if i%3 == 1 {
			must.Do(sum(1 + i*9999%n))
		}
		must.Do(g.Launch(m.s))
		must.Do(m.s.Copy(host.Ptr(), dst, 4*n))
		must.Do(m.sync())
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

// replayMixed replays a graph of operations of all kinds, each with new inputs, and makes eager calls
// between the replays.
func replayMixed(m *member, n, rounds int) error {
	type placed struct {
		operation
		src, dst, in, out int
	}
	g := rand.New(rand.NewPCG(11, 3)) // the same on all ranks
	var list []placed
	used := 0
	for i := range n {
		o := placed{operation: randomOperation(g, 2000, nil, false)}
		o.kind, o.inPlace = kind(i%int(kinds)), kind(i%int(kinds)) == broadcast
		if order := m.c.Order(); order != nil && o.kind <= allGather && i >= int(kinds) {
			o.form.Ring, o.order = true, order
		}
		o.in, o.out = o.sizes(m.rank, m.ranks)
		room := (o.n*o.d.Size()*m.ranks + 63) / 16 * 16
		o.src, o.dst = used, used+room
		if o.inPlace {
			o.dst = o.src
		}
		list, used = append(list, o), used+2*room
	}
	mem := must.Get(m.v.Alloc(used))
	defer mem.Close()
	host := must.Get(m.d.AllocHost(used))
	defer host.Close()
	call := func(o placed) error {
		return m.do(o.operation, mem.Ptr()+driver.Ptr(o.dst), mem.Ptr()+driver.Ptr(o.src))
	}
	graph := must.Get(driver.Capture(m.s, func() error {
		for _, o := range list {
			if err := call(o); err != nil {
				return err
			}
		}
		return nil
	}))
	defer graph.Close()
	must.Do(m.meet())
	for round := range rounds {
		inputs := make([][][]byte, n)
		for i, o := range list {
			for r := range m.ranks {
				in, _ := o.sizes(r, m.ranks)
				b := make([]byte, in)
				fill(b, o.d, o.seed+uint64(round*m.ranks+r))
				inputs[i] = append(inputs[i], b)
			}
			copy(host.Bytes()[o.src:], inputs[i][m.rank])
		}
		must.Do(m.s.Copy(mem.Ptr(), host.Ptr(), used))
		if o := list[round%n]; round%3 == 1 && !o.inPlace {
			must.Do(call(o))
		}
		must.Do(graph.Launch(m.s))
		must.Do(m.s.Copy(host.Ptr(), mem.Ptr(), used))
		must.Do(m.sync())
		for i, o := range list {
			want := must.Get(o.expect(m.rank, inputs[i]))
			if o.kind == reduce && want == nil {
				continue // no outcome
			}
			if !same(o.d, want, host.Bytes()[o.dst:][:o.out]) {
				return fmt.Errorf("rank %d: replay %d: %v is wrong", m.rank, round, o.operation)
			}
		}
	}
	return nil
}
