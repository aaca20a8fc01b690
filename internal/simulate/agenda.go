package simulate

// agenda is a heap of events by time. Events of one time are ordered by their rank, then by
// the order in which they were entered, so ties do not depend on how far ranks ran ahead.
// The field what is a rank or, inverted, a transfer. A node has four children: the heap is
// half as deep as a binary one, and the four are adjacent in memory.
type agenda struct {
	events []event
	count  uint64
}

type event struct {
	at    ps
	order uint64
	what  int32
}

func (a *event) before(b *event) bool { return a.at < b.at || a.at == b.at && a.order < b.order }

func (h *agenda) len() int { return len(h.events) }

// top returns the earliest time; there must be one.
func (h *agenda) top() ps { return h.events[0].at }

func (h *agenda) push(at ps, rank, what int32) {
	h.count++
	e := event{at, uint64(rank)<<40 | h.count&(1<<40-1), what}
	h.events = append(h.events, e)
	i := len(h.events) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !e.before(&h.events[up]) {
			break
		}
		h.events[i] = h.events[up]
		i = up
	}
	h.events[i] = e
}

func (h *agenda) pop() (at ps, what int32) {
	first := h.events[0]
	last := len(h.events) - 1
	e := h.events[last]
	h.events = h.events[:last]
	if last == 0 {
		return first.at, first.what
	}
	for i := 0; ; {
		least, end := 4*i+1, min(4*i+5, last)
		if least >= last {
			h.events[i] = e
			break
		}
		for c := least + 1; c < end; c++ {
			if h.events[c].before(&h.events[least]) {
				least = c
			}
		}
		if !h.events[least].before(&e) {
			h.events[i] = e
			break
		}
		h.events[i] = h.events[least]
		i = least
	}
	return first.at, first.what
}
