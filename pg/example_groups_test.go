package pg_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// Without a launcher, the URL or InitOptions say where the ranks meet and which rank this is. The
// two ranks are goroutines here, and processes in a real job.
func ExampleInit() {
	addr, err := freeport.Reserve() // a real job has a port of its own
	if err != nil {
		log.Fatal(err)
	}
	sums := make([]float32, 2)
	var wg sync.WaitGroup
	for rank := range sums {
		wg.Go(func() {
			ctx := context.Background()
			g, err := pg.Init(ctx, fmt.Sprintf("tcp://%s?rank=%d&world_size=2", addr, rank))
			if err != nil {
				log.Print(err)
				return
			}
			defer g.Close()
			sum := []float32{float32(rank + 1)}
			if err := pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum())); err != nil {
				log.Print(err)
			}
			sums[rank] = sum[0]
		})
	}
	wg.Wait()
	fmt.Println(sums)
	// Output: [3 3]
}

// New makes a group in a store that the program has opened.
func ExampleNew() {
	ctx := context.Background()
	server, err := tcp.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	said := make([]string, 2)
	var wg sync.WaitGroup
	for rank := range said {
		wg.Go(func() {
			st, err := tcp.New(ctx, server.Addr().String())
			if err != nil {
				log.Print(err)
				return
			}
			defer st.Close()
			g, err := pg.New(ctx, st, rank, len(said))
			if err != nil {
				log.Print(err)
				return
			}
			defer g.Close()
			all, err := pg.AllGatherObject(ctx, g, fmt.Sprintf("rank %d", g.Rank()))
			if err != nil {
				log.Print(err)
				return
			}
			said[rank] = strings.Join(all, " and ")
		})
	}
	wg.Wait()
	fmt.Println(strings.Join(said, "\n"))
	// Output:
	// rank 0 and rank 1
	// rank 0 and rank 1
}

// Rank 0 sends a matrix to rank 1.
func ExampleProcessGroup_Send() {
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		m := make([]int32, 4)
		t, err := tensor.Of(m, 2, 2)
		if err != nil {
			return "", err
		}
		tag := pg.P2POptions{Tag: 7} // the receiver gives the same tag
		if g.Rank() == 0 {
			copy(m, []int32{1, 2, 3, 4})
			w, err := g.Send(ctx, t, 1, tag)
			if err != nil {
				return "", err
			}
			return "rank 0 has sent", w.Wait(ctx)
		}
		w, err := g.Recv(ctx, t, 0, tag)
		if err != nil {
			return "", err
		}
		err = w.Wait(ctx)
		return fmt.Sprint("rank 1 has ", m), err
	})
	// Output:
	// rank 0 has sent
	// rank 1 has [1 2 3 4]
}

// Every rank calls NewGroup. Those that are not in the list get a group of which they are no member.
func ExampleProcessGroup_NewGroup() {
	ranks(3, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		ends, err := g.NewGroup(ctx, []int{0, 2})
		if err != nil {
			return "", err
		}
		sum := []int32{int32(g.Rank())}
		err = pg.Wait(ends.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
		if errors.Is(err, pg.ErrNotMember) {
			return fmt.Sprintf("rank %d is no member", g.Rank()), nil
		}
		return fmt.Sprintf("rank %d is rank %d of %d: %d", g.Rank(), ends.Rank(), ends.Size(), sum[0]), err
	})
	// Output:
	// rank 0 is rank 0 of 2: 2
	// rank 1 is no member
	// rank 2 is rank 1 of 2: 2
}

// The ranks of each colour make a group. The key orders them: here the highest rank comes first.
func ExampleProcessGroup_Split() {
	ranks(4, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		part, err := g.Split(ctx, g.Rank()%2, -g.Rank())
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("rank %d is rank %d of %v", g.Rank(), part.Rank(), part.Ranks()), nil
	})
	// Output:
	// rank 0 is rank 1 of [2 0]
	// rank 1 is rank 1 of [3 1]
	// rank 2 is rank 0 of [2 0]
	// rank 3 is rank 0 of [3 1]
}

// Operations use memory from Alloc without an intermediate copy. It is not the garbage collector's.
func ExampleProcessGroup_Alloc() {
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		t, err := g.Alloc(ctx, tensor.Float32, 3)
		if err != nil {
			return "", err
		}
		defer g.Free(t)
		v, err := tensor.Data[float32](t)
		if err != nil {
			return "", err
		}
		v[g.Rank()] = 1
		w, err := g.AllReduce(ctx, t, pg.Sum())
		if err != nil {
			return "", err
		}
		err = w.Wait(ctx)
		return fmt.Sprint(v), err
	})
	// Output:
	// [1 1 0]
	// [1 1 0]
}

// A process joins a group of two ranks that run. They see it in Pending and take it in.
func ExampleJoin() {
	ctx, j := context.Background(), pgtest.NewJob(2)
	defer j.Close()
	o := j.Options()
	o.Elastic = true
	step := func(g *pg.ProcessGroup) string {
		sum := []int32{1}
		if err := pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum())); err != nil {
			return err.Error()
		}
		return fmt.Sprintf("rank %d of %d: %d", g.Rank(), g.Size(), sum[0])
	}
	said := make([]string, 3)
	var wg sync.WaitGroup
	for rank := range j.Size {
		wg.Go(func() {
			g, err := pg.New(ctx, j.Store, rank, j.Size, o)
			if err != nil {
				log.Print(err)
				return
			}
			defer g.Close()
			if _, err := g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 3}); err != nil { // waits for the third
				log.Print(err)
				return
			}
			said[rank] = step(g)
		})
	}
	wg.Go(func() {
		g, err := pg.Join(ctx, j.Store, o)
		if err != nil {
			log.Print(err)
			return
		}
		defer g.Close()
		said[g.Rank()] = step(g)
	})
	wg.Wait()
	for _, s := range said {
		fmt.Println(s)
	}
	// Output:
	// rank 0 of 3: 3
	// rank 1 of 3: 3
	// rank 2 of 3: 3
}
