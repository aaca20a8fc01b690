package redis

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/c10d-go/c10d/store"
)

// firstPoll and lastPoll are the pauses between two questions of a store for all keys that its calls wait for. At 50 ms a
// thousand ranks send 20 000 questions a second. A Redis 7.0 on two busy cores answered 45 000 commands a second of
// redis-benchmark on the same cores.
const (
	firstPoll = time.Millisecond
	lastPoll  = 50 * time.Millisecond
)

// waiter is a call that waits for names.
type waiter struct {
	missing []string
	at      func(name string) []string // the Redis keys of a name, of which one has to exist
	there   chan struct{}              // closed when none is missing, or the server does not say
}

// watch has the calls of a store that wait. One question asks for the keys of all.
type watch struct {
	mu    sync.Mutex
	all   map[*waiter]bool
	asks  bool
	begun chan struct{} // a call has begun to wait: look soon
}

// await waits for names. With an error it returns those that are missing, else all.
func (s *Store) await(ctx context.Context, names []string, at func(string) []string) (missing []string, err error) {
	w := &waiter{slices.Clone(names), at, make(chan struct{})}
	s.watch.mu.Lock()
	s.watch.all[w] = true
	first := !s.watch.asks
	s.watch.asks = true
	s.watch.mu.Unlock()
	if first {
		s.mu.Lock()
		if !s.isClosed() {
			s.calls.Go(s.ask)
		}
		s.mu.Unlock()
	}
	select {
	case s.watch.begun <- struct{}{}:
	default:
	}
	select {
	case <-w.there:
	case <-s.closed:
		err = store.ErrClosed
	case <-ctx.Done():
		err = store.WaitErr(ctx)
	}
	s.watch.mu.Lock()
	defer s.watch.mu.Unlock()
	delete(s.watch.all, w)
	if err != nil {
		names = w.missing
	}
	return names, err
}

// ask asks the server until no call waits.
func (s *Store) ask() {
	for pause := firstPoll; ; pause = min(2*pause, lastPoll) {
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-s.watch.begun:
			if t.Stop(); pause > firstPoll {
				pause = firstPoll / 2
				continue
			}
		case <-s.closed:
			t.Stop()
			return
		}
		s.watch.mu.Lock()
		var all []*waiter
		var keys [][]string
		for w := range s.watch.all {
			all = append(all, w)
			for _, name := range w.missing {
				keys = append(keys, w.at(name))
			}
		}
		s.watch.asks = len(all) > 0
		s.watch.mu.Unlock()
		if len(all) == 0 {
			return
		}
		there, err := call(context.Background(), s, func(ctx context.Context) ([]bool, error) { return s.exist(ctx, keys) }, nil)
		s.watch.mu.Lock()
		for _, w := range all {
			var missing []string
			for _, name := range w.missing {
				if err == nil && !there[0] {
					missing = append(missing, name)
				}
				there = there[min(1, len(there)):]
			}
			if err == nil {
				w.missing = missing
			}
			if s.watch.all[w] && len(missing) == 0 {
				close(w.there)
				delete(s.watch.all, w)
			}
		}
		s.watch.mu.Unlock()
	}
}

// exist reports for each list of Redis keys whether one of them exists.
func (s *Store) exist(ctx context.Context, keys [][]string) ([]bool, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	answers := make([]*redis.IntCmd, len(keys))
	_, err := s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, k := range keys {
			answers[i] = p.Exists(ctx, k...)
		}
		return nil
	})
	there := make([]bool, len(keys))
	for i, a := range answers {
		there[i] = a.Val() > 0
	}
	return there, err
}

// poll repeats f until it says that no name is missing. Errors name those that are. undo is that of call.
func poll[T any](ctx context.Context, s *Store, op string, names []string, at func(string) []string, f func(context.Context) (T, []string, error), undo func(T)) (T, error) {
	type result struct {
		value   T
		missing []string
	}
	start := time.Now()
	ctx, cancel := store.WithTimeout(ctx, s.Timeout())
	defer cancel()
	var undoResult func(result)
	if undo != nil {
		undoResult = func(r result) {
			if len(r.missing) == 0 {
				undo(r.value)
			}
		}
	}
	missing := slices.Clone(names)
	for {
		r, err := call(ctx, s, func(ctx context.Context) (result, error) {
			value, missing, err := f(ctx)
			return result{value, missing}, err
		}, undoResult)
		if err == nil && len(r.missing) == 0 {
			return r.value, nil
		}
		if err == nil {
			missing, err = s.await(ctx, r.missing, at)
		}
		if err != nil {
			var none T
			return none, s.fail(op, err, start, missing)
		}
	}
}
