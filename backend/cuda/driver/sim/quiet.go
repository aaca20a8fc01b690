package sim

// What Config.Quiet hides from Go's race detector.

//go:norace
func quietCopy(dst, src []byte) {
	for i := range dst {
		dst[i] = src[i]
	}
}

//go:norace
func quietFill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// fill sets b.
func (m *Machine) fill(b []byte, v byte) {
	if m.cfg.Quiet {
		quietFill(b, v)
		return
	}
	for i := range b {
		b[i] = v
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
