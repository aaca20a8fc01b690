package window

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

const (
	// MostRingRanks is how many ranks a ring can connect.
	MostRingRanks = 16

	// RingSlotBytes is how much data a slot of a ring holds.
	RingSlotBytes = 2048

	// ringWordBytes are those of a slot's flag, and of a channel's count.
	ringWordBytes = 4
)

// RingDepth returns the number of slots of a channel of a ring: a power of two, at least the number of ranks. A rank
// sends a tile when it has taken all before. So the tile that was sent as many tiles ago as there are ranks has been
// taken, and its slot is free.
func RingDepth(ranks int) int { return 1 << bits.Len(uint(ranks-1)) }

// RingChannelBytes returns how much device memory a channel of a ring takes.
func RingChannelBytes(ranks int) int {
	return RingDepth(ranks)*(RingSlotBytes+ringWordBytes) + ringWordBytes
}

// Ring is an order of the ranks, the same for all, and what this rank's kernels use. Each rank's device reaches the
// next one's, and that of the last rank the first one's.
type Ring struct {
	Order                []int // ranks
	Place                int   // this rank's
	Slots, Flags, State  driver.Ptr
	NextSlots, NextFlags driver.Ptr // in the memory of the next rank
	Failed, Host         driver.Ptr // as in Own
}

// At returns the rank at a place; places go round.
func (x *Ring) At(place int) int { return x.Order[(place+len(x.Order))%len(x.Order)] }

// Ring returns the window's ring, and how many channels it has. It is for windows that are connected and have one.
func (w *Window) Ring() (x Ring, channels int, ok bool) {
	if channels = w.o.RingChannels; channels == 0 || w.order == nil {
		return x, 0, false
	}
	x = Ring{Order: w.order, Place: slices.Index(w.order, w.o.Rank), Failed: w.Own().Failed, Host: w.host.Ptr()}
	x.Slots, x.Flags, x.State = w.ringAt(w.mem.Ptr())
	x.NextSlots, x.NextFlags, _ = w.ringAt(w.opens[x.At(x.Place+1)].Ptr())
	return x, channels, true
}

func (w *Window) ringAt(base driver.Ptr) (slots, flags, state driver.Ptr) {
	n := driver.Ptr(w.o.RingChannels * RingDepth(w.o.Ranks))
	slots = base + driver.Ptr(w.l.ringAt)
	flags = slots + n*RingSlotBytes
	return slots, flags, flags + n*ringWordBytes
}

// apart is the entry of a rank's links for a rank whose memory it does not reach. Other entries are the ranks of links.
const apart = math.MaxUint16

// survey finds out which other ranks' memory this rank reaches, and how good the links are. It leaves nothing open.
// Where everything is open, it only asks for the links.
func (w *Window) survey(ctx context.Context, all []greeting) (row []byte, err error) {
	for r := range all {
		rank := uint16(0)
		if r != w.o.Rank {
			if w.o.Next {
				reached, err := w.reaches(ctx, all, r)
				if err != nil {
					return nil, err
				}
				if !reached {
					rank = apart
				}
			}
			if rank != apart {
				rank = w.linkTo(all[r].handle.UUID)
			}
		}
		row = binary.LittleEndian.AppendUint16(row, rank)
	}
	return row, nil
}

// reaches reports whether this rank reaches the memory of another one. An error is one of this rank's own device.
func (w *Window) reaches(ctx context.Context, all []greeting, r int) (bool, error) {
	err := w.open(all, r)
	if err == nil {
		err = w.try(ctx, r)
	}
	if w.busy || ctx.Err() != nil {
		return false, cmp.Or(err, ctx.Err())
	}
	if w.opens[r] != nil {
		closed := w.opens[r].Close()
		w.opens[r] = nil
		if closed != nil {
			return false, w.wrap(closed, "letting go of the memory of rank %d", r)
		}
	}
	return err == nil, w.disable()
}

// linkTo returns the rank of the link to a device, 0 if the driver does not see it.
func (w *Window) linkTo(uuid [16]byte) uint16 {
	for i := range w.o.Driver.Count() {
		if v, err := w.o.Driver.Device(i); err == nil && v.Info().UUID == uuid {
			if l, err := w.o.Driver.Link(w.o.Device.ID().Index, i); err == nil {
				return uint16(min(max(l.Rank, 0), apart-1))
			}
		}
	}
	return 0
}

// arrange has the ranks tell each other their links, and finds the order of the ring.
func (w *Window) arrange(ctx context.Context, exchange Exchange, all []greeting) (reason, err error) {
	row, mine := w.survey(ctx, all)
	if mine != nil {
		row = make([]byte, 2*w.o.Ranks)
	}
	reason, told, err := exchange(mine, row)
	if cmp.Or(err, reason) != nil {
		return reason, err
	}
	links := make([][]uint16, w.o.Ranks)
	for r, b := range told {
		for ; len(b) > 0; b = b[2:] {
			links[r] = append(links[r], binary.LittleEndian.Uint16(b))
		}
	}
	if w.order = RingOrder(links); w.order == nil {
		w.cliques = Cliques(links)
		return w.wrap(fmt.Errorf("%s", missing(links)), "no ring of the ranks"), nil
	}
	return nil, nil
}

// Cliques returns the number of each rank's clique: of ranks that all reach each other, MostRanks at most. It is known
// when Connect has found no ring, the same for all ranks. Nil means that no two ranks reach each other, or that the
// ranks do not know.
func (w *Window) Cliques() []int { return w.cliques }

// Cliques is Window.Cliques for links as RingOrder has them. It takes the largest clique first, and of some that are as
// large the one without the last ranks.
func Cliques(links [][]uint16) []int {
	reach := make([]uint32, len(links)) // the ranks that a rank reaches, and that reach it
	for a := range links {
		for b := range links {
			if links[a][b] != apart && links[b][a] != apart {
				reach[a] |= 1 << b
			}
		}
	}
	numbers := make([]int, len(links))
	for n, left := 0, uint32(1)<<len(links)-1; left != 0; n++ {
		best, most := uint32(0), 0
		for set := left; set != 0; set = (set - 1) & left {
			all, size := set, bits.OnesCount32(set)
			if size < most || size > MostRanks {
				continue
			}
			for r := range links {
				if set>>r&1 != 0 {
					all &= reach[r]
				}
			}
			if all == set {
				best, most = set, size
			}
		}
		if n == 0 && most < 2 {
			return nil
		}
		for r := range links {
			if best>>r&1 != 0 {
				numbers[r] = n
			}
		}
		left &^= best
	}
	return numbers
}

// missing says which ranks do not reach others.
func missing(links [][]uint16) string {
	var pairs []string
	for a := range links {
		for b := range links[a] {
			if links[a][b] == apart {
				pairs = append(pairs, fmt.Sprintf("%d that of %d", a, b))
			}
		}
	}
	const some = 4
	text := "these ranks' devices do not reach those of others: " + strings.Join(pairs[:min(len(pairs), some)], ", ")
	if more := len(pairs) - some; more > 0 {
		text += fmt.Sprintf(", and of %d more pairs", more)
	}
	return text
}

// RingOrder returns the ranks in an order in which each one is linked to the next one, and the last to the first.
// Links has, for each rank, the ranks of its links to all ranks: 0 is the best, the largest number is none.
// The slowest link limits a ring, so the worst link of the order is as good as it can be. After each rank comes the one
// of the best link, then of the smallest number, as far as that leads to an order. It returns nil if there is none.
func RingOrder(links [][]uint16) []int {
	var worst []uint16
	for _, row := range links {
		worst = append(worst, row...)
	}
	slices.Sort(worst)
	for _, limit := range slices.Compact(worst) {
		if limit == apart {
			break
		}
		if order := orderWithin(links, limit); order != nil {
			return order
		}
	}
	return nil
}

// orderWithin returns an order without links that are worse than a limit. The ranks that it has had, and the last of
// them, decide what can follow. So it remembers where nothing could, and tries that once.
func orderWithin(links [][]uint16, limit uint16) []int {
	type at struct {
		had  uint32
		last int
	}
	dead := make(map[at]bool)
	order := []int{0}
	next := make([][]int, len(links)) // of each rank, the best links first
	for a := range links {
		for b := range links {
			if a != b && links[a][b] <= limit {
				next[a] = append(next[a], b)
			}
		}
		slices.SortStableFunc(next[a], func(x, y int) int { return cmp.Compare(links[a][x], links[a][y]) })
	}
	var search func(x at) bool
	search = func(x at) bool {
		if len(order) == len(links) {
			return links[x.last][0] <= limit
		}
		if dead[x] {
			return false
		}
		for _, b := range next[x.last] {
			if x.had>>b&1 != 0 {
				continue
			}
			order = append(order, b)
			if search(at{x.had | 1<<b, b}) {
				return true
			}
			order = order[:len(order)-1]
		}
		dead[x] = true
		return false
	}
	if !search(at{1, 0}) {
		return nil
	}
	return order
}
