// Command single is a GoMLX program of one process. Command parallel is the same on several ranks.
package main

import (
	"context"
	"fmt"
	"log"
	"math/rand"

	"github.com/c10d-go/c10d/integrations/gomlx"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/dataset"
	"github.com/gomlx/gomlx/ml/layers/fnn"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

func main() {
	backend, store := gobackend.GetBackend(), model.NewStore()
	ds, err := dataset.InMemoryFromData(backend, "points", []any{inputs}, []any{labels})
	if err != nil {
		log.Fatal(err)
	}
	ds.BatchSize(32, true).Shuffle().WithRand(rand.New(rand.NewSource(1))).Infinite(true)
	if err := store.SetRNGStateFromSeed(1); err != nil {
		log.Fatal(err)
	}
	p, err := gomlx.Init(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	trainer := train.NewTrainer(backend, store, network, loss.MeanSquaredError,
		p.Optimizer(optimizer.Adam().LearningRate(0.01).Done()),
		nil, nil)
	loop := p.NewLoop(trainer)
	metrics, err := loop.RunSteps(p.Split(ds), 100)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("loss %.6f\n", metrics[0].Value())
}

func network(scope *model.Scope, x *graph.Node) *graph.Node {
	return fnn.New(scope.In("model"), x, 1).NumHiddenLayers(2, 16).Done()
}

var inputs, labels = points(256)

func points(n int) (x, y [][]float32) {
	rng := rand.New(rand.NewSource(2))
	for range n {
		a, b := rng.Float32(), rng.Float32()
		x, y = append(x, []float32{a, b}), append(y, []float32{a*a - b})
	}
	return x, y
}
