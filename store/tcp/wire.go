package tcp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/store"
)

// query is the kind of a request, numbered as by PyTorch since 2.2.
type query byte

const (
	qValidate query = iota
	qSet
	qCompareSet
	qGet
	qAdd
	qCheck
	qWait
	qNumKeys
	qDelete
	qAppend
	qMultiGet
	qMultiSet
	qCancelWait
	qPing
	qQueuePush
	qQueuePop
	qQueueLen
	qListKeys
	qBarrier
	qWatch
	qGiveUp    // this and the next ones are only in the native dialect
	qQueueTake // a pop that waits
	qHello     // the client's job, for the server's
	qSetWill   // see data.leave
	qDropWill
	queries
)

// dialect is a set of queries with their numbers on the wire.
type dialect struct{ queries []query }

// none is in a dialect for a number that no query has.
const none = queries

// from0 returns queries with their own numbers, but for those that a dialect lacks.
func from0(end query, lacks ...query) []query {
	all := make([]query, end)
	for q := range all {
		if all[q] = query(q); slices.Contains(lacks, query(q)) {
			all[q] = none
		}
	}
	return all
}

var (
	// pytorch is the protocol of PyTorch since 2.2.
	pytorch = &dialect{from0(qWatch)}
	// native is that of a client and a server of this package, see mux.
	native = &dialect{from0(queries, qValidate, qCancelWait, qBarrier, qWatch)}
)

// number returns the number of q, or a negative one if the dialect lacks it.
func (d *dialect) number(q query) int { return slices.Index(d.queries, q) }

// query returns the query of a number.
func (d *dialect) query(n byte) (query, error) {
	if int(n) >= len(d.queries) || d.queries[n] == none {
		return 0, malformedf("unknown query %#x", n)
	}
	return d.queries[n], nil
}

// form is what follows the byte that names a query.
type form struct {
	name string
	keys int  // blobs that are keys
	vals int  // blobs that are values, after the key
	num  int  // bytes of the number at the end
	many bool // a count comes first, and then that many times the blobs
}

var forms = [...]form{
	qValidate:   {name: "VALIDATE", num: 4},
	qSet:        {name: "SET", keys: 1, vals: 1},
	qCompareSet: {name: "COMPARE_SET", keys: 1, vals: 2},
	qGet:        {name: "GET", keys: 1},
	qAdd:        {name: "ADD", keys: 1, num: 8},
	qCheck:      {name: "CHECK", keys: 1, many: true},
	qWait:       {name: "WAIT", keys: 1, many: true},
	qNumKeys:    {name: "GETNUMKEYS"},
	qDelete:     {name: "DELETE_KEY", keys: 1},
	qAppend:     {name: "APPEND", keys: 1, vals: 1},
	qMultiGet:   {name: "MULTI_GET", keys: 1, many: true},
	qMultiSet:   {name: "MULTI_SET", keys: 1, vals: 1, many: true},
	qCancelWait: {name: "CANCEL_WAIT"},
	qPing:       {name: "PING", num: 4},
	qQueuePush:  {name: "QUEUE_PUSH", keys: 1, vals: 1},
	qQueuePop:   {name: "QUEUE_POP", keys: 1},
	qQueueLen:   {name: "QUEUE_LEN", keys: 1},
	qListKeys:   {name: "LIST_KEYS"},
	qBarrier:    {name: "BARRIER", keys: 1, num: 8},
	qWatch:      {name: "WATCH_KEY", keys: 1},
	qGiveUp:     {name: "GIVE_UP", num: 4},
	qQueueTake:  {name: "QUEUE_TAKE", keys: 1},
	qHello:      {name: "HELLO", keys: 1},
	qSetWill:    {name: "SET_WILL", keys: 1, vals: 2},
	qDropWill:   {name: "DROP_WILL", keys: 1},
}

func (q query) String() string { return forms[q].name }

// opening is VALIDATE with its number, what a new client says first.
var opening = []byte{0, 0xce, 0xf7, 0x85, 0x3c}

// Replies of one byte.
const (
	ready     = 0 // CHECK: all there. WAIT, BARRIER: stop waiting
	notReady  = 1 // CHECK
	cancelled = 1 // CANCEL_WAIT
	watched   = 3 // WATCH_KEY
)

// request is one message of a client.
type request struct {
	query query
	keys  []string
	vals  [][]byte // form.vals of them for each key
	num   int64

	room func(n int) error // asked before n bytes are allocated for more of a message; nil allows all
}

// append adds the bytes of r to b.
func (r *request) append(b []byte, d *dialect) ([]byte, error) {
	n := d.number(r.query)
	if n < 0 {
		return b, fmt.Errorf("%v: %w", r.query, errors.ErrUnsupported)
	}
	f := &forms[r.query]
	b = append(b, byte(n))
	if f.many {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(r.keys)))
	}
	for i, key := range r.keys {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(key)))
		b = append(b, key...)
		for _, v := range r.vals[i*f.vals : (i+1)*f.vals] {
			b = binary.LittleEndian.AppendUint64(b, uint64(len(v)))
			b = append(b, v...)
		}
	}
	switch f.num {
	case 4:
		b = binary.LittleEndian.AppendUint32(b, uint32(r.num))
	case 8:
		b = binary.LittleEndian.AppendUint64(b, uint64(r.num))
	}
	return b, nil
}

// Limits bound one peer's requests. PyTorch's servers since 2.2 have the first three, with these
// defaults.
type Limits struct {
	// Key is the longest key in bytes, with the "/" that clients put in front and all prefixes. 0
	// means 8 KiB.
	Key int

	// Value is the longest value of one request in bytes. 0 means 8 MiB.
	Value int

	// Keys is the most keys of one request. 0 means 131072.
	Keys int

	// Message limits the bytes of one request and of one reply. It also limits those of the keys
	// that one connection waits for, and of a value that grew by Append. A client without a
	// certificate is also limited by ServerOptions.MaxHeld, which may be less. 0 means 64
	// MiB: eight of the largest values.
	Message int
}

func (l Limits) withDefaults() Limits {
	set := func(p *int, n int) {
		if *p == 0 {
			*p = n
		}
	}
	set(&l.Key, 8<<10)
	set(&l.Value, 8<<20)
	set(&l.Keys, 128<<10)
	set(&l.Message, 64<<20)
	return l
}

// validate checks what clients and servers have in common.
func (l Limits) validate(job string) error {
	for _, f := range []struct {
		name string
		n    int
	}{{"Key", l.Key}, {"Value", l.Value}, {"Keys", l.Keys}, {"Message", l.Message}} {
		if f.n < 1 {
			return fmt.Errorf("limit %s is %d, it has to be positive", f.name, f.n)
		}
	}
	if limit := min(l.Key, maxJob); len(job) > limit {
		return fmt.Errorf("the name of a job of %d bytes: %w of %d", len(job), store.ErrTooLarge, limit)
	}
	return nil
}

// check returns an error that matches store.ErrTooLarge if r is over a limit.
func (l Limits) check(r *request) error {
	over := func(what string, n, limit int) error {
		return fmt.Errorf("%s of %d, the limit is %d: %w", what, n, limit, store.ErrTooLarge)
	}
	if len(r.keys) > l.Keys {
		return over("a request for a number of keys", len(r.keys), l.Keys)
	}
	total := 0
	for _, k := range r.keys {
		if len(k) > l.Key {
			return over("a key with a length in bytes", len(k), l.Key)
		}
		total += len(k)
	}
	for _, v := range r.vals {
		if len(v) > l.Value {
			return over("a value with a length in bytes", len(v), l.Value)
		}
		total += len(v)
	}
	if total > l.Message {
		return over("a request with a length in bytes", total, l.Message)
	}
	return nil
}

// malformed is the error of invalid bytes from a client.
type malformed struct{ error }

func malformedf(format string, args ...any) error {
	return malformed{fmt.Errorf(format, args...)}
}

func (m malformed) Unwrap() error { return m.error }

// size is the number of bytes that append adds.
func (r *request) size() int {
	f := &forms[r.query]
	n := 1 + f.num + 8*(len(r.keys)+len(r.vals))
	if f.many {
		n += 8
	}
	n += r.held()
	for _, v := range r.vals {
		n += len(v)
	}
	return n
}

// held is the number of bytes of the keys.
func (r *request) held() (n int) {
	for _, k := range r.keys {
		n += len(k)
	}
	return n
}

// clone returns a copy that shares only keys' and values' bytes.
func (r *request) clone() *request {
	return &request{query: r.query, keys: slices.Clone(r.keys), vals: slices.Clone(r.vals), num: r.num}
}

// names returns the keys as the user knows them, for errors.
func (r *request) names() []string {
	var names []string
	for _, k := range r.keys {
		if name, ok := strings.CutPrefix(k, "/"); ok {
			names = append(names, strings.Clone(name))
		}
	}
	return names
}

// keptKeys is how many keys a request that is used again keeps room for.
const keptKeys = 64

// reset makes r ready to be read into.
func (r *request) reset() {
	clear(r.keys)
	clear(r.vals)
	r.keys, r.vals, r.num = r.keys[:0], r.vals[:0], 0
	if cap(r.keys) > keptKeys {
		r.keys, r.vals = nil, nil
	}
}

// readFrom reads one message with its first byte into req, which may have been used before.
// Its error is io.EOF if the stream ends between two messages.
func (req *request) readFrom(r *bufio.Reader, d *dialect, l Limits) error {
	n, err := r.ReadByte()
	if err != nil {
		return err
	}
	req.reset()
	if req.query, err = d.query(n); err != nil {
		return err
	}
	if err := req.read(r, l); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("%v: %w", req.query, err)
	}
	return nil
}

func (req *request) read(r *bufio.Reader, l Limits) error {
	f := &forms[req.query]
	count := f.keys
	if f.many {
		n, err := readUint64(r)
		if err != nil {
			return err
		}
		if n > uint64(l.Keys) {
			return malformedf("%d keys: %w", n, store.ErrTooLarge)
		}
		count = int(n)
	}
	left := l.Message
	length := func(what string, limit int) (int, error) {
		n, err := readUint64(r)
		if err == nil && n > uint64(min(limit, left)) {
			err = malformedf("%s of %d bytes: %w", what, n, store.ErrTooLarge)
		}
		left -= int(n)
		return int(n), err
	}
	for range count {
		n, err := length("key", l.Key)
		if err != nil {
			return err
		}
		var key []byte
		if n <= r.Size() {
			key, err = r.Peek(n)
		} else {
			key, err = readBytes(r, n, req.room)
		}
		if err != nil {
			return err
		}
		req.keys = append(req.keys, string(key))
		if n <= r.Size() {
			r.Discard(n)
		}
		for range f.vals {
			if n, err = length("value", l.Value); err != nil {
				return err
			}
			v, err := readBytes(r, n, req.room)
			if err != nil {
				return err
			}
			req.vals = append(req.vals, v)
		}
	}
	switch f.num {
	case 4:
		n, err := readUint32(r)
		req.num = int64(n)
		return err
	case 8:
		n, err := readUint64(r)
		req.num = int64(n)
		return err
	}
	return nil
}

// readPiece is the most that is allocated for a length that a peer announces, before the bytes
// arrive. Each further piece makes the whole four times as large.
const readPiece = 4 << 10

// wholePiece is how much of a key or value has to come before a server allocates the whole, if there is room.
const wholePiece = 64 << 10

// keptBuffer is the largest buffer of requests that a client keeps for the next ones.
const keptBuffer = 64 << 10

// readBytes reads n bytes into a slice that grows as they arrive. A server asks for room first.
func readBytes(r io.Reader, n int, room func(n int) error) ([]byte, error) {
	b := make([]byte, min(n, readPiece))
	for got := 0; ; {
		m, err := io.ReadFull(r, b[got:])
		if err != nil {
			return nil, cut(err)
		}
		if got += m; got == n {
			return b, nil
		}
		size := min(n, 4*got)
		if room != nil {
			if got >= wholePiece {
				size = n
			}
			if err := room(size - got); err != nil {
				return nil, err
			}
		}
		grown := make([]byte, size)
		copy(grown, b)
		b = grown
	}
}

func readUint32(r *bufio.Reader) (uint32, error) {
	b, err := r.Peek(4)
	if err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint32(b)
	r.Discard(4)
	return n, nil
}

func readUint64(r *bufio.Reader) (uint64, error) {
	b, err := r.Peek(8)
	if err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint64(b)
	r.Discard(8)
	return n, nil
}

// The readers of replies, the client's side.

func readInt64(r *bufio.Reader) (int64, error) {
	n, err := readUint64(r)
	return int64(n), err
}

// unframed is how much is left of a reply in PyTorch's dialects, which do not say it. A value may
// have grown by Append, and memory is allocated only as bytes arrive.
const unframed int64 = math.MaxInt64

// readBlob reads a value from a reply of which left bytes are left.
func readBlob(r *bufio.Reader, left int64) ([]byte, error) {
	n, err := readInt64(r)
	if err != nil {
		return nil, err
	}
	if n < 0 || n > left-8 || int64(int(n)) != n {
		return nil, malformedf("a value of %d bytes does not fit into the reply", n)
	}
	return readBytes(r, int(n), nil)
}

// readBlobs reads n values from a reply of which left bytes are left.
func readBlobs(r *bufio.Reader, n, left int64) ([][]byte, error) {
	if n < 0 || n > left/8 {
		return nil, malformedf("a reply with %d values", n)
	}
	all := make([][]byte, 0, min(n, 1024))
	for range n {
		b, err := readBlob(r, left)
		if err != nil {
			return nil, err
		}
		all = append(all, b)
		left -= 8 + int64(len(b))
	}
	return all, nil
}

// reply is a server's answer. The table answers says which fields a query's reply has.
type reply struct {
	num    int64
	value  []byte
	values [][]byte
}

// Kinds of replies.
const (
	nothing = iota
	aNonce  // num
	aFlag   // num
	aNumber // num
	aBlob   // value
	blobs   // values, one for each key
	aList   // values, their number before them
	popped  // num, the queue's length before, and value if that is not 0
)

var answers = [len(forms)]byte{
	qCompareSet: aBlob,
	qGet:        aBlob,
	qAdd:        aNumber,
	qCheck:      aFlag,
	qWait:       aFlag,
	qNumKeys:    aNumber,
	qDelete:     aNumber,
	qMultiGet:   blobs,
	qPing:       aNonce,
	qQueuePop:   popped,
	qQueueLen:   aNumber,
	qListKeys:   aList,
	qQueueTake:  popped,
	qHello:      aBlob,
}

// readReply reads the reply to a query about a number of keys. It has left bytes, or is unframed.
func readReply(r *bufio.Reader, q query, keys int, left int64) (a reply, err error) {
	switch answers[q] {
	case aNonce:
		var n uint32
		n, err = readUint32(r)
		a.num = int64(n)
	case aFlag:
		var b byte
		b, err = readFlag(r)
		a.num = int64(b)
	case aNumber:
		a.num, err = readInt64(r)
	case aBlob:
		a.value, err = readBlob(r, left)
	case blobs:
		a.values, err = readBlobs(r, int64(keys), left)
	case aList:
		var n int64
		if n, err = readInt64(r); err == nil {
			a.values, err = readBlobs(r, n, left-8)
		}
	case popped:
		if a.num, err = readInt64(r); err == nil && a.num > 0 {
			a.value, err = readBlob(r, left-8)
		}
	}
	return a, err
}

// size is the number of bytes of the reply to q.
func (a *reply) size(q query) uint64 {
	blob := func(b []byte) uint64 { return 8 + uint64(len(b)) }
	var n uint64
	switch answers[q] {
	case aNonce:
		n = 4
	case aFlag:
		n = 1
	case aNumber:
		n = 8
	case aBlob:
		n = blob(a.value)
	case aList:
		n = 8
	case popped:
		n = 8
		if a.num > 0 {
			n += blob(a.value)
		}
	}
	for _, v := range a.values {
		n += blob(v)
	}
	return n
}

// readFlag reads the reply of CHECK, WAIT, or CANCEL_WAIT: 0 or 1.
func readFlag(r *bufio.Reader) (byte, error) {
	b, err := r.ReadByte()
	if err == nil && b > 1 {
		err = malformedf("a reply of %#x where 0 or 1 was expected", b)
	}
	return b, err
}
