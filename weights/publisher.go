package weights

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/tensor"
)

// Defaults of the options.
const (
	DefaultBucket   = 4 << 20
	DefaultTimeout  = 10 * time.Second
	DefaultMaxBytes = 64 << 30
)

// queued is how many buckets wait for a receiver's connection before the update waits for them.
const queued = 4

// A newcomer is admitted once it has acknowledged a version, or taken proof bytes: more than the kernels' buffers hold, so
// somebody reads. Until then it gets copies of batch bytes (at least a bucket), and nobody waits for it.
const (
	proof = 64 << 20
	batch = 4 << 20
)

// PublisherOptions are options of Listen.
type PublisherOptions struct {
	// Bucket is the number of bytes that are sent at once, a multiple of 64 from 1 KiB to 256 MiB; 0 means
	// DefaultBucket.
	Bucket int
	// Timeout is the longest time in which a receiver takes no bucket, the longest time until it
	// acknowledges an update, and the longest time of its joining; 0 means DefaultTimeout. A receiver
	// that takes longer is dropped. An update waits at most this long for a receiver that stalls. It does not wait
	// for a new receiver that has not taken a version yet.
	Timeout time.Duration
	// Full sends all elements in every update. The publisher then compares nothing.
	Full bool
	// TLS is the configuration of a server; nil means no TLS. pg's Security.Configs returns one.
	TLS *tls.Config
}

// Named is a parameter to publish.
type Named struct {
	Name   string
	Tensor *tensor.Tensor // contiguous, in host memory
}

// Report describes an update.
type Report struct {
	Version   uint64
	Delta     int64     // bytes on the wire to a receiver that has the last version
	Full      int64     // bytes of all parameters
	Receivers int       // that use the version
	Dropped   []Dropped // since the last report, the last 1000 of them
}

// Dropped is a receiver that was given up. It may connect again.
type Dropped struct {
	Name string
	Err  error
}

// Publisher sends versions of parameters to the receivers that have connected. Make one with Listen.
// Its methods may be called from several goroutines.
type Publisher struct {
	options  PublisherOptions
	listener net.Listener
	waiting  *strangers.List
	tasks    sync.WaitGroup

	late    chan struct{} // holds a value while a catchUp waits for the turn or has it: an update waits for one
	turn    chan struct{} // holds a value while somebody uses the fields up to list
	layout  *layout
	text    []byte   // the layout's frame
	base    [][]byte // the parameters of version
	version uint64   // 0 if base has no version
	last    uint64   // the greatest version so far
	deltas  []delta  // of each bucket, kept for their memory
	copied  *copied  // the last copy for newcomers; nil since an update began

	list      sync.Mutex // the fields below
	receivers map[*peer]struct{}
	dropped   []Dropped
	refused   map[string]struct{} // names and hosts of newcomers that have refused the current version
	came      chan struct{}       // closed and replaced when a receiver has come
	closed    bool
}

type delta struct{ payload, values []byte }

// copied has the frames of a version's buckets from a first one on, in memory of their own. Newcomers share it.
type copied struct {
	version uint64
	from    int
	frames  []encoded
}

// peer is a receiver, as the publisher sees it.
type peer struct {
	name string
	raw  net.Conn
	conn net.Conn      // raw, or TLS on it
	acks chan uint64   // versions that it uses
	gone chan struct{} // closed when it is dropped

	admitted bool // updates wait for it; under Publisher.list

	// Whoever has the turn uses these.
	layout *layout // that it was told
	has    uint64  // the version that it was sent
}

// Listen returns a publisher to which receivers connect at address.
func Listen(ctx context.Context, address string, o PublisherOptions) (*Publisher, error) {
	if o.Bucket == 0 {
		o.Bucket = DefaultBucket
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Timeout < 0 || o.Bucket < minBucket || o.Bucket > maxBucket || o.Bucket%64 != 0 {
		return nil, fmt.Errorf("weights: Listen: Timeout %v or Bucket %d is out of range", o.Timeout, o.Bucket)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("weights: Listen: %w", err)
	}
	p := &Publisher{
		options: o, listener: l, waiting: strangers.New(strangers.Limit(0)), late: make(chan struct{}, 1), turn: make(chan struct{}, 1),
		receivers: make(map[*peer]struct{}), refused: make(map[string]struct{}), came: make(chan struct{}),
	}
	p.tasks.Go(p.accept)
	return p, nil
}

// Addr returns the address for receivers.
func (p *Publisher) Addr() string { return p.listener.Addr().String() }

func (p *Publisher) accept() {
	for {
		p.waiting.Pace()
		c, err := p.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(50 * time.Millisecond) // no file descriptor is left, for example
			continue
		}
		if !p.waiting.Add(c, p.options.Timeout) {
			c.Close()
			return
		}
		p.tasks.Go(func() { p.join(c) })
	}
}

// join reads the name of a new receiver, sends it the current version, and reads its answers.
func (p *Publisher) join(raw net.Conn) {
	r := &peer{raw: raw, conn: raw, acks: make(chan uint64, 8), gone: make(chan struct{})}
	if p.options.TLS != nil {
		r.conn = tls.Server(raw, p.options.TLS)
	}
	var scratch [headerSize]byte
	h, err := readHeader(r.conn, &scratch)
	var name []byte
	if err == nil {
		name, err = readSmall(r.conn, h, kindHello, maxName)
	}
	if err != nil || h.count != protocol || !p.waiting.Remove(raw) {
		p.waiting.Refuse(raw)
		return
	}
	r.name = string(name)
	raw.SetDeadline(time.Time{})
	if t, is := raw.(*net.TCPConn); is && tcpsock.IsLocal(t) {
		tcpsock.SetCongestion(t, congestion) // every kernel has it; without it an update takes longer
		if err := t.SetWriteBuffer(buffer); err != nil {
			raw.Close()
			return
		}
	}
	p.list.Lock()
	if p.closed {
		p.list.Unlock()
		raw.Close()
		return
	}
	p.receivers[r] = struct{}{}
	p.tasks.Go(func() { p.catchUp(r) })
	p.list.Unlock()
	p.drop(r, r.readAcks())
}

var errRefused = errors.New("refused")

// readAcks reads a receiver's answers until it fails.
func (r *peer) readAcks() error {
	var scratch [headerSize]byte
	for {
		h, err := readHeader(r.conn, &scratch)
		if err != nil {
			return err
		}
		if h.kind == kindRefuse {
			why, err := readSmall(r.conn, h, kindRefuse, maxName)
			return errors.Join(fmt.Errorf("it %w: %s", errRefused, why), err)
		}
		b, err := readSmall(r.conn, h, kindAck, 8)
		if err != nil {
			return err
		}
		if len(b) != 8 {
			return fmt.Errorf("%w: an acknowledgement of %d bytes", errWire, len(b))
		}
		select {
		case r.acks <- binary.LittleEndian.Uint64(b):
		default:
			return fmt.Errorf("%w: more acknowledgements than updates", errWire)
		}
	}
}

// admit makes updates wait for a receiver.
func (p *Publisher) admit(r *peer) {
	p.list.Lock()
	defer p.list.Unlock()
	r.admitted = true
	p.wake()
}

// takeTurn waits for the turn of a receiver that is catching up. It returns false if the receiver is gone.
func (p *Publisher) takeTurn(r *peer) bool {
	select {
	case p.late <- struct{}{}:
	case <-r.gone:
		return false
	}
	select {
	case p.turn <- struct{}{}:
		return true
	case <-r.gone:
		<-p.late
		return false
	}
}

func (p *Publisher) leaveTurn() {
	<-p.turn
	<-p.late
}

// catchUp sends the current version to a receiver that came late, and leaves the turn to others
// between buckets. An update that comes in between begins the receiver anew. To a newcomer it sends
// without the turn.
func (p *Publisher) catchUp(r *peer) {
	var v uint64
	var digest uint32
	var taken int
	admitted := false
	for i := 0; p.takeTurn(r); {
		if !admitted && p.version == 0 { // the next update is its first
			p.admit(r)
			p.leaveTurn()
			return
		}
		if i == 0 || !admitted && p.version != v {
			i, v, digest = 0, p.version, 0
		}
		if v == 0 || p.version != v || r.has == v {
			p.leaveTurn()
			return
		}
		var begin []byte
		if i == 0 {
			begin = append(p.introduce(r), startFrame(v, 0)...)
		}
		some := []encoded(nil)
		if !admitted {
			some = p.copies(i)
		} else if i < len(p.layout.buckets) {
			some = []encoded{p.full(i)}
		}
		i += len(some)
		last := i == len(p.layout.buckets)
		if last {
			r.has = v // nobody else asks before it is admitted
		}
		if !admitted {
			p.leaveTurn()
		}
		var err error
		if len(begin) > 0 {
			err = p.write(r, begin)
		}
		for _, e := range some {
			if err == nil {
				err = p.send(r, e)
			}
			digest = chain(digest, e.crc)
			taken += int(e.length)
		}
		if err == nil && last {
			err = p.write(r, finishFrame(v, digest))
		}
		switch {
		case admitted:
			p.leaveTurn()
		case err == nil && last:
			err = p.awaitAck(context.Background(), r, v)
		}
		if err != nil {
			p.drop(r, err)
			return
		}
		if !admitted && (last || taken >= proof) {
			p.admit(r)
			admitted = true
		}
		if last { // there may be a newer version
			i = 0
		}
	}
}

// copies returns the frames of buckets from i on, up to batch bytes, in memory that updates do not change.
func (p *Publisher) copies(i int) []encoded {
	if c := p.copied; c != nil && c.version == p.version && c.from == i {
		return c.frames
	}
	c := &copied{version: p.version, from: i}
	for size := 0; i < len(p.layout.buckets); i++ {
		e := p.full(i)
		if size += int(e.length); size > batch && len(c.frames) > 0 {
			break
		}
		e.payload = bytes.Clone(e.payload)
		c.frames = append(c.frames, e)
	}
	p.copied = c
	return c.frames
}

// introduce returns the layout's frame if r does not know the layout.
func (p *Publisher) introduce(r *peer) []byte {
	if r.layout == p.layout {
		return nil
	}
	r.layout = p.layout
	return p.text[:len(p.text):len(p.text)]
}

// encoded is the frame of a bucket.
type encoded struct {
	header
	payload []byte
}

func (p *Publisher) send(r *peer, e encoded) error {
	var head [headerSize]byte
	v := net.Buffers{e.header.append(head[:0]), e.payload}
	r.raw.SetWriteDeadline(time.Now().Add(p.options.Timeout))
	_, err := v.WriteTo(r.conn)
	return err
}

func (p *Publisher) write(r *peer, b []byte) error {
	r.raw.SetWriteDeadline(time.Now().Add(p.options.Timeout))
	_, err := r.conn.Write(b)
	return err
}

// full is the frame with all bytes of bucket i of the base.
func (p *Publisher) full(i int) encoded {
	b := p.layout.buckets[i]
	all := p.base[b.param][b.from:b.to]
	return encoded{header{kindFull, uint32(i), 0, uint32(len(all)), checksum(all)}, all}
}

// frames are those of a bucket for the receivers that have the base, and for the others.
type frames struct{ most, others encoded }

// encode brings bucket i of the base up to date and returns its frames. That for others is there if it is the
// same or others is set.
func (p *Publisher) encode(i int, now []byte, relative, others bool) (both frames) {
	b := p.layout.buckets[i]
	base := p.base[b.param][b.from:b.to]
	short := false
	if relative {
		d := &p.deltas[i]
		if d.payload, d.values, short = diff(base, now, b.unit, d.payload[:0], d.values[:0]); short {
			count := len(d.payload) / 4
			d.payload = append(d.payload, d.values...)
			both.most = encoded{header{kindDelta, uint32(i), uint32(count), uint32(len(d.payload)), checksum(d.payload)}, d.payload}
		}
	}
	if !short {
		copy(base, now)
	}
	if !short || others {
		both.others = p.full(i)
	}
	if !short {
		both.most = both.others
	}
	return both
}

// encodeAll returns a channel for each bucket, in order, from which its frames come. It ends early if ctx ends. The
// caller takes all. Goroutines encode a few buckets ahead.
func (p *Publisher) encodeAll(ctx context.Context, memory [][]byte, relative, others bool) <-chan chan frames {
	ahead := make(chan chan frames, min(4, runtime.GOMAXPROCS(0))-1)
	go func() {
		defer close(ahead)
		for i, b := range p.layout.buckets {
			if ctx.Err() != nil {
				return
			}
			c := make(chan frames, 1)
			ahead <- c
			go func() { c <- p.encode(i, memory[b.param][b.from:b.to], relative, others) }()
		}
	}()
	return ahead
}

// feed is the update of one receiver.
type feed struct {
	*peer
	relative bool
	begin    []byte
	queue    chan encoded
	digest   uint32 // of all buckets, known when the queue is closed
	used     bool   // the receiver has acknowledged
}

// Publish sends a version to all receivers and waits until they use it. Versions increase. The
// parameters belong to Publish until it returns; their names, dtypes and shapes may differ from those of
// the last version. A receiver that fails is dropped, which is no error. After an error no
// receiver is connected; they connect again and keep their version until the next one.
func (p *Publisher) Publish(ctx context.Context, version uint64, params []Named) (Report, error) {
	report := Report{Version: version}
	fail := func(err error) (Report, error) {
		return report, fmt.Errorf("weights: Publish: version %d: %w", version, err)
	}
	if err := ctx.Err(); err != nil {
		return fail(context.Cause(ctx))
	}
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return fail(context.Cause(ctx))
	}
	if version <= p.last {
		return fail(fmt.Errorf("versions increase, and the last one was %d", p.last))
	}
	l, memory, err := layoutOf(params, p.options.Bucket)
	if err != nil {
		return fail(err)
	}
	if p.layout == nil || !p.layout.equal(l) {
		text := l.encode()
		if len(text) > maxLayout {
			return fail(fmt.Errorf("the names and shapes have %d bytes, at most %d fit", len(text), maxLayout))
		}
		p.base = nil // so that the old memory can go before the new comes
		p.layout, p.text, p.base, p.deltas = l, frame(kindInit, text), l.memory(), make([]delta, len(l.buckets))
		p.version = 0
	}
	p.copied = nil
	base := p.version
	relative := base != 0 && !p.options.Full
	p.last, p.version = version, 0

	// A goroutine for each receiver sends what this one encodes.
	feeds, others, isClosed := p.feeds(base, relative)
	if isClosed {
		return fail(net.ErrClosed)
	}
	var sending sync.WaitGroup
	stop := context.AfterFunc(ctx, func() {
		for _, f := range feeds {
			f.raw.Close()
		}
	})
	for _, f := range feeds {
		sending.Go(func() {
			err := p.feed(ctx, f, version, base)
			for range f.queue { // after an error
			}
			if err != nil {
				p.drop(f.peer, err)
			}
		})
	}
	var digest, digestOthers uint32
	report.Full, report.Delta = l.bytes, 2*headerSize+16+12
	for c := range p.encodeAll(ctx, memory, relative, others) {
		both := <-c
		most, other := both.most, both.others
		digest, digestOthers = chain(digest, most.crc), chain(digestOthers, other.crc)
		report.Delta += headerSize + int64(most.length)
		for _, f := range feeds {
			if f.relative || !relative {
				f.queue <- most
			} else {
				f.queue <- other
			}
		}
	}
	for _, f := range feeds {
		if f.digest = digestOthers; f.relative {
			f.digest = digest
		}
		close(f.queue)
	}
	sending.Wait()
	stop()
	if ctx.Err() != nil { // maybe before the function of stop has begun
		for _, f := range feeds {
			p.drop(f.peer, context.Cause(ctx))
		}
		p.layout = nil // the base is a mixture: the next update is a full one
		return fail(context.Cause(ctx))
	}
	p.version = version
	for _, f := range feeds {
		if f.used {
			report.Receivers++
		}
	}
	p.list.Lock()
	report.Dropped, p.dropped = p.dropped, nil
	p.list.Unlock()
	return report, nil
}

// layoutOf returns the layout of params and their memory.
func layoutOf(params []Named, bucket int) (*layout, [][]byte, error) {
	l := &layout{bucket: bucket}
	memory := make([][]byte, 0, len(params))
	for _, n := range params {
		t := n.Tensor
		if t == nil || !t.IsContiguous() || t.Device() != (tensor.Device{}) {
			return nil, nil, fmt.Errorf("parameter %q is not a contiguous tensor in host memory", n.Name)
		}
		l.params = append(l.params, Param{n.Name, t.DType(), t.Shape()})
		memory = append(memory, t.Bytes())
	}
	return l, memory, l.plan(math.MaxInt64)
}

// feeds returns a feed for each receiver that has been admitted. It reports whether some get all elements in an update that is
// relative for the others, and whether the publisher is closed.
func (p *Publisher) feeds(base uint64, relative bool) (all []*feed, others, closed bool) {
	p.list.Lock()
	defer p.list.Unlock()
	clear(p.refused)
	for r := range p.receivers {
		if !r.admitted {
			continue
		}
		f := &feed{peer: r, relative: relative && r.has == base && r.layout == p.layout, queue: make(chan encoded, queued)}
		f.begin = p.introduce(r)
		r.has = p.last
		others = others || relative && !f.relative
		all = append(all, f)
	}
	return all, others, p.closed
}

// feed sends an update to a receiver and waits until it uses the version.
func (p *Publisher) feed(ctx context.Context, f *feed, version, base uint64) error {
	if !f.relative {
		base = 0
	}
	if err := p.write(f.peer, append(f.begin, startFrame(version, base)...)); err != nil {
		return err
	}
	for e := range f.queue {
		if err := p.send(f.peer, e); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := p.write(f.peer, finishFrame(version, f.digest)); err != nil {
		return err
	}
	err := p.awaitAck(ctx, f.peer, version)
	f.used = err == nil
	return err
}

// awaitAck waits until a receiver uses a version.
func (p *Publisher) awaitAck(ctx context.Context, r *peer, version uint64) error {
	timer := time.NewTimer(p.options.Timeout)
	defer timer.Stop()
	for {
		select {
		case v := <-r.acks:
			if v == version {
				return nil
			}
		case <-r.gone:
			return io.ErrUnexpectedEOF // its reader has said why
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
			return fmt.Errorf("it did not acknowledge version %d within %v", version, p.options.Timeout)
		}
	}
}

// drop gives up a receiver. The first reason counts.
func (p *Publisher) drop(r *peer, err error) {
	defer r.raw.Close()
	p.list.Lock()
	defer p.list.Unlock()
	if _, there := p.receivers[r]; !there {
		return
	}
	delete(p.receivers, r)
	close(r.gone)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		err = fmt.Errorf("it took no data for %v: %w", p.options.Timeout, err)
	}
	p.dropped = append(p.dropped, Dropped{r.name, fmt.Errorf("weights: receiver %q at %s was dropped: %w", r.name, r.raw.RemoteAddr(), err)})
	p.dropped = p.dropped[max(0, len(p.dropped)-1000):]
	if errors.Is(err, errRefused) && !r.admitted && len(p.refused) < 1000 {
		host, _, _ := net.SplitHostPort(r.raw.RemoteAddr().String())
		p.refused[r.name+"@"+host] = struct{}{}
		p.wake()
	}
}

// wake tells Await that a receiver has come. Publisher.list is held.
func (p *Publisher) wake() {
	if !p.closed {
		close(p.came)
		p.came = make(chan struct{})
	}
}

// Await waits until n receivers are connected, for which the next Publish waits. If there is a version, they have it, or
// have taken 64 MiB of it. A receiver that has refused the version counts too: it may take the next one.
func (p *Publisher) Await(ctx context.Context, n int) error {
	for {
		p.list.Lock()
		have, came, closed := len(p.refused), p.came, p.closed
		for r := range p.receivers {
			if r.admitted {
				have++
			}
		}
		p.list.Unlock()
		switch {
		case closed:
			return fmt.Errorf("weights: Await: %w", net.ErrClosed)
		case have >= n:
			return nil
		}
		select {
		case <-came:
		case <-ctx.Done():
			return fmt.Errorf("weights: Await: %d of %d receivers have connected: %w", have, n, context.Cause(ctx))
		}
	}
}

// Close ends all connections. Receivers keep their version. A running Publish drops its receivers.
func (p *Publisher) Close() error {
	p.list.Lock()
	if p.closed {
		p.list.Unlock()
		p.tasks.Wait()
		return nil
	}
	p.closed = true
	close(p.came)
	p.came = make(chan struct{})
	for r := range p.receivers {
		r.raw.Close()
	}
	p.list.Unlock()
	err := p.listener.Close()
	p.waiting.Close()
	p.tasks.Wait()
	return err
}
