package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"
)

// DefaultTimeout is the limit of a wait, as in c10d, unless SetTimeout changes it.
const DefaultTimeout = 300 * time.Second

// Store is a key-value service that the ranks of a job share. Its methods are c10d's. They may be
// called from many goroutines. A call that blocks ends with its context, with Close, or, if the
// context has no deadline, after the store's timeout.
//
// Values belong to the caller: a store copies its arguments and results. Keys may hold any bytes.
// An operation that a store lacks (an old TCP server has no queues) returns an error that matches
// errors.ErrUnsupported.
type Store interface {
	// Set overwrites the value of key.
	Set(ctx context.Context, key string, value []byte) error

	// Get waits until key exists and returns its value.
	Get(ctx context.Context, key string) ([]byte, error)

	// Add adds delta to the decimal number that key holds, a missing key
	// counting as 0, and returns the sum. Sums wrap like int64. A value that
	// is no number is an error and stays as it was.
	Add(ctx context.Context, key string, delta int64) (int64, error)

	// CompareSet sets key to desired if it holds expected, or if it is missing
	// and expected is empty. It returns what the key holds afterwards; for a
	// missing key that was not set it returns expected, as c10d does.
	CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error)

	// Wait returns once every key exists. A name that holds a queue with an
	// element counts as existing.
	Wait(ctx context.Context, keys ...string) error

	// Check reports whether every key exists now.
	Check(ctx context.Context, keys ...string) (bool, error)

	// Delete removes key and reports whether it was there.
	Delete(ctx context.Context, key string) (bool, error)

	// NumKeys returns the number of keys, with the store's own keys and without queues.
	NumKeys(ctx context.Context) (int64, error)

	// Append adds value to the end of key's value. It creates a missing key.
	Append(ctx context.Context, key string, value []byte) error

	// MultiGet waits until every key exists and returns their values in order.
	MultiGet(ctx context.Context, keys []string) ([][]byte, error)

	// MultiSet sets keys[i] to values[i], in order.
	MultiSet(ctx context.Context, keys []string, values [][]byte) error

	// QueuePush adds value at the end of the queue named key. Queues and
	// ordinary keys of one name do not see each other.
	QueuePush(ctx context.Context, key string, value []byte) error

	// QueuePop takes the first element. On an empty queue it waits for one if
	// block is set, and returns ErrQueueEmpty otherwise.
	QueuePop(ctx context.Context, key string, block bool) ([]byte, error)

	// QueueLen returns the number of elements in a queue.
	QueueLen(ctx context.Context, key string) (int64, error)

	// ListKeys returns the keys that users set, in no particular order.
	ListKeys(ctx context.Context) ([]string, error)

	// Timeout returns the limit of a wait whose context sets none.
	Timeout() time.Duration

	// SetTimeout changes that limit. Zero means DefaultTimeout, a negative
	// value no limit but the context's.
	SetTimeout(d time.Duration)

	// Close ends every pending call with ErrClosed and frees what the store
	// holds. It may be called more than once.
	Close() error
}

// Cloner is a store that can open a second connection to the same data. A long wait on one does
// not delay calls on the other.
type Cloner interface {
	// Clone returns a store over the same data with the same timeout. Closing
	// it leaves the original open.
	Clone(ctx context.Context) (Store, error)
}

// Willer is a store that can tell the others when this client is gone: its process ended, or its
// connection broke. MQTT calls that a last will. A process that has only stopped is not gone.
type Willer interface {
	// SetWill makes the store carry out CompareSet(key, expected, desired) when this client is
	// gone, unless DropWill is called before. A second will for a key replaces the first. The error
	// matches errors.ErrUnsupported if the store cannot notice, for example a server of PyTorch's.
	SetWill(ctx context.Context, key string, expected, desired []byte) error

	// DropWill withdraws the will for a key. It is no error if there is none.
	DropWill(ctx context.Context, key string) error
}

// SetWill calls SetWill of s. The error matches errors.ErrUnsupported if s is no Willer.
func SetWill(ctx context.Context, s Store, key string, expected, desired []byte) error {
	if w, ok := s.(Willer); ok {
		return w.SetWill(ctx, key, expected, desired)
	}
	return fmt.Errorf("store: a will for %q: %w", key, errors.ErrUnsupported)
}

// DropWill calls DropWill of s if it is a Willer.
func DropWill(ctx context.Context, s Store, key string) error {
	if w, ok := s.(Willer); ok {
		return w.DropWill(ctx, key)
	}
	return nil
}

// Keeper is a store whose server may lose keys and go on. It may evict keys, or start again from an old
// copy, or a replica may take its place.
type Keeper interface {
	// Kept returns an error if the server may have lost keys since this client connected.
	Kept(ctx context.Context) error
}

// Kept calls Kept of s if it is a Keeper.
func Kept(ctx context.Context, s Store) error {
	if k, ok := s.(Keeper); ok {
		return k.Kept(ctx)
	}
	return nil
}

// LocalAddresser is a store that knows this host's address on the connection to it. Ranks listen
// there for each other unless options say otherwise.
type LocalAddresser interface {
	// LocalAddr returns that address: a loopback one if only this host reaches the store, an
	// invalid one if the store cannot tell.
	LocalAddr() netip.Addr
}

// LocalAddrOf returns LocalAddr of s, or an invalid address if s has no such method.
func LocalAddrOf(s Store) netip.Addr {
	if l, ok := s.(LocalAddresser); ok {
		return l.LocalAddr()
	}
	return netip.Addr{}
}

// LocalAddrFor is LocalAddr of a store whose clients connect to host, where local is this end of
// the connection. It is invalid for a loopback connection to a name, such as the host's own:
// other hosts may reach the store by another address.
func LocalAddrFor(local net.Addr, host string) netip.Addr {
	tcp, ok := local.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	a := tcp.AddrPort().Addr().Unmap()
	if a.IsLinkLocalUnicast() || a.IsLoopback() && !IsLoopback(host) {
		return netip.Addr{}
	}
	return a
}

// IsLoopback reports whether host is localhost or a loopback address.
func IsLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.IsLoopback()
}

var (
	// ErrTimeout is matched by the error of every wait that ran out of time. That error is also a
	// net.Error whose Timeout method returns true.
	ErrTimeout error = timeoutError{}

	// ErrClosed is matched by the error of a call on a closed store.
	ErrClosed = errors.New("store: closed")

	// ErrQueueEmpty is returned by a QueuePop that does not block.
	ErrQueueEmpty = errors.New("store: queue is empty")

	// ErrNotNumber is matched by the error of an Add to a value that is not a decimal number.
	ErrNotNumber = errors.New("value is not a decimal number")

	// ErrTooLarge is matched by the error of a call whose key, value or key
	// count is over a store's limit.
	ErrTooLarge = errors.New("over the store's limit")
)

type timeoutError struct{}

func (timeoutError) Error() string   { return "timed out" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// Error is what the methods of this module's stores return.
type Error struct {
	Store string        // which store: "tcp 127.0.0.1:29500", "file /tmp/s", "hash"
	Op    string        // the operation: "get", "wait", ...
	Keys  []string      // the keys it was about; for a wait that timed out, those still missing where known
	After time.Duration // for a timeout, how long the wait took; else 0
	Err   error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "store: %s: %s", e.Store, e.Op)
	for i, k := range e.Keys {
		if i == 8 {
			fmt.Fprintf(&b, " and %d more", len(e.Keys)-i)
			break
		}
		fmt.Fprintf(&b, " %q", k)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if e.After > 0 {
		fmt.Fprintf(&b, " after %v", e.After.Round(time.Millisecond))
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is makes a wait that a deadline ended match ErrTimeout, besides context.DeadlineExceeded.
func (e *Error) Is(target error) bool { return target == ErrTimeout && e.Timeout() }

// Timeout reports whether the cause is a timeout, so that an Error can be used
// as a net.Error.
func (e *Error) Timeout() bool {
	return errors.Is(e.Err, ErrTimeout) || errors.Is(e.Err, context.DeadlineExceeded)
}

// Temporary is part of net.Error. It reports the same as Timeout.
func (e *Error) Temporary() bool { return e.Timeout() }
