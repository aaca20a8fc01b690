package strangers

import "time"

// When more than half of lookAt connections were refused, the listener pauses before every 16th of the next ones,
// for 0.1 ms each. Ranks are seldom refused, so 1024 ranks that meet are not slowed down. On a busy host a pause
// takes up to a millisecond longer: with one before every eighth, 8000 strangers at two stores kept a new client
// out for 2.9 s.
const (
	lookAt = 64
	every  = 16
	pause  = every * 100 * time.Microsecond
)

// Pace slows down a listener that refuses most of its connections. The kernel then keeps others in
// the listener's queue, and drops those for which it has no room. The zero value is ready. One
// goroutine at a time uses it.
type Pace struct {
	accepted int
	refused  int64 // at the last look
	hostile  bool
}

// Wait is called before each Accept, with the number of connections that were refused until now. It reports
// whether most of the last ones were.
func (p *Pace) Wait(refused int64) (hostile bool) {
	if p.look(refused) {
		time.Sleep(pause)
	}
	return p.hostile
}

func (p *Pace) look(refused int64) (hostile bool) {
	if p.accepted++; p.accepted%lookAt == 0 {
		p.hostile = refused-p.refused > lookAt/2
		p.refused = refused
	}
	return p.hostile && p.accepted%every == 0
}
