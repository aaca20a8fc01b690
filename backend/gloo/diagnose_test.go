package gloo

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// patient is a mesh of ranks that answer each question after some time, the negative never.
type patient struct {
	transport.Mesh
	after []time.Duration
	asked int
}

func (p *patient) Rank() int               { return 0 }
func (p *patient) Fault() *transport.Fault { return nil }

func (p *patient) Failed() <-chan struct{} { return nil }

func (p *patient) Diagnose(limit time.Duration, about ...int) []transport.Health {
	p.asked++
	health, wait := make([]transport.Health, len(p.after)), time.Duration(0)
	for r, after := range p.after {
		health[r] = transport.Health{Rank: r, Native: true, Answered: after >= 0 && after <= limit}
		if !health[r].Answered {
			after = limit
		}
		for _, other := range about {
			if health[r].Answered && r > 0 {
				health[r].Links = append(health[r].Links, transport.Link{Peer: other, Silent: limit})
			}
		}
		wait = max(wait, after)
	}
	time.Sleep(wait)
	return health
}

// TestTimeoutsEnd: whatever the others answer, an operation ends after its time, and before 1.1 times that or 0.3 s more
// have passed. One that ends in time blames nobody.
func TestTimeoutsEnd(t *testing.T) {
	const never, ms = -1, time.Millisecond
	for name, after := range map[string][]time.Duration{
		"all answer": {0, ms, 20 * ms}, "one is stopped": {0, ms, never}, "one takes a while": {0, ms, 300 * ms}, "all are stopped": {0, never, never},
	} {
		for _, limit := range []time.Duration{0, ms, 10 * ms, 50 * ms, 200 * ms, time.Second, 2 * time.Second, 3 * time.Second, time.Minute, 30 * time.Minute} {
			for _, busy := range []bool{false, true} {
				for turn := range 3 {
					t.Run(fmt.Sprintf("%s, %v, busy %v, turn %d", name, limit, busy, turn), func(t *testing.T) {
						VirtualTime(t, func(t *testing.T) {
							m := &patient{after: after}
							q := newInquiry(slog.New(slog.DiscardHandler), nil, false)
							q.lag = func() func() time.Duration {
								begun := time.Now()
								return func() time.Duration {
									if busy {
										return time.Since(begun) * 3 / 4
									}
									return 0
								}
							}
							end := func(inTime bool) (took time.Duration) {
								p := new(work.Promise)
								since := time.Now()
								d := &due{wait: wait{collective: true, since: since, until: since.Add(limit)}, mesh: m, ctx: context.Background(), work: p.Work(), turn: turn}
								d.latest = d.until.Add(grace(limit, turn))
								d.blame = func(*due, verdict) {
									took = time.Since(since)
									p.Complete(work.ErrTimeout)
								}
								time.Sleep(limit - lead(limit))
								q.add(m, d)
								if inTime {
									time.Sleep(lead(limit) * 98 / 100)
									p.Complete(nil)
								}
								q.wg.Wait()
								return took
							}
							took := end(false)
							require.GreaterOrEqual(t, took, limit)
							require.LessOrEqual(t, took, max(limit+300*ms, limit*11/10))
							if limit >= 3*time.Second && name == "all answer" && !busy && turn == 0 {
								require.LessOrEqual(t, took, limit+20*ms, "the answers were there before")
							}
							if limit > 0 {
								require.Zero(t, end(true))
							}
							require.Less(t, m.asked, 200, "questions")
						})
					})
				}
			}
		}
	}
}

// TestManyAreDue: an operation that is over before the one that is being asked for ends in its own time.
func TestManyAreDue(t *testing.T) {
	VirtualTime(t, func(t *testing.T) {
		m := &patient{after: []time.Duration{0, time.Millisecond}}
		q := newInquiry(slog.New(slog.DiscardHandler), nil, false)
		begun := time.Now()
		took := make(map[time.Duration]time.Duration)
		add := func(limit time.Duration) {
			p, now := new(work.Promise), time.Now()
			d := &due{wait: wait{collective: true, since: now, until: now.Add(limit)}, mesh: m, ctx: context.Background(), work: p.Work()}
			d.latest = d.until.Add(grace(limit, 0))
			d.blame = func(*due, verdict) {
				took[limit] = time.Since(now)
				p.Complete(work.ErrTimeout)
			}
			q.add(m, d)
		}
		add(time.Minute)
		time.Sleep(10 * time.Second)
		add(10 * time.Millisecond)
		q.wg.Wait()
		require.InDelta(t, time.Minute, took[time.Minute], float64(300*time.Millisecond))
		require.Less(t, took[10*time.Millisecond], 310*time.Millisecond)
		require.Less(t, time.Since(begun), 66*time.Second)
	})
}

// A rank that hears nobody, because its process does not get a CPU, blames nobody for that.
func TestDiagnoseWithoutCPU(t *testing.T) {
	VirtualTime(t, func(t *testing.T) {
		diagnose := func(lag func() func() time.Duration) (found verdict) {
			p, now := new(work.Promise), time.Now()
			q := newInquiry(slog.New(slog.DiscardHandler), nil, false)
			q.lag = lag
			m := &patient{after: []time.Duration{0, -1, -1}}
			d := &due{wait: wait{since: now, until: now.Add(time.Second)}, mesh: m, ctx: context.Background(), work: p.Work(), latest: now.Add(2 * time.Second)}
			d.waitsFor.Store(anyRank)
			d.blame = func(_ *due, v verdict) {
				found = v
				p.Complete(work.ErrTimeout)
			}
			q.add(m, d)
			q.wg.Wait()
			return found
		}
		v := diagnose(func() func() time.Duration {
			begun := time.Now()
			return func() time.Duration { return time.Since(begun) * 3 / 4 }
		})
		require.Equal(t, -1, v.rank)
		require.Contains(t, v.why, "rank 0 waited for a CPU for 1.5 s of 2.0")
		v = diagnose(func() func() time.Duration { return func() time.Duration { return 0 } })
		require.Contains(t, v.why, "its network does not work")
	})
}
