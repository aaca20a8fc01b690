package tcp_test

import (
	"context"
	"fmt"
	"log"

	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/store/tcp"
)

// Two ranks, here in one process, meet in a store.
func Example() {
	ctx := context.Background()
	server, err := tcp.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	rank := func(rank int) error {
		s, err := tcp.New(ctx, server.Addr().String(), tcp.Options{WorldSize: 2, Rank: rank})
		if err != nil {
			return err
		}
		defer s.Close()
		if rank == 0 {
			return s.Set(ctx, "greeting", []byte("hello"))
		}
		v, err := s.Get(ctx, "greeting")
		fmt.Printf("rank %d: %s\n", rank, v)
		return err
	}
	var ranks errgroup.Group
	for i := range 2 {
		ranks.Go(func() error { return rank(i) })
	}
	if err := ranks.Wait(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("keys:", server.Stats().Keys) // with the counter of ranks, and a name for each
	// Output:
	// rank 1: hello
	// keys: 4
}
