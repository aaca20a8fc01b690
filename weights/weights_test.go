package weights

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testcerts"
	"github.com/c10d-go/c10d/tensor"
)

// patience bounds what must come at once.
const patience = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func listen(t testing.TB, o PublisherOptions) *Publisher {
	p := must.Get(Listen(within(t), "127.0.0.1:0", o))
	t.Cleanup(func() { p.Close() })
	return p
}

func dial(t testing.TB, address string, o ReceiverOptions) *Receiver {
	r := must.Get(Dial(address, o))
	t.Cleanup(func() { r.Close() })
	return r
}

// model returns parameters of several dtypes; every byte depends on seed.
func model(t testing.TB, seed uint64) []Named {
	random := rand.New(rand.NewPCG(seed, 1))
	var all []Named
	for i, p := range []Param{
		{"a", tensor.BFloat16, []int{33, 4000}}, {"b", tensor.Float32, []int{7}}, {"empty", tensor.Float64, []int{3, 0}},
		{"scalar", tensor.Complex128, nil}, {"bytes", tensor.Uint8, []int{96000}}, {"c", tensor.Int64, []int{25000}}, {"mask", tensor.Bool, []int{9}},
	} {
		x := must.Get(tensor.New(p.DType, p.Shape...))
		for j := range x.Bytes() {
			if x.Bytes()[j] = byte(random.Uint32()); p.DType == tensor.Bool {
				x.Bytes()[j] &= 1
			}
		}
		all = append(all, Named{fmt.Sprint(i, p.Name), x})
	}
	return all
}

// requireVersion wants the receiver's version to have these parameters.
func requireVersion(t testing.TB, r *Receiver, number uint64, params []Named) {
	t.Helper()
	v, ok := r.Acquire()
	require.True(t, ok)
	defer v.Release()
	require.Equal(t, number, v.Number())
	require.Len(t, v.Params(), len(params))
	for i, n := range params {
		require.Equal(t, n.Name, v.Params()[i].Name)
		require.Equal(t, n.Tensor.Shape(), v.Tensor(n.Name).Shape())
		require.Equal(t, n.Tensor.DType(), v.Tensor(n.Name).DType())
		require.Equal(t, n.Tensor.Bytes(), v.Tensor(n.Name).Bytes(), "%s of version %d", n.Name, number)
	}
	require.Nil(t, v.Tensor("none"))
}

// TestVersions: full updates, deltas of all sizes, a late receiver, another layout.
func TestVersions(t *testing.T) {
	p := listen(t, PublisherOptions{Bucket: minBucket})
	early := dial(t, p.Addr(), ReceiverOptions{Name: "early"})
	require.NoError(t, p.Await(within(t), 1))
	_, ok := early.Acquire()
	require.False(t, ok)
	params := model(t, 1)
	random := rand.New(rand.NewPCG(2, 2))
	lates := 0
	for version := uint64(1); version < 40; version++ {
		var receivers []*Receiver
		if version == 5 || version == 30 {
			late := dial(t, p.Addr(), ReceiverOptions{Name: "late"})
			require.NoError(t, late.Await(within(t), version-1))
			requireVersion(t, late, version-1, params)
			lates++
			require.NoError(t, p.Await(within(t), 1+lates), "its acknowledgement has come")
			receivers = append(receivers, late)
		}
		if version == 20 { // another layout
			params = append(model(t, 7), Named{"new", params[0].Tensor})
		}
		changes := random.IntN(3) * random.IntN(100) // from none to most of a bucket
		for range changes {
			b := params[random.IntN(len(params))].Tensor.Bytes()
			if len(b) > 9 {
				b[random.IntN(len(b))] ^= 1
			}
		}
		report := must.Get(p.Publish(within(t), version, params))
		require.Empty(t, report.Dropped)
		require.GreaterOrEqual(t, report.Receivers, 1)
		if changes == 0 && version != 1 && version != 20 {
			require.Less(t, report.Delta, report.Full/5)
		}
		for _, r := range append(receivers, early) {
			requireVersion(t, r, version, params)
		}
	}
	_, err := p.Publish(within(t), 39, params)
	require.ErrorContains(t, err, "versions increase, and the last one was 39")
	require.NoError(t, early.Close())
	requireVersion(t, early, 39, params)
	require.ErrorIs(t, early.Await(within(t), 99), net.ErrClosed)
}

// TestAccept: a receiver refuses parameters that its server cannot use, and keeps the version that it has.
func TestAccept(t *testing.T) {
	p := listen(t, PublisherOptions{})
	r := dial(t, p.Addr(), ReceiverOptions{Name: "careful", Retry: 50 * time.Millisecond, Accept: func(params []Param) error {
		if len(params) != 7 {
			return fmt.Errorf("%d parameters, want 7", len(params))
		}
		return nil
	}})
	require.NoError(t, p.Await(within(t), 1))
	params := model(t, 1)
	must.Get(p.Publish(within(t), 1, params))
	report := must.Get(p.Publish(within(t), 2, params[:6]))
	require.Zero(t, report.Receivers)
	require.ErrorContains(t, report.Dropped[0].Err, "it refused: weights: publisher "+p.Addr()+": 6 parameters, want 7")
	require.ErrorContains(t, r.Status().Err, "6 parameters, want 7")
	requireVersion(t, r, 1, params)
	last := uint64(2)
	require.Eventually(t, func() bool {
		last++
		must.Get(p.Publish(within(t), last, params))
		return r.Status().Version > 1
	}, patience, time.Millisecond)
	require.NoError(t, r.Await(within(t), last), "it may have come as a newcomer, with the version before")
	requireVersion(t, r, last, params)
}

func TestTLS(t *testing.T) {
	cert, key, ca := testcerts.Files(t)
	server, client, err := credentials.Files{Cert: cert, Key: key, CA: ca}.Configs()
	require.NoError(t, err)
	p := listen(t, PublisherOptions{TLS: server})
	r := dial(t, p.Addr(), ReceiverOptions{TLS: client})
	plain := dial(t, p.Addr(), ReceiverOptions{Retry: 50 * time.Millisecond})
	stranger := dial(t, p.Addr(), ReceiverOptions{TLS: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, Retry: 50 * time.Millisecond})
	params := model(t, 3)
	require.NoError(t, p.Await(within(t), 1))
	for v := uint64(1); v < 4; v++ {
		params[1].Tensor.Bytes()[0]++
		must.Get(p.Publish(within(t), v, params))
		require.NoError(t, r.Await(within(t), v))
		requireVersion(t, r, v, params)
	}
	for _, refused := range []*Receiver{plain, stranger} {
		require.Eventually(t, func() bool { return refused.Status().Err != nil }, patience, time.Millisecond)
		require.Zero(t, refused.Status().Version)
	}
}

// TestStalledReceiver: one that takes no data is dropped, and the others get the version.
func TestStalledReceiver(t *testing.T) {
	t.Parallel()
	p := listen(t, PublisherOptions{Timeout: 6 * time.Second})
	r := dial(t, p.Addr(), ReceiverOptions{Name: "good"})
	stalled := must.Get(net.Dial("tcp", p.Addr()))
	defer stalled.Close()
	must.Get(stalled.Write(header{kind: kindHello, count: protocol}.withPayload([]byte("stalled"))))
	require.NoError(t, p.Await(within(t), 2))
	big := must.Get(tensor.New(tensor.Uint8, 64<<20))
	params := []Named{{"big", big}}
	begun := time.Now()
	report := must.Get(p.Publish(within(t), 1, params))
	require.Less(t, time.Since(begun), patience/2)
	require.Equal(t, 1, report.Receivers)
	require.Len(t, report.Dropped, 1)
	require.Equal(t, "stalled", report.Dropped[0].Name)
	require.ErrorContains(t, report.Dropped[0].Err, "it took no data for 6s")
	requireVersion(t, r, 1, params)

	// A reader that keeps a version: the receiver cannot acknowledge the next but one.
	v, _ := r.Acquire()
	must.Get(p.Publish(within(t), 2, params))
	report = must.Get(p.Publish(within(t), 3, params))
	require.Zero(t, report.Receivers)
	require.ErrorContains(t, report.Dropped[0].Err, "it did not acknowledge version 3 within 6s")
	require.EqualValues(t, 1, v.Number())
	v.Release()
	require.NoError(t, r.Await(within(t), 3), "it connects again")
	requireVersion(t, r, 3, params)
	require.Panics(t, v.Release)
}

// strange connects strangers that say hello and never read.
func strange(t *testing.T, p *Publisher, count int) {
	t.Helper()
	connected := func() int { // also those that were dropped since the last report
		p.list.Lock()
		defer p.list.Unlock()
		return len(p.receivers) + len(p.dropped)
	}
	before := connected()
	for range count {
		stranger := must.Get(net.Dial("tcp", p.Addr()))
		t.Cleanup(func() { stranger.Close() })
		must.Get(stranger.Write(header{kind: kindHello, count: protocol}.withPayload(nil)))
	}
	require.Eventually(t, func() bool { return connected() == before+count }, patience, time.Millisecond)
}

// TestStrangersDelayNoUpdate: no update waits for what says hello and then never reads.
func TestStrangersDelayNoUpdate(t *testing.T) {
	for name, size := range map[string]int{"in the kernel's buffers": 1000, "more than those": 64 << 20} {
		t.Run(name, func(t *testing.T) {
			p := listen(t, PublisherOptions{Timeout: 10 * patience})
			r := dial(t, p.Addr(), ReceiverOptions{})
			require.NoError(t, p.Await(within(t), 1))
			x := must.Get(tensor.New(tensor.Uint8, size))
			params := []Named{{"x", x}}
			for version := uint64(1); version < 4; version++ {
				report := must.Get(p.Publish(within(t), version, params))
				require.Equal(t, 1, report.Receivers)
				require.Empty(t, report.Dropped)
				requireVersion(t, r, version, params)
				strange(t, p, 4)
			}
			require.Error(t, p.Await(canceled(), 2), "they do not count")
			late := dial(t, p.Addr(), ReceiverOptions{})
			require.NoError(t, late.Await(within(t), 3))
			requireVersion(t, late, 3, params)
		})
	}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// TestAwaitAfterRefusal: a trainer whose version is refused by whoever comes can wait for receivers and publish another.
func TestAwaitAfterRefusal(t *testing.T) {
	p := listen(t, PublisherOptions{})
	wrong := must.Get(tensor.New(tensor.Int8, 3))
	must.Get(p.Publish(within(t), 1, []Named{{"wrong", wrong}}))
	r := dial(t, p.Addr(), ReceiverOptions{Retry: time.Millisecond, Accept: func(params []Param) error {
		if params[0].Name == "wrong" {
			return errors.New("another model")
		}
		return nil
	}})
	require.NoError(t, p.Await(within(t), 1))
	params := model(t, 2)
	must.Get(p.Publish(within(t), 2, params))
	require.NoError(t, r.Await(within(t), 2))
	requireVersion(t, r, 2, params)
}

// TestStrangersAreDropped: newcomers that take nothing are dropped after the timeout.
func TestStrangersAreDropped(t *testing.T) {
	t.Parallel()
	const count = 12
	p := listen(t, PublisherOptions{Timeout: 6 * time.Second})
	big := must.Get(tensor.New(tensor.Uint8, 64<<20))
	params := []Named{{"big", big}}
	must.Get(p.Publish(within(t), 1, params))
	strange(t, p, count)
	dropped := must.Get(p.Publish(within(t), 2, params)).Dropped // updates give them no more time
	require.Eventually(t, func() bool {
		p.list.Lock()
		defer p.list.Unlock()
		return len(p.receivers) == 0
	}, patience, time.Millisecond)
	dropped = append(dropped, must.Get(p.Publish(within(t), 3, params)).Dropped...)
	require.Len(t, dropped, count)
	for _, d := range dropped {
		require.ErrorContains(t, d.Err, "it took no data for 6s")
	}
}

// TestNewcomerAmongUpdates: a receiver gets a version although a new one comes before it has taken the last.
func TestNewcomerAmongUpdates(t *testing.T) {
	p := listen(t, PublisherOptions{Full: true})
	x := must.Get(tensor.New(tensor.Uint8, 3*batch))
	params := []Named{{"x", x}}
	must.Get(p.Publish(within(t), 1, params))
	r := dial(t, p.Addr(), ReceiverOptions{})
	end := time.Now().Add(time.Minute)
	for version := uint64(2); r.Status().Version == 0; version++ {
		must.Get(p.Publish(within(t), version, params))
		require.True(t, time.Now().Before(end), "no version")
	}
}

func TestCancelledPublish(t *testing.T) {
	p := listen(t, PublisherOptions{})
	r := dial(t, p.Addr(), ReceiverOptions{})
	params := model(t, 1)
	silent, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	defer silent.Close()
	_, err = silent.Write(append(header{kind: kindHello, count: protocol}.withPayload(nil), frame(kindAck, binary.LittleEndian.AppendUint64(nil, 1))...))
	require.NoError(t, err)
	require.NoError(t, p.Await(within(t), 2))
	require.Equal(t, 2, must.Get(p.Publish(within(t), 1, params)).Receivers)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(within(t))
	time.AfterFunc(50*time.Millisecond, func() { cancel(why) })
	require.ErrorIs(t, must.Err(p.Publish(ctx, 2, model(t, 2))), why)
	require.ErrorIs(t, must.Err(p.Publish(ctx, 3, params)), why)
	require.NoError(t, p.Await(within(t), 1), "the receiver connects again")
	params = model(t, 4)
	must.Get(p.Publish(within(t), 4, params))
	require.NoError(t, r.Await(within(t), 4))
	requireVersion(t, r, 4, params)
	require.NoError(t, p.Close())
	require.ErrorIs(t, must.Err(p.Publish(within(t), 5, params)), net.ErrClosed)
	require.ErrorIs(t, p.Await(within(t), 1), net.ErrClosed)
}

// late is a context that ends some time before its callbacks run, as any context may.
type late struct {
	context.Context
	asked atomic.Int32
}

func (l *late) Err() error {
	if l.asked.Add(1) > 10 {
		return context.Canceled
	}
	return nil
}

// TestLateCancellation: an update that its context has ended gets no version, also if nobody has closed the
// connections yet.
func TestLateCancellation(t *testing.T) {
	p := listen(t, PublisherOptions{Bucket: minBucket})
	r := dial(t, p.Addr(), ReceiverOptions{})
	require.NoError(t, p.Await(within(t), 1))
	x := must.Get(tensor.New(tensor.Float32, 32*minBucket/4))
	must.Do(x.Fill(1))
	params := []Named{{"x", x}}
	must.Get(p.Publish(within(t), 1, params))
	require.NoError(t, x.Fill(2))
	require.ErrorIs(t, must.Err(p.Publish(&late{Context: within(t)}, 2, params)), context.Canceled)
	require.NoError(t, p.Await(within(t), 1), "the receiver connects again")
	require.NoError(t, x.Fill(3))
	must.Get(p.Publish(within(t), 3, params))
	require.NoError(t, r.Await(within(t), 2))
	requireVersion(t, r, 3, params)
}

// TestNoTornVersions has readers look at versions while updates come. All elements of a version are
// its number.
func TestNoTornVersions(t *testing.T) {
	p := listen(t, PublisherOptions{Bucket: minBucket})
	r := dial(t, p.Addr(), ReceiverOptions{})
	require.NoError(t, p.Await(within(t), 1))
	const n = 100000
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			last := uint64(0)
			for {
				select {
				case <-done:
					return
				default:
				}
				runtime.Gosched()
				v, ok := r.Acquire()
				if !ok {
					continue
				}
				data, err := tensor.Data[int32](v.Tensor("w"))
				if err != nil || v.Number() < last {
					t.Errorf("version %d after %d, error %v", v.Number(), last, err)
				}
				last = v.Number()
				for i, x := range data {
					if want := int32(last); x != want && i < n/2 || i >= n/2 && x != 0 && uint64(x) != last {
						t.Errorf("element %d of version %d is %d", i, last, x)
						break
					}
				}
				v.Release()
			}
		})
	}
	data := make([]int32, n)
	x := must.Get(tensor.Of(data, n))
	for version := uint64(1); version <= 100; version++ {
		for i := range n / 2 {
			data[i] = int32(version)
		}
		for i := n / 2; i < n; i++ {
			data[i] = 0
		}
		data[n/2+int(version)*13%(n/2)] = int32(version) // a short delta
		require.Equal(t, 1, must.Get(p.Publish(within(t), version, []Named{{"w", x}})).Receivers)
	}
	close(done)
	readers.Wait()
	requireVersion(t, r, 100, []Named{{"w", x}})
}

// fake is a publisher that sends what a test says.
type fake struct {
	t *testing.T
	net.Listener
	conn net.Conn
}

func newFake(t *testing.T) *fake {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	f := &fake{t: t, Listener: l}
	t.Cleanup(func() { l.Close(); f.conn.Close() })
	return f
}

// accept takes the next connection and reads its hello.
func (f *fake) accept() {
	c, err := f.Accept()
	require.NoError(f.t, err)
	if f.conn != nil {
		f.conn.Close()
	}
	f.conn = c
	f.conn.SetDeadline(time.Now().Add(patience))
	f.read(kindHello)
}

func (f *fake) read(k kind) string {
	var scratch [headerSize]byte
	h, err := readHeader(f.conn, &scratch)
	require.NoError(f.t, err)
	b, err := readSmall(f.conn, h, k, maxName)
	require.NoError(f.t, err)
	return string(b)
}

func (f *fake) send(frames ...[]byte) {
	f.conn.Write(bytes.Join(frames, nil)) // the receiver may have left before the end
}

func bucketFrame(k kind, bucket, count uint32, payload []byte) []byte {
	return header{kind: k, bucket: bucket, count: count}.withPayload(payload)
}

func digestOf(payloads ...[]byte) (d uint32) {
	for _, b := range payloads {
		d = chain(d, checksum(b))
	}
	return d
}

func deltaOf(pairs ...uint32) []byte { // of bytes: index, value
	var indices, values []byte
	for i := 0; i < len(pairs); i += 2 {
		indices, values = binary.LittleEndian.AppendUint32(indices, pairs[i]), append(values, byte(pairs[i+1]))
	}
	return append(indices, values...)
}

// TestBrokenUpdates: whatever ends an update half-way leaves the version before whole, and the receiver connects
// again.
func TestBrokenUpdates(t *testing.T) {
	l := &layout{bucket: minBucket, params: []Param{{"w", tensor.Uint8, []int{minBucket + 476}}, {"m", tensor.Bool, []int{20}}}}
	initial := frame(kindInit, l.encode())
	one, two, three := bytes.Repeat([]byte{1}, minBucket), bytes.Repeat([]byte{2}, 476), bytes.Repeat([]byte{1}, 20)
	first := [][]byte{initial, startFrame(1, 0), bucketFrame(kindFull, 0, 0, one), bucketFrame(kindFull, 1, 0, two), bucketFrame(kindFull, 2, 0, three), finishFrame(1, digestOf(one, two, three))}
	good := bucketFrame(kindDelta, 0, 1, deltaOf(7, 9))
	damaged := bytes.Clone(good)
	damaged[len(damaged)-1]++
	delta := func(pairs ...uint32) []byte {
		return bucketFrame(kindDelta, 0, uint32(len(pairs)/2), deltaOf(pairs...))
	}
	huge := bytes.Clone(l.encode())
	binary.LittleEndian.PutUint64(huge[len(huge)-8:], 1<<40)
	for name, c := range map[string]struct {
		frames [][]byte
		want   string // "" if the connection just ends
	}{
		"the trainer dies between buckets": {frames: [][]byte{startFrame(2, 1), good}},
		"the trainer dies in a bucket":     {frames: [][]byte{startFrame(2, 0), bucketFrame(kindFull, 0, 0, two)[:100]}},
		"checksum":                         {[][]byte{startFrame(2, 1), damaged}, "a frame of bucket 0 has checksum"},
		"digest":                           {[][]byte{startFrame(2, 1), good, bucketFrame(kindDelta, 1, 0, nil), bucketFrame(kindDelta, 2, 0, nil), finishFrame(2, 5)}, "version 2 has digest"},
		"too few buckets":                  {[][]byte{startFrame(2, 1), good, finishFrame(2, 0)}, "an update ends after 1 buckets"},
		"index too large":                  {[][]byte{startFrame(2, 1), delta(minBucket, 1)}, "a delta has index 65536 after -1"},
		"indices do not increase":          {[][]byte{startFrame(2, 1), delta(5, 1, 5, 2)}, "a delta has index 5 after 5"},
		"count":                            {[][]byte{startFrame(2, 1), bucketFrame(kindDelta, 0, 2, deltaOf(1, 1))}, "a delta of 2 elements and 5 bytes"},
		"delta of a full update":           {[][]byte{startFrame(2, 0), good}, "bucket 0 of kind 5 came"},
		"bucket out of order":              {[][]byte{startFrame(2, 1), bucketFrame(kindDelta, 1, 0, nil)}, "where bucket 0 was expected"},
		"bucket of another size":           {[][]byte{startFrame(2, 0), bucketFrame(kindFull, 0, 0, two)}, "bucket 0 has 476 bytes, want 65536"},
		"long delta":                       {[][]byte{startFrame(2, 1), bucketFrame(kindDelta, 0, 1, one)}, "a delta of 1 elements and 65536 bytes"},
		"another base":                     {[][]byte{startFrame(3, 2)}, "version 3 is relative to 2, this receiver has 1"},
		"no bool":                          {[][]byte{startFrame(2, 1), good, bucketFrame(kindDelta, 1, 0, nil), bucketFrame(kindDelta, 2, 1, deltaOf(3, 2))}, "a bool has the byte 2"},
		"huge model":                       {[][]byte{frame(kindInit, huge)}, "(ReceiverOptions.MaxBytes)"},
		"no frame":                         {[][]byte{bytes.Repeat([]byte("HTTP"), 6)}, "does not speak this protocol: it sent \"HTTP\""},
		"unknown kind":                     {[][]byte{frame(77, nil)}, "a frame of kind 77"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			r := dial(t, f.Addr().String(), ReceiverOptions{MaxBytes: 1 << 20, Retry: 50 * time.Millisecond})
			f.accept()
			f.send(first...)
			f.read(kindAck)
			f.send(c.frames...)
			if c.want != "" {
				require.Contains(t, f.read(kindRefuse), c.want)
			}
			f.conn.Close()
			f.accept()
			v, ok := r.Acquire()
			require.True(t, ok)
			require.EqualValues(t, 1, v.Number())
			require.Equal(t, append(bytes.Clone(one), two...), v.Tensor("w").Bytes())
			v.Release()
			require.ErrorContains(t, r.Status().Err, c.want)
			// The next trainer starts from its own version, and then a delta finds the right base.
			f.send(first...)
			f.read(kindAck)
			f.send(startFrame(2, 1), good, bucketFrame(kindDelta, 1, 0, nil), bucketFrame(kindDelta, 2, 0, nil), finishFrame(2, digestOf(deltaOf(7, 9), nil, nil)))
			f.read(kindAck)
			v, _ = r.Acquire()
			w := bytes.Clone(one)
			w[7] = 9
			require.Equal(t, append(w, two...), v.Tensor("w").Bytes())
			require.EqualValues(t, 2, v.Number())
			v.Release()
		})
	}
}

// TestSilentTrainer: a trainer that stops in an update is given up after the timeout.
func TestSilentTrainer(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	r := dial(t, f.Addr().String(), ReceiverOptions{Timeout: 5 * time.Second})
	f.accept()
	l := &layout{bucket: minBucket, params: []Param{{"w", tensor.Uint8, []int{minBucket + 1}}}}
	f.send(frame(kindInit, l.encode()), startFrame(1, 0))
	f.accept()
	require.ErrorContains(t, r.Status().Err, "i/o timeout")
	_, ok := r.Acquire()
	require.False(t, ok)
	require.ErrorContains(t, r.Await(func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}(), 1), "version 1 has not come from")
}

func TestWrongReceivers(t *testing.T) {
	p := listen(t, PublisherOptions{})
	for _, bad := range [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n........"), frame(kindAck, nil), bucketFrame(kindHello, 0, 9, nil)} {
		c, err := net.Dial("tcp", p.Addr())
		require.NoError(t, err)
		c.SetDeadline(time.Now().Add(patience))
		c.Write(bad)
		_, err = io.ReadAll(c)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		var timeout net.Error
		require.False(t, errors.As(err, &timeout) && timeout.Timeout())
		c.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorContains(t, p.Await(ctx, 1), "0 of 1 receivers have connected")
	for _, o := range []PublisherOptions{{Bucket: 100}, {Timeout: -1}, {Bucket: 2 * maxBucket}} {
		require.ErrorContains(t, must.Err(Listen(t.Context(), "127.0.0.1:0", o)), "is out of range")
	}
	_, err := Dial("127.0.0.1")
	require.ErrorContains(t, err, "missing port")
	require.ErrorContains(t, must.Err(Dial("127.0.0.1:1", ReceiverOptions{MaxBytes: -1})), "is out of range")
	_, err = p.Publish(t.Context(), 1, []Named{{Name: "x"}})
	require.ErrorContains(t, err, `parameter "x" is not a contiguous tensor in host memory`)
}

// TestDiff compares deltas with the naive ones, for all units.
func TestDiff(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for range 3000 {
		unit := 1 << random.IntN(4)
		base := alignedBytes(unit * (1 + random.IntN(60)))
		for i := range base {
			base[i] = byte(random.IntN(4))
		}
		now, was := append(alignedBytes(len(base))[:0], base...), bytes.Clone(base)
		changed := map[int]bool{}
		for range random.IntN(4) {
			i := random.IntN(len(now))
			now[i] ^= 0x80
		}
		for i := 0; i < len(now); i += unit {
			if !bytes.Equal(now[i:i+unit], base[i:i+unit]) {
				changed[i/unit] = true
			}
		}
		indices, values, short := diff(base, now, unit, nil, nil)
		require.Equal(t, len(changed)*(4+unit) < len(now), short)
		if !short {
			continue
		}
		require.Equal(t, now, base)
		d := append(indices, values...)
		require.NoError(t, checkDelta(d, len(changed), unit, len(now)))
		to := bytes.Clone(was)
		patch(to, d, len(changed), unit)
		require.Equal(t, now, to)
	}
}

// FuzzReceiver feeds a receiver what a publisher could send.
func FuzzReceiver(f *testing.F) {
	l := &layout{bucket: minBucket, params: []Param{{"w", tensor.BFloat16, []int{5, 3}}, {"m", tensor.Bool, []int{2}}}}
	one, two := bytes.Repeat([]byte{1}, 30), []byte{0, 1}
	d := append(binary.LittleEndian.AppendUint32(nil, 4), 8, 8)
	f.Add(bytes.Join([][]byte{
		frame(kindInit, l.encode()), startFrame(1, 0), bucketFrame(kindFull, 0, 0, one), bucketFrame(kindFull, 1, 0, two), finishFrame(1, digestOf(one, two)),
		startFrame(2, 1), bucketFrame(kindDelta, 0, 1, d), bucketFrame(kindDelta, 1, 0, nil), finishFrame(2, digestOf(d, nil)),
		startFrame(3, 2), bucketFrame(kindDelta, 0, 0, nil),
	}, nil))
	f.Add(frame(kindInit, l.encode()[:9]))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := &Receiver{options: ReceiverOptions{MaxBytes: 1 << 16, Timeout: time.Second}, changed: make(chan struct{}), interrupt: func() {}}
		s := session{r: r, in: bufio.NewReader(bytes.NewReader(data)), deadline: func(time.Time) error { return nil }}
		for {
			if _, err := s.next(t.Context()); err != nil {
				break
			}
		}
		if v, ok := r.Acquire(); ok {
			v.Release()
		}
	})
}
