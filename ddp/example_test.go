package ddp_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// line is the model y = weight*x + bias.
type line struct {
	weight, bias         []float32
	weightGrad, biasGrad []float32
}

// train fits the line to this rank's part of the points (x, 3x-1).
func train(ctx context.Context, g *pg.ProcessGroup) (*line, error) {
	m := &line{[]float32{float32(g.Rank())}, []float32{0}, []float32{0}, []float32{0}}
	params, err := ddp.Params([][]float32{m.weight, m.bias}, [][]float32{m.weightGrad, m.biasGrad})
	if err != nil {
		return nil, err
	}
	d, err := ddp.New(ctx, g, params)
	if err != nil {
		return nil, err
	}
	for range 200 {
		if err := d.Begin(ctx); err != nil {
			return nil, err
		}
		var dw, db float32
		for i := g.Rank(); i < 8; i += g.Size() {
			x := float32(i) / 4
			diff := m.weight[0]*x + m.bias[0] - (3*x - 1)
			dw += diff * x
			db += diff
		}
		m.biasGrad[0] = db
		if err := d.Ready(1); err != nil {
			return nil, err
		}
		m.weightGrad[0] = dw
		if err := d.Ready(0); err != nil {
			return nil, err
		}
		if err := d.Finish(ctx); err != nil {
			return nil, err
		}
		m.weight[0] -= 0.2 * m.weightGrad[0]
		m.bias[0] -= 0.2 * m.biasGrad[0]
	}
	return m, nil
}

// Two ranks fit one line, each with half of the points. They are goroutines
// here; ranks of a real job are processes that call pg.Init.
func Example() {
	ctx := context.Background()
	job := pgtest.NewJob(2)
	defer job.Close()
	models := make([]*line, job.Size)
	var wg sync.WaitGroup
	for rank := range models {
		wg.Go(func() {
			g, err := job.Join(ctx, rank)
			if err != nil {
				log.Print(err)
				return
			}
			defer g.Close()
			if models[rank], err = train(ctx, g); err != nil {
				log.Print(err)
			}
		})
	}
	wg.Wait()
	for rank, m := range models {
		fmt.Printf("rank %d: y = %.3fx %+.3f\n", rank, m.weight[0], m.bias[0])
	}
	fmt.Println("equal:", models[0].weight[0] == models[1].weight[0] && models[0].bias[0] == models[1].bias[0])
	// Output:
	// rank 0: y = 3.000x -1.000
	// rank 1: y = 3.000x -1.000
	// equal: true
}

// Gradients may be written where they are reduced from.
func ExampleDDP_GradView() {
	g := newInstant() // a group of one rank
	value, err := tensor.New(tensor.Float32, 3)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	d, err := ddp.New(ctx, g, []ddp.Param{{Name: "w", Value: value}}, ddp.Options{GradientAsBucketView: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := d.Begin(ctx); err != nil {
		log.Fatal(err)
	}
	grad, err := tensor.Data[float32](d.GradView(0))
	if err != nil {
		log.Fatal(err)
	}
	copy(grad, []float32{1, 2, 3}) // the backward pass
	if err := d.Ready(0); err != nil {
		log.Fatal(err)
	}
	if err := d.Finish(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(grad)
	// Output: [1 2 3]
}

// Each of two ranks keeps the momentum of half of the parameters.
func ExampleNewShardedOptimizer() {
	ctx := context.Background()
	job := pgtest.NewJob(2)
	defer job.Close()
	said := make([]string, job.Size)
	var wg sync.WaitGroup
	for rank := range said {
		wg.Go(func() {
			g, err := job.Join(ctx, rank)
			if err != nil {
				log.Print(err)
				return
			}
			defer g.Close()
			values, grads := [][]float32{{1, 2, 3}, {4}}, [][]float32{make([]float32, 3), make([]float32, 1)}
			params, err := ddp.Params(values, grads)
			if err != nil {
				log.Print(err)
				return
			}
			var momentum []float32
			o, err := ddp.NewShardedOptimizer(ctx, g, params, func(values, grads []float32) error {
				if momentum == nil {
					momentum = make([]float32, len(values))
				}
				for i, g := range grads {
					momentum[i] = 0.9*momentum[i] + g
					values[i] -= 0.5 * momentum[i]
				}
				return nil
			})
			if err != nil {
				log.Print(err)
				return
			}
			for range 2 {
				grads[0][0], grads[1][0] = float32(rank), 2 // the backward pass
				if err := o.Step(ctx); err != nil {
					log.Print(err)
					return
				}
			}
			said[rank] = fmt.Sprintf("rank %d: %v, momentum of %d elements", rank, values, len(momentum))
		})
	}
	wg.Wait()
	fmt.Println(said[0])
	fmt.Println(said[1])
	// Output:
	// rank 0: [[0.275 2 3] [1.1]], momentum of 2 elements
	// rank 1: [[0.275 2 3] [1.1]], momentum of 2 elements
}
