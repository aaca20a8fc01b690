package weights

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/tensor"
)

// Defaults of the options.
const (
	DefaultBucket  = 4 << 20
	DefaultTimeout = 10 * time.Second
)

// A newcomer is admitted once it has acknowledged a version, or taken proof bytes: more than the kernels' buffers hold, so
// somebody reads. Until then it gets copies of batch bytes (at least a bucket), and nobody waits for it.
const (
	proof = 64 << 20
	batch = 4 << 20
)

// PublisherOptions are options of Listen.
type PublisherOptions struct {
	// Bucket is the number of bytes that are sent at once, a multiple of 64 from 64 KiB to 256 MiB; 0 means
	// DefaultBucket.
	Bucket int
	// Timeout is the longest time in which a receiver takes no bucket, the longest time until it
	// acknowledges an update, and the longest time of its joining; 0 means DefaultTimeout. A receiver
	// that takes longer is dropped. An update that has been sent waits at most this long for receivers that stall. It does not wait
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

	turn    chan struct{} // holds a value while somebody uses the fields up to list
	layout  *layout
	text    []byte                          // the layout's frame
	base    [][]byte                        // the parameters of version
	version uint64                          // 0 if base has no version
	last    uint64                          // the greatest version so far
	deltas  []delta                         // of each bucket, kept for their memory
	copied  map[int]weak.Pointer[[]encoded] // the copies for newcomers, by their first buckets; none since an update began

	list      sync.Mutex // the fields below
	receivers map[*peer]struct{}
	dropped   []Dropped
	refused   map[string]struct{} // names and hosts of newcomers that have refused the current version
	came      chan struct{}       // closed and replaced when a receiver has come
	closed    bool
}

type delta struct{ payload, values []byte }

// peer is a receiver, as the publisher sees it.
type peer struct {
	name string
	raw  net.Conn
	conn net.Conn      // raw, or TLS on it
	acks chan uint64   // versions that it uses
	gone chan struct{} // closed when it is dropped

	admitted bool       // updates wait for it; under Publisher.list. catchUp sets it
	sending  sync.Mutex // one update at a time. Who wants the turn as well takes that first

	// Whoever has the turn uses these.
	layout *layout // that it was told
	has    uint64  // the version that it was sent
}

// Listen returns a publisher to which receivers connect at address.
func Listen(ctx context.Context, address string, opts ...PublisherOptions) (*Publisher, error) {
	o := option.Last(opts)
	o.Bucket, o.Timeout = cmp.Or(o.Bucket, DefaultBucket), cmp.Or(o.Timeout, DefaultTimeout)
	if o.Timeout < 0 || o.Bucket < minBucket || o.Bucket > maxBucket || o.Bucket%64 != 0 {
		return nil, fmt.Errorf("weights: Listen: Timeout %v or Bucket %d is out of range", o.Timeout, o.Bucket)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("weights: Listen: %w", err)
	}
	p := &Publisher{
		options: o, listener: l, waiting: strangers.New(0), turn: make(chan struct{}, 1),
		receivers: make(map[*peer]struct{}), refused: make(map[string]struct{}), came: make(chan struct{}), copied: make(map[int]weak.Pointer[[]encoded]),
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
	handshake := strangers.InHandshake(raw)
	if p.options.TLS != nil {
		r.conn = tls.Server(handshake, p.options.TLS)
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
	handshake.Proved()
	r.name = printable(string(name))
	raw.SetDeadline(time.Time{})
	if t, is := raw.(*net.TCPConn); is && tcpsock.IsLocal(t) {
		tcpsock.SetCongestion(t, congestion) // every kernel has it; without it an update takes longer
		t.SetWriteBuffer(buffer)
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
		if err == nil && len(b) != 8 {
			err = fmt.Errorf("%w: an acknowledgement of %d bytes", errWire, len(b))
		}
		if err != nil {
			return err
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

// catchUp sends the current version to a receiver that came late. It has the turn only to copy the next buckets. An update
// that comes in between begins the receiver anew: it serves the receiver itself if that is admitted.
func (p *Publisher) catchUp(r *peer) {
	var v uint64
	var digest uint32
	taken := 0
	for i := 0; ; {
		select {
		case p.turn <- struct{}{}:
		case <-r.gone:
			return
		}
		if p.version == 0 || p.version == r.has {
			if !r.admitted { // the next update is its first
				p.admit(r)
			}
			<-p.turn
			return
		}
		var begin []byte
		if i == 0 || p.version != v {
			i, v, digest = 0, p.version, 0
			begin = append(p.introduce(r), startFrame(v, 0)...)
		}
		some := p.copies(i)
		i += len(*some)
		last := i == len(p.layout.buckets)
		if last {
			r.has = v
		}
		r.sending.Lock() // nobody has it without the turn
		<-p.turn
		err := p.write(r, begin)
		for _, e := range *some {
			if err == nil {
				err = p.send(r, e)
			}
			digest = chain(digest, e.crc)
			taken += int(e.length)
		}
		runtime.KeepAlive(some) // for others that need it meanwhile
		if err == nil && last {
			err = p.finish(context.Background(), r, v, digest)
		}
		r.sending.Unlock()
		if err != nil {
			p.drop(r, err)
			return
		}
		if !r.admitted && (last || taken >= proof) {
			p.admit(r)
		}
	}
}

// copies returns frames of up to batch bytes from bucket i on, in memory that updates do not change and newcomers share.
func (p *Publisher) copies(i int) *[]encoded {
	if c := p.copied[i].Value(); c != nil {
		return c
	}
	c := new([]encoded)
	p.copied[i] = weak.Make(c)
	for size := 0; i < len(p.layout.buckets); i++ {
		e := p.full(i)
		if size += int(e.length); size > batch && len(*c) > 0 {
			break
		}
		e.payload = bytes.Clone(e.payload)
		*c = append(*c, e)
	}
	return c
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

// write sends parts, together within the timeout.
func (p *Publisher) write(r *peer, parts ...[]byte) error {
	r.raw.SetWriteDeadline(time.Now().Add(p.options.Timeout))
	_, err := (*net.Buffers)(&parts).WriteTo(r.conn)
	return err
}

func (p *Publisher) send(r *peer, e encoded) error {
	return p.write(r, e.header.append(nil), e.payload)
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
		both.most = p.full(i)
		both.others = both.most
	} else if others {
		both.others = p.full(i)
	}
	return both
}

// feed is the update of one receiver.
type feed struct {
	*peer
	relative bool
	begin    []byte
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
		l.cut()
		p.layout, p.text, p.base, p.deltas = l, frame(kindInit, text), l.memory(), make([]delta, len(l.buckets))
		p.version = 0
	}
	l = p.layout
	clear(p.copied)
	base := p.version
	relative := base != 0 && !p.options.Full
	p.last, p.version = version, 0

	feeds, others, isClosed := p.feeds(base, relative)
	if isClosed {
		return fail(net.ErrClosed)
	}
	// The fastest feed has buckets encoded, and the next ones ahead. So receivers that read nothing stall at the same time.
	encoded := make([]func() frames, len(l.buckets))
	for i, b := range l.buckets {
		encoded[i] = sync.OnceValue(func() frames { return p.encode(i, memory[b.param][b.from:b.to], relative, others) })
	}
	var used atomic.Int64
	var sending sync.WaitGroup
	ahead := min(4, runtime.GOMAXPROCS(0))
	encode := func(i int) frames {
		for _, next := range encoded[i+1 : min(i+ahead, len(encoded))] {
			sending.Go(func() { next() })
		}
		return encoded[i]()
	}
	stop := context.AfterFunc(ctx, func() {
		for _, f := range feeds {
			f.raw.Close()
		}
	})
	for _, f := range feeds {
		sending.Go(func() {
			err := p.feed(ctx, f, encode, version, base)
			if err != nil {
				p.drop(f.peer, err)
				return
			}
			used.Add(1)
		})
	}
	sending.Wait()
	stop()
	report.Full, report.Delta = l.bytes, 2*headerSize+16+12
	for i := 0; i < len(encoded) && ctx.Err() == nil; i++ { // also what no feed has needed
		report.Delta += headerSize + int64(encode(i).most.length)
	}
	sending.Wait()
	if ctx.Err() != nil { // maybe before the function of stop has begun
		for _, f := range feeds {
			p.drop(f.peer, context.Cause(ctx))
		}
		p.layout = nil // the base is a mixture: the next update is a full one
		return fail(context.Cause(ctx))
	}
	p.version = version
	report.Receivers = int(used.Load())
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
	return l, memory, l.check()
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
		f := &feed{peer: r, relative: relative && r.has == base && r.layout == p.layout, begin: p.introduce(r)}
		r.has = p.last
		others = others || relative && !f.relative
		all = append(all, f)
	}
	return all, others, p.closed
}

// feed sends an update to a receiver and waits until it uses the version.
func (p *Publisher) feed(ctx context.Context, f *feed, encode func(int) frames, version, base uint64) error {
	f.sending.Lock() // catchUp may have begun to send buckets: at most for the timeout if it reads nothing
	defer f.sending.Unlock()
	if !f.relative {
		base = 0
	}
	if err := p.write(f.peer, append(f.begin, startFrame(version, base)...)); err != nil {
		return err
	}
	var digest uint32
	for i := range p.layout.buckets {
		both := encode(i)
		e := both.others
		if base != 0 {
			e = both.most
		}
		if err := p.send(f.peer, e); err != nil {
			return err
		}
		digest = chain(digest, e.crc)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return p.finish(ctx, f.peer, version, digest)
}

// finish ends an update and waits until the receiver uses the version, for the timeout in all.
func (p *Publisher) finish(ctx context.Context, r *peer, version uint64, digest uint32) error {
	timer := time.NewTimer(p.options.Timeout)
	defer timer.Stop()
	if err := p.write(r, finishFrame(version, digest)); err != nil {
		return err
	}
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
	p.dropped = append(p.dropped, Dropped{r.name, shown{fmt.Errorf("weights: receiver %q at %s was dropped: %w", r.name, r.raw.RemoteAddr(), err)}})
	p.dropped = p.dropped[max(0, len(p.dropped)-1000):]
	if errors.Is(err, errRefused) && !r.admitted && len(p.refused) < 1000 {
		host, _, _ := net.SplitHostPort(r.raw.RemoteAddr().String())
		p.refused[r.name+"@"+host] = struct{}{}
		p.wake()
	}
}

// wake tells Await that a receiver has come. Publisher.list is held.
func (p *Publisher) wake() {
	close(p.came)
	p.came = make(chan struct{})
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
	p.wake()
	for r := range p.receivers {
		r.raw.Close()
	}
	p.list.Unlock()
	err := p.listener.Close()
	p.waiting.Close()
	p.tasks.Wait()
	return err
}
