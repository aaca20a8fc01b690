package run

import (
	"context"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/work"
)

// called is what a collective and a message know of their call.
type called struct {
	*work.Promise
	ctx        context.Context
	timeout    time.Duration
	call       uint64 // which collective this is, counted from 0
	tag        uint32
	collective bool
}

// until returns when the time of an operation is over that began to wait at since.
func (o *called) until(since time.Time) time.Time {
	if c, ok := o.ctx.(*begun.Context); ok {
		since = c.Since
	}
	until := since.Add(o.timeout)
	if d, ok := o.ctx.Deadline(); ok && d.Before(until) {
		return d
	}
	return until
}

// anyRank is the peer of a receive from any rank.
const anyRank = -1

// wait describes an operation that has not ended. Peer is that of a send or a receive, else -1.
func (o *called) wait(peer int, since time.Time) blame.Call {
	i := o.Info()
	return blame.Call{
		Op: i.Op, Seq: i.Seq, Collective: o.collective, Number: o.call, Tag: o.tag, Peer: peer,
		Since: since, Until: o.until(since),
	}
}

// Gloo's numbers of the collectives.
const (
	prefixGather    = 1
	prefixAllGather = 2
	prefixReduce    = 3
	prefixAllReduce = 4
	prefixScatter   = 5
	prefixBroadcast = 6
	prefixBarrier   = 7
	prefixAllToAll  = 8

	// prefixMonitored is this library's own; see monitoredSlot.
	prefixMonitored = 0x80
)

// slotOf is Gloo's number of a collective's messages: prefix, tag, step (always 0).
func slotOf(prefix uint8, tag uint32) uint64 { return uint64(prefix)<<56 | uint64(tag)<<24 }
