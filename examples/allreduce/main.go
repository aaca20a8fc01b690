// Command allreduce is the smallest complete program: every rank adds up a
// vector with the others and prints the sum.
//
//	go run ./cmd/c10d run -n 3 -- go run ./examples/allreduce
//	torchrun --no-python --nproc-per-node 3 ./allreduce
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/c10d-go/c10d/pg"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer, o ...pg.InitOptions) error {
	g, err := pg.Init(ctx, "env://", o...) // rank, size and address from the launcher's environment
	if err != nil {
		return err
	}
	defer g.Close()

	v := []float32{float32(g.Rank()), 0.5}            // every rank has its own
	w, err := g.AllReduce(ctx, pg.Slice(v), pg.Sum()) // without a copy
	if err != nil {
		return err // the call was wrong: nothing was sent
	}
	// ... compute something else meanwhile ...
	if err := w.Wait(ctx); err != nil {
		return err // what happened on the wire; names the operation and the rank at fault
	}
	fmt.Fprintf(out, "rank %d of %d has %v\n", g.Rank(), g.Size(), v)
	return nil
}
