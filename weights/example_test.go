package weights_test

import (
	"context"
	"fmt"
	"log"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/weights"
)

// A trainer publishes, and a server uses the newest version. They are processes of different hosts in a real job.
func Example() {
	ctx := context.Background()
	p, err := weights.Listen(ctx, "127.0.0.1:0")
	check(err)
	defer p.Close()
	r, err := weights.Dial(p.Addr(), weights.ReceiverOptions{Name: "server 3"})
	check(err)
	defer r.Close()
	check(p.Await(ctx, 1))

	embedding, err := tensor.Of([]float32{1, 2, 3})
	check(err)
	_, err = p.Publish(ctx, 1, []weights.Named{{Name: "embedding", Tensor: embedding}})
	check(err)

	check(r.Await(ctx, 1))
	v, _ := r.Acquire()
	defer v.Release()
	x, err := tensor.Data[float32](v.Tensor("embedding"))
	fmt.Println(v.Number(), x, err)
	// Output: 1 [1 2 3] <nil>
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
