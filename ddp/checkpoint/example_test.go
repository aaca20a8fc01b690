package checkpoint_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/c10d-go/c10d/ddp/checkpoint"
)

// Rank 0 saves now and then, and after a restart every rank loads the file before the first step.
func ExampleSave() {
	dir, err := os.MkdirTemp("", "checkpoint")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "model")

	type progress struct{ Epoch, Step int }
	weights, momenta := []float32{1, 2}, []float32{0.5, 0.25}
	if err := checkpoint.Save(file, progress{Epoch: 3, Step: 120}, [][]float32{weights, momenta}); err != nil {
		log.Fatal(err)
	}

	var at progress
	state, err := checkpoint.Load(file, &at)
	fmt.Println(at.Epoch, at.Step, state, err)
	// Output: 3 120 [[1 2] [0.5 0.25]] <nil>
}
