// Command kernel launches a kernel of its own on two devices, and sums the results over
// them. It shows how a program with CUDA kernels uses this library's collectives.
//
//	go run ./examples/kernel             on GPUs in software
//	go run ./examples/kernel -device cuda
//
// The ranks are goroutines here, each with a stream; examples/ddp has them in
// processes, and trains.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// squares(x *u32, n u32, first u32) sets x[i] to the square of first + i.
//
//go:embed squares.ptx
var squares []byte

// onCPU is the kernel as the simulator runs it: once for a launch, for all threads.
func onCPU(k *sim.Run) error {
	n, first := k.Uint32(1), k.Uint32(2)
	x := sim.Slice[uint32](k.Write(k.Ptr(0), 4*int(n)))
	for i := range x {
		x[i] = (first + uint32(i)) * (first + uint32(i))
	}
	return nil
}

const elements = 1000

func main() {
	where := flag.String("device", "sim", "`kind` of device that runs the kernel: sim or cuda")
	flag.Parse()
	sums, err := run(*where, 2)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(sums[:4], "...", sums[elements-1])
}

func run(where string, ranks int) (sums []uint32, err error) {
	var d driver.Driver
	switch where {
	case "sim":
		d, err = sim.Open(sim.Config{Devices: ranks, Kernels: map[string]sim.Kernel{"squares": onCPU}})
	case "cuda":
		d, err = cuda.Default()
	default:
		err = fmt.Errorf("%q must be sim or cuda", where)
	}
	if err != nil {
		return nil, fmt.Errorf("kernel: -device: %w", err)
	}
	st := store.NewHash()
	defer st.Close()
	results, errs := make([][]uint32, ranks), make([]error, ranks)
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() { results[r], errs[r] = rank(context.Background(), d, st, r, ranks) })
	}
	wg.Wait()
	if where == "sim" {
		errs = append(errs, d.Close()) // says what was not ordered or not closed
	}
	return results[0], errors.Join(errs...)
}

// rank is what every rank does: launch, sum, read.
func rank(ctx context.Context, d driver.Driver, st store.Store, r, ranks int) (sums []uint32, err error) {
	g, err := pg.New(ctx, st, r, ranks, pg.Options{
		Backend: "cpu:gloo,cuda:cuda", BackendOptions: pg.BackendOptions{cuda.Options{Driver: d}},
	})
	if err != nil {
		return nil, err
	}
	var open []interface{ Close() error }
	defer func() {
		err = errors.Join(err, g.Close())
		for _, c := range open {
			err = errors.Join(err, c.Close())
		}
	}()
	gpu, err := d.Device(r % d.Count())
	if err != nil {
		return nil, err
	}
	stream, err := gpu.NewStream(driver.StreamOptions{Name: fmt.Sprint("rank ", r)})
	if err != nil {
		return nil, err
	}
	mem, err := gpu.Alloc(4 * elements)
	if err != nil {
		return nil, errors.Join(err, stream.Close())
	}
	host, err := d.AllocHost(4 * elements)
	if err != nil {
		return nil, errors.Join(err, stream.Close(), mem.Close())
	}
	module, err := gpu.Load(squares)
	if err != nil {
		return nil, errors.Join(err, stream.Close(), mem.Close(), host.Close())
	}
	open = append(open, stream, mem, host, module)
	kernel, err := module.Function("squares")
	if err != nil {
		return nil, err
	}

	// Args are in the order of the kernel's parameters. The simulator fails a kernel that
	// uses other memory than Access declares.
	err = stream.Launch(&driver.Launch{
		Function: kernel, Grid: driver.Dim{X: (elements + 255) / 256}, Block: driver.Dim{X: 256},
		Args:   new(driver.Args).Ptr(mem.Ptr()).Uint32(elements).Uint32(uint32(r)),
		Access: []driver.Access{driver.Writes(mem.Ptr(), 4*elements)},
	})
	if err != nil {
		return nil, err
	}
	// The sum comes after what the stream has been given, and what the stream is
	// given later comes after the sum. Nothing has waited for the device yet.
	t, err := tensor.OnDevice(tensor.Uint32, mem, elements)
	if err != nil {
		return nil, err
	}
	w, err := g.AllReduce(cuda.WithStreams(ctx, stream), t, pg.Sum())
	if err != nil {
		return nil, err
	}
	if err := w.Synchronize(stream); err != nil {
		return nil, err
	}
	if err := stream.Copy(host.Ptr(), mem.Ptr(), 4*elements); err != nil {
		return nil, err
	}
	copied, err := stream.Record()
	if err != nil {
		return nil, err
	}
	defer copied.Release()
	if err := errors.Join(copied.Sync(ctx), w.Wait(ctx)); err != nil {
		return nil, err
	}
	driver.HostAccess(d, "result", driver.Reads(host.Ptr(), 4*elements))
	all, err := tensor.FromBytes(tensor.Uint32, append([]byte(nil), host.Bytes()...), elements)
	if err != nil {
		return nil, err
	}
	return tensor.Data[uint32](all)
}
