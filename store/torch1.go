package store

// PyTorch up to 2.0 has other names for keys, another form of addresses, and another protocol of its TCP store than
// PyTorch since 2.2. It is called torch1. A package that has something for it has it in a file of this name.

// IsTorch1 reports whether the keys of s are for ranks of PyTorch up to 2.0: s has a method IsTorch1 that says so.
// It is so for a TCP server of that PyTorch, and for the store that a process group gives its backends if such
// ranks are in the group.
func IsTorch1(s Store) bool {
	t, ok := s.(interface{ IsTorch1() bool })
	return ok && t.IsTorch1()
}

func (p *prefixed) IsTorch1() bool { return IsTorch1(p.inner) }
