package redis

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/store"
)

const (
	// DefaultPrefix is the prefix if neither the URL nor Options has one.
	DefaultPrefix = "c10d"

	// DefaultExpiry is how long keys outlive the last store of a job.
	DefaultExpiry = 24 * time.Hour

	// ioTimeout bounds the answer to one command if the URL does not. In that time a value of 512
	// MiB, Redis' largest, passes at 150 Mbit/s. A cancelled call does not wait for it.
	ioTimeout = 30 * time.Second

	// maxIdle is how long a connection may lie idle if the URL does not say. go-redis does not notice that the server
	// has ended one with TLS.
	maxIdle = time.Minute

	// dialTimeout is go-redis' limit of a connection attempt if the URL has none.
	dialTimeout = 5 * time.Second

	// scanCount is how many keys a step of SCAN looks at. A step blocks the server: 1000 keys
	// take well below a millisecond.
	scanCount = 1000

	// closeWait bounds how long Close waits for the elements of interrupted QueuePops, which go back into their queues. A
	// server that answers needs two round trips.
	closeWait = 5 * time.Second
)

// quiet drops go-redis's lines on standard error, since calls return those errors. go-redis has
// one logger for all clients.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func init() {
	redis.SetLogger(quiet{})
	for _, scheme := range []string{"redis", "rediss"} {
		store.Register(scheme, func(ctx context.Context, url string, o store.OpenOptions) (store.Store, error) {
			return New(ctx, url, Options{Prefix: o.Prefix, Timeout: o.Timeout, TLS: o.TLS})
		})
	}
}

// Options of a store. The zero value works.
type Options struct {
	// Prefix is the job's part of all names, without braces. Empty means the URL's
	// ("prefix=job-7"), or DefaultPrefix.
	Prefix string

	// Expiry is how long keys live after they were last written or renewed, at least a second.
	// Zero means the URL's ("expiry=90m"), or DefaultExpiry. Negative means no expiry.
	Expiry time.Duration

	// Timeout is the store's timeout, see SetTimeout.
	Timeout time.Duration

	// TLS is used with a rediss:// URL, for example with a private certificate authority. Nil
	// means the system's authorities and the URL's host name. An empty ServerName means the URL's
	// host name.
	TLS *tls.Config
}

// Store is a store in a Redis server. Make one with New. Its calls run concurrently on a pool of
// connections.
type Store struct {
	config  *redis.Options
	client  *redis.Client
	prefix  string // with braces
	expiry  time.Duration
	timeout atomic.Int64
	local   atomic.Pointer[netip.Addr] // see LocalAddr

	incarnation atomic.Pointer[string]   // of what the prefix holds; nil until joined
	server      atomic.Pointer[identity] // as it was then; nil if it does not say

	mu     sync.Mutex // guards calls.Add against Close
	closed chan struct{}
	calls  sync.WaitGroup
	pops   sync.WaitGroup // those of calls that may have to be undone

	watch watch
}

// New connects to the server that rawURL names:
//
//	redis://user:password@host:port/database?prefix=job-7&expiry=12h
//
// with rediss:// for TLS and unix:// for a socket, and go-redis' options in the
// query (dial_timeout, pool_size, skip_verify and so on). It fails at once if
// the server does not answer. Any node of a Redis Cluster will do: New goes on to the one that has the
// prefix. In a cluster the database must be 0.
func New(ctx context.Context, rawURL string, o ...Options) (*Store, error) {
	opts := option.Last(o)
	config, err := parse(rawURL, &opts)
	if err != nil {
		return nil, fmt.Errorf("store: redis: %w", err)
	}
	s, err := open(ctx, config, opts)
	addr, moved := redis.IsMovedError(err)
	if !moved {
		return s, err
	}
	elsewhere, e := atNode(rawURL, addr)
	if e == nil {
		config, e = parse(elsewhere, &opts)
	}
	if e != nil {
		return nil, fmt.Errorf("%w: %w", err, e)
	}
	return open(ctx, config, opts)
}

// atNode returns the URL with another server's address. A node that knows no host of its own leaves the host out.
func atNode(rawURL, addr string) (string, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return "", err
	}
	i := strings.LastIndexByte(addr, ':') // Redis writes no brackets around an IPv6 address
	if i < 0 {
		return "", fmt.Errorf("the node %.100q has no port", addr)
	}
	host, port := addr[:i], addr[i+1:]
	if host == "" || host == "?" {
		host = u.Hostname()
	}
	if host == "" || u.Scheme == "unix" {
		return "", fmt.Errorf("give the address of the node %.100q in place of the socket", addr)
	}
	u.Host = net.JoinHostPort(host, port)
	return u.String(), nil
}

// parse fills the zero fields of opts. Its errors do not repeat the URL, which
// may hold a password.
func parse(rawURL string, opts *Options) (*redis.Options, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		var e *url.Error
		if errors.As(err, &e) {
			err = e.Err
		}
		return nil, fmt.Errorf("the URL is wrong: %w", err)
	}
	query := u.Query()
	if opts.Prefix == "" {
		opts.Prefix = query.Get("prefix")
	}
	if opts.Prefix == "" {
		opts.Prefix = DefaultPrefix
	}
	if strings.ContainsAny(opts.Prefix, "{}") {
		return nil, fmt.Errorf("prefix %q has braces", opts.Prefix)
	}
	if text := query.Get("expiry"); text != "" && opts.Expiry == 0 {
		if opts.Expiry, err = time.ParseDuration(text); err != nil {
			return nil, fmt.Errorf("the URL's expiry: %w", err)
		}
	}
	if opts.Expiry == 0 {
		opts.Expiry = DefaultExpiry
	}
	if opts.Expiry > 0 && opts.Expiry < time.Second {
		return nil, fmt.Errorf("expiry %v is below a second", opts.Expiry)
	}
	query.Del("prefix")
	query.Del("expiry")
	u.RawQuery = query.Encode()
	config, err := redis.ParseURL(u.String())
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "redis: "))
	}
	if config.DB < 0 {
		return nil, fmt.Errorf("database %d: the number must be 0 or more", config.DB)
	}
	if opts.TLS != nil {
		if config.TLSConfig == nil {
			return nil, errors.New("TLS is set, but the URL's scheme is not rediss")
		}
		config.TLSConfig = credentials.ForHost(opts.TLS, config.TLSConfig.ServerName)
	}
	config.MaxRetries = -1
	config.DialerRetries = 1
	config.DisableIdentity = true
	if config.ConnMaxIdleTime == 0 {
		config.ConnMaxIdleTime = maxIdle
	}
	config.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	config.Dialer = plainDialer(config)
	if config.TLSConfig != nil {
		config.Dialer = tlsDialer(config)
	}
	if config.Protocol == 0 {
		config.Protocol = 2
	}
	if config.DialTimeout == 0 {
		config.DialTimeout = dialTimeout
	}
	if config.ReadTimeout == 0 {
		config.ReadTimeout = ioTimeout
	}
	return config, nil
}

func open(ctx context.Context, config *redis.Options, opts Options) (*Store, error) {
	s := &Store{
		config: config,
		prefix: "{" + opts.Prefix + "}",
		expiry: max(opts.Expiry, 0),
		closed: make(chan struct{}),
		watch:  watch{all: make(map[*waiter]bool), begun: make(chan struct{}, 1)},
	}
	own := *config
	own.Dialer = s.dial
	own.OnConnect = s.check
	s.client = redis.NewClient(&own)
	s.SetTimeout(opts.Timeout)
	_, err := do(ctx, s, "connect", nil, func(ctx context.Context) (string, error) {
		return "", s.join(ctx)
	})
	if err != nil {
		s.Close()
		return nil, err
	}
	if s.expiry > 0 {
		s.calls.Go(s.renewUntilClosed)
	}
	return s, nil
}

// dial connects, and notes the address of this host.
func (s *Store) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := s.config.Dialer(ctx, network, addr)
	if err == nil {
		host, _, _ := net.SplitHostPort(addr)
		local := store.LocalAddrFor(c.LocalAddr(), host)
		s.local.Store(&local)
	}
	return c, err
}

// LocalAddr returns this host's address on the connection to the server, see
// store.LocalAddresser. It is invalid with a Unix socket.
func (s *Store) LocalAddr() netip.Addr {
	if a := s.local.Load(); a != nil {
		return *a
	}
	return netip.Addr{}
}

// ErrEmptied is matched by the error of a call if the server has lost the data that it had when
// the store was opened. It was started again without them, it was emptied, or another server took
// its place. Each new connection checks that.
var ErrEmptied = errors.New("the server has lost the data under this store's prefix")

// emptied is an ErrEmptied. It has no Unwrap, because the client strips a layer.
type emptied struct{ prefix string }

func (e emptied) Error() string {
	return fmt.Sprintf("%v (%s): it was started again without its data, or emptied; start the job again", ErrEmptied, e.prefix)
}

func (e emptied) Is(target error) bool { return target == ErrEmptied }

// join writes an incarnation under the prefix, unless there is one.
func (s *Store) join(ctx context.Context) error {
	key := s.prefix + incarnationKey
	err := s.transact(ctx, func(p redis.Pipeliner) {
		p.SetNX(ctx, key, rand.Text(), s.expiry)
		s.renew(ctx, p, key) // that of an earlier job may be about to expire
	})
	if err != nil {
		return err
	}
	found, now, err := s.identify(ctx)
	if err == nil {
		s.server.Store(now)
		s.incarnation.Store(&found)
	}
	return err
}

// check is called for each new connection of the pool.
func (s *Store) check(ctx context.Context, conn *redis.Conn) error {
	want := s.incarnation.Load()
	if want == nil {
		return nil
	}
	found, err := conn.Get(ctx, s.prefix+incarnationKey).Result()
	if err == redis.Nil || err == nil && found != *want {
		return emptied{strings.Trim(s.prefix, "{}")}
	}
	return err
}

// incarnationKey is the incarnation's key, after the prefix. Users' keys begin with another
// letter.
const incarnationKey = "i"

// Clone opens another store on the same data with the same settings.
func (s *Store) Clone(ctx context.Context) (store.Store, error) {
	if s.isClosed() {
		return nil, s.fail("clone", store.ErrClosed, time.Time{}, nil)
	}
	expiry := s.expiry
	if expiry == 0 {
		expiry = -1
	}
	if err := s.Kept(ctx); errors.Is(err, ErrEmptied) {
		return nil, err // the clone would take the emptied server for a new one
	}
	return open(ctx, s.config, Options{Prefix: strings.Trim(s.prefix, "{}"), Expiry: expiry, Timeout: s.Timeout()})
}

// Close ends pending calls and closes the connections. The data stay until they
// expire.
func (s *Store) Close() error {
	s.mu.Lock()
	first := !s.isClosed()
	if first {
		close(s.closed)
	}
	s.mu.Unlock()
	var err error
	if first {
		s.awaitPops()
		err = s.client.Close()
	}
	s.calls.Wait()
	return err
}

// awaitPops waits until interrupted QueuePops have put their elements back.
func (s *Store) awaitPops() {
	done := make(chan struct{})
	go func() { // it ends before s.calls
		s.pops.Wait()
		close(done)
	}()
	t := time.NewTimer(closeWait)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

func (s *Store) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}

// Timeout returns the limit of a wait whose context has no deadline.
func (s *Store) Timeout() time.Duration {
	if d := time.Duration(s.timeout.Load()); d != 0 {
		return d
	}
	return store.DefaultTimeout
}

// SetTimeout changes that limit for calls that begin later.
func (s *Store) SetTimeout(d time.Duration) { s.timeout.Store(int64(d)) }

func (s *Store) key(name string) string   { return s.prefix + "k" + name }
func (s *Store) queue(name string) string { return s.prefix + "q" + name }

// atKey, atQueue and atEither return the Redis keys of a name.
func (s *Store) atKey(name string) []string    { return []string{s.key(name)} }
func (s *Store) atQueue(name string) []string  { return []string{s.queue(name)} }
func (s *Store) atEither(name string) []string { return []string{s.key(name), s.queue(name)} }

func (s *Store) keys(names []string) []string {
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = s.key(n)
	}
	return keys
}

func (s *Store) fail(op string, err error, start time.Time, keys []string) error {
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("the server closed the connection: %w", err)
	}
	if redis.HasErrorPrefix(err, "DB index") || redis.HasErrorPrefix(err, "SELECT") {
		err = fmt.Errorf("database %d: %w", s.config.DB, err)
	}
	if addr, moved := redis.IsMovedError(err); moved {
		err = fmt.Errorf("the Redis Cluster has moved the keys of prefix %q to the node %s; start the job again, with that node in the URL: %w", strings.Trim(s.prefix, "{}"), addr, err)
	}
	e := &store.Error{Store: "redis " + s.config.Addr, Op: op, Keys: keys, Err: err}
	if e.Timeout() {
		e.After = time.Since(start)
	}
	return e
}

// call runs f, one exchange with the server, and returns early if ctx or the store ends. f may
// then still run, so it must not use the caller's memory. If f returns a value after that, undo gets it.
// A nil undo does nothing.
func call[T any](ctx context.Context, s *Store, f func(context.Context) (T, error), undo func(T)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	s.mu.Lock()
	if s.isClosed() {
		s.mu.Unlock()
		return none, store.ErrClosed
	}
	s.calls.Add(1)
	if undo != nil {
		s.pops.Add(1)
	}
	s.mu.Unlock()
	answers, left := make(chan answer), make(chan struct{})
	defer close(left)
	go func() {
		defer s.calls.Done()
		if undo != nil {
			defer s.pops.Done()
		}
		value, err := f(ctx)
		select {
		case answers <- answer{value, err}:
		case <-left:
			if err == nil && undo != nil {
				undo(value)
			}
		}
	}()
	var a answer
	select {
	case a = <-answers:
	case <-s.closed:
		a.err = store.ErrClosed
	case <-ctx.Done():
		a.err = store.WaitErr(ctx)
	}
	switch {
	case a.err == nil:
	case s.isClosed():
		a.err = store.ErrClosed
	case ctx.Err() != nil:
		a.err = store.WaitErr(ctx)
	}
	return a.value, a.err
}

// do is call for a method, with the store's timeout and error.
func do[T any](ctx context.Context, s *Store, op string, keys []string, f func(context.Context) (T, error)) (T, error) {
	start := time.Now()
	ctx, cancel := store.WithTimeout(ctx, s.Timeout())
	defer cancel()
	value, err := call(ctx, s, f, nil)
	if err != nil {
		err = s.fail(op, err, start, keys)
	}
	return value, err
}

// transact sends what f queues as one transaction.
func (s *Store) transact(ctx context.Context, f func(redis.Pipeliner)) error {
	cmds, err := s.client.TxPipelined(ctx, func(p redis.Pipeliner) error { f(p); return nil })
	return refusal(cmds, err)
}

// write is transact for a method that changes one Redis key and returns
// nothing.
func (s *Store) write(ctx context.Context, op, name, key string, f func(context.Context, redis.Pipeliner)) error {
	_, err := do(ctx, s, op, []string{name}, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.transact(ctx, func(p redis.Pipeliner) {
			f(ctx, p)
			s.renew(ctx, p, key)
		})
	})
	return err
}

func (s *Store) renew(ctx context.Context, p redis.Pipeliner, key string) {
	if s.expiry > 0 {
		p.PExpire(ctx, key, s.expiry)
	}
}

func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	return s.MultiSet(ctx, []string{key}, [][]byte{value})
}

func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	names := []string{key}
	return poll(ctx, s, "get", names, s.atKey, func(ctx context.Context) ([]byte, []string, error) {
		value, err := s.client.Get(ctx, s.key(key)).Bytes()
		if err == redis.Nil {
			return nil, names, nil
		}
		return value, nil, err
	}, nil)
}

// Add uses Redis's INCRBY if Redis parses the number as c10d does and the sum does not wrap.
// Otherwise it computes the sum and sets it, unless the value has changed meanwhile.
func (s *Store) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return do(ctx, s, "add", []string{key}, func(ctx context.Context) (int64, error) {
		var sum *redis.IntCmd
		err := s.transact(ctx, func(p redis.Pipeliner) {
			sum = p.IncrBy(ctx, s.key(key), delta)
			s.renew(ctx, p, s.key(key))
		})
		if redis.HasErrorPrefix(sum.Err(), "value is not an integer") ||
			redis.HasErrorPrefix(sum.Err(), "increment or decrement would overflow") {
			return s.addText(ctx, key, delta)
		}
		return sum.Val(), err
	})
}

func (s *Store) addText(ctx context.Context, key string, delta int64) (int64, error) {
	for {
		text, err := s.client.Get(ctx, s.key(key)).Bytes()
		if err != nil && err != redis.Nil {
			return 0, err
		}
		var n int64
		if err == nil {
			if n, err = store.ParseNumber(text); err != nil {
				return 0, err
			}
		}
		n += delta
		set, _, err := s.compareSet(ctx, key, text, strconv.AppendInt(nil, n, 10))
		if set || err != nil {
			return n, err
		}
	}
}

// compareSet returns whether it set the key, and the key's value. ARGV are the expected and the desired value, and the
// expiry.
var compareSet = redis.NewScript(`
local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] and (held or ARGV[1] ~= '') then
	return {0, held or ARGV[1]}
end
if ARGV[3] == '0' then
	redis.call('SET', KEYS[1], ARGV[2])
else
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {1, ARGV[2]}`)

func (s *Store) compareSet(ctx context.Context, key string, expected, desired []byte) (set bool, after []byte, err error) {
	answer, err := compareSet.Run(ctx, s.client, []string{s.key(key)}, expected, desired, s.expiry.Milliseconds()).Slice()
	if err != nil {
		return false, nil, err
	}
	if len(answer) == 2 {
		flag, ok := answer[0].(int64)
		value, ok2 := answer[1].(string)
		if ok && ok2 {
			return flag == 1, []byte(value), nil
		}
	}
	return false, nil, fmt.Errorf("the server answered a script with %v", answer)
}

func (s *Store) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	expected, desired = bytes.Clone(expected), bytes.Clone(desired)
	return do(ctx, s, "compare set", []string{key}, func(ctx context.Context) ([]byte, error) {
		_, after, err := s.compareSet(ctx, key, expected, desired)
		return after, err
	})
}

// missing returns the keys for which there is neither a key nor a queue.
func (s *Store) missing(ctx context.Context, names []string) ([]string, error) {
	keys := make([][]string, len(names))
	for i, name := range names {
		keys[i] = s.atEither(name)
	}
	there, err := s.exist(ctx, keys)
	if err != nil {
		return nil, err
	}
	var missing []string
	for i, name := range names {
		if !there[i] {
			missing = append(missing, name)
		}
	}
	return missing, nil
}

func (s *Store) Wait(ctx context.Context, keys ...string) error {
	keys = slices.Clone(keys)
	_, err := poll(ctx, s, "wait", keys, s.atEither, func(ctx context.Context) (struct{}, []string, error) {
		missing, err := s.missing(ctx, keys)
		return struct{}{}, missing, err
	}, nil)
	return err
}

func (s *Store) Check(ctx context.Context, keys ...string) (bool, error) {
	keys = slices.Clone(keys)
	return do(ctx, s, "check", keys, func(ctx context.Context) (bool, error) {
		missing, err := s.missing(ctx, keys)
		return err == nil && len(missing) == 0, err
	})
}

func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	return do(ctx, s, "delete", []string{key}, func(ctx context.Context) (bool, error) {
		n, err := s.client.Del(ctx, s.key(key)).Result()
		return n > 0, err
	})
}

func (s *Store) NumKeys(ctx context.Context) (int64, error) {
	return do(ctx, s, "number of keys", nil, func(ctx context.Context) (int64, error) {
		names, err := s.scan(ctx, s.key(""))
		return int64(len(names)), err
	})
}

func (s *Store) ListKeys(ctx context.Context) ([]string, error) {
	return do(ctx, s, "list keys", nil, func(ctx context.Context) ([]string, error) {
		return s.scan(ctx, s.key(""))
	})
}

// glob escapes the prefix for SCAN.
var glob = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// scan returns the names of Redis keys that begin with begin, without it.
func (s *Store) scan(ctx context.Context, begin string) ([]string, error) {
	seen := make(map[string]bool) // SCAN may name a key twice
	var names []string
	for cursor := uint64(0); ; {
		keys, next, err := s.client.Scan(ctx, cursor, glob.Replace(begin)+"*", scanCount).Result()
		if err != nil {
			return nil, err
		}
		for _, k := range keys {
			if name, ok := strings.CutPrefix(k, begin); ok && !seen[name] {
				seen[name] = true
				names = append(names, name)
			}
		}
		if cursor = next; cursor == 0 {
			return names, nil
		}
	}
}

func (s *Store) Append(ctx context.Context, key string, value []byte) error {
	text := string(value) // a copy
	return s.write(ctx, "append", key, s.key(key), func(ctx context.Context, p redis.Pipeliner) {
		p.Append(ctx, s.key(key), text)
	})
}

// MultiGet waits until every key exists and returns their values in order.
func (s *Store) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	keys = slices.Clone(keys)
	return poll(ctx, s, "multi get", keys, s.atKey, func(ctx context.Context) ([][]byte, []string, error) {
		answer, err := s.client.MGet(ctx, s.keys(keys)...).Result()
		if err != nil {
			return nil, nil, err
		}
		values := make([][]byte, len(keys))
		var missing []string
		for i, a := range answer {
			text, ok := a.(string)
			if !ok {
				missing = append(missing, keys[i])
			}
			values[i] = []byte(text)
		}
		return values, missing, nil
	}, nil)
}

// MultiSet sets keys[i] to values[i], all in one transaction.
func (s *Store) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if len(keys) == 0 || len(keys) != len(values) { // which MultiSetBySet refuses
		return store.MultiSetBySet(ctx, s, keys, values)
	}
	keys = slices.Clone(keys)
	copies := make([][]byte, len(values))
	for i, v := range values {
		copies[i] = bytes.Clone(v)
	}
	op := "multi set"
	if len(keys) == 1 {
		op = "set"
	}
	_, err := do(ctx, s, op, keys, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.transact(ctx, func(p redis.Pipeliner) {
			for i, k := range keys {
				p.Set(ctx, s.key(k), copies[i], s.expiry)
			}
		})
	})
	return err
}

func (s *Store) QueuePush(ctx context.Context, key string, value []byte) error {
	value = bytes.Clone(value)
	return s.write(ctx, "queue push", key, s.queue(key), func(ctx context.Context, p redis.Pipeliner) {
		p.RPush(ctx, s.queue(key), value)
	})
}

// QueuePop puts an element that comes after its context has ended, or after Close, back into the queue, as the first one.
// An element whose connection ends before it has come is lost, and so is one whose process ends.
func (s *Store) QueuePop(ctx context.Context, key string, block bool) ([]byte, error) {
	names := []string{key}
	return poll(ctx, s, "queue pop", names, s.atQueue, func(ctx context.Context) ([]byte, []string, error) {
		value, err := s.client.LPop(ctx, s.queue(key)).Bytes()
		switch {
		case err == redis.Nil && block:
			return nil, names, nil
		case err == redis.Nil:
			err = store.ErrQueueEmpty
		}
		return value, nil, err
	}, func(value []byte) {
		ctx := context.WithoutCancel(ctx)
		_ = s.transact(ctx, func(p redis.Pipeliner) {
			p.LPush(ctx, s.queue(key), value)
			s.renew(ctx, p, s.queue(key))
		})
	})
}

func (s *Store) QueueLen(ctx context.Context, key string) (int64, error) {
	return do(ctx, s, "queue length", []string{key}, func(ctx context.Context) (int64, error) {
		return s.client.LLen(ctx, s.queue(key)).Result()
	})
}

// renewUntilClosed renews the job's keys. It ignores errors: if the server is gone, the job's
// calls fail.
func (s *Store) renewUntilClosed() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tick := time.NewTicker(s.expiry / 3)
	defer tick.Stop()
	for {
		select {
		case <-s.closed:
			return
		case <-tick.C:
			_ = s.renewAll(ctx)
		}
	}
}

// renewAll renews the expiry of every key and queue under the prefix.
func (s *Store) renewAll(ctx context.Context) error {
	names, err := s.scan(ctx, s.prefix)
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(names, scanCount) {
		_, err := s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, n := range batch {
				s.renew(ctx, p, s.prefix+n)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
