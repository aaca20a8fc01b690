package meet

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/store"
)

// log reads the log of a turn: who has come. Rank 0 does so in its run. While there is no rank 0, the rank with the first
// entry does, to answer the others.
type log struct {
	c    *Call
	turn int
	zero bool // rank 0 reads

	mu       sync.Mutex
	came     map[int]record // by rank
	next     int            // the entry to be read
	late     []int          // entries before that are not there yet
	answers  int            // how many questions were answered
	stranger int            // the rank from which on rank 0 looks for foreign ones
}

// newLog returns the log of this rank's turn.
func (c *Call) newLog() *log {
	return &log{c: c, turn: c.turn, zero: c.leads(c.before), came: map[int]record{c.cfg.Rank: c.self}, next: 1, stranger: 1}
}

func (l *log) full() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.came) >= l.c.cfg.Size
}

// absent returns the ranks without an entry.
func (l *log) absent() []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	ranks := make([]int, 0, max(0, l.c.cfg.Size-len(l.came)))
	for r := range l.c.cfg.Size {
		if _, there := l.came[r]; !there {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// take takes an entry. Of those that rank 0 reads, a rank has one.
func (l *log) take(text []byte) error {
	var r record
	if json.Unmarshal(text, &r) != nil || r.Nonce == "" || r.Rank < 0 || r.Rank >= l.c.cfg.Size {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if before, there := l.came[r.Rank]; there && before.Nonce != r.Nonce && l.zero {
		f := twice(before, r)
		f.By = l.c.cfg.Rank
		return f
	}
	l.came[r.Rank] = r
	return nil
}

// read reads entries until all have come or ctx ends.
func (l *log) read(ctx context.Context) error {
	for !l.full() {
		l.mu.Lock()
		next := l.next
		l.mu.Unlock()
		b, err := l.c.corner.Get(ctx, entryKey(l.turn, next))
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.next = max(l.next, next+1)
		l.mu.Unlock()
		if err := l.take(b); err != nil {
			return err
		}
		if l.full() {
			break
		}
		n, err := l.c.corner.Add(ctx, countKey(l.turn), 0)
		if err == nil {
			err = l.readUpTo(ctx, int(n))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readUpTo waits for the entries up to one, and reads them.
func (l *log) readUpTo(ctx context.Context, to int) error {
	l.mu.Lock()
	next := l.next
	l.mu.Unlock()
	err := together(func(begin func(func() error)) {
		for from := next; from <= to; from += batch {
			var keys []string
			for i := from; i <= min(to, from+batch-1); i++ {
				keys = append(keys, entryKey(l.turn, i))
			}
			begin(func() error {
				texts, err := l.c.corner.MultiGet(ctx, keys)
				for _, text := range texts {
					if e := l.take(text); err == nil {
						err = e
					}
				}
				return err
			})
		}
	})
	if err == nil {
		l.mu.Lock()
		l.next = max(next, to+1)
		l.mu.Unlock()
	}
	return err
}

// catchUp reads all entries that are there, and waits for none.
func (l *log) catchUp(ctx context.Context) error {
	n, err := l.c.corner.Add(ctx, countKey(l.turn), 0)
	if err != nil {
		return err
	}
	l.mu.Lock()
	next, late := l.next, l.late
	l.mu.Unlock()
	if len(late) == 0 { // in most cases all of them are there
		brief, cancel := context.WithTimeout(ctx, longestLook)
		err := l.readUpTo(brief, int(n))
		cancel()
		if err == nil || errors.As(err, new(*Fault)) {
			return err
		}
	}
	for i := next; i <= int(n); i++ {
		late = append(late, i)
	}
	var still []int
	for k, i := range late {
		text, err := l.c.peek(ctx, entryKey(l.turn, i))
		if err != nil {
			still = append(still, late[k:]...)
			break
		}
		if text == "" {
			still = append(still, i)
		} else if err := l.take([]byte(text)); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next, l.late = max(l.next, int(n)+1), still
	return nil
}

// lead is the part of the rank that reads the log, until the turn has ended. It calls stop if the store fails.
func (l *log) lead(ctx context.Context, stop context.CancelCauseFunc) {
	for pause := firstLook; ctx.Err() == nil; pause = min(2*pause, longestLook) {
		brief, cancel := context.WithTimeout(ctx, pause)
		err := l.read(brief)
		cancel()
		if err == nil {
			l.mu.Lock()
			e := end{Begun: &begun{Read: l.next - 1, Late: l.late, Answers: l.answers}}
			l.mu.Unlock()
			if _, err = l.c.endTurn(ctx, l.turn, e); err == nil {
				return
			}
		} else if ctx.Err() == nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, store.ErrTimeout)) {
			var over bool
			if over, err = l.look(ctx); over {
				return
			}
		}
		if f := (*Fault)(nil); errors.As(err, &f) {
			if _, err = l.c.post(ctx, f); err == nil {
				return // this rank hears of it as the others do
			}
		}
		if err != nil && ctx.Err() == nil {
			stop(err)
			return
		}
	}
}

// look is what is done between readings. It reports whether it has ended the turn.
func (l *log) look(ctx context.Context) (over bool, err error) {
	l.mu.Lock()
	next, late := l.next, len(l.late)
	l.mu.Unlock()
	n, err := l.c.corner.Add(ctx, countKey(l.turn), 0)
	if err == nil && (late > 0 || int(n) >= next) {
		err = l.catchUp(ctx)
	}
	if err == nil {
		err = l.answer(ctx)
	}
	if err != nil || !l.zero {
		return false, err
	}
	ranks := l.absent()
	first, _ := slices.BinarySearch(ranks, l.stranger)
	for i := range min(window, len(ranks)) {
		r := ranks[(first+i)%len(ranks)]
		place, key, err := l.c.foreign(ctx, r)
		if err != nil {
			return false, err
		}
		if key != "" {
			_, err := l.c.endTurn(ctx, l.turn, end{Foreign: place + 1})
			return err == nil, err
		}
		l.stranger = r + 1
	}
	return false, nil
}

// answer answers a question of another rank: who has not come. It is one answer for all that ask at a time.
func (l *log) answer(ctx context.Context) error {
	l.mu.Lock()
	k := l.answers + 1
	l.mu.Unlock()
	if asked, err := l.c.corner.Check(ctx, askKey(l.turn, k)); err != nil || !asked {
		return err
	}
	if err := l.c.corner.Set(ctx, answerKey(l.turn, k), encode(l.absent())); err != nil {
		return err
	}
	l.mu.Lock()
	l.answers = k
	l.mu.Unlock()
	_, err := l.c.corner.Add(ctx, answersKey(l.turn), 1)
	return err
}
