package weights

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"net"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/tensor"
)

// Defaults of the options.
const (
	DefaultBucket  = 4 << 20
	DefaultTimeout = 30 * time.Second
)

// PublisherOptions are options of Listen.
type PublisherOptions struct {
	// Bucket is the number of bytes that are sent at once, a multiple of 64; 0 means DefaultBucket.
	Bucket int
	// Timeout is the longest time without progress of a receiver, and the longest time of its joining; 0
	// means DefaultTimeout. A receiver that takes longer is dropped.
	Timeout time.Duration
	// Full sends all elements in every update.
	Full bool
}

// Named is a parameter to publish.
type Named struct {
	Name   string
	Tensor *tensor.Tensor // contiguous, in host memory
}

// Report describes an update.
type Report struct {
	Version   uint64
	Bytes     int64     // to each receiver
	Receivers int       // that use the version
	Dropped   []Dropped // since the last report
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

	mu      sync.Mutex // an update, or a receiver's joining
	layout  *layout
	text    []byte   // the layout's JSON
	base    [][]byte // the parameters of version
	version uint64   // 0 before the first
	deltas  []delta  // of each bucket, kept for their memory

	list      sync.Mutex // the fields below
	receivers map[*receiverConn]struct{}
	dropped   []Dropped
	came      chan struct{} // closed and replaced when receivers change
	closed    bool
}

type delta struct{ indices, values []byte }

// receiverConn is a publisher's side of a receiver.
type receiverConn struct {
	name string
	conn net.Conn
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
		options: o, listener: l, waiting: strangers.New(strangers.Limit(0)),
		receivers: make(map[*receiverConn]struct{}), came: make(chan struct{}),
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

// join reads the name of a new receiver and sends it the current version.
func (p *Publisher) join(c net.Conn) {
	var scratch [headerSize]byte
	h, err := readHeader(c, &scratch)
	var name []byte
	if err == nil {
		name, err = readSmall(c, h, kindHello, maxName)
	}
	if err != nil || !p.waiting.Remove(c) {
		p.waiting.Refuse(c)
		return
	}
	r := &receiverConn{string(name), c}
	p.mu.Lock()
	defer p.mu.Unlock()
	c.SetDeadline(time.Now().Add(p.options.Timeout))
	p.list.Lock()
	if p.closed {
		p.list.Unlock()
		c.Close()
		return
	}
	p.receivers[r] = struct{}{}
	p.list.Unlock()
	if p.version != 0 {
		if err := p.sendCurrent(r); err != nil {
			p.drop(r, err)
			return
		}
	}
	p.list.Lock()
	close(p.came)
	p.came = make(chan struct{})
	p.list.Unlock()
}

// sendCurrent sends all elements of the current version to r.
func (p *Publisher) sendCurrent(r *receiverConn) error {
	begin := append(frame(kindInit, p.text), startFrame(p.version, 0)...)
	if _, err := r.conn.Write(begin); err != nil {
		return err
	}
	var digest uint32
	for i, b := range p.layout.buckets {
		f := p.full(i, b)
		digest = chain(digest, f.crc)
		if err := f.send(r.conn); err != nil {
			return err
		}
	}
	if _, err := r.conn.Write(finishFrame(p.version, digest)); err != nil {
		return err
	}
	return awaitAck(r.conn, p.version)
}

func startFrame(version, base uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, version)
	return frame(kindStart, binary.LittleEndian.AppendUint64(b, base))
}

func finishFrame(version uint64, digest uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, version)
	return frame(kindFinish, binary.LittleEndian.AppendUint32(b, digest))
}

// chain returns the digest of the buckets so far and the next one.
func chain(digest, crc uint32) uint32 {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], crc)
	return crc32.Update(digest, crc32.IEEETable, b[:])
}

// awaitAck reads a receiver's answer to an update.
func awaitAck(r io.Reader, version uint64) error {
	var scratch [headerSize]byte
	h, err := readHeader(r, &scratch)
	if err != nil {
		return err
	}
	if h.kind == kindRefuse {
		why, err := readSmall(r, h, kindRefuse, maxName)
		return errors.Join(fmt.Errorf("weights: the receiver refused version %d: %s", version, why), err)
	}
	b, err := readSmall(r, h, kindAck, 8)
	if err != nil {
		return err
	}
	if len(b) != 8 || binary.LittleEndian.Uint64(b) != version {
		return fmt.Errorf("%w: another version than %d was acknowledged", errWire, version)
	}
	return nil
}

// encoded is a bucket on its way: a frame whose parts are sent one after the other.
type encoded struct {
	header
	parts [2][]byte
}

func (e *encoded) send(c net.Conn) error {
	var head [headerSize]byte
	v := net.Buffers{e.header.append(head[:0]), e.parts[0], e.parts[1]}
	_, err := v.WriteTo(c)
	return err
}

// full is the frame with all bytes of bucket i.
func (p *Publisher) full(i int, b bucket) encoded {
	all := p.base[b.param][b.from:b.to]
	return encoded{header{kindFull, uint32(i), 0, uint32(len(all)), crc32.ChecksumIEEE(all)}, [2][]byte{all, nil}}
}

// encode brings bucket i of the base up to date and returns the frame for it.
func (p *Publisher) encode(i int, b bucket, now []byte, relative bool) encoded {
	base := p.base[b.param][b.from:b.to]
	if relative {
		d := &p.deltas[i]
		var short bool
		if d.indices, d.values, short = diff(base, now, b.unit, d.indices[:0], d.values[:0]); short {
			crc := crc32.Update(crc32.ChecksumIEEE(d.indices), crc32.IEEETable, d.values)
			return encoded{
				header{kindDelta, uint32(i), uint32(len(d.indices) / 4), uint32(len(d.indices) + len(d.values)), crc},
				[2][]byte{d.indices, d.values},
			}
		}
	}
	copy(base, now)
	return p.full(i, b)
}

// Publish sends a version to all receivers and waits until they use it. Versions increase. The
// parameters belong to Publish until it returns; their names, dtypes and shapes may differ from those of
// the last version. A receiver that fails is dropped, which is no error. After an error no
// receiver is connected; they connect again and wait for the next version.
func (p *Publisher) Publish(ctx context.Context, version uint64, params []Named) (Report, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	report := Report{Version: version}
	if version <= p.version {
		return report, fmt.Errorf("weights: Publish: version %d is not after %d", version, p.version)
	}
	l := &layout{Bucket: p.options.Bucket}
	memory := make([][]byte, 0, len(params))
	for _, n := range params {
		t := n.Tensor
		if t == nil || !t.IsContiguous() || t.Device() != (tensor.Device{}) {
			return report, fmt.Errorf("weights: Publish: parameter %q is not a contiguous tensor in host memory", n.Name)
		}
		l.Params = append(l.Params, Param{n.Name, t.DType().String(), t.Shape()})
		memory = append(memory, t.Bytes())
	}
	if err := l.plan(math.MaxInt64); err != nil {
		return report, err
	}
	if err := ctx.Err(); err != nil {
		return report, err
	}
	relative := p.version != 0 && !p.options.Full
	var begin []byte
	if p.layout == nil || !p.layout.equal(l) {
		text, err := json.Marshal(l)
		if err != nil || len(text) > maxLayout {
			return report, errors.Join(fmt.Errorf("weights: Publish: a layout of %d bytes, at most %d fit", len(text), maxLayout), err)
		}
		p.layout, p.text, p.base, p.deltas = l, text, l.memory(), make([]delta, len(l.buckets))
		relative = false
		begin = frame(kindInit, text)
	}
	base := p.version
	if !relative {
		base = 0
	}
	p.version = version
	begin = append(begin, startFrame(version, base)...)
	report.Bytes = int64(len(begin))

	// One goroutine a receiver sends what this one encodes; two buckets may wait between them.
	receivers := p.connected()
	queues := make([]chan encoded, len(receivers))
	var digest uint32
	var sending sync.WaitGroup
	sent, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(sent, func() {
		for _, r := range receivers {
			r.conn.SetDeadline(time.Unix(1, 0))
		}
	})
	for i, r := range receivers {
		q := make(chan encoded, 2)
		queues[i] = q
		sending.Go(func() {
			err := p.feed(sent, r, begin, q)
			for range q { // after an error
			}
			if err == nil {
				_, err = r.conn.Write(finishFrame(version, digest))
			}
			if err == nil {
				err = awaitAck(r.conn, version)
			}
			if err != nil {
				p.drop(r, err)
			}
		})
	}
	for i, b := range l.buckets {
		if ctx.Err() != nil {
			break
		}
		e := p.encode(i, b, memory[b.param][b.from:b.to], relative)
		digest = chain(digest, e.crc)
		report.Bytes += headerSize + int64(e.length)
		for _, q := range queues {
			q <- e
		}
	}
	if err := ctx.Err(); err != nil {
		cancel(err)
	}
	for _, q := range queues {
		close(q)
	}
	sending.Wait()
	report.Bytes += headerSize + 12
	if !stop() && ctx.Err() != nil {
		for _, r := range p.connected() {
			p.drop(r, ctx.Err())
		}
		p.layout, p.version = nil, base // the base is a mixture: the next update is a full one
		return report, fmt.Errorf("weights: Publish: version %d: %w", version, context.Cause(ctx))
	}
	p.list.Lock()
	report.Receivers, report.Dropped, p.dropped = len(p.receivers), p.dropped, nil
	p.list.Unlock()
	return report, nil
}

// feed sends the beginning of an update and its buckets to r. Each has the timeout.
func (p *Publisher) feed(ctx context.Context, r *receiverConn, begin []byte, q <-chan encoded) error {
	progress := func() error {
		r.conn.SetDeadline(time.Now().Add(p.options.Timeout))
		return ctx.Err() // a cancelled context may have set its deadline before
	}
	if err := progress(); err != nil {
		return err
	}
	if _, err := r.conn.Write(begin); err != nil {
		return err
	}
	for e := range q {
		if err := progress(); err != nil {
			return err
		}
		if err := e.send(r.conn); err != nil {
			return err
		}
	}
	return progress()
}

func (p *Publisher) connected() []*receiverConn {
	p.list.Lock()
	defer p.list.Unlock()
	all := make([]*receiverConn, 0, len(p.receivers))
	for r := range p.receivers {
		all = append(all, r)
	}
	return all
}

// drop gives up a receiver.
func (p *Publisher) drop(r *receiverConn, err error) {
	r.conn.Close()
	p.list.Lock()
	defer p.list.Unlock()
	if _, there := p.receivers[r]; !there {
		return
	}
	delete(p.receivers, r)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		err = fmt.Errorf("no progress within %v: %w", p.options.Timeout, err)
	}
	p.dropped = append(p.dropped, Dropped{r.name, fmt.Errorf("weights: receiver %q at %s was dropped: %w", r.name, r.conn.RemoteAddr(), err)})
	p.dropped = p.dropped[max(0, len(p.dropped)-1000):]
}

// Await waits until n receivers are connected.
func (p *Publisher) Await(ctx context.Context, n int) error {
	for {
		p.list.Lock()
		have, came, closed := len(p.receivers), p.came, p.closed
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
			return fmt.Errorf("weights: Await: %d of %d receivers have connected: %w", have, n, ctx.Err())
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
		r.conn.Close()
	}
	p.list.Unlock()
	err := p.listener.Close()
	p.waiting.Close()
	p.tasks.Wait()
	return err
}
