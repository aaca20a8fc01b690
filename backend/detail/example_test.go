package detail_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// Two ranks whose tensors have as many bytes, but not the same dtype: without
// the check they would add the bits of whole numbers to those of fractions.
func Example() {
	ctx := context.Background()
	j := pgtest.NewJob(2) // over memory; pg.Init and TORCH_DISTRIBUTED_DEBUG=DETAIL do the same
	defer j.Close()
	said := make([]string, 2)
	var ranks sync.WaitGroup
	for r := range 2 {
		ranks.Go(func() {
			o := j.Options()
			o.Detail = true
			g, err := pg.New(ctx, j.Store, r, 2, o)
			if err != nil {
				panic(err)
			}
			defer g.Close()
			t, err := tensor.New([]tensor.DType{tensor.Float32, tensor.Int32}[r], 5)
			if err != nil {
				panic(err)
			}
			_, err = g.AllReduce(ctx, t, pg.Sum())
			var mismatch *detail.MismatchError
			if errors.As(err, &mismatch) {
				said[r] = fmt.Sprintf("rank %d differs: %v", mismatch.Peer(), err)
			}
		})
	}
	ranks.Wait()
	fmt.Println(said[0])
	fmt.Println(said[1])
	// Output:
	// rank 1 differs: detail: ranks disagree on the operation: rank 0 of group "0" calls all_reduce with sum of float32 [5] on cpu, but rank 1 calls all_reduce with sum of int32 [5] on cpu
	// rank 0 differs: detail: ranks disagree on the operation: rank 1 of group "0" calls all_reduce with sum of int32 [5] on cpu, but rank 0 calls all_reduce with sum of float32 [5] on cpu
}
