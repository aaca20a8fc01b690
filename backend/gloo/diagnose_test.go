package gloo

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

// patient is a mesh of ranks that answer after some time, the negative never.
type patient struct {
	transport.Mesh
	after []time.Duration
	begun time.Time
}

func (p *patient) Rank() int               { return 0 }
func (p *patient) Fault() *transport.Fault { return nil }

func (p *patient) Failed() <-chan struct{} { return nil }

func (p *patient) Diagnose(limit time.Duration, about ...int) []transport.Health {
	health, all, by := make([]transport.Health, len(p.after)), time.Now(), time.Now().Add(limit)
	for r, after := range p.after {
		at := p.begun.Add(after)
		health[r] = transport.Health{Rank: r, Native: true, Answered: after >= 0 && !at.After(by)}
		if !health[r].Answered {
			at = by
		}
		for _, other := range about {
			if health[r].Answered && r > 0 {
				health[r].Links = append(health[r].Links, transport.Link{Peer: other, Silent: limit})
			}
		}
		if at.After(all) {
			all = at
		}
	}
	time.Sleep(time.Until(all))
	return health
}

// TestDiagnose asks ranks that are stopped, slow, or both.
func TestDiagnose(t *testing.T) {
	const never = -1
	ms := func(n ...time.Duration) []time.Duration {
		for i := range n {
			if n[i] > 0 {
				n[i] *= time.Millisecond
			}
		}
		return n
	}
	for _, tc := range []struct {
		name   string
		after  []time.Duration // of rank 0, this one, and others
		lags   int             // in how many rounds this rank is kept waiting
		take   time.Duration
		silent int
	}{
		{"all answer", ms(0, 1, 20), 0, 20 * time.Millisecond, 0},
		{"one is stopped", ms(0, 1, never), 0, leastRounds * diagnoseFor / 2, 1},
		{"one takes a while", ms(0, 1, 300), 0, 300 * time.Millisecond, 0},
		{"one is slower, and so is another", ms(0, 300, 500), 0, 500 * time.Millisecond, 0},
		{"one is too slow", ms(0, 1, 1200), 0, leastRounds * diagnoseFor / 2, 1},
		{"one is slow, and so is this one", ms(0, 1, 1200), leastRounds, 1200 * time.Millisecond, 0},
		{"one is stopped, and this one is slow for a while", ms(0, 1, never), 8, 10 * diagnoseFor / 2, 1},
		{"one is stopped, and this one is slow", ms(0, 1, never), 1 << 20, diagnoseMost, 1},
		{"all are stopped", ms(0, never, never), 0, diagnoseMost, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			VirtualTime(t, func(t *testing.T) {
				m := &patient{after: tc.after, begun: time.Now()}
				lag := func() func() time.Duration {
					return func() time.Duration {
						if tc.lags--; tc.lags >= 0 {
							return diagnoseFor
						}
						return time.Millisecond
					}
				}
				e := evidence{peer: -1}
				diagnose(m, lag, &e)
				require.Equal(t, tc.take, time.Since(m.begun))
				require.Equal(t, tc.silent, silent(m, e.health))
			})
		})
	}
}

// A rank that hears nobody, because its process does not get a CPU, blames itself for that.
func TestDiagnoseWithoutCPU(t *testing.T) {
	VirtualTime(t, func(t *testing.T) {
		m := &patient{after: []time.Duration{0, -1, -1}, begun: time.Now()}
		late := func() func() time.Duration {
			begun := time.Now()
			return func() time.Duration { return time.Since(begun) * 3 / 4 }
		}
		v := diagnose(m, late, &evidence{peer: -1})
		require.Zero(t, v.rank)
		require.Contains(t, v.why, "rank 0 is slow: it waited for a CPU for 2.5 s of 3.5")
		m.begun = time.Now()
		v = diagnose(m, func() func() time.Duration { return func() time.Duration { return 0 } }, &evidence{peer: -1})
		require.Contains(t, v.why, "its network does not work")
	})
}
