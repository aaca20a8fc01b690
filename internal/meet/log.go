package meet

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

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

// read reads the entries that are there, and further ones as they come, until all ranks have come or limit is over. An entry
// that is late keeps it from others for that long at most: its process may have died before it wrote it.
func (l *log) read(ctx context.Context, limit time.Duration) error {
	brief, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		if err := l.catchUp(ctx); err != nil || l.full() {
			return err
		}
		l.mu.Lock()
		first := slices.Concat(l.late, []int{l.next})[0]
		l.mu.Unlock()
		b, err := l.c.corner.Get(brief, entryKey(l.turn, first))
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.next = max(l.next, first+1)
		l.late = slices.DeleteFunc(l.late, func(i int) bool { return i == first })
		l.mu.Unlock()
		if err := l.take(b); err != nil || l.full() {
			return err
		}
	}
}

// catchUp reads all entries that are there, and waits for none.
func (l *log) catchUp(ctx context.Context) error {
	n, err := l.c.corner.Add(ctx, countKey(l.turn), 0)
	if err != nil {
		return err
	}
	l.mu.Lock()
	open := slices.Clone(l.late)
	for i := l.next; i <= int(n); i++ {
		open = append(open, i)
	}
	l.mu.Unlock()
	keys := make([]string, len(open))
	for k, i := range open {
		keys[k] = entryKey(l.turn, i)
	}
	texts, err := l.texts(ctx, keys)
	if err != nil {
		return err
	}
	var still []int
	for k, text := range texts {
		if text == "" {
			still = append(still, open[k])
		} else if err := l.take([]byte(text)); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next, l.late = max(l.next, int(n)+1), still
	return nil
}

// texts returns the values of keys, "" for missing ones. In most cases all of them are there.
func (l *log) texts(ctx context.Context, keys []string) ([]string, error) {
	if len(keys) > 1 {
		if all, err := l.c.corner.Check(ctx, keys...); err != nil {
			return nil, err
		} else if all {
			brief, cancel := context.WithTimeout(ctx, longestLook) // a rank that gives up deletes its entry
			values, err := l.c.corner.MultiGet(brief, keys)
			over := brief.Err() != nil && ctx.Err() == nil
			cancel()
			if err == nil || !over {
				texts := make([]string, len(values))
				for i, v := range values {
					texts[i] = string(v)
				}
				return texts, err
			}
		}
	}
	return Look(ctx, l.c.corner, keys...)
}

// lead is the part of the rank that reads the log, until the turn has ended. It calls stop if the store fails.
func (l *log) lead(ctx context.Context, stop context.CancelCauseFunc) {
	for pause := firstLook; ctx.Err() == nil; pause = min(2*pause, longestLook) {
		err := l.read(ctx, pause)
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
	if err := l.answer(ctx); err != nil || !l.zero {
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
	if err := l.catchUp(ctx); err != nil {
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
