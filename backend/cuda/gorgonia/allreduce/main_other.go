//go:build !cuda || !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "allreduce: built without CUDA: build it with -tags cuda on Linux, or with make gorgonia")
	os.Exit(1)
}
