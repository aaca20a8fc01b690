//go:build cuda && linux

// Command allreduce is a program that has contexts, streams and memory of gorgonia.org/cu,
// and sums that memory over its ranks:
//
//	make gorgonia              # in the root of the repository; leaves bin/gorgonia-allreduce
//	bin/gorgonia-allreduce     # on a machine with a GPU
//
// The ranks are goroutines. Rank r uses device r modulo the number of devices, so one GPU is
// enough. Lines marked "c10d" are what the sum adds to a program on cu.
package main

import (
	stdcontext "context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/gorgonia"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

func main() {
	ranks := flag.Int("ranks", 2, "`number` of ranks")
	elements := flag.Int("elements", 1<<20, "`number` of float32 elements of each rank")
	flag.Parse()
	if err := run(*ranks, *elements); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ranks, elements int) (err error) {
	if ranks < 1 || elements < 1 {
		return errors.New("allreduce: -ranks and -elements must be at least 1")
	}
	// The program's contexts, one for each device.
	devices, err := cu.NumDevices()
	if err != nil {
		return err
	}
	contexts := make(map[int]cu.CUContext)
	for i := range min(devices, ranks) {
		if contexts[i], err = newContext(i); err != nil {
			return err
		}
		defer func() {
			c := contexts[i]
			err = errors.Join(err, c.Destroy())
		}()
	}

	d, err := gorgonia.Open(gorgonia.Options{Contexts: contexts}) // c10d
	if err != nil {
		return err
	}
	st := store.NewHash() // c10d
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() { errs[r] = rank(d, contexts[r%devices], st, r, ranks, elements) })
	}
	wg.Wait()
	return errors.Join(append(errs, st.Close(), d.Close())...)
}

// newContext makes a context that is current on no thread.
func newContext(i int) (cu.CUContext, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	v, err := cu.GetDevice(i)
	if err != nil {
		return cu.CUContext{}, err
	}
	ctx, err := v.MakeContext(cu.SchedAuto)
	if err != nil {
		return cu.CUContext{}, err
	}
	return ctx, cu.SetCurrentContext(cu.CUContext{})
}

// rank has the values rank+1, sums them over the ranks, and checks the sum.
func rank(d driver.Driver, ctx cu.CUContext, st store.Store, r, ranks, elements int) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cu.SetCurrentContext(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cu.SetCurrentContext(cu.CUContext{})) }()
	stream, err := cu.MakeStream(cu.NonBlocking)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Destroy()) }()
	bytes := 4 * int64(elements)
	p, err := cu.MemAlloc(bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cu.MemFree(p)) }()
	values := make([]float32, elements)
	for i := range values {
		values[i] = float32(r + 1)
	}
	host := unsafe.Pointer(unsafe.SliceData(values))
	if err := cu.MemcpyHtoDAsync(p, host, bytes, stream); err != nil {
		return err
	}

	if err := sum(d, st, stream, p, r, ranks, elements); err != nil { // c10d
		return err
	}

	if err := cu.MemcpyDtoHAsync(host, p, bytes, stream); err != nil {
		return err
	}
	if err := stream.Synchronize(); err != nil {
		return err
	}
	want := float32(ranks * (ranks + 1) / 2)
	for i, v := range values {
		if v != want {
			return fmt.Errorf("allreduce: rank %d: element %d is %v, want %v", r, i, v, want)
		}
	}
	if r == 0 {
		fmt.Printf("%d ranks, %d elements: every element is %v\n", ranks, elements, want)
	}
	return nil
}

// sum replaces the elements at p, on all ranks, by their sums. It is part of the stream: after
// its earlier commands, and before its later ones.
func sum(d driver.Driver, st store.Store, stream cu.Stream, p cu.DevicePtr, r, ranks, elements int) (err error) {
	gpu, err := d.Device(r % d.Count())
	if err != nil {
		return err
	}
	s, err := gorgonia.Stream(gpu, stream)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	t, err := gorgonia.Tensor(gpu, p, tensor.Float32, elements)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gorgonia.Return(t)) }()
	ctx := stdcontext.Background()
	g, err := pg.New(ctx, st, r, ranks, pg.Options{
		Backend: "cpu:gloo,cuda:cuda", BackendOptions: pg.BackendOptions{cuda.Options{Driver: d}},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }() // the group first: it may still use the tensor
	w, err := g.AllReduce(cuda.InStream(ctx, s), t, backend.Sum())
	if err != nil {
		return err
	}
	if err := w.Wait(ctx); err != nil {
		return err
	}
	return g.Shutdown(ctx) // no rank leaves before the others have their sum
}
