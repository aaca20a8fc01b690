package plan_test

import (
	"fmt"

	"github.com/c10d-go/c10d/internal/plan"
)

func Example() {
	// Rank 1 of three gathers eight bytes from each.
	fmt.Print(plan.GatherV(1, 1, []int64{8, 8, 8}))
	// Output:
	// requests 2, scratch 0
	// recv   #0 from 0 out[0:8]
	// recv   #1 from 2 out[16:24]
	// copy   out[8:16] in[0:8]
	// wait   #0
	// wait   #1
}
