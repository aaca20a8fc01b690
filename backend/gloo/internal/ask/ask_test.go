package ask

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// patient is a mesh of two ranks. Rank 1 answers each question after 1 ms.
type patient struct {
	transport.Mesh
	asked int
}

func (p *patient) Rank() int               { return 0 }
func (p *patient) Fault() *transport.Fault { return nil }

func (p *patient) Failed() <-chan struct{} { return nil }

func (p *patient) Diagnose(time.Duration, ...int) []transport.Health {
	p.asked++
	time.Sleep(time.Millisecond)
	return []transport.Health{{Rank: 0, Native: true, Answered: true}, {Rank: 1, Native: true, Answered: true}}
}

// dueIn is a collective whose time ends after a limit.
func dueIn(m transport.Mesh, w *work.Work, limit time.Duration) *Operation {
	d := &Operation{Mesh: m, Work: w, Ctx: context.Background()}
	d.Collective, d.Since, d.Until = true, time.Now(), time.Now().Add(limit)
	return d
}

// TestEndsInTime: an inquiry ends with the last operation, and blames nobody for one that ends in time.
func TestEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, p := new(patient), new(work.Promise)
		q := New(slog.New(slog.DiscardHandler), nil, false)
		d := dueIn(m, p.Work(), time.Second)
		d.Blame = func(*Operation, blame.Verdict) { t.Error("it has ended in time") }
		q.Add(m, d)
		time.Sleep(980 * time.Millisecond)
		synctest.Wait()
		require.NotZero(t, m.asked)
		p.Complete(nil)
		q.Wait()
		require.Less(t, m.asked, 100, "questions")
	})
}

// TestManyAreDue: an operation that is over before the one that is being asked for ends in its own time.
func TestManyAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(patient)
		q := New(slog.New(slog.DiscardHandler), nil, false)
		begun := time.Now()
		took := make(map[time.Duration]time.Duration)
		add := func(limit time.Duration) {
			p, now := new(work.Promise), time.Now()
			d := dueIn(m, p.Work(), limit)
			d.Blame = func(*Operation, blame.Verdict) {
				took[limit] = time.Since(now)
				p.Complete(work.ErrTimeout)
			}
			q.Add(m, d)
		}
		add(time.Minute)
		time.Sleep(10 * time.Second)
		add(10 * time.Millisecond)
		q.Wait()
		require.InDelta(t, time.Minute, took[time.Minute], float64(300*time.Millisecond))
		require.Less(t, took[10*time.Millisecond], 310*time.Millisecond)
		require.Less(t, time.Since(begun), 66*time.Second)
	})
}
