// Command nccl is a rank of a PyTorch job on GPUs. Python's ranks train (trainer.py). This one gets the parameters after
// each epoch, which a broadcast on the GPUs brings, and evaluates. See README.md.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{
		Backend: "nccl", PyTorch: true, BackendOptions: pg.BackendOptions{nccl.Options{}},
	}})
	if err != nil {
		return err
	}
	defer g.Close()
	local, _ := strconv.Atoi(os.Getenv("LOCAL_RANK"))
	all, err := cuda.Default()
	if err != nil {
		return err
	}
	gpu, err := all.Device(local)
	if err != nil {
		return err
	}
	s, err := gpu.NewStream(driver.StreamOptions{})
	if err != nil {
		return err
	}
	defer s.Close()
	// Python makes a group of the ranks that train. All ranks take part in that.
	trainers := make([]int, g.Size()-1)
	for r := range trainers {
		trainers[r] = r
	}
	if _, err := g.NewGroup(ctx, trainers); err != nil {
		return err
	}
	in := cuda.InStream(ctx, s)
	params, err := cuda.ToDevice(ctx, all, s, make([]float32, 2))
	if err != nil {
		return err
	}
	for epoch := range 5 {
		// The parameters of rank 0: a slope and an offset.
		if err := pg.Wait(g.Broadcast(in, params, 0)); err != nil {
			return err
		}
		p, err := cuda.ToHost[float32](ctx, all, s, params)
		if err != nil {
			return err
		}
		loss := evaluate(p[0], p[1])
		fmt.Printf("epoch %d: y = %.3fx + %.3f, mean squared error %.5f\n", epoch, p[0], p[1], loss)
		// All ranks hear of it.
		report, err := cuda.ToDevice(ctx, all, s, []float32{loss})
		if err != nil {
			return err
		}
		if err := pg.Wait(g.Broadcast(in, report, g.Size()-1)); err != nil {
			return err
		}
		if err := free(report); err != nil {
			return err
		}
	}
	return free(params)
}

// evaluate returns the error of a line on points of y = 3x + 1.
func evaluate(slope, offset float32) (loss float32) {
	const n = 100
	for i := range n {
		x := float32(i) / n
		d := slope*x + offset - (3*x + 1)
		loss += d * d / n
	}
	return loss
}

// free frees a tensor of cuda.ToDevice.
func free(t *tensor.Tensor) error { return t.Memory().(driver.Memory).Close() }
