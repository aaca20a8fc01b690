package blame

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

// never is how long a stopped rank takes to answer.
const never = -1

// patient are ranks that answer each question after some time.
type patient []time.Duration

// diagnose returns what they answer within a limit, and how long that takes.
func (p patient) diagnose(limit time.Duration, about []int) (health []transport.Health, took time.Duration) {
	for r, after := range p {
		h := transport.Health{Rank: r, Native: true, Answered: after >= 0 && after <= limit}
		if !h.Answered {
			after = limit
		}
		for _, other := range about {
			if h.Answered && r > 0 {
				h.Links = append(h.Links, transport.Link{Peer: other, Silent: limit})
			}
		}
		health, took = append(health, h), max(took, after)
	}
	return health, took
}

// ask runs an inquiry of rank 0 about a call in a time that passes only here. While the process is busy it waits for a
// CPU for three quarters of that time. It returns the verdict, when that came, and how often ranks were asked.
func (p patient) ask(begun time.Time, c Call, busy bool) (v Verdict, now time.Time, asked int) {
	q := New(0, nil, false, begun)
	now, last := begun, begun
	for {
		limit, about := q.Ask(now, c)
		var health []transport.Health
		if limit > 0 {
			var took time.Duration
			health, took = p.diagnose(limit, about)
			now = now.Add(took)
			asked++
		} else {
			now = c.Latest
		}
		var waited time.Duration
		if busy {
			waited = now.Sub(last) * 3 / 4
		}
		last = now
		q.Hear(health, waited)
		if !now.Before(c.Until) {
			if v, ok := q.Judge(now, c); ok {
				return v, now, asked
			}
		}
		if next := q.Next(now, c); next.After(now) {
			now = next
		}
	}
}

// TestTimeoutsEnd: whatever the others answer, an operation ends after its time, and before 1.1 times that or 0.3 s
// more have passed.
func TestTimeoutsEnd(t *testing.T) {
	const ms = time.Millisecond
	since := time.Unix(1000, 0)
	for name, p := range map[string]patient{
		"all answer": {0, ms, 20 * ms}, "one is stopped": {0, ms, never},
		"one takes a while": {0, ms, 300 * ms}, "all are stopped": {0, never, never},
	} {
		for _, limit := range []time.Duration{0, 1, 10, 50, 200, 1000, 2000, 3000, 60_000, 1_800_000} {
			limit *= ms
			for _, busy := range []bool{false, true} {
				for turn := range 3 {
					t.Run(fmt.Sprintf("%s, %v, busy %v, turn %d", name, limit, busy, turn), func(t *testing.T) {
						until := since.Add(limit)
						c := Call{Collective: true, Peer: -1, Until: until, Turn: turn}
						c.Latest = until.Add(Grace(limit, turn))
						_, end, asked := p.ask(until.Add(-Lead(limit)), c, busy)
						took := end.Sub(since)
						require.GreaterOrEqual(t, took, limit)
						require.LessOrEqual(t, took, max(limit+300*ms, limit*11/10))
						if limit >= 3*time.Second && name == "all answer" && !busy && turn == 0 {
							require.LessOrEqual(t, took, limit+20*ms, "the answers were there before")
						}
						require.Less(t, asked, 100, "questions")
					})
				}
			}
		}
	}
}

// TestWithoutCPU: a rank that hears nobody, because its process does not get a CPU, blames nobody for that.
func TestWithoutCPU(t *testing.T) {
	begun := time.Unix(1000, 0)
	c := Call{Peer: -1, Until: begun.Add(time.Second), Latest: begun.Add(2 * time.Second)}
	v, _, _ := patient{0, never, never}.ask(begun, c, true)
	require.Equal(t, -1, v.Rank)
	require.Contains(t, v.Why, "rank 0 waited for a CPU for 1.5 s of 2.0")
	v, _, _ = patient{0, never, never}.ask(begun, c, false)
	require.Zero(t, v.Rank)
	require.Contains(t, v.Why, "its network does not work")
}
