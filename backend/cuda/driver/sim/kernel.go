package sim

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// Kernel is a kernel in Go. It is called once for a launch and does the work of
// all its threads. It reaches memory through k only. An error, or a panic,
// breaks the device, as a fault in a kernel does.
type Kernel func(k *Run) error

// Run is one launch of a Kernel. It is used by the goroutine that runs the
// kernel.
type Run struct {
	Grid, Block driver.Dim
	Shared      int // bytes of dynamic shared memory a block

	s  *stream
	op *op
	l  *launch
}

// launch is what a Launch leaves in the queue.
type launch struct {
	fn          Kernel
	mod         *Module
	args        []byte
	offs        []int
	grid, block driver.Dim
	shared      int
}

// violation is what a kernel panics with when it does what the device forbids.
type violation struct{ err error }

// launch runs a kernel.
func (s *stream) launch(o *op) {
	k := &Run{Grid: o.launch.grid, Block: o.launch.block, Shared: o.launch.shared, s: s, op: o, l: o.launch}
	if err := k.call(); err != nil && s.stopped() == nil {
		s.d.m.findings.add(&Fault{Kernel: o.full(), Err: err})
		s.dev.lose(fmt.Errorf("kernel %s: %w", o.name, err))
	}
}

func (k *Run) call() (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case violation:
			err = r.err
		default:
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return k.l.fn(k)
}

func (k *Run) fail(format string, args ...any) {
	panic(violation{fmt.Errorf(format, args...)})
}

// Args returns the number of parameters.
func (k *Run) Args() int { return len(k.l.offs) }

// Arg returns the bytes of parameter i, for structures.
func (k *Run) Arg(i int) []byte {
	if i < 0 || i >= len(k.l.offs) {
		k.fail("there are %d parameters, number %d was asked for", len(k.l.offs), i)
	}
	end := len(k.l.args)
	if i+1 < len(k.l.offs) {
		end = k.l.offs[i+1]
	}
	return k.l.args[k.l.offs[i]:end]
}

func (k *Run) number(i, n int) []byte {
	b := k.Arg(i)
	if len(b) < n {
		k.fail("parameter %d has %d bytes, %d were asked for", i, len(b), n)
	}
	return b
}

// Ptr returns parameter i as an address.
func (k *Run) Ptr(i int) driver.Ptr { return driver.Ptr(k.Uint64(i)) }

// Uint64 returns parameter i.
func (k *Run) Uint64(i int) uint64 { return binary.NativeEndian.Uint64(k.number(i, 8)) }

// Int returns parameter i, of 8 bytes.
func (k *Run) Int(i int) int { return int(k.Uint64(i)) }

// Uint32 returns parameter i.
func (k *Run) Uint32(i int) uint32 { return binary.NativeEndian.Uint32(k.number(i, 4)) }

// Float32 returns parameter i.
func (k *Run) Float32(i int) float32 { return math.Float32frombits(k.Uint32(i)) }

// Device returns the device that the kernel runs on.
func (k *Run) Device() tensor.Device { return k.s.dev.ID() }

// span returns the declared access that n bytes at p are in.
func (k *Run) span(p driver.Ptr, n int, may driver.Mode, what string) span {
	if n < 0 {
		k.fail("it %s %d bytes at %v", what, n, p)
	}
	for _, sp := range k.op.spans {
		if sp.mode&may == 0 || p < sp.ptr || p-sp.ptr > driver.Ptr(sp.len) || n > sp.len-int(p-sp.ptr) {
			continue
		}
		if by := sp.b.freed.Load(); by != nil {
			k.fail("it %s %d bytes at %v, which %s freed", what, n, p, by.caller())
		}
		sp.off += int(p - sp.ptr)
		sp.ptr, sp.len = p, n
		return sp
	}
	k.fail("it %s %d bytes at %v, which Launch.Access does not have", what, n, p)
	return span{}
}

// touch logs a use and returns the bytes.
func (k *Run) touch(p driver.Ptr, n int, may, mode driver.Mode, what string) []byte {
	if n == 0 {
		return nil
	}
	sp := k.span(p, n, may, what)
	sp.mode = mode
	k.s.log(k.op, []span{sp})
	return sp.bytes()
}

// Read returns n bytes at p for reading; Launch.Access must have them, as read or
// written. The bytes are meant to be used before the next Store or Add: to the
// checker they are used where Read is called.
func (k *Run) Read(p driver.Ptr, n int) []byte {
	return k.touch(p, n, driver.Read|driver.Write, driver.Read, "reads")
}

// Write returns n bytes at p for reading and writing; Launch.Access must have
// them as written. As with Read they are used before the next Store or Add.
func (k *Run) Write(p driver.Ptr, n int) []byte {
	return k.touch(p, n, driver.Write, driver.Write, "writes")
}

// Common returns n bytes at p that Launch.Access has as shared. Kernels that run
// at the same time order their uses themselves, with sync/atomic, or with Store
// and Await.
func (k *Run) Common(p driver.Ptr, n int) []byte {
	return k.touch(p, n, driver.Shared, driver.Shared, "shares")
}

// Reached is Common for memory that Launch.Access cannot name, because another kernel has told its address.
func (k *Run) Reached(p driver.Ptr, n int) []byte {
	if n == 0 {
		return nil
	}
	d := k.s.d
	d.mu.Lock()
	spans, err := d.resolve("Reached", k.s.dev.index, []driver.Access{driver.Shares(p, n)})
	d.mu.Unlock()
	if err != nil {
		k.fail("%w", err)
	}
	sp := spans[0]
	if by := sp.b.freed.Load(); by != nil {
		k.fail("it shares %d bytes at %v, which %s freed", n, p, by.caller())
	}
	k.s.log(k.op, spans)
	return sp.bytes()
}

func (k *Run) word(p driver.Ptr) span {
	if p%4 != 0 {
		k.fail("it uses a word at %v, which is no multiple of 4", p)
	}
	return k.span(p, 4, driver.Shared, "shares")
}

// Load reads the word at p, shared, and orders the kernel after whoever wrote
// the value.
func (k *Run) Load(p driver.Ptr) uint32 {
	w := k.word(p)
	v, c := w.b.load(w.off)
	if c == nil && k.s.d.m.cfg.Dir != "" {
		c = k.s.d.m.everything()
	}
	k.s.clock = k.s.clock.join(c)
	return v
}

// Store writes the word at p, shared. A reader of the value is ordered after all that the kernel
// has done so far.
func (k *Run) Store(p driver.Ptr, v uint32) {
	w := k.word(p)
	w.b.store(w.off, v, k.publish())
}

// publish ends the kernel's step. Others have seen nothing of the next one.
func (k *Run) publish() clock {
	c := k.s.now()
	k.s.step(k.op, nil)
	return c
}

// Await blocks the kernel until the word at p, shared, fulfils a condition. It
// returns false when the device or the process has ended first; the kernel
// should then return.
func (k *Run) Await(p driver.Ptr, v uint32, c driver.Condition) bool {
	return k.AwaitFor(p, v, c, 0)
}

// AwaitFor is Await for at most so long, or for ever if limit is 0. It returns false after that too.
func (k *Run) AwaitFor(p driver.Ptr, v uint32, c driver.Condition, limit time.Duration) bool {
	w := k.word(p)
	return k.s.awaitWord(k.op, &w, v, c, limit) && !k.Aborted()
}

// Spin calls f until it returns true, letting others run in between. It returns
// false when the device or the process has ended first.
func (k *Run) Spin(f func() bool) bool {
	pause := time.Microsecond
	for i := 0; !f(); i++ {
		if k.Aborted() {
			return false
		}
		if i < 100 {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, 200*time.Microsecond)
	}
	return true
}

// Aborted reports whether the device or the process has ended. A kernel that
// waits for something has to ask.
func (k *Run) Aborted() bool { return k.s.stopped() != nil }

// Launch runs a kernel.
func (s *Stream) Launch(l *driver.Launch) error {
	const call = "Launch"
	at := s.s.dev.index
	if err := driver.CheckLaunch(at, l); err != nil {
		return err
	}
	f, ok := l.Function.(*Function)
	if !ok || f.mod.dev.d != s.s.d {
		return invalid(call, at, "%s is of another driver", l.Function.Name())
	}
	if f.mod.closed.Load() {
		return &driver.Error{Call: call, Device: at, Err: fmt.Errorf("%w: the module of %s", driver.ErrClosed, f.name)}
	}
	if most := int(f.shared.Load()); l.Shared > most {
		return invalid(call, at, "%s: %d bytes of shared memory, SetShared allows %d", f.name, l.Shared, most)
	}
	if err := f.checkArgs(l.Args); err != nil {
		return invalid(call, at, "%s: %v", f.name, err)
	}
	if l.Cooperative {
		if n, _ := f.Blocks(l.Block.Len(), l.Shared); l.Grid.Len() > n*multiprocessors {
			return &driver.Error{Call: call, Device: at, Func: "sim", Code: 720, Name: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
				Err: fmt.Errorf("%w: %s: %d blocks at the same time, %d fit", driver.ErrInvalid, f.name, l.Grid.Len(), n*multiprocessors)}
		}
	}
	k := &launch{fn: f.fn, mod: f.mod, args: append([]byte(nil), l.Args.Bytes()...), grid: l.Grid.Full(), block: l.Block.Full(), shared: l.Shared}
	for i := range l.Args.Len() {
		k.offs = append(k.offs, l.Args.Offset(i))
	}
	return s.enqueue(call, &op{kind: opLaunch, name: f.name, launch: k}, true, l.Access...)
}

// Module is a loaded image.
type Module struct {
	dev    *Device
	image  []entryPoint
	made   *op
	closed atomic.Bool
}

// Load returns the kernels of a PTX text: of each entry point the Go function
// that is registered under its name. The bodies do not matter; the parameters'
// sizes are checked at each launch. Image makes such a text where there is none.
func (v *Device) Load(image []byte) (driver.Module, error) {
	const call = "Load"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	mod := &Module{dev: v, made: &op{kind: opAlloc, name: call}}
	mod.made.where()
	t, err := readPTX(image)
	if err != nil {
		return nil, &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w: %w", driver.ErrImage, err)}
	}
	mod.image = t.entries
	v.d.mu.Lock()
	if v.modules == nil {
		v.modules = make(map[*Module]bool)
	}
	v.modules[mod] = true
	v.d.stats.Modules++
	if !v.kept[t] {
		v.d.stats.MadeModules++
	}
	v.d.mu.Unlock()
	return mod, nil
}

// Keep loads an image on every device of the process, until it is closed. It has all
// its functions then.
func (d *Driver) Keep(image []byte, _ ...string) {
	t, err := readPTX(image)
	if err != nil {
		return // an error of Load
	}
	for i := range d.devices {
		v := &d.devices[i]
		d.mu.Lock()
		there := v.kept[t]
		d.mu.Unlock()
		if there || v.enter("Load") != nil {
			continue
		}
		d.mu.Lock()
		if v.kept == nil {
			v.kept = make(map[*text]bool)
		}
		if !v.kept[t] {
			v.kept[t] = true
			d.stats.MadeModules++
		}
		d.mu.Unlock()
	}
}

// Function returns a kernel. The image must have it as an entry point, and a
// Go function must be registered under its name.
func (b *Module) Function(name string) (driver.Function, error) {
	const call = "Function"
	if err := b.dev.enter(call); err != nil {
		return nil, err
	}
	fail := func(why string) error {
		return &driver.Error{Call: call, Device: b.dev.index, Err: fmt.Errorf("%w: %q%s", driver.ErrNotFound, name, why)}
	}
	if b.closed.Load() {
		return nil, &driver.Error{Call: call, Device: b.dev.index, Err: driver.ErrClosed}
	}
	for i := range b.image {
		if b.image[i].name != name {
			continue
		}
		m := b.dev.d.m
		m.mu.Lock()
		fn := m.kernels[name]
		m.mu.Unlock()
		if fn == nil {
			return nil, fail(" is in the image, but no Go function is registered for it")
		}
		f := &Function{mod: b, name: name, fn: fn, entry: &b.image[i]}
		f.shared.Store(48 << 10)
		return f, nil
	}
	return nil, fail(" is no entry point of the image")
}

// Close unloads the image.
func (b *Module) Close() error {
	if b.closed.Swap(true) {
		return nil
	}
	d := b.dev.d
	d.mu.Lock()
	delete(b.dev.modules, b)
	d.stats.Modules--
	d.mu.Unlock()
	return nil
}

// Function is a kernel of a module.
type Function struct {
	mod    *Module
	name   string
	fn     Kernel
	entry  *entryPoint
	shared atomic.Int64
}

// Name returns the kernel's name.
func (f *Function) Name() string { return f.name }

// Device returns the device it was loaded for.
func (f *Function) Device() tensor.Device { return f.mod.dev.ID() }

// SetShared allows more shared memory.
func (f *Function) SetShared(n int) error {
	if err := f.mod.dev.enter("SetShared"); err != nil {
		return err
	}
	if n < 0 || n > mostShared {
		return invalid("SetShared", f.mod.dev.index, "%d bytes, want at most %d", n, mostShared)
	}
	f.shared.Store(int64(max(n, 48<<10)))
	return nil
}

// Blocks returns how many blocks fit on a multiprocessor.
func (f *Function) Blocks(threads, shared int) (int, error) {
	if threads < 1 || threads > 1024 || shared < 0 || shared > mostShared {
		return 0, invalid("Blocks", f.mod.dev.index, "blocks of %d threads with %d bytes of shared memory", threads, shared)
	}
	n := min(32, 2048/threads)
	if shared > 0 {
		n = min(n, (mostShared+1<<10)/(shared+1<<10))
	}
	return n, nil
}

// checkArgs compares parameters with what the image says.
func (f *Function) checkArgs(a *driver.Args) error {
	if !f.entry.typed {
		return nil
	}
	if n := len(f.entry.params); a.Len() != n {
		return fmt.Errorf("%d parameters, the kernel has %d", a.Len(), n)
	}
	at := 0
	for i, p := range f.entry.params {
		at = (at + p.align - 1) / p.align * p.align
		end := len(a.Bytes())
		if i+1 < a.Len() {
			end = a.Offset(i + 1)
		}
		if a.Offset(i) != at || end-at < p.size || end-at >= p.size+16 {
			return fmt.Errorf("parameter %d is at offset %d, the kernel has it at %d with %d bytes", i, a.Offset(i), at, p.size)
		}
		at += p.size
	}
	if len(a.Bytes()) != at {
		return fmt.Errorf("%d bytes of parameters, the kernel has %d", len(a.Bytes()), at)
	}
	return nil
}

var (
	_ driver.Module   = (*Module)(nil)
	_ driver.Function = (*Function)(nil)
)
