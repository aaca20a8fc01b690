package edges_test

import (
	"context"
	"fmt"
	"log"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
)

// A tensor goes to the host in two halves, is changed there, and comes back,
// between what the caller's stream does with it before and afterwards.
func Example() {
	d, err := sim.Open(sim.Config{})
	check(err)
	gpu, err := d.Device(0)
	check(err)
	stream := func(name string) driver.Stream {
		s, err := gpu.NewStream(driver.StreamOptions{Name: name})
		check(err)
		return s
	}
	caller, down, up := stream("caller"), stream("down"), stream("up")
	const n, half = 1024, 512
	grad, err := gpu.Alloc(n)
	check(err)
	staging, err := d.AllocHost(n)
	check(err)

	t := edges.New(d)
	t.Trace = func(e edges.Edge) { fmt.Printf("%s waits for %s: operation %d for %d\n", e.On, e.FromOn, e.To, e.From) }
	host, err := t.Host("host")
	check(err)

	check(caller.Memset(grad.Ptr(), 20, n)) // the tracker does not see this
	b := t.Batch()
	b.Before(caller, driver.Writes(grad.Ptr(), n))
	var turns [2]int
	for i := range turns {
		at := driver.Ptr(i * half)
		b.Copy(down, staging.Ptr()+at, grad.Ptr()+at, half)
		turns[i] = b.Host(host, driver.Writes(staging.Ptr()+at, half))
		b.Copy(up, grad.Ptr()+at, staging.Ptr()+at, half)
	}
	b.After(caller, driver.Reads(grad.Ptr(), n))
	p, err := b.Run() // everything is enqueued, nothing has been waited for
	check(err)
	check(caller.Copy(staging.Ptr(), grad.Ptr(), n))
	end, err := caller.Record()
	check(err)

	ctx := context.Background()
	for i, turn := range turns {
		check(p.Begin(ctx, turn))
		for j := range half {
			staging.Bytes()[i*half+j]++
		}
		p.End(turn)
	}
	check(p.Sync(ctx))
	check(end.Sync(ctx))
	fmt.Println(staging.Bytes()[0], staging.Bytes()[n-1])

	end.Release()
	p.Release()
	check(t.Close())
	for _, c := range []interface{ Close() error }{caller, down, up, grad, staging} {
		check(c.Close())
	}
	fmt.Println("wrong:", d.Close())
	// Output:
	// down waits for caller: operation 1 for 0
	// host waits for down: operation 2 for 1
	// up waits for host: operation 3 for 2
	// host waits for down: operation 5 for 4
	// up waits for host: operation 6 for 5
	// caller waits for up: operation 7 for 6
	// 21 21
	// wrong: <nil>
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
