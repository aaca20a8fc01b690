package cuda_test

import (
	"context"
	"fmt"
	"log"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
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
		ranks.Go(func() { train(machine, st, rank) })
	}
	ranks.Wait()
	fmt.Println("wrong:", machine.Close())
	// Output:
	// every gradient is 1.5 1.5
	// wrong: <nil>
}

func train(machine *sim.Machine, st store.Store, rank int) {
	ctx := context.Background()
	d, err := machine.Process(fmt.Sprint("rank ", rank))
	check(err)
	g, err := pg.New(ctx, st, rank, 2, pg.Options{
		Backend: "cpu:gloo,cuda:cuda", BackendOptions: pg.BackendOptions{cuda.Options{Driver: d}},
	})
	check(err)
	defer g.Close()
	gpu, err := d.Device(rank)
	check(err)
	stream, err := gpu.NewStream()
	check(err)
	defer stream.Close()
	grad, err := cuda.ToDevice(ctx, d, stream, slices.Repeat([]float32{float32(rank + 1)}, 500))
	check(err)
	defer cuda.Free(grad)

	// The average, and what comes after it in the stream, are only enqueued.
	w, err := g.AllReduce(ctx, grad, pg.Avg())
	check(err)
	check(w.Synchronize(stream))
	result, err := cuda.ToHost[float32](ctx, d, stream, grad)
	check(err)
	check(w.Wait(ctx))
	if rank == 0 {
		fmt.Println("every gradient is", result[0], result[499])
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
