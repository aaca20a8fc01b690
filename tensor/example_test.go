package tensor_test

import (
	"fmt"
	"log"

	"github.com/c10d-go/c10d/tensor"
)

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

func ExampleOf() {
	grad := []float32{1, 2, 3, 4, 5, 6}
	t := must(tensor.Of(grad, 2, 3))
	grad[0] = 10 // the tensor sees the caller's memory
	fmt.Println(t)
	fmt.Printf("%+v\n", t)
	// Output:
	// float32[2 3]
	// float32[2 3]
	// [[10,  2,  3],
	//  [ 4,  5,  6]]
}

func ExampleTensor_Transpose() {
	t := must(tensor.Of([]int64{0, 1, 2, 3, 4, 5}, 2, 3))
	v := must(t.Transpose(0, 1))
	fmt.Println(v, v.Strides(), v.IsContiguous())

	// Go slices need adjacent elements: a view is copied first.
	fmt.Println(must(tensor.Data[int64](must(v.Contiguous()))))
	// Output:
	// int64[3 2] [1 3] false
	// [0 3 1 4 2 5]
}

func ExampleTensor_Unpack() {
	grid := make([]uint8, 12)
	column := must(must(tensor.Of(grid, 3, 4)).Select(1, 2))
	if err := column.Unpack([]byte{7, 8, 9}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(grid)
	// Output: [0 0 7 0 0 0 8 0 0 0 9 0]
}

func ExampleSumSparse() {
	// Two ranks' gradients of an embedding of five rows, two numbers each.
	rank0 := must(tensor.Sparse(
		must(tensor.Of([]int64{3, 0}, 1, 2)),
		must(tensor.Of([]float32{1, 1, 2, 2}, 2, 2)), 5, 2))
	rank1 := must(tensor.Sparse(
		must(tensor.Of([]int64{3}, 1, 1)),
		must(tensor.Of([]float32{10, 20}, 1, 2)), 5, 2))
	sum := must(tensor.SumSparse(rank0, rank1))
	fmt.Printf("%+v\n", sum)
	// Output:
	// float32[5 2] sparse_coo
	// indices int64[1 2]
	// [[0, 3]]
	// values float32[2 2]
	// [[ 2,  2],
	//  [11, 21]]
}

func ExampleBF16From() {
	h := tensor.BF16From(3.14159)
	fmt.Printf("%#x %v\n", uint16(h), h.Float32())
	// Output: 0x4049 3.140625
}

func ExampleTensor_AsStrided() {
	t := must(tensor.Of([]int32{0, 1, 2, 3, 4}, 5))
	windows := must(t.AsStrided([]int{3, 3}, []int{1, 1}, 0))
	fmt.Printf("%+v\n%v\n", windows, windows.HasOverlap())
	_, err := t.AsStrided([]int{4, 3}, []int{1, 1}, 0)
	fmt.Println(err)
	// Output:
	// int32[3 3]
	// [[0, 1, 2],
	//  [1, 2, 3],
	//  [2, 3, 4]]
	// true
	// tensor: AsStrided: shape [4 3] with strides [1 1] at 0 leaves the storage of 5 elements
}
