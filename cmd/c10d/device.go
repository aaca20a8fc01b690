package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Kinds of devices that tensors can be on.
const (
	onCPU  = "cpu"
	onCUDA = "cuda"
	onSim  = "sim"
)

// devices is a flag such as cpu, cuda, cuda:0,1 or sim:0,1: the devices that hold the
// ranks' tensors. Local rank r takes device r modulo their number.
type devices struct {
	kind  string
	index []int // empty means all
}

const devicesUsage = "`devices` that hold the tensors: cpu, cuda, sim (GPUs in software), or a list such as cuda:0,1; local rank r takes number r modulo their count"

func (d *devices) String() string {
	s := d.kind
	for i, n := range d.index {
		s += ":,"[min(i, 1):][:1] + strconv.Itoa(n)
	}
	return s
}

func (d *devices) Set(s string) error {
	kind, list, some := strings.Cut(s, ":")
	if kind != onCUDA && kind != onSim && (kind != onCPU || some) {
		return fmt.Errorf("%q is not cpu, cuda, sim or a list such as cuda:0,1", s)
	}
	d.kind, d.index = kind, nil
	if !some {
		return nil
	}
	for _, word := range strings.Split(list, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 0 || n > 1023 {
			return fmt.Errorf("%q in %q is not the number of a device", word, s)
		}
		if slices.Contains(d.index, n) {
			return fmt.Errorf("device %d is twice in %q", n, s)
		}
		d.index = append(d.index, n)
	}
	return nil
}

func (d *devices) onCPU() bool { return d.kind == onCPU || d.kind == "" }

// check returns an error if ranks on this host cannot have their devices.
func (d *devices) check() error {
	if d.kind != onCUDA {
		return nil
	}
	all, err := cuda.Default()
	if err != nil {
		return fmt.Errorf("-device %v: %w", d, err)
	}
	_, err = d.list(all.Count())
	return err
}

// list returns the devices to use, given their count.
func (d *devices) list(count int) ([]int, error) {
	if len(d.index) == 0 {
		all := make([]int, count)
		for i := range all {
			all[i] = i
		}
		return all, nil
	}
	for _, n := range d.index {
		if n >= count {
			return nil, fmt.Errorf("-device %v: no device %d, the driver has %d", d, n, count)
		}
	}
	return d.index, nil
}

// simulated returns the number of devices of the simulated host. It includes the last one
// that is named. If none is named it is the number of local ranks.
func (d *devices) simulated() int {
	if len(d.index) > 0 {
		return slices.Max(d.index) + 1
	}
	e, err := launch.Detect(os.Getenv)
	if err != nil {
		return 1
	}
	return max(e.LocalSize, 1)
}

// simMemory is the memory of a simulated device. Unused memory takes no space.
const simMemory = 64 << 30

// What -stream may be.
const (
	besideStream = "beside"
	inStream     = "in"
	noStream     = "none"
)

// gpu is a rank's device, with its streams and memory. Nil is the CPU.
type gpu struct {
	devices
	driver driver.Driver
	close  func() error // of the driver

	device driver.Device
	info   driver.Info
	stream driver.Stream // nil: operations are ordered after no stream
	part   bool          // operations are part of the stream
	copies driver.Stream // of the check
	stage  driver.HostMemory
	memory []driver.Memory // of the tensors that there are
}

// stageBytes is the size of the pieces in which a tensor on a device is checked.
const stageBytes = 4 << 20

// open opens the driver. The result is nil for tensors in CPU memory.
func (d *devices) open() (*gpu, error) {
	g := &gpu{devices: *d, close: func() error { return nil }}
	switch d.kind {
	case onCUDA:
		all, err := cuda.Default()
		if err != nil {
			return nil, fmt.Errorf("-device %v: %w", d, err)
		}
		g.driver = all
	case onSim:
		s, err := sim.Open(sim.Config{Devices: d.simulated(), NoDelays: true, Memory: simMemory, Kernels: simkernels.All(), Dir: os.Getenv(launch.ScratchVariable)})
		if err != nil {
			return nil, err
		}
		g.driver, g.close = s, s.Close
	default:
		return nil, nil
	}
	if _, err := d.list(g.driver.Count()); err != nil {
		return nil, errors.Join(err, g.close())
	}
	return g, nil
}

// take prepares the device of this rank, with a stream if asked for. Ranks are counted on
// each host.
func (g *gpu) take(ctx context.Context, group *pg.ProcessGroup, stream string) error {
	if g == nil {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	hosts, err := pg.AllGatherObject(ctx, group, host)
	if err != nil {
		return err
	}
	local := 0
	for _, h := range hosts[:group.Rank()] {
		if h == host {
			local++
		}
	}
	list, err := g.list(g.driver.Count())
	if err != nil {
		return err
	}
	if g.device, err = g.driver.Device(list[local%len(list)]); err != nil {
		return err
	}
	g.info = g.device.Info()
	if g.part = stream == inStream; stream != noStream {
		if g.stream, err = g.device.NewStream(driver.StreamOptions{Name: "bench"}); err != nil {
			return err
		}
	}
	if g.copies, err = g.device.NewStream(driver.StreamOptions{Name: "check"}); err != nil {
		return err
	}
	g.stage, err = g.driver.AllocHost(stageBytes)
	return err
}

// free frees everything. No operation may be running.
func (g *gpu) free() error {
	if g == nil {
		return nil
	}
	err := g.freeTensors()
	if g.stage != nil {
		err = errors.Join(err, g.stage.Close())
	}
	for _, s := range []driver.Stream{g.stream, g.copies} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return errors.Join(err, g.close())
}

func (g *gpu) freeTensors() error {
	if g == nil {
		return nil
	}
	var err error
	for _, m := range g.memory {
		err = errors.Join(err, m.Close())
	}
	g.memory = nil
	return err
}

// where returns the kind of device, "" for the CPU.
func (g *gpu) where() string {
	if g == nil {
		return ""
	}
	return g.kind
}

// describe returns the name of the device.
func (g *gpu) describe() string {
	s := fmt.Sprintf("%s:%d %s", g.kind, g.device.ID().Index, g.info.Name)
	if g.info.PCI != "" {
		s += " at " + g.info.PCI
	}
	return s
}

// tensor returns zeros.
func (g *gpu) tensor(d tensor.DType, n int) (*tensor.Tensor, error) {
	if g == nil {
		return tensor.New(d, n)
	}
	m, err := g.device.Alloc(n * d.Size())
	if err != nil {
		return nil, err
	}
	g.memory = append(g.memory, m)
	if err := g.copies.Memset(m.Ptr(), 0, m.Len()); err != nil {
		return nil, err
	}
	if err := drain(context.Background(), g.copies); err != nil {
		return nil, err
	}
	return tensor.OnDevice(d, m, n)
}

// context returns a context for calls, which orders them after the rank's stream.
func (g *gpu) context(ctx context.Context) context.Context {
	if g == nil || g.stream == nil {
		return ctx
	}
	if g.part {
		return cuda.InStream(ctx, g.stream)
	}
	return cuda.WithStreams(ctx, g.stream)
}

// order orders this rank's next call after an operation, as a trainer would: by its stream,
// or by waiting if there is none.
func (g *gpu) order(ctx context.Context, w *work.Work) error {
	if g == nil || g.stream == nil {
		return w.Wait(ctx)
	}
	if g.part {
		return nil
	}
	return w.Synchronize(g.stream)
}

// finish waits until an operation's result can be used. On a device it waits for the
// stream that is ordered after the operation, or for an operation that is part of the stream.
func (g *gpu) finish(ctx context.Context, w *work.Work) error {
	if g != nil && g.part {
		return w.Wait(ctx)
	}
	if err := g.order(ctx, w); err != nil || g == nil || g.stream == nil {
		return err
	}
	if err := drain(ctx, g.stream); err != nil {
		return err
	}
	if w.IsCompleted() {
		return w.Err()
	}
	return nil // the Work completes a moment after the stream
}

// drain waits until a stream has done all that it was given. It never pauses, as [driver.Event].Sync does: a
// benchmark would measure the pause.
func drain(ctx context.Context, s driver.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	for {
		if done, err := e.Done(); done || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		runtime.Gosched()
	}
}

// pieces calls f with the bytes of a contiguous tensor, one piece in CPU memory after the
// other, and the number of their first element. With write it copies the bytes that f
// changed into the tensor.
func (g *gpu) pieces(ctx context.Context, t *tensor.Tensor, write bool, f func(b []byte, first int) error) error {
	if g == nil {
		return f(t.Bytes(), 0)
	}
	m, ok := t.Memory().(driver.Memory)
	if !ok {
		return fmt.Errorf("tensor in a %T, want memory of package driver", t.Memory())
	}
	es := t.DType().Size()
	at := m.Ptr() + driver.Ptr(t.Offset()*es)
	for done := 0; done < t.ByteLen(); done += stageBytes {
		n := min(stageBytes, t.ByteLen()-done)
		b, p := g.stage.Bytes()[:n], at+driver.Ptr(done)
		mode := driver.Reads
		if write {
			mode = driver.Writes
		} else if err := errors.Join(g.copies.Copy(g.stage.Ptr(), p, n), drain(ctx, g.copies)); err != nil {
			return err
		}
		driver.HostAccess(g.driver, "bench", mode(g.stage.Ptr(), n))
		if err := f(b, done/es); err != nil {
			return err
		}
		if write {
			if err := errors.Join(g.copies.Copy(p, g.stage.Ptr(), n), drain(ctx, g.copies)); err != nil {
				return err
			}
		}
	}
	return nil
}

// poison sets a tensor to numbers that no result has.
func (g *gpu) poison(ctx context.Context, t *tensor.Tensor) error {
	return g.pieces(ctx, t, true, func(b []byte, _ int) error {
		for i := range b {
			b[i] = 0xff
		}
		return nil
	})
}

// series are numbers that grow by slope from one element to the next and repeat after
// period elements. An element in the wrong place has another number.
type series struct {
	dtype  tensor.DType
	period int
	bytes  []byte // of many periods
}

// seriesBytes is the approximate number of bytes that are compared at a time.
const seriesBytes = 4 << 10

func newSeries(d tensor.DType, base, slope float64, period int) (*series, error) {
	times := max(seriesBytes/(period*d.Size()), 2)
	t, err := tensor.New(d, period*times)
	if err != nil {
		return nil, err
	}
	for i := range period {
		if err := t.SetFloat64(base+slope*float64(i), i); err != nil {
			return nil, err
		}
	}
	b := t.Bytes()
	for n := period * d.Size(); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
	return &series{dtype: d, period: period, bytes: b}, nil
}

// from returns bytes of the series from element number i on: at least one period.
func (s *series) from(i int) []byte { return s.bytes[i%s.period*s.dtype.Size():] }

// fill writes the elements from number first on.
func (s *series) fill(b []byte, first int) {
	for at := 0; at < len(b); {
		at += copy(b[at:], s.from(first+at/s.dtype.Size()))
	}
}

// check returns the number of the first wrong element, its value and the right one. The
// number is -1 if all elements are right.
func (s *series) check(b []byte, first int) (i int, got, want float64, err error) {
	es := s.dtype.Size()
	for at := 0; at < len(b); {
		w := s.from(first + at/es)
		n := min(len(w), len(b)-at)
		if !bytes.Equal(b[at:at+n], w[:n]) {
			for k := 0; k < n; k += es {
				if bytes.Equal(b[at+k:at+k+es], w[k:k+es]) {
					continue
				}
				x, err := element(s.dtype, b[at+k:at+k+es])
				if err != nil {
					return 0, 0, 0, err
				}
				y, err := element(s.dtype, w[k:k+es])
				if err != nil {
					return 0, 0, 0, err
				}
				if x != y || s.dtype.IsComplex() { // else it is -0 and 0
					return (at + k) / es, x, y, nil
				}
			}
		}
		at += n
	}
	return -1, 0, 0, nil
}

// element reads an element. Of a complex one it returns the real part.
func element(d tensor.DType, b []byte) (float64, error) {
	t, err := tensor.FromBytes(d, bytes.Clone(b), 1)
	if err == nil && d.IsComplex() {
		if t, err = t.ViewAsReal(); err == nil {
			return t.Float64At(0, 0)
		}
	}
	if err != nil {
		return 0, err
	}
	return t.Float64At(0)
}

// exactTo returns a number up to which a type can hold every whole number.
func exactTo(d tensor.DType) float64 {
	switch d {
	case tensor.Bool:
		return 1
	case tensor.Float8E5M2:
		return 8
	case tensor.Float8E4M3:
		return 16
	case tensor.Int8:
		return 127
	case tensor.Uint8:
		return 255
	case tensor.BFloat16:
		return 256
	case tensor.Float16:
		return 2048
	}
	return 1 << 15
}

// choicesOf returns how the backend of a kind of device does an operation, by size.
func choicesOf(all []backend.Explanation, device, op string) []backend.Choice {
	switch op {
	case "send_recv":
		op = work.Send.String()
	case "recv_any":
		op = work.RecvAnySource.String()
	}
	var some []backend.Choice
	for _, e := range all {
		if e.Backend != cuda.Name || device == "" {
			continue
		}
		for _, c := range e.Choices {
			if c.Op == op {
				some = append(some, c)
			}
		}
	}
	return some
}

// choiceOf returns the one for a number of bytes.
func choiceOf(all []backend.Explanation, at *gpu, op string, size int) (backend.Choice, bool) {
	for _, c := range choicesOf(all, at.where(), op) {
		if c.UpTo < 0 || int64(size) <= c.UpTo {
			return c, true
		}
	}
	return backend.Choice{}, false
}

// backends returns the backends that a group needs for its tensors.
func (g *gpu) backends() string {
	if g == nil {
		return "cpu:" + gloo.Name
	}
	return "cpu:" + gloo.Name + ",cuda:" + cuda.Name
}

// queues reports whether calls can be made before their results are waited for.
func (g *gpu) queues() bool { return g != nil && g.stream != nil }

// rankDevice is a rank and its device.
type rankDevice struct {
	Host, Device string
	PID          int
}

type rankDevices []rankDevice

// gather tells every rank the devices of all ranks. On the CPU it returns none.
func (g *gpu) gather(ctx context.Context, group *pg.ProcessGroup) (rankDevices, error) {
	if g == nil {
		return nil, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return pg.AllGatherObject(ctx, group, rankDevice{host, g.describe(), os.Getpid()})
}

func (s rankDevices) lines() []string {
	var all []string
	for r, x := range s {
		all = append(all, fmt.Sprintf("rank %d, pid %d on %s: %s", r, x.PID, x.Host, x.Device))
	}
	return all
}

// count returns the number of different devices.
func (s rankDevices) count() int {
	distinct := map[rankDevice]bool{}
	for _, x := range s {
		distinct[rankDevice{Host: x.Host, Device: x.Device}] = true
	}
	return len(distinct)
}
