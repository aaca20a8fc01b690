package weights

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/tensor"
)

// farewell is the longest time that a receiver takes to tell its publisher why it leaves. A publisher that has read it
// closes the connection.
const farewell = 5 * time.Second

// ReceiverOptions are options of Dial.
type ReceiverOptions struct {
	// Name is what the publisher's reports call this receiver, at most 1 KiB.
	Name string
	// Timeout is the longest time to connect, and the longest time without a bucket during an update; 0
	// means DefaultTimeout. Between updates a receiver waits without limit.
	Timeout time.Duration
	// Retry is the longest pause before the receiver connects again; 0 means 5 s. Pauses begin
	// with 50 ms and double.
	Retry time.Duration
	// MaxBytes bounds the bytes of a version; 0 means no bound. In any case the host must have memory for two versions and
	// their deltas, which are an eighth of one.
	MaxBytes int64
	// Accept, if not nil, looks at the parameters when a publisher connects, and when their names, dtypes or shapes change. An
	// error refuses the publisher, which is told why; the version in use stays. Accept must not change the parameters.
	Accept func(params []Param) error
	// TLS is the configuration of a client; nil means no TLS. pg's Security.Configs returns one.
	TLS *tls.Config
}

// Receiver has the newest whole version of a publisher's parameters. Make one with Dial. Its methods
// may be called from several goroutines.
type Receiver struct {
	options ReceiverOptions
	address string
	cancel  context.CancelFunc
	done    chan struct{}

	mu      sync.Mutex // the fields below
	active  *copyOf    // nil before the first version
	standby *copyOf    // what the next version is written to; only run replaces it
	status  Status
	changed chan struct{} // closed and replaced with each version

	// Only run uses these.
	bytes     atomic.Int64          // Status.Bytes, which others read
	behind    []behind              // what each bucket of standby lacks of active
	touched   int                   // so many buckets of standby were written to since the last swap
	workers   sync.WaitGroup        // goroutines that check what came and write to standby
	worker    chan struct{}         // holds a value for each of them
	interrupt func()                // ends the connection's read
	failed    atomic.Pointer[error] // the first error of them
}

// Status is the state of a receiver.
type Status struct {
	Connected bool
	Version   uint64 // in use; 0 before the first. It may decrease when a connection begins
	Updates   int64  // versions that were taken into use
	Bytes     int64  // read from publishers
	Err       error  // why the last connection ended, nil once a later one has brought a version
}

// copyOf is one copy of all parameters.
type copyOf struct {
	version uint64
	layout  *layout
	memory  [][]byte                  // of each parameter, see part
	second  bool                      // there is one of this layout
	tensors map[string]*tensor.Tensor // nil before the first version

	readers int           // Receiver.mu
	idle    chan struct{} // if not nil, closed when the last reader is gone
}

// behind is what a bucket of the standby lacks of the active copy: all, or this delta of count units, which may be 0.
type behind struct {
	whole bool
	delta []byte
	count int
}

// Version is a version in use. Release ends the use; a Version must not be used after that.
type Version struct {
	r *Receiver
	c *copyOf
}

// Number is the version's number.
func (v Version) Number() uint64 { return v.c.version }

// Params describes the parameters, in the publisher's order. The caller must not change it.
func (v Version) Params() []Param { return v.c.layout.params }

// Tensor returns the parameter with this name, or nil. Its elements must not be changed.
func (v Version) Tensor(name string) *tensor.Tensor { return v.c.tensors[name] }

// Release ends the use of the version.
func (v Version) Release() {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	v.c.readers--
	switch {
	case v.c.readers < 0:
		panic("weights: Release was called twice")
	case v.c.readers == 0 && v.c.idle != nil:
		close(v.c.idle)
		v.c.idle = nil
	}
}

// Dial returns a receiver that connects to a publisher, now and whenever the connection is lost, until Close.
// It does not wait for the publisher: see Await.
func Dial(address string, opts ...ReceiverOptions) (*Receiver, error) {
	o := option.Last(opts)
	o.Timeout, o.Retry, o.MaxBytes = cmp.Or(o.Timeout, DefaultTimeout), cmp.Or(o.Retry, 5*time.Second), cmp.Or(o.MaxBytes, math.MaxInt64)
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("weights: Dial: %w", err)
	}
	if o.Timeout < 0 || o.Retry < 0 || o.MaxBytes < 0 || len(o.Name) > maxName {
		return nil, fmt.Errorf("weights: Dial: Timeout %v, Retry %v, MaxBytes %d or a name of %d bytes is out of range", o.Timeout, o.Retry, o.MaxBytes, len(o.Name))
	}
	if o.TLS != nil {
		o.TLS = credentials.ForHost(o.TLS, host)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &Receiver{options: o, address: address, cancel: cancel, done: make(chan struct{}), changed: make(chan struct{})}
	r.worker = make(chan struct{}, min(workers, runtime.GOMAXPROCS(0)-1))
	go r.run(ctx)
	return r, nil
}

// Acquire returns the newest version, and false before the first. It never waits for the network. Call
// Release soon: the next update but one waits for it.
func (r *Receiver) Acquire() (Version, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.active == nil {
		return Version{}, false
	}
	r.active.readers++
	return Version{r, r.active}, true
}

// Await waits until a version of this number or a greater one is in use.
func (r *Receiver) Await(ctx context.Context, version uint64) error {
	for {
		r.mu.Lock()
		s, changed := r.status, r.changed
		r.mu.Unlock()
		if s.Version != 0 && s.Version >= version {
			return nil
		}
		select {
		case <-changed:
		case <-r.done:
			return fmt.Errorf("weights: Await: version %d: %w", version, net.ErrClosed)
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("weights: Await: version %d has not come from %s, the receiver has %d: %w", version, r.address, s.Version, context.Cause(ctx)), s.Err)
		}
	}
}

// Status returns the receiver's state.
func (r *Receiver) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Bytes = r.bytes.Load()
	return r.status
}

// Close ends the connection. The version stays usable.
func (r *Receiver) Close() error {
	r.cancel()
	<-r.done
	return nil
}

func (r *Receiver) run(ctx context.Context) {
	defer close(r.done)
	const first = 50 * time.Millisecond
	for pause := first; ; pause = min(2*pause, r.options.Retry) {
		before := r.Status().Updates
		r.ended(r.connect(ctx))
		if r.Status().Updates != before {
			pause = first
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(pause, r.options.Retry)):
		}
	}
}

// ended puts the reason for a connection's end into the status, and returns it as others see it.
func (r *Receiver) ended(why error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Connected, r.status.Err = false, shown{fmt.Errorf("weights: publisher %s: %w", r.address, why)}
	return r.status.Err
}

// connect follows a publisher until the connection ends.
func (r *Receiver) connect(ctx context.Context) error {
	dialing, cancel := context.WithTimeout(ctx, r.options.Timeout)
	defer cancel()
	raw, err := tcpsock.Dial(dialing, "tcp", r.address)
	if err != nil {
		return err
	}
	defer raw.Close()
	defer func() {
		r.workers.Wait()
		r.failed.Store(nil)
	}()
	if t := raw.(*net.TCPConn); tcpsock.IsLocal(t) {
		t.SetReadBuffer(buffer)
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer stop()
	conn := raw
	if r.options.TLS != nil {
		t := tls.Client(raw, r.options.TLS)
		if err := t.HandshakeContext(dialing); err != nil {
			return err
		}
		conn = t
	}
	write := func(b []byte) error {
		raw.SetWriteDeadline(time.Now().Add(r.options.Timeout))
		_, err := conn.Write(b)
		return err
	}
	if err := write(header{kind: kindHello, count: protocol}.withPayload([]byte(r.options.Name))); err != nil {
		return err
	}
	r.mu.Lock()
	r.status.Connected = true
	r.mu.Unlock()
	r.interrupt = func() { raw.SetReadDeadline(time.Unix(1, 0)) }
	s := session{r: r, in: bufio.NewReaderSize(conn, 64<<10), deadline: raw.SetReadDeadline}
	for {
		ack, err := s.next(ctx)
		if err != nil {
			if s.received { // tell it why; a peer that is gone does not mind
				text := r.ended(err).Error()
				raw.SetDeadline(time.Now().Add(farewell))
				conn.Write(frame(kindRefuse, []byte(text[:min(len(text), maxName)])))
				// To close a socket that has unread bytes resets the connection, and the publisher would not read why.
				io.Copy(io.Discard, raw)
			}
			return err
		}
		if ack != 0 {
			if err := write(frame(kindAck, binary.LittleEndian.AppendUint64(nil, ack))); err != nil {
				return err
			}
			r.catchUp() // while the trainer goes on
		}
	}
}

// session reads the frames of one connection. It can begin an update anew at any frame.
type session struct {
	r        *Receiver
	in       *bufio.Reader
	deadline func(time.Time) error
	scratch  [headerSize]byte
	received bool // the last error is about what came, not about the connection

	layout        *layout
	has           uint64 // the version that came on this connection, of this layout
	last          uint64 // the version that came on this connection
	updating      bool
	version, base uint64
	bucket        int // the next
	digest        uint32
}

// next reads a frame and returns the version that it completes, or 0.
func (s *session) next(ctx context.Context) (ack uint64, err error) {
	var limit time.Time
	if s.updating {
		limit = time.Now().Add(s.r.options.Timeout)
	}
	s.received = false
	s.deadline(limit)
	var h header
	err = s.r.worked() // a goroutine that fails after this ends the read
	if err == nil {
		h, err = readHeader(s.in, &s.scratch)
	}
	if err != nil {
		failed := s.r.worked()
		s.received = failed != nil || errors.Is(err, errWire)
		return 0, cmp.Or(failed, err)
	}
	s.deadline(time.Now().Add(s.r.options.Timeout))
	s.received = true
	defer func() { s.r.bytes.Add(headerSize + int64(h.length)) }()
	switch h.kind {
	case kindInit:
		text, err := readSmall(s.in, h, kindInit, maxLayout)
		if err != nil {
			return 0, err
		}
		s.updating, s.has, s.layout = false, 0, nil
		l, err := parseLayout(text)
		if err == nil {
			err = s.r.room(l)
		}
		if err == nil && s.r.options.Accept != nil {
			err = s.r.options.Accept(l.params)
		}
		if err != nil {
			return 0, err
		}
		l.cut()
		s.layout = l
		return 0, nil
	case kindStart:
		b, err := readSmall(s.in, h, kindStart, 16)
		if err != nil {
			return 0, err
		}
		if len(b) != 16 || s.layout == nil {
			return 0, fmt.Errorf("%w: an update begins with %d bytes and parameters known %v", errWire, len(b), s.layout != nil)
		}
		s.version, s.base = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
		if s.version == 0 || s.base != 0 && s.base != s.has {
			return 0, fmt.Errorf("%w: version %d is relative to %d, this receiver has %d", errWire, s.version, s.base, s.has)
		}
		if s.version <= s.last {
			return 0, fmt.Errorf("%w: version %d comes after %d", errWire, s.version, s.last)
		}
		s.updating, s.bucket, s.digest = true, 0, 0
		return 0, s.r.prepare(ctx, s.layout, s.base != 0)
	case kindFull, kindDelta:
		if !s.updating || s.bucket >= len(s.layout.buckets) || h.bucket != uint32(s.bucket) || h.kind == kindDelta && s.base == 0 {
			return 0, fmt.Errorf("%w: bucket %d of kind %d came where bucket %d was expected", errWire, h.bucket, h.kind, s.bucket)
		}
		if err := s.r.fill(s.in, h, s.layout.buckets[s.bucket], s.bucket); err != nil {
			return 0, cmp.Or(s.r.worked(), err)
		}
		s.bucket++
		s.digest = chain(s.digest, h.crc)
		return 0, nil
	case kindFinish:
		b, err := readSmall(s.in, h, kindFinish, 12)
		if err != nil {
			return 0, err
		}
		if !s.updating || len(b) != 12 || s.bucket != len(s.layout.buckets) || binary.LittleEndian.Uint64(b) != s.version {
			return 0, fmt.Errorf("%w: an update ends after %d buckets", errWire, s.bucket)
		}
		if d := binary.LittleEndian.Uint32(b[8:]); d != s.digest {
			return 0, fmt.Errorf("weights: version %d has digest %08x, %08x was sent", s.version, s.digest, d)
		}
		s.r.workers.Wait()
		if err := s.r.worked(); err != nil {
			return 0, err
		}
		s.updating, s.has, s.last = false, s.version, s.version
		return s.version, s.r.swap(s.version)
	}
	return 0, fmt.Errorf("%w: a frame of kind %d", errWire, h.kind)
}

// prepare waits until nobody reads the standby and makes it fit the layout. If deltas follow, it brings the standby up
// to date.
func (r *Receiver) prepare(ctx context.Context, l *layout, deltas bool) error {
	r.workers.Wait()
	r.mu.Lock()
	idle := make(chan struct{})
	if r.standby != nil && r.standby.readers > 0 {
		r.standby.idle = idle
	} else {
		close(idle)
	}
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for i := range r.touched {
		r.behind[i].whole = true
	}
	r.touched = 0
	if r.standby != nil && r.standby.layout.equal(l) {
		if deltas {
			r.catchUp()
		}
		return nil
	}
	r.mu.Lock()
	r.standby = nil // so that this memory can go before the new comes
	r.mu.Unlock()
	if err := r.room(l); err != nil {
		return err
	}
	c := &copyOf{layout: l, memory: make([][]byte, len(l.params)), second: r.active != nil && r.active.layout.equal(l)}
	r.behind = make([]behind, len(l.buckets))
	for i := range r.behind {
		r.behind[i].whole = true
	}
	r.mu.Lock()
	r.standby = c
	r.mu.Unlock()
	return nil
}

// fill reads bucket number i into the standby. The payload is checked later, see work.
func (r *Receiver) fill(in *bufio.Reader, h header, b bucket, i int) error {
	to := r.standby.part(b)
	isBool := r.standby.layout.params[b.param].DType == tensor.Bool
	at := &r.behind[i]
	r.touched = i + 1
	if h.kind == kindFull {
		if int64(h.length) != int64(len(to)) {
			return fmt.Errorf("%w: bucket %d has %d bytes, want %d", errWire, i, h.length, len(to))
		}
		at.whole = true
		if err := readBytes(in, to); err != nil {
			return err
		}
		r.work(func() error { return errors.Join(h.check(to), checkBools(isBool, to)) })
		return nil
	}
	if int64(h.length) >= int64(len(to)) || 4*int64(h.count) > int64(h.length) {
		return fmt.Errorf("%w: a delta of %d elements and %d bytes for a bucket of %d bytes", errWire, h.count, h.length, len(to))
	}
	// After the swap the other copy lacks this delta.
	d, count, whole := at.delta, int(h.count), at.whole
	at.whole, at.count = int(h.length) > len(to)/8, count
	if at.whole {
		d = nil
	}
	if d = slices.Grow(d[:0], max(16, int(h.length)))[:h.length]; !at.whole { // Go aligns 16 bytes and more
		at.delta = d
	}
	if err := readBytes(in, d); err != nil {
		return err
	}
	var from []byte
	if whole {
		from = r.active.memory[b.param][b.from:b.to]
	}
	r.work(func() error {
		if err := h.check(d); err != nil {
			return err
		}
		if err := checkDelta(d, count, b.unit, len(to)); err != nil {
			return err
		}
		if err := checkBools(isBool, d[4*count:]); err != nil {
			return err
		}
		for at := 0; at < len(from); at += piece {
			copy(to[at:min(at+piece, len(to))], from[at:])
			runtime.Gosched()
		}
		patch(to, d, count, b.unit)
		return nil
	})
	return nil
}

// work checks a bucket or writes to the standby, on another goroutine if less than `workers` run. An error ends the
// connection's read, and worked returns it.
func (r *Receiver) work(do func() error) {
	run := func() {
		if err := do(); err != nil && r.failed.CompareAndSwap(nil, &err) {
			r.interrupt()
		}
	}
	select {
	case r.worker <- struct{}{}:
		r.workers.Go(func() {
			run()
			<-r.worker
		})
	default:
		run()
		runtime.Gosched()
	}
}

// worked returns an error of work.
func (r *Receiver) worked() error {
	if err := r.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// catchUp applies the last update's deltas to the standby, unless somebody reads it.
func (r *Receiver) catchUp() {
	r.mu.Lock()
	busy := r.standby == nil || r.standby.readers > 0
	r.mu.Unlock()
	if busy {
		return
	}
	for i := range r.behind {
		at := &r.behind[i]
		if at.whole || at.count == 0 {
			continue
		}
		b := r.standby.layout.buckets[i]
		to, count := r.standby.memory[b.param][b.from:b.to], at.count
		at.count = 0
		r.work(func() error {
			patch(to, at.delta, count, b.unit)
			return nil
		})
	}
	r.workers.Wait()
}

// checkBools refuses bytes that are no Go bools.
func checkBools(isBool bool, b []byte) error {
	if isBool {
		for _, v := range b {
			if v > 1 {
				return fmt.Errorf("weights: a bool has the byte %d", v)
			}
		}
	}
	return nil
}

// swap makes the standby the active copy.
func (r *Receiver) swap(version uint64) error {
	c := r.standby
	if c.tensors == nil {
		c.tensors = make(map[string]*tensor.Tensor, len(c.memory))
		for i, p := range c.layout.params {
			t, err := tensor.FromBytes(p.DType, c.memory[i], p.Shape...)
			if err != nil {
				return fmt.Errorf("weights: parameter %.100q: %w", p.Name, err)
			}
			c.tensors[p.Name] = t
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c.version = version
	r.active, r.standby = c, r.active
	r.touched = 0
	r.status.Version, r.status.Err = version, nil
	r.status.Updates++
	close(r.changed)
	r.changed = make(chan struct{})
	return nil
}
