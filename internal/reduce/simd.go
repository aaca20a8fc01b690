//go:build (amd64 || arm64) && !purego

package reduce

import "github.com/c10d-go/c10d/tensor"

//go:generate go run -C asm .

// Loops in assembly need no alignment: bounded calls them as loops over bytes.
type loops = map[tensor.DType]map[Kind]func(dst, src []byte)

// tabled returns the kernels that run loops.
func tabled(all loops) map[pair]Func {
	t := make(map[pair]Func)
	for d, loops := range all {
		for k, loop := range loops {
			t[pair{k, d}] = bounded(d.Size(), loop)
		}
	}
	return t
}
