package sim

import "unsafe"

// What Config.Quiet hides from Go's race detector.

//go:norace
func quietCopy(dst, src []byte) {
	for ; len(dst) >= 8; dst, src = dst[8:], src[8:] {
		*(*uint64)(unsafe.Pointer(&dst[0])) = *(*uint64)(unsafe.Pointer(&src[0]))
	}
	for i := range dst {
		dst[i] = src[i]
	}
}

//go:norace
func quietFill(b []byte, v byte) {
	for word := 0x0101010101010101 * uint64(v); len(b) >= 8; b = b[8:] {
		*(*uint64)(unsafe.Pointer(&b[0])) = word
	}
	for i := range b {
		b[i] = v
	}
}

// fill sets b.
func (m *Machine) fill(b []byte, v byte) {
	if m.cfg.Quiet || len(b) == 0 {
		quietFill(b, v)
		return
	}
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// copy copies src to dst.
func (m *Machine) copy(dst, src []byte) {
	if m.cfg.Quiet {
		quietCopy(dst, src)
		return
	}
	copy(dst, src)
}
