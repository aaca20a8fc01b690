// Package simkernels has the kernels of package backend/cuda as Go functions, for
// simulated devices. With them groups on simulated devices do what groups on GPUs
// do, device work included; without them they go through the host:
//
//	m, err := sim.New(sim.Config{Devices: 2, Kernels: simkernels.All()})
//
// They are what the GPU's kernels are tested against.
package simkernels

import (
	"bytes"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
)

// All returns the kernels by name. The map is the caller's: it may add its own.
func All() map[string]sim.Kernel {
	all := map[string]sim.Kernel{
		kernels.Copy:   copyBytes,
		kernels.Pack:   func(k *sim.Run) error { return pack(k, false) },
		kernels.Unpack: func(k *sim.Run) error { return pack(k, true) },

		kernels.Exchange: exchange,
		kernels.List:     list,

		kernels.CooKey:    cooKey,
		kernels.CooAt:     cooAt,
		kernels.CooMerge:  cooMerge,
		kernels.CooFirst:  cooFirst,
		kernels.CooScan:   cooScan,
		kernels.CooUnique: cooUnique,
		kernels.CooAdd:    cooAdd,
	}
	kernels.EachCombine(func(d tensor.DType, name string) {
		all[name] = func(k *sim.Run) error { return combine(k, d) }
	})
	kernels.EachCast(func(to, from tensor.DType, name string) {
		all[name] = func(k *sim.Run) error { return cast(k, to, from) }
	})
	all[direct.RingKernel] = ringTiles
	direct.Each(func(name string, job direct.Job) {
		all[name] = map[direct.Job]sim.Kernel{
			direct.OneShotJob: exchangeTiles,
			direct.SpreadJob:  spreadTiles,
			direct.TwoShotsJob: func(k *sim.Run) error {
				return bothTiles(k, direct.Move{Call: direct.Read[direct.Call](k.Arg(0))}, false)
			},
			direct.StraightJob: func(k *sim.Run) error { return bothTiles(k, direct.Read[direct.Move](k.Arg(0)), true) },
			direct.MoveJob:     moveTiles,
		}[job]
	})
	return all
}

// write writes b to those of two places that are there. A kernel may write the memory that it
// reads, as long as it reads first.
func write(k *sim.Run, b []byte, out, push driver.Ptr) {
	for _, p := range []driver.Ptr{out, push} {
		if p != 0 {
			copy(k.Write(p, len(b)), b)
		}
	}
}

func combine(k *sim.Run, d tensor.DType) error {
	n := k.Int(2) * d.Size()
	red, err := kernels.Operator(k.Uint32(3)).Reduction(d, 1)
	if err != nil {
		return err
	}
	b := bytes.Clone(k.Read(k.Ptr(0), n))
	red.Combine(b, k.Read(k.Ptr(1), n))
	copy(k.Write(k.Ptr(0), n), b)
	return nil
}

func cast(k *sim.Run, to, from tensor.DType) error {
	n := k.Int(2)
	src, err := tensor.FromBytes(from, k.Read(k.Ptr(1), n*from.Size()), n)
	if err != nil {
		return err
	}
	dst, err := tensor.FromBytes(to, k.Write(k.Ptr(0), n*to.Size()), n)
	if err != nil {
		return err
	}
	for i := range n {
		v, err := src.Float64At(i)
		if err != nil {
			return err
		}
		if err := dst.SetFloat64(float64(float32(v)), i); err != nil {
			return err
		}
	}
	return nil
}

func copyBytes(k *sim.Run) error {
	write(k, bytes.Clone(k.Read(k.Ptr(2), k.Int(3))), k.Ptr(0), k.Ptr(1))
	return nil
}

func exchange(k *sim.Run) error {
	x, n, count := k.Ptr(0), k.Int(3), k.Uint32(7)
	b := bytes.Clone(k.Read(x, n))
	copy(k.Write(k.Ptr(1), n), b)
	k.Store(k.Ptr(4), count)
	if !k.AwaitFor(k.Ptr(5), count, driver.AtLeast, time.Duration(k.Uint64(8))) {
		return nil
	}
	b = bytes.Clone(k.Read(k.Ptr(2), n))
	copy(k.Write(x, n), b)
	k.Store(k.Ptr(6), count)
	return nil
}

func list(k *sim.Run) error {
	packed, back, parts := kernels.ParseList(k.Arg(0), int(k.Grid.X))
	for _, p := range parts {
		if at := packed + driver.Ptr(p.Off); back {
			copy(k.Write(p.At, p.N), k.Read(at, p.N))
		} else {
			copy(k.Write(at, p.N), k.Read(p.At, p.N))
		}
	}
	return nil
}

// pack reads and writes the runs of elements one by one: between them may be what
// others use.
func pack(k *sim.Run, back bool) error {
	l, n := kernels.ParseLayout(k.Arg(2))
	es := l.Size
	if es != 1 && es != 2 && es != 4 && es != 8 {
		return fmt.Errorf("elements of %d bytes", es)
	}
	packed := make([]byte, n*es)
	if back {
		copy(packed, k.Read(k.Ptr(0), len(packed)))
	}
	for i := range n {
		at, left := 0, i
		for d := len(l.Shape) - 1; d >= 0; d-- {
			at += left % l.Shape[d] * l.Strides[d]
			left /= l.Shape[d]
		}
		p := k.Ptr(1) + driver.Ptr(at*es)
		if back {
			copy(k.Write(p, es), packed[i*es:])
		} else {
			copy(packed[i*es:][:es], k.Read(p, es))
		}
	}
	if !back {
		copy(k.Write(k.Ptr(0), len(packed)), packed)
	}
	return nil
}
