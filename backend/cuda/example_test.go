package cuda_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// Two ranks average gradients that are in device memory. The devices are
// simulated; on a machine with GPUs cuda.Default has them, and nothing else changes.
func Example() {
	machine, err := sim.New(sim.Config{Devices: 2})
	check(err)
	st := store.NewHash()
	defer st.Close()
	var ranks sync.WaitGroup
	for rank := range 2 {
		ranks.Go(func() {
			ctx := context.Background()
			d, err := machine.Process(fmt.Sprint("rank ", rank))
			check(err)
			g, err := pg.New(ctx, st, rank, 2, pg.Options{
				Backend: "cpu:gloo,cuda:cuda", BackendOptions: []backend.SpecificOptions{cuda.Options{Driver: d}},
			})
			check(err)
			check(train(ctx, g, d, rank))
			check(g.Close())
		})
	}
	ranks.Wait()
	fmt.Println("wrong:", machine.Close())
	// Output:
	// every gradient is 0x0303
	// wrong: <nil>
}

func train(ctx context.Context, g *pg.ProcessGroup, d driver.Driver, rank int) error {
	gpu, err := d.Device(rank)
	if err != nil {
		return err
	}
	stream, err := gpu.NewStream(driver.StreamOptions{})
	if err != nil {
		return err
	}
	defer stream.Close()
	mem, err := gpu.Alloc(1000)
	if err != nil {
		return err
	}
	defer mem.Close()
	grad, err := tensor.OnDevice(tensor.Uint16, mem, 500)
	if err != nil {
		return err
	}
	host, err := d.AllocHost(1000)
	if err != nil {
		return err
	}
	defer host.Close()

	// The backward pass, the sum, and what comes after it are only enqueued.
	if err := stream.Memset(mem.Ptr(), byte(rank+1), 1000); err != nil {
		return err
	}
	w, err := g.AllReduce(cuda.WithStreams(ctx, stream), []*tensor.Tensor{grad}, backend.AllReduceOptions{})
	if err != nil {
		return err
	}
	if err := w.Synchronize(stream); err != nil {
		return err
	}
	if err := stream.Copy(host.Ptr(), mem.Ptr(), 1000); err != nil {
		return err
	}
	done, err := stream.Record()
	if err != nil {
		return err
	}
	defer done.Release()
	if err := done.Sync(ctx); err != nil {
		return err
	}
	if rank == 0 {
		fmt.Printf("every gradient is %#04x\n", uint16(host.Bytes()[0])|uint16(host.Bytes()[999])<<8)
	}
	return w.Wait(ctx)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
