package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store/tcp"
)

// Three ranks, here as goroutines. A launcher starts them as processes and sets
// the environment for each; what differs between them is given as options here.
func Example() {
	const size = 3
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out [size]bytes.Buffer
	var ranks errgroup.Group
	for rank := range size {
		ranks.Go(func() error {
			return run(ctx, &out[rank], pg.InitOptions{Rank: rank, Size: size})
		})
	}
	if err := ranks.Wait(); err != nil {
		fmt.Println(err)
	}
	for rank := range size {
		fmt.Print(&out[rank])
	}
	// Output:
	// rank 0 of 3 has [3 1.5]
	// rank 1 of 3 has [3 1.5]
	// rank 2 of 3 has [3 1.5]
}

// TestMain plays the launcher: it hosts the store and says so.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		server, err := tcp.Listen(context.Background(), "127.0.0.1:0")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer server.Close()
		host, port, err := net.SplitHostPort(server.Addr().String())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		os.Setenv("MASTER_ADDR", host)
		os.Setenv("MASTER_PORT", port)
		os.Setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
		return m.Run()
	}())
}
