package redis

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
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
//	{prefix}w        sorted set of names: of random text and of how many silent looks mean death
//	{prefix}w TEXT   hash: from key to expected and desired value; also the channel
//
// A store looks around before it becomes a member. Members that do not listen then may be of an earlier
// run that ended as a whole. The store passes them over. If they still do not listen later, it removes them without
// their wills. It knows all other members to be of this run, or to listen.
//
// When new members take over a neighbour, the old ones look at it until they hear it once more. So a store may
// die while others come. Those that looked at it before miss it.
//
// After the server was away, stores come back at different times. So silence means nothing for a while, except
// that of a neighbour that has come back.

const (
	// lookPause is the time between two looks at the neighbours. A death is noticed after silences
	// looks. A store whose connection ended connects again meanwhile: it needs up to a pause to notice that. Where
	// connecting takes longer than a pause, more looks have to pass, up to mostSilences.
	lookPause    = 150 * time.Millisecond
	silences     = 3
	mostSilences = int(patience / lookPause)

	// neighbours is how many other stores a store looks at. As many may die at once, and one is
	// still noticed.
	neighbours = 3

	// patience is how long others may take to come back after the server was away. go-redis tries to connect once a
	// second. TCP repeats a lost first packet after one second, and again after two.
	patience = 10 * time.Second

	// Every revisit looks a store looks again at the members that it passes over. After lastVisit looks it removes those
	// that are silent. By then whoever knows one has carried out its wills.
	revisit   = 20
	lastVisit = 100

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

func (s *Store) mourners() string    { return s.prefix + "w" }
func (s *Store) lastMourner() string { return s.prefix + "w#" }

// wills is the hash with the wills of a member, and its channel.
func (s *Store) wills(name string) string {
	text, _, _ := strings.Cut(name, " ")
	return s.prefix + "w " + text
}

// SetWill leaves a CompareSet for the time when this store is closed or its process has ended.
// Another store of the prefix that has a will carries it out, after about half a second (see the package's
// comment). If no other store has one, nobody does. The error matches errors.ErrUnsupported if
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
		m.keys[key] = true // also if the answer is lost: then DropWill has to withdraw it
		return struct{}{}, s.transact(ctx, func(p redis.Pipeliner) {
			p.HSet(ctx, s.wills(m.name), key, text)
			p.ZAdd(ctx, s.mourners(), redis.Z{Score: float64(m.number), Member: m.name})
			for _, k := range []string{s.wills(m.name), s.mourners(), s.lastMourner()} {
				s.renew(ctx, p, k)
			}
		})
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
	client, text := s.client.WithTimeout(lookLimit), rand.Text() // go-redis does not end a call when ctx does
	began := time.Now()
	sub := client.Subscribe(ctx, s.wills(text))
	if _, err := sub.Receive(ctx); err != nil {
		sub.Close()
		return asUnsupported(err)
	}
	if s.isClosed() {
		sub.Close()
		return store.ErrClosed
	}
	w := &watch{client: client, own: fmt.Sprintf("%s %d", text, silencesFor(time.Since(began)))}
	if err := s.becomeMember(ctx, w); err != nil {
		sub.Close()
		return asUnsupported(err)
	}
	m.number, m.name, m.keys, m.sub = w.number, w.own, make(map[string]bool), sub
	var looking context.Context
	looking, m.stop = context.WithCancel(context.Background())
	m.watching.Go(func() { s.look(looking, w) })
	return nil
}

// silencesFor returns how many silent looks mean that a store is dead that takes so long to connect.
func silencesFor(took time.Duration) int {
	return min(silences+2*int(took/lookPause), mostSilences)
}

// silencesOf returns the same for a member.
func silencesOf(name string) int {
	_, number, _ := strings.Cut(name, " ")
	n, _ := strconv.Atoi(number)
	return max(silences, min(n, mostSilences))
}

// watch is what a member knows of the others.
type watch struct {
	client *redis.Client
	own    string
	number int64

	from   string                // of the members before this one, those from this number on count
	passed map[string]bool       // members that did not listen when this store looked around
	all    map[string]*neighbour // that this store looks at
	looks  int                   // since this one became a member, and since the server was last away

	patient time.Time // until then silence means nothing, except that of neighbours heard since
}

// neighbour is a member that another one looks at.
type neighbour struct {
	silent int  // looks in a row that found it not listening
	heard  bool // since the server was last away
}

// becomeMember looks around, and then makes the store a member. Numbers are in the order of that.
func (s *Store) becomeMember(ctx context.Context, w *watch) error {
	w.from, w.passed, w.all = "-inf", make(map[string]bool), make(map[string]*neighbour)
	members, err := w.client.ZRangeWithScores(ctx, s.mourners(), 0, -1).Result()
	if err != nil {
		return err
	}
	names := make([]string, len(members))
	for i, z := range members {
		names[i], _ = z.Member.(string)
	}
	listens, err := s.listening(ctx, w, names) // also without members: is PUBSUB permitted?
	if err != nil {
		return err
	}
	for i, name := range names {
		if !listens[name] {
			w.passed[name] = true
			if len(w.all) == 0 { // none that listens has come
				w.from = fmt.Sprintf("(%.0f", members[i].Score)
			}
			continue
		}
		if len(w.all) == 0 {
			w.from = fmt.Sprintf("%.0f", members[i].Score)
		}
		if len(w.all) < neighbours { // this store is the last one, and comes before these
			w.all[name] = &neighbour{}
		}
	}
	w.number, err = become.Run(ctx, w.client, []string{s.lastMourner(), s.mourners()}, w.own, s.expiry.Milliseconds()).Int64()
	return err
}

// become makes a store a member, and returns its number.
var become = redis.NewScript(`
local number = redis.call('INCR', KEYS[1])
redis.call('ZADD', KEYS[2], number, ARGV[1])
if ARGV[2] ~= '0' then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
	redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return number`)

// listening returns which of this store and of some members listen.
func (s *Store) listening(ctx context.Context, w *watch, names []string) (map[string]bool, error) {
	channels := []string{s.wills(w.own)}
	for _, name := range names {
		channels = append(channels, s.wills(name))
	}
	counts, err := w.client.PubSubNumSub(ctx, channels...).Result()
	if err != nil {
		return nil, err
	}
	listens := map[string]bool{w.own: counts[channels[0]] > 0}
	for i, name := range names {
		listens[name] = counts[channels[1+i]] > 0
	}
	return listens, nil
}

// asUnsupported returns err, which matches errors.ErrUnsupported if the server lacks or forbids the command.
func asUnsupported(err error) error {
	if redis.HasErrorPrefix(err, "NOPERM") || redis.HasErrorPrefix(err, "unknown command") {
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

// look looks at the neighbours until ctx ends. It ignores errors: if the server is gone, the
// store's calls fail.
func (s *Store) look(ctx context.Context, w *watch) {
	t := time.NewTicker(lookPause)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		limited, cancel := context.WithTimeout(ctx, lookLimit)
		heard, err := s.lookOnce(limited, w)
		if !heard {
			w.patient, w.looks = time.Now().Add(patience), 0
			for _, n := range w.all {
				*n = neighbour{}
			}
		}
		if err == nil && !heard {
			_ = s.listenAgain(limited, w)
		}
		cancel()
	}
}

// lookOnce looks at the neighbours once. It reports whether
// this store itself is listening. If it is not, the server was away or the connection, and perhaps
// the others' too: then the look says nothing about them.
func (s *Store) lookOnce(ctx context.Context, w *watch) (heard bool, err error) {
	nearest, err := s.nearest(ctx, w)
	if err != nil {
		return false, err
	}
	for _, name := range nearest {
		if w.all[name] == nil {
			w.all[name] = &neighbour{}
		}
	}
	w.looks++
	visit := w.looks%revisit == 0 && len(w.passed) > 0
	names := slices.Collect(maps.Keys(w.all))
	if visit {
		names = slices.AppendSeq(names, maps.Keys(w.passed))
	}
	listens, err := s.listening(ctx, w, names)
	if err != nil || !listens[w.own] {
		return false, err
	}
	for name, n := range w.all {
		if listens[name] {
			*n = neighbour{heard: true}
			if !slices.Contains(nearest, name) {
				delete(w.all, name)
			}
			continue
		}
		if n.silent++; n.silent < silencesOf(name) || !n.heard && time.Now().Before(w.patient) {
			continue
		}
		if err := s.carryOut(ctx, w, name); err != nil {
			return true, err
		}
		delete(w.all, name)
	}
	if visit {
		err = s.visit(ctx, w, listens)
	}
	return true, err
}

// nearest returns the neighbours: the next members, and after the last one the first ones.
func (s *Store) nearest(ctx context.Context, w *watch) ([]string, error) {
	var later, first *redis.StringSliceCmd
	at := strconv.FormatInt(w.number, 10)
	_, err := w.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		later = p.ZRangeByScore(ctx, s.mourners(), &redis.ZRangeBy{Min: "(" + at, Max: "+inf", Count: neighbours})
		first = p.ZRangeByScore(ctx, s.mourners(), &redis.ZRangeBy{Min: w.from, Max: "(" + at, Count: neighbours + int64(len(w.passed))})
		return nil
	})
	if err != nil {
		return nil, err
	}
	all := append(later.Val(), first.Val()...)
	all = slices.DeleteFunc(all, func(name string) bool { return w.passed[name] })
	return all[:min(len(all), neighbours)], nil
}

// visit looks at the members that this store passes over. Those that listen again are like all others from then on.
func (s *Store) visit(ctx context.Context, w *watch, listens map[string]bool) error {
	for name := range w.passed {
		if listens[name] {
			delete(w.passed, name)
			w.from = "-inf"
		}
	}
	if w.looks < lastVisit || len(w.passed) == 0 {
		return nil
	}
	err := s.transact(ctx, func(p redis.Pipeliner) {
		for name := range w.passed {
			p.ZRem(ctx, s.mourners(), name)
			p.Del(ctx, s.wills(name))
		}
	})
	if err == nil {
		clear(w.passed)
	}
	return err
}

// listenAgain replaces a connection that has ended.
func (s *Store) listenAgain(ctx context.Context, w *watch) error {
	m := &s.mourner
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sub == nil || m.name != w.own {
		return nil
	}
	sub := w.client.Subscribe(ctx, s.wills(w.own))
	if _, err := sub.Receive(ctx); err != nil {
		sub.Close()
		return err
	}
	m.sub.Close()
	m.sub = sub
	return nil
}

// mourn carries out a member's wills and removes it, all at once. KEYS are the set, the hash, and the wills' keys. ARGV
// are the name, the expiry, the number of wills, and for each key the field, the text, the expected and the desired value.
// It does nothing and returns 0 if the wills are others.
var mourn = redis.NewScript(setIf + `
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[3]) then
	return 0
end
for i = 3, #KEYS do
	if redis.call('HGET', KEYS[2], ARGV[4 * i - 8]) ~= ARGV[4 * i - 7] then
		return 0
	end
end
for i = 3, #KEYS do
	setIf(KEYS[i], ARGV[4 * i - 6], ARGV[4 * i - 5], ARGV[2])
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1`)

// carryOut carries out the wills of a member that is gone, and removes it. If its wills have changed meanwhile, the
// next look does so.
func (s *Store) carryOut(ctx context.Context, w *watch, name string) error {
	wills, err := w.client.HGetAll(ctx, s.wills(name)).Result()
	if err != nil {
		return err
	}
	keys, args := []string{s.mourners(), s.wills(name)}, []any{name, s.expiry.Milliseconds(), len(wills)}
	for key, text := range wills {
		length, values, ok := strings.Cut(text, " ")
		n, err := strconv.Atoi(length)
		if !ok || err != nil || n < 0 || n > len(values) {
			continue // not of this package
		}
		keys = append(keys, s.key(key))
		args = append(args, key, text, values[:n], values[n:])
	}
	done, err := mourn.Run(ctx, w.client, keys, args...).Int()
	if err == nil && done == 0 {
		err = errors.New("the wills have changed")
	}
	return err
}
