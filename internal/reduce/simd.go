//go:build (amd64 || arm64) && !purego

package reduce

import "github.com/c10d-go/c10d/tensor"

//go:generate go run -C asm .

// loops are loops in assembly. Each takes whole steps, at any address.
type loops map[tensor.DType]map[Kind]func(dst, src []byte)

// addBitwise adds the loops that serve integers of every width.
func (l loops) addBitwise(and, or, xor func(dst, src []byte)) {
	for _, d := range tensor.DTypes() {
		if d.IsInteger() {
			if l[d] == nil {
				l[d] = make(map[Kind]func(dst, src []byte))
			}
			l[d][BAnd], l[d][BOr], l[d][BXor] = and, or, xor
		}
	}
}

// kernels returns the functions that run the loops.
func (l loops) kernels() map[pair]Func {
	t := make(map[pair]Func)
	for d, kinds := range l {
		for k, loop := range kinds {
			t[pair{k, d}] = stepped(d.Size(), loop)
		}
	}
	return t
}
