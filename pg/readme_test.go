package pg_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/pg"
)

// Example is the program in README.md, in a job of one rank.
func Example() {
	defer launched()()
	// README.md:
	ctx := context.Background()
	g, err := pg.Init(ctx, "env://") // rank, size and address from the launcher
	if err != nil {
		log.Fatal(err)
	}
	defer g.Close()
	sum := []float32{float32(g.Rank())} // in place: the rank before, the sum of all ranks after
	if err := pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum())); err != nil {
		log.Fatal(err) // names the operation and the rank at fault
	}
	fmt.Printf("rank %d of %d: the sum is %v\n", g.Rank(), g.Size(), sum[0])
	// Output: rank 0 of 1: the sum is 0
}

// launched sets the environment of a job of one rank and returns what undoes it.
func launched() (undo func()) {
	addr, err := freeport.Reserve()
	if err != nil {
		log.Fatal(err)
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		log.Fatal(err)
	}
	env := map[string]string{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": port}
	for name, value := range env {
		os.Setenv(name, value)
	}
	return func() {
		for name := range env {
			os.Unsetenv(name)
		}
	}
}
