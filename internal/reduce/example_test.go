package reduce_test

import (
	"encoding/binary"
	"fmt"

	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/tensor"
)

func ExampleKernel() {
	mine := binary.NativeEndian.AppendUint16(nil, uint16(tensor.BF16From(1.5)))
	received := binary.NativeEndian.AppendUint16(nil, uint16(tensor.BF16From(2)))

	add, err := reduce.Kernel(reduce.Sum, tensor.BFloat16)
	if err != nil {
		panic(err)
	}
	add(mine, received)
	fmt.Println(tensor.BF16(binary.NativeEndian.Uint16(mine)).Float32())

	_, err = reduce.Kernel(reduce.BAnd, tensor.BFloat16)
	fmt.Println(err)
	// Output:
	// 3.5
	// reduce: band of bfloat16: bitwise reductions need an integer or bool dtype
}
