package simulate_test

import (
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/simulate"
)

func Example() {
	job := simulate.Job{Network: simulate.Network{Latency: 10 * time.Microsecond, Bandwidth: 1e9}}
	call := plan.Call{Size: 256, Bytes: 1 << 20, Elem: 4}
	for _, name := range []string{"ring", "halving-doubling", "binomial"} {
		a, err := plan.Lookup(plan.OpAllReduce, name)
		if err != nil {
			panic(err)
		}
		r, err := simulate.Run(context.Background(), job, a, call)
		if err != nil {
			panic(err)
		}
		fmt.Println(name, r.Time.Round(time.Microsecond), r.Messages, "messages")
	}
	// Output:
	// ring 7.189ms 130560 messages
	// halving-doubling 2.249ms 4096 messages
	// binomial 16.937ms 510 messages
}
