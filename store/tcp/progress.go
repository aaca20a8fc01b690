package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

// progress describes what New waits for, in lines of the log.
type progress struct {
	addr     string
	hostedBy string

	mu    sync.Mutex
	tries int
	last  error // of the last try to connect

	host   *Store // nil until this process, which hosts, waits for others
	size   int
	joined int64
}

// tried notes that a try to connect has failed.
func (o *progress) tried(err error) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tries++
	o.last = err
}

// connected notes that the server has accepted a connection and must answer.
func (o *progress) connected() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = errMute
}

// count notes how many workers have joined host.
func (o *progress) count(host *Store, joined int64, size int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.host, o.joined, o.size = host, joined, size
}

func (o *progress) report(ctx context.Context) (string, []slog.Attr) {
	o.mu.Lock()
	host, joined, size, tries, last := o.host, o.joined, o.size, o.tries, o.last
	o.mu.Unlock()
	if host != nil {
		return fmt.Sprintf("waiting for %s: %d of %d ranks have joined the store", host.absent(ctx, joined, size), joined, size),
			[]slog.Attr{slog.String("store", o.addr)}
	}
	text := "waiting for the store at " + o.addr
	if o.hostedBy != "" {
		text = fmt.Sprintf("waiting for %s, which hosts the store at %s", o.hostedBy, o.addr)
	}
	attrs := []slog.Attr{slog.Int("attempts", tries)}
	if last != nil {
		attrs = append(attrs, slog.String("last", last.Error()))
	}
	return text, attrs
}

// workerKey is the key of a worker's host and process, beside the counter of workers. PyTorch
// does not use it.
func workerKey(rank int) string { return workers + "rank_" + strconv.Itoa(rank) }

// leftKey is the key that Leave writes.
func leftKey(rank int) string { return workers + "left_" + strconv.Itoa(rank) }

// errLeft is why a rank does not join a server.
var errLeft = errors.New("the server belongs to a group that this rank has left, and its host has not closed it yet")

// leftPause is how long New waits before it looks for another server than one that its rank has left.
const leftPause = 50 * time.Millisecond

// Leave notes in the server that a rank has left its group for good: a later New of this rank with
// Options.Once does not join this server.
func (s *Store) Leave(ctx context.Context, rank int) error {
	_, err := s.call(ctx, "leave", &request{query: qSet, keys: one(leftKey(rank)), vals: [][]byte{[]byte("1")}})
	return err
}

func (s *Store) hasLeft(ctx context.Context, rank int) (bool, error) {
	rep, err := s.call(ctx, "join", &request{query: qCheck, keys: one(leftKey(rank))})
	return err == nil && rep.num == ready, err
}

// enroll writes this worker's host and process to servers of this package. They add when its connection has ended.
func (s *Store) enroll(ctx context.Context, rank int) error {
	if s.mux.Load() == nil {
		return nil
	}
	host, _ := os.Hostname()
	who := fmt.Sprintf("host %s, process %d", host, os.Getpid())
	_, err := s.call(ctx, "join", &request{query: qSet, keys: one(workerKey(rank)), vals: [][]byte{[]byte(who)}})
	if err == nil {
		_, err = s.call(ctx, "join", &request{query: qSetWill, keys: one(workerKey(rank)), vals: [][]byte{[]byte(who), []byte(who + "; its connection has ended")}})
	}
	return err
}

// Worker returns the host and the process of a rank that joined with Options.WorldSize and
// Options.Rank, and says if its connection has ended since. ok is false if none did. It is for messages about missing ranks. Nothing is known
// of PyTorch's ranks, and of ranks that joined through a PyTorch server.
func (s *Store) Worker(ctx context.Context, rank int) (who string, ok bool, err error) {
	const op = "worker"
	rep, err := s.call(ctx, op, &request{query: qCheck, keys: one(workerKey(rank))})
	if err != nil || rep.num != ready {
		return "", false, err
	}
	v, err := s.get(ctx, op, workerKey(rank))
	const most = 300
	if len(v) > most {
		v = v[:most]
	}
	return strings.ToValidUTF8(string(v), "?"), err == nil, err
}

// Joined returns how many workers have joined with Options.WorldSize, with PyTorch's.
func (s *Store) Joined(ctx context.Context) (int64, error) {
	rep, err := s.call(ctx, "joined", &request{query: qAdd, keys: one(workers)})
	return rep.num, err
}

// absent names the ranks that have not joined. If some joined without their rank, it lists the
// ranks that may be missing.
func (s *Store) absent(ctx context.Context, joined int64, size int) string {
	var unknown []int
	for r := range size {
		_, there, err := s.Worker(ctx, r)
		if err != nil {
			return fmt.Sprintf("%d ranks", int64(size)-joined)
		}
		if !there {
			unknown = append(unknown, r)
		}
	}
	if missing := int64(size) - joined; int64(len(unknown)) != missing {
		return fmt.Sprintf("%d of the %s", missing, waiting.Ranks(unknown))
	}
	return waiting.Ranks(unknown)
}

// lastLook bounds the last query, after a timeout, for the missing ranks.
const lastLook = 500 * time.Millisecond

// notJoined is the error of a host if workers are missing.
func (s *Store) notJoined(ctx context.Context, joined int64, size int) error {
	look, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), lastLook)
	defer cancel()
	return fmt.Errorf("%d of %d workers have joined; missing: %s: %w", joined, size, s.absent(look, joined, size), store.WaitErr(ctx))
}

// resolveFor is how long a host name that does not exist is looked up again. The names of pods
// appear in a cluster's DNS seconds after the first pods run.
const resolveFor = 30 * time.Second

// noSuchHost reports whether err says that a host name does not exist. It is false if the name
// server does not answer.
func noSuchHost(err error) bool {
	var e *net.DNSError
	return errors.As(err, &e) && e.IsNotFound
}

// unresolved keeps since when a name has not existed, and says when that is too long.
type unresolved struct {
	since time.Time // zero while the name exists
	limit time.Duration
}

// see notes the outcome of a try. It returns how long to try on, and the error that
// ends it when the time is over.
func (u *unresolved) see(err error) (left time.Duration, final error) {
	if !noSuchHost(err) {
		u.since = time.Time{}
		return longestPause, nil
	}
	if u.since.IsZero() {
		u.since = time.Now()
	}
	if left = u.limit - time.Since(u.since); left > 0 {
		return left, nil
	}
	return 0, permanent{fmt.Errorf("the host name has not existed for %v; check the address: %w", u.limit, err)}
}

// errNoStore says that another service answers.
var errNoStore = errors.New("answers, but is no TCPStore; check the port")

// stranger is the error for an answer to the handshake that is not a TCPStore's.
func stranger(answer []byte) error {
	const tlsAlert, tlsHandshake = 0x15, 0x16
	if (answer[0] == tlsAlert || answer[0] == tlsHandshake) && answer[1] == 3 {
		return errNeedsTLS
	}
	return permanent{fmt.Errorf("%w: its answer begins with %q", errNoStore, answer)}
}

// errMute says that the handshake was not answered.
var errMute = errors.New("accepts connections but does not answer: it is no TCPStore, or its process has stopped")

func mute(err error) error { return fmt.Errorf("%w: %w", errMute, err) }
