package redis

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/c10d-go/c10d/store"
)

// Redis cannot set a key when a client is gone, but it knows how many clients listen to a channel.
// A store with a will listens to a channel of its own: that connection ends with the process. All
// stores with wills are members of a sorted set, in the order of their numbers. Each looks at the
// next three; after the last comes the first. If nobody listens to a channel any more, the one that
// looks carries out the wills of its store.
//
//	{prefix}w#       the last number
//	{prefix}w        sorted set of names
//	{prefix}w NAME   hash: from key to expected and desired value; also the channel
//
// A store carries out only the wills of stores that came later or that it has seen listen. Others
// may be from an earlier run that ended as a whole. It removes them.
//
// A store may die while others come that look at it from then on. A store looks before it becomes a
// member, and thus knows who is alive. When new members take over a neighbour, the old ones look at
// it until they see it listen once more.

const (
	// lookPause is the time between two looks at the neighbours. A death is noticed after silences
	// looks. A store that has to connect again needs one pause for that.
	lookPause = 150 * time.Millisecond
	silences  = 3

	// strangeSilences is after how many looks a store that this one has never seen listen is
	// removed. Another store that has seen it is faster.
	strangeSilences = 20

	// neighbours is how many other stores a store looks at. As many may die at once, and one is
	// still noticed.
	neighbours = 3

	// lookLimit bounds one look, and one change of a will after the caller has gone.
	lookLimit = 5 * time.Second
)

// mourner keeps a store's wills and looks for neighbours that are gone.
type mourner struct {
	mu       sync.Mutex
	name     string // in the sorted set
	number   int64
	keys     map[string]bool // with a will
	sub      *redis.PubSub   // nil without wills
	stop     context.CancelFunc
	watching sync.WaitGroup
}

func (s *Store) mourners() string         { return s.prefix + "w" }
func (s *Store) lastMourner() string      { return s.prefix + "w#" }
func (s *Store) wills(name string) string { return s.prefix + "w " + name }

// SetWill leaves a CompareSet for the time when this store is closed or its process has ended.
// Another store of the prefix that has a will carries it out, after about half a second. If no
// other store has one, nobody does. The error matches errors.ErrUnsupported if
// the server does not permit SUBSCRIBE or PUBSUB. See store.Willer.
func (s *Store) SetWill(ctx context.Context, key string, expected, desired []byte) error {
	text := append(strconv.AppendInt(nil, int64(len(expected)), 10), ' ')
	text = append(append(text, expected...), desired...)
	_, err := do(ctx, s, "set will", []string{key}, func(ctx context.Context) (struct{}, error) {
		m := &s.mourner
		m.mu.Lock()
		defer m.mu.Unlock()
		if err := s.listen(ctx); err != nil {
			return struct{}{}, err
		}
		err := s.transact(ctx, func(p redis.Pipeliner) {
			p.HSet(ctx, s.wills(m.name), key, text)
			p.ZAdd(ctx, s.mourners(), redis.Z{Score: float64(m.number), Member: m.name})
			for _, k := range []string{s.wills(m.name), s.mourners(), s.lastMourner()} {
				s.renew(ctx, p, k)
			}
		})
		if err == nil {
			m.keys[key] = true
		}
		return struct{}{}, err
	})
	return err
}

// DropWill withdraws the will for key.
func (s *Store) DropWill(ctx context.Context, key string) error {
	_, err := do(ctx, s, "drop will", []string{key}, func(ctx context.Context) (struct{}, error) {
		m := &s.mourner
		m.mu.Lock()
		defer m.mu.Unlock()
		if !m.keys[key] {
			return struct{}{}, nil
		}
		last := len(m.keys) == 1
		err := s.transact(ctx, func(p redis.Pipeliner) {
			p.HDel(ctx, s.wills(m.name), key)
			if last {
				p.ZRem(ctx, s.mourners(), m.name)
			}
		})
		if err != nil {
			return struct{}{}, err
		}
		delete(m.keys, key)
		if last {
			m.end()
		}
		return struct{}{}, nil
	})
	return err
}

// listen begins to listen and to look at the neighbours, unless this store does so already. m.mu is
// held.
func (s *Store) listen(ctx context.Context) error {
	m := &s.mourner
	if m.sub != nil {
		return nil
	}
	number, err := s.client.Incr(ctx, s.lastMourner()).Result()
	if err != nil {
		return err
	}
	m.number, m.name, m.keys = number, rand.Text(), make(map[string]bool)
	sub := s.client.Subscribe(ctx, s.wills(m.name))
	if _, err := sub.Receive(ctx); err != nil {
		sub.Close()
		return asUnsupported(err)
	}
	if s.isClosed() {
		sub.Close()
		return store.ErrClosed
	}
	all := make(map[string]*neighbour)
	if _, err := s.lookOnce(ctx, m.name, number, all); err != nil {
		sub.Close()
		return asUnsupported(err)
	}
	m.sub = sub
	var looking context.Context
	looking, m.stop = context.WithCancel(context.Background())
	m.watching.Go(func() { s.look(looking, m.name, number, all) })
	return nil
}

// asUnsupported returns err, which matches errors.ErrUnsupported if the server lacks or forbids the command.
func asUnsupported(err error) error {
	if redis.HasErrorPrefix(err, "NOPERM") || redis.HasErrorPrefix(err, "ERR unknown command") {
		return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	return err
}

// end stops listening and looking. m.mu is held.
func (m *mourner) end() {
	if m.sub != nil {
		m.stop()
		m.sub.Close()
		m.sub = nil
	}
}

// close ends the mourner; its wills are carried out.
func (m *mourner) close() {
	m.mu.Lock()
	m.end()
	m.mu.Unlock()
	m.watching.Wait()
}

// neighbour is another store that has a will.
type neighbour struct {
	known  bool // to run now: it came later, or was seen listening
	silent int  // looks in a row that found it not listening
}

// look looks at the neighbours until ctx ends. It ignores errors: if the server is gone, the
// store's calls fail.
func (s *Store) look(ctx context.Context, own string, number int64, all map[string]*neighbour) {
	t := time.NewTicker(lookPause)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		limited, cancel := context.WithTimeout(ctx, lookLimit)
		if heard, err := s.lookOnce(limited, own, number, all); err == nil && !heard {
			_ = s.listenAgain(limited, own)
		}
		cancel()
	}
}

// lookOnce looks at the neighbours and updates all, the result of earlier looks. It reports whether
// this store itself is listening. If it is not, the server was away or the connection, and perhaps
// the others' too: then the look says nothing about them.
func (s *Store) lookOnce(ctx context.Context, own string, number int64, all map[string]*neighbour) (heard bool, err error) {
	var later, first *redis.StringSliceCmd
	at := strconv.FormatInt(number, 10)
	_, err = s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		later = p.ZRangeByScore(ctx, s.mourners(), &redis.ZRangeBy{Min: "(" + at, Max: "+inf", Count: neighbours})
		first = p.ZRangeByScore(ctx, s.mourners(), &redis.ZRangeBy{Min: "-inf", Max: "(" + at, Count: neighbours})
		return nil
	})
	if err != nil {
		return false, err
	}
	nearest := append(later.Val(), first.Val()...)
	nearest = nearest[:min(len(nearest), neighbours)]
	for i, name := range nearest {
		if all[name] == nil {
			all[name] = &neighbour{known: i < len(later.Val())}
		}
	}
	names := slices.Collect(maps.Keys(all))
	channels := []string{s.wills(own)}
	for _, name := range names {
		channels = append(channels, s.wills(name))
	}
	listening, err := s.client.PubSubNumSub(ctx, channels...).Result()
	if err != nil || listening[channels[0]] == 0 {
		return false, err
	}
	for i, name := range names {
		n := all[name]
		if listening[channels[1+i]] > 0 {
			n.known, n.silent = true, 0
			if !slices.Contains(nearest, name) {
				delete(all, name)
			}
			continue
		}
		n.silent++
		if n.silent < silences || !n.known && n.silent < strangeSilences {
			continue
		}
		if err := s.carryOut(ctx, name, n.known); err != nil {
			return true, err
		}
		delete(all, name)
	}
	return true, nil
}

// listenAgain replaces a connection that has ended.
func (s *Store) listenAgain(ctx context.Context, own string) error {
	m := &s.mourner
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sub == nil || m.name != own {
		return nil
	}
	sub := s.client.Subscribe(ctx, s.wills(own))
	if _, err := sub.Receive(ctx); err != nil {
		sub.Close()
		return err
	}
	m.sub.Close()
	m.sub = sub
	return nil
}

// mourn removes a member with its wills.
var mourn = redis.NewScript(`
redis.call('ZREM', KEYS[1], ARGV[1])
local wills = redis.call('HGETALL', KEYS[2])
redis.call('DEL', KEYS[2])
return wills`)

// carryOut removes a store that is gone, and carries out its wills if it is known.
func (s *Store) carryOut(ctx context.Context, name string, known bool) error {
	wills, err := mourn.Run(ctx, s.client, []string{s.mourners(), s.wills(name)}, name).StringSlice()
	if err != nil || !known {
		return err
	}
	for i := 0; i+1 < len(wills); i += 2 {
		length, values, ok := bytes.Cut([]byte(wills[i+1]), []byte(" "))
		n, err := strconv.Atoi(string(length))
		if !ok || err != nil || n < 0 || n > len(values) {
			continue // not of this package
		}
		if _, _, err := s.compareSet(ctx, wills[i], values[:n], values[n:]); err != nil {
			return err
		}
	}
	return nil
}
