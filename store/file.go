package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
)

const (
	// filePoll is how often a waiter looks at the file; c10d's is the same.
	filePoll = 10 * time.Millisecond

	// lockPoll is the first pause between two tries to lock the file. A change
	// holds the lock for some ten microseconds, so the next try mostly succeeds.
	// Pauses double up to filePoll.
	lockPoll = 50 * time.Microsecond

	// tornPatience is how long the file may end in the middle of a record while it can be locked.
	// A writer with a lock never shows such a file. A writer without one (a copy in progress, a
	// slow file system) gets this much time.
	tornPatience = time.Second

	// setupLimit bounds the wait for the lock in NewFile and Close, which take
	// no context. It is long against the microseconds of a change, and short
	// enough to notice a stopped process that holds the lock.
	setupLimit = 10 * time.Second

	// maxBlob is the longest key or value in a file. PyTorch's limit is the four bytes of the
	// length. This one detects damaged lengths in long files.
	maxBlob = 1 << 30

	refcountKey = "refcount/"
	cleanupKey  = "cleanup/"
)

var errNoStore = errors.New("the file is no store")

// headLen is how many bytes show whether a file is a store: a length and the start of a key.
const headLen = 4 + len(refcountKey)

// begins reports whether head, at most headLen bytes, can be the start of a store file: a record,
// whole or cut off, of an internal or a user's key.
func begins(head []byte) bool {
	if len(head) < 4 {
		return true
	}
	length, key := binary.LittleEndian.Uint32(head), string(head[4:])
	if length == 0 || length > maxBlob {
		return false
	}
	for _, own := range []string{refcountKey, cleanupKey, "/", "-/"} {
		n := min(len(own), len(key))
		if own[:n] == key[:n] && int(length) >= len(own) {
			return true
		}
	}
	return false
}

var errTorn = errors.New("the file ends in the middle of a record: the process that wrote it may have died")

// File is a store in a file that processes share. It has the format, locking and life cycle of
// c10d's FileStore, so Go and Python processes can use one file. It needs Unix and a file system
// with flock(2). Waits poll. There are no queues, as in PyTorch.
//
// The file is a log that grows with every change, and every process reads it into memory. Use it
// for rendezvous, not for data.
//
// Only its user can read and write a file that NewFile has made. A link is refused, and so is a file
// of another user than root if everybody can write to it or to its directory.
type File struct {
	handle
	path      string
	worldSize int
	id        os.FileInfo // tells whether path still names the file of NewFile
	keep      *os.File    // open, so that no other file can get the same id

	patience time.Duration // tornPatience, but in tests

	turn  chan struct{} // held by the goroutine whose operation is under way, guards:
	cache map[string][]byte
	pos   int64     // how much of the file cache reflects
	read  time.Time // when that was so
}

// NewFile opens the store in the file at path and creates a missing file. The keys of earlier
// jobs in the file are visible. Package pg keeps the keys of runs apart. Without it, or with
// PyTorch ranks, the file must not exist when the first process opens it.
//
// The last Close removes the file, if at least worldSize handles have been closed. With a
// worldSize below 1 it stays (c10d's -1).
func NewFile(path string, worldSize int) (*File, error) {
	f := &File{
		path:      path,
		worldSize: worldSize,
		patience:  tornPatience,
		turn:      make(chan struct{}, 1),
		cache:     make(map[string][]byte),
	}
	f.init("file " + path)
	ctx, cancel := context.WithTimeout(context.Background(), setupLimit)
	defer cancel()
	err := f.change(ctx, func() (records []record, err error) {
		if records, err = f.count(nil, refcountKey, 1); err == nil {
			f.keep, _, err = ownfile.Open(path, os.O_RDONLY, 0)
		}
		return records, err
	})
	if err != nil {
		f.keep.Close()
		return nil, f.fail("open", err, time.Time{})
	}
	return f, nil
}

// Close ends pending calls, counts this handle out and removes the file if it
// was the last.
func (f *File) Close() error {
	var err error
	f.closing.Do(func() {
		close(f.closed)
		f.turn <- struct{}{}
		ctx, cancel := context.WithTimeout(context.Background(), setupLimit)
		defer cancel()
		err = f.leave(ctx)
		f.keep.Close()
	})
	if err != nil {
		return f.fail("close", err, time.Time{})
	}
	return nil
}

// leave does what c10d's destructor does. The caller has the turn for good.
func (f *File) leave(ctx context.Context) error {
	file, err := f.lock(ctx, true, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if err := f.refresh(ctx, file); err != nil {
		return err
	}
	records, err := f.count(nil, cleanupKey, 1)
	if err == nil {
		records, err = f.count(records, refcountKey, -1)
	}
	if err != nil {
		return err
	}
	left, _ := ParseNumber(records[0].value)
	open, _ := ParseNumber(records[1].value)
	if f.worldSize > 0 && open == 0 && left >= int64(f.worldSize) {
		return os.Remove(f.path)
	}
	return f.write(file, records)
}

// record is one entry of the log.
type record struct {
	key   string
	value []byte
}

// appendRecord adds the bytes of r to b: each of key and value after its length
// in four bytes, low byte first.
func appendRecord(b []byte, r record) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.key)))
	b = append(b, r.key...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.value)))
	return append(b, r.value...)
}

// readRecord reads a record from r, which has size bytes left, and returns how
// many bytes it took. Its error is errTorn if the record goes on beyond size.
func readRecord(r io.Reader, size int64) (rec record, n int64, err error) {
	blob := func() []byte {
		var length [4]byte
		if err != nil {
			return nil
		}
		if size-n < int64(len(length)) {
			err = errTorn
			return nil
		}
		if _, err = io.ReadFull(r, length[:]); err != nil {
			return nil
		}
		n += int64(len(length))
		l := int64(binary.LittleEndian.Uint32(length[:]))
		switch {
		case l > maxBlob:
			err = fmt.Errorf("a record of %d bytes: %w of %d", l, ErrTooLarge, maxBlob)
		case l > size-n:
			err = errTorn
		default:
			b := make([]byte, l)
			_, err = io.ReadFull(r, b)
			n += l
			return b
		}
		return nil
	}
	if rec.key = string(blob()); rec.key == "" && err == nil {
		err = errors.New("a record without a key: not a store's file")
	}
	rec.value = blob()
	return rec, n, err
}

// apply puts a record into the cache. Users' keys have a slash in front, and
// "-/k" with no value deletes "/k".
func (f *File) apply(r record) {
	if key, ok := strings.CutPrefix(r.key, "-"); ok {
		delete(f.cache, key)
		return
	}
	f.cache[r.key] = r.value
}

// count adds to records one that changes the counter under key.
func (f *File) count(records []record, key string, delta int64) ([]record, error) {
	var n int64
	if v, ok := f.cache[key]; ok {
		var err error
		if n, err = ParseNumber(v); err != nil {
			return nil, err
		}
	}
	return append(records, record{key, strconv.AppendInt(nil, n+delta, 10)}), nil
}

// lock opens the file and locks it; closing it unlocks. closed, if not nil,
// ends the wait for the lock.
func (f *File) lock(ctx context.Context, exclusive bool, closed <-chan struct{}) (*os.File, error) {
	flags := os.O_RDONLY
	if exclusive {
		flags = os.O_RDWR
	}
	if f.id == nil {
		flags |= os.O_CREATE
	}
	for pause := lockPoll; ; pause = min(2*pause, filePoll) {
		file, err := f.tryLock(flags, exclusive)
		if err != nil || file != nil {
			return file, err
		}
		// Jitter keeps processes that collided once from doing so in step.
		timer := time.NewTimer(pause/2 + rand.N(pause/2))
		select {
		case <-timer.C:
			continue
		case <-closed:
			err = ErrClosed
		case <-ctx.Done():
			err = fmt.Errorf("waiting for the lock of the file: %w", WaitErr(ctx))
		}
		timer.Stop()
		return nil, err
	}
}

// tryLock returns neither file nor error if another process has the lock.
func (f *File) tryLock(flags int, exclusive bool) (*os.File, error) {
	// Only this user may read it: the file has the numbers that connections between ranks need.
	file, info, err := ownfile.Open(f.path, flags, 0o600)
	if err != nil {
		if info, e := os.Lstat(f.path); e == nil && info.Mode()&fs.ModeSymlink != 0 {
			err = errors.New("the file is a link, which could be another user's: give the path that it stands for")
		}
		return nil, err
	}
	if f.id == nil {
		err = f.checkOwner(info)
	}
	locked := false
	if err == nil {
		locked, err = flock(file, exclusive)
	}
	if err == nil && locked {
		locked, err = f.isCurrent(file)
	}
	if err != nil || !locked {
		file.Close()
		return nil, err
	}
	return file, nil
}

// checkOwner refuses a file that another user may have put there: it is not this user's or root's, and
// everybody can write to it or to its directory. A file system in the network may show one owner for
// the files of all users. So a file of another user is taken elsewhere.
func (f *File) checkOwner(info fs.FileInfo) error {
	if !ownfile.Foreign(info) {
		return nil
	}
	dir, err := os.Stat(filepath.Dir(f.path))
	if err == nil && (info.Mode()|dir.Mode()).Perm()&0o002 != 0 {
		err = errors.New("the file belongs to another user, and everybody can write to it or to its directory: give the path of a file in a directory of your own")
	}
	return err
}

// isCurrent reports whether path still names the open file: the last holder of the lock may have
// removed it. NewFile then opens the file again, since that file was an earlier job's.
func (f *File) isCurrent(file *os.File) (bool, error) {
	opened, err := file.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(f.path)
	if f.id == nil {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(opened, named) {
			return false, nil
		}
		f.id = opened
		return err == nil, err
	}
	if err == nil && !(os.SameFile(f.id, opened) && os.SameFile(opened, named)) {
		err = errors.New("the file was replaced by another")
	}
	return err == nil, err
}

// refresh reads what the file has beyond pos.
func (f *File) refresh(ctx context.Context, file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	left := info.Size() - f.pos
	if left < 0 {
		return fmt.Errorf("the file shrank from %d bytes to %d", f.pos, info.Size())
	}
	r := bufio.NewReader(io.NewSectionReader(file, f.pos, left))
	if f.pos == 0 && left > 0 {
		if head, _ := r.Peek(int(min(left, int64(headLen)))); !begins(head) {
			return fmt.Errorf("%w: it begins with %q; give the path of a file that does not exist yet", errNoStore, head)
		}
	}
	for left > 0 {
		if err := ctx.Err(); err != nil {
			return WaitErr(ctx)
		}
		rec, n, err := readRecord(r, left)
		if err != nil {
			return fmt.Errorf("at byte %d: %w", f.pos, err)
		}
		f.apply(rec)
		f.pos += n
		left -= n
	}
	return nil
}

// write adds records to the end of the file, which is at pos, or nothing.
func (f *File) write(file *os.File, records []record) error {
	var b []byte
	for _, r := range records {
		if len(r.key) > maxBlob || len(r.value) > maxBlob {
			return fmt.Errorf("a record of %d bytes: %w of %d", max(len(r.key), len(r.value)), ErrTooLarge, maxBlob)
		}
		b = appendRecord(b, r)
	}
	if _, err := file.WriteAt(b, f.pos); err != nil {
		return errors.Join(err, file.Truncate(f.pos))
	}
	for _, r := range records {
		f.apply(r)
	}
	f.pos += int64(len(b))
	return nil
}

// locked runs work on the file, locked and read to its end.
func (f *File) locked(ctx context.Context, exclusive bool, work func(*os.File) error) error {
	torn := time.Time{}
	for {
		if err := f.begin(ctx); err != nil {
			return err
		}
		select {
		case f.turn <- struct{}{}:
		case <-f.closed:
			return ErrClosed
		case <-ctx.Done():
			return WaitErr(ctx)
		}
		err := f.once(ctx, exclusive, work)
		<-f.turn
		if !errors.Is(err, errTorn) {
			return err
		}
		if torn.IsZero() {
			torn = time.Now()
		}
		if time.Since(torn) > f.patience {
			return err
		}
		if err := pause(ctx, &f.handle, time.After(filePoll)); err != nil {
			return err
		}
	}
}

func (f *File) once(ctx context.Context, exclusive bool, work func(*os.File) error) error {
	file, err := f.lock(ctx, exclusive, f.closed)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := f.refresh(ctx, file); err != nil {
		return err
	}
	f.read = time.Now()
	return work(file)
}

// view runs look on the current data.
func (f *File) view(ctx context.Context, look func()) error {
	return f.locked(ctx, false, func(*os.File) error { look(); return nil })
}

// viewAgain is view for a call that waits. Several waiting calls share a look at the file: what another one has read in the
// last half of filePoll is new enough.
func (f *File) viewAgain(ctx context.Context, look func()) error {
	select {
	case f.turn <- struct{}{}:
	case <-f.closed:
		return ErrClosed
	case <-ctx.Done():
		return WaitErr(ctx)
	}
	recent := time.Since(f.read) < filePoll/2 && !f.isClosed()
	if recent {
		look()
	}
	<-f.turn
	if recent {
		return nil
	}
	return f.view(ctx, look)
}

// change writes the records that edit returns, as one change.
func (f *File) change(ctx context.Context, edit func() ([]record, error)) error {
	return f.locked(ctx, true, func(file *os.File) error {
		records, err := edit()
		if err != nil || len(records) == 0 {
			return err
		}
		return f.write(file, records)
	})
}

// do is change for a method, with the store's timeout and error.
func (f *File) do(ctx context.Context, op string, keys []string, edit func() ([]record, error)) error {
	start := time.Now()
	ctx, cancel := WithTimeout(ctx, f.Timeout())
	defer cancel()
	if err := f.change(ctx, edit); err != nil {
		return f.fail(op, err, start, keys...)
	}
	return nil
}

// await polls until all keys exist and returns their values.
func (f *File) await(ctx context.Context, op string, keys []string) ([][]byte, error) {
	start := time.Now()
	ctx, cancel := WithTimeout(ctx, f.Timeout())
	defer cancel()
	missing := keys
	for view := f.view; ; view = f.viewAgain {
		var values [][]byte
		err := view(ctx, func() { values, missing = f.lookUp(keys) })
		if err == nil && len(missing) == 0 {
			return values, nil
		}
		if err == nil {
			err = pause(ctx, &f.handle, time.After(filePoll))
		}
		if err != nil {
			return nil, f.fail(op, err, start, missing...)
		}
	}
}

// lookUp returns copies of the values of keys, and which keys are missing.
func (f *File) lookUp(keys []string) (values [][]byte, missing []string) {
	for _, k := range keys {
		v, ok := f.cache["/"+k]
		if !ok {
			missing = append(missing, k)
		}
		values = append(values, append([]byte{}, v...))
	}
	return values, missing
}

func (f *File) Set(ctx context.Context, key string, value []byte) error {
	return f.do(ctx, "set", []string{key}, func() ([]record, error) {
		return []record{{"/" + key, bytes.Clone(value)}}, nil
	})
}

func (f *File) Get(ctx context.Context, key string) ([]byte, error) {
	values, err := f.await(ctx, "get", []string{key})
	if err != nil {
		return nil, err
	}
	return values[0], nil
}

func (f *File) Add(ctx context.Context, key string, delta int64) (sum int64, err error) {
	err = f.do(ctx, "add", []string{key}, func() ([]record, error) {
		records, err := f.count(nil, "/"+key, delta)
		if err == nil {
			sum, err = ParseNumber(records[0].value)
		}
		return records, err
	})
	return sum, err
}

func (f *File) CompareSet(ctx context.Context, key string, expected, desired []byte) (after []byte, err error) {
	err = f.do(ctx, "compare set", []string{key}, func() ([]record, error) {
		var set bool
		held, ok := f.cache["/"+key]
		if after, set = compareSet(held, ok, expected, desired); !set {
			return nil, nil
		}
		return []record{{"/" + key, bytes.Clone(after)}}, nil
	})
	return after, err
}

func (f *File) Wait(ctx context.Context, keys ...string) error {
	_, err := f.await(ctx, "wait", keys)
	return err
}

// look is view for a method, with the store's timeout and error.
func (f *File) look(ctx context.Context, op string, keys []string, look func()) error {
	start := time.Now()
	ctx, cancel := WithTimeout(ctx, f.Timeout())
	defer cancel()
	if err := f.view(ctx, look); err != nil {
		return f.fail(op, err, start, keys...)
	}
	return nil
}

func (f *File) Check(ctx context.Context, keys ...string) (all bool, err error) {
	err = f.look(ctx, "check", keys, func() {
		_, missing := f.lookUp(keys)
		all = len(missing) == 0
	})
	return all, err
}

// Delete removes key and reports whether it was there. Like PyTorch it writes
// its record for a missing key too; unlike PyTorch it then returns false.
func (f *File) Delete(ctx context.Context, key string) (deleted bool, err error) {
	err = f.do(ctx, "delete", []string{key}, func() ([]record, error) {
		_, deleted = f.cache["/"+key]
		return []record{{"-/" + key, nil}}, nil
	})
	return deleted && err == nil, err
}

// NumKeys returns the number of keys, the counters of open and closed handles
// among them, as in c10d.
func (f *File) NumKeys(ctx context.Context) (n int64, err error) {
	err = f.look(ctx, "number of keys", nil, func() { n = int64(len(f.cache)) })
	return n, err
}

func (f *File) Append(ctx context.Context, key string, value []byte) error {
	return f.do(ctx, "append", []string{key}, func() ([]record, error) {
		held := f.cache["/"+key]
		return []record{{"/" + key, append(held[:len(held):len(held)], value...)}}, nil
	})
}

func (f *File) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return f.await(ctx, "multi get", keys)
}

// MultiSet sets keys[i] to values[i], all in one change.
func (f *File) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if err := checkMultiSet(keys, values); err != nil {
		return err
	}
	return f.do(ctx, "multi set", keys, func() (records []record, err error) {
		for i, k := range keys {
			records = append(records, record{"/" + k, bytes.Clone(values[i])})
		}
		return records, nil
	})
}

func (f *File) ListKeys(ctx context.Context) (keys []string, err error) {
	err = f.look(ctx, "list keys", nil, func() {
		for k := range f.cache {
			if name, ok := strings.CutPrefix(k, "/"); ok {
				keys = append(keys, name)
			}
		}
	})
	return keys, err
}

// QueuePush, QueuePop and QueueLen return errors.ErrUnsupported.
func (f *File) QueuePush(_ context.Context, key string, _ []byte) error {
	return f.noQueues("queue push", key)
}

func (f *File) QueuePop(_ context.Context, key string, _ bool) ([]byte, error) {
	return nil, f.noQueues("queue pop", key)
}

func (f *File) QueueLen(_ context.Context, key string) (int64, error) {
	return 0, f.noQueues("queue length", key)
}

func (f *File) noQueues(op, key string) error {
	return f.fail(op, fmt.Errorf("queues in a file: %w", errors.ErrUnsupported), time.Time{}, key)
}
