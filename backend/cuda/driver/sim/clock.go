package sim

// clock is a vector clock: for each agent (a stream, or a process's host) how
// many of its steps have happened before. A clock that was published is never
// changed.
type clock []uint32

func (c clock) at(agent int) uint32 {
	if agent < len(c) {
		return c[agent]
	}
	return 0
}

// covers reports whether everything in o is in c.
func (c clock) covers(o clock) bool {
	for i, n := range o {
		if n > c.at(i) {
			return false
		}
	}
	return true
}

// join returns a clock that has what c and o have; c itself if that is enough.
func (c clock) join(o clock) clock {
	if c.covers(o) {
		return c
	}
	n := make(clock, max(len(c), len(o)))
	copy(n, c)
	for i, v := range o {
		n[i] = max(n[i], v)
	}
	return n
}

// with returns a clock that has agent's steps up to n.
func (c clock) with(agent int, n uint32) clock {
	if c.at(agent) >= n {
		return c
	}
	r := make(clock, max(len(c), agent+1))
	copy(r, c)
	r[agent] = n
	return r
}
