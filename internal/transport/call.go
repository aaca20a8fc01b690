package transport

import "fmt"

// Call is a rank's call of a collective. What holds the properties on which all ranks have to
// agree, encoded by the caller. Before is What of the call before. History is a digest of What
// in all calls of the rank up to this one: ranks with the same History have made the same
// calls. The zero Call is never compared.
type Call struct {
	What, Before [2]uint64
	History      uint64
}

// Follow makes c the call after one with this What and History, zero if there was none.
func (c *Call) Follow(before [2]uint64, history uint64) {
	// Each step maps different numbers to different ones: a difference stays for good.
	h := (history ^ c.What[0]) * mixer
	h = (h ^ h>>32 ^ c.What[1]) * mixer
	c.Before, c.History = before, h^h>>32
}

const mixer = 0x9e3779b97f4a7c15 // odd

// Disagreement is the error of ranks that called different operations under one number.
type Disagreement struct {
	Number uint32    // of the collective, counted from 0
	Ranks  [2]int    // ascending
	Calls  [2]string // what each called
	// Earlier says that Calls are the same, and that an earlier call was not. It is no longer
	// known which.
	Earlier bool
}

// Disagree returns the error for two ranks, in any order, and their calls.
func Disagree(number uint32, rank int, call string, other int, otherCall string) *Disagreement {
	if rank > other {
		rank, call, other, otherCall = other, otherCall, rank, call
	}
	return &Disagreement{Number: number, Ranks: [2]int{rank, other}, Calls: [2]string{call, otherCall}}
}

func (d *Disagreement) Error() string {
	if d.Earlier {
		return fmt.Sprintf("transport: the ranks disagree on an operation: rank %d and rank %d both called %s as collective number %d, but an earlier call of theirs differs",
			d.Ranks[0], d.Ranks[1], d.Calls[0], d.Number)
	}
	return fmt.Sprintf("transport: the ranks disagree on the operation: as collective number %d rank %d called %s, rank %d called %s",
		d.Number, d.Ranks[0], d.Calls[0], d.Ranks[1], d.Calls[1])
}
