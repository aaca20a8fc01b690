package libcuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// Module is a driver.Module.
type Module struct {
	v      *Device
	h      ModuleHandle
	closed atomic.Bool

	of        *Module              // the one that stays, whose handle this has
	functions map[string]*Function // of one that stays; guarded by Device.loading
}

// kept is an image that stays loaded.
type kept struct {
	image     []byte
	functions []string // guarded by Driver.mu
}

// Keep loads functions for as long as the Driver is open.
func (d *Driver) Keep(image []byte, functions ...string) {
	d.mu.Lock()
	k := d.keeps(image)
	if k == nil {
		k = &kept{image: bytes.Clone(image)}
		d.kept = append(d.kept, k)
	}
	for _, name := range functions {
		if !slices.Contains(k.functions, name) {
			k.functions = append(k.functions, name)
		}
	}
	d.mu.Unlock()
	for _, v := range d.devices {
		if v.ready.Load() {
			_, _ = v.stay(k)
		}
	}
}

// keeps returns the image that stays loaded, nil if it is none of them; the caller
// holds d.mu.
func (d *Driver) keeps(image []byte) *kept {
	for _, k := range d.kept {
		if bytes.Equal(k.image, image) {
			return k
		}
	}
	return nil
}

// loadKept loads what stays on a device that has got ready.
func (v *Device) loadKept() {
	v.d.mu.Lock()
	all := slices.Clone(v.d.kept)
	v.d.mu.Unlock()
	for _, k := range all {
		_, _ = v.stay(k) // Load says why not
	}
}

// stay returns an image that stays loaded, with its functions, as far as there are
// such.
func (v *Device) stay(k *kept) (*Module, error) {
	v.loading.Lock()
	defer v.loading.Unlock()
	m := v.stays[k]
	if m == nil {
		var err error
		if m, err = v.load(k.image); err != nil {
			return nil, err
		}
		m.functions = make(map[string]*Function)
		if v.stays == nil {
			v.stays = make(map[*kept]*Module)
		}
		v.stays[k] = m
	}
	v.d.mu.Lock()
	names := slices.Clone(k.functions)
	v.d.mu.Unlock()
	for _, name := range names {
		if m.functions[name] == nil {
			if f, err := m.function(name); err == nil {
				m.functions[name] = f
			}
		}
	}
	return m, nil
}

// unloadKept unloads what stayed; the Driver is closing.
func (v *Device) unloadKept() (err error) {
	v.loading.Lock()
	defer v.loading.Unlock()
	for _, m := range v.stays {
		err = errors.Join(err, m.unload("Close"))
	}
	v.stays = nil
	return err
}

// Load returns the kernels of an image.
func (v *Device) Load(image []byte) (driver.Module, error) {
	const call = "Load"
	if err := v.alive(call); err != nil {
		return nil, err
	}
	v.d.mu.Lock()
	k := v.d.keeps(image)
	v.d.mu.Unlock()
	var m *Module
	var err error
	if k == nil {
		m, err = v.load(image)
	} else if m, err = v.stay(k); err == nil {
		m = &Module{v: v, h: m.h, of: m}
	}
	if err != nil {
		return nil, err
	}
	v.d.made(m, "module")
	return m, nil
}

func (v *Device) load(image []byte) (*Module, error) {
	const call = "Load"
	image, err := terminated(image)
	if err != nil {
		return nil, &driver.Error{Call: call, Device: v.index, Err: err}
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	h, log, r := v.d.api.ModuleLoad(image)
	if r != Success {
		return nil, v.failed(call, "cuModuleLoadDataEx", r, strings.TrimSpace(log))
	}
	return &Module{v: v, h: h}, nil
}

// terminated returns the image as the driver takes it. The driver is not told how long an
// image is: a binary one must have the length that it says, and a text ends with a zero
// byte.
func terminated(image []byte) ([]byte, error) {
	short := func(what string, need uint64) error {
		return fmt.Errorf("%w: %s of %d bytes, %d are there", driver.ErrImage, what, need, len(image))
	}
	const elfHeader, fatHeader = 64, 16
	switch {
	case len(image) == 0:
		return nil, fmt.Errorf("%w: it is empty", driver.ErrImage)
	case bytes.HasPrefix(image, []byte("\x7fELF")):
		if len(image) < elfHeader {
			return nil, short("a binary", elfHeader)
		}
		le := binary.LittleEndian
		for _, t := range [][3]uint64{
			{le.Uint64(image[32:]), uint64(le.Uint16(image[54:])), uint64(le.Uint16(image[56:]))},
			{le.Uint64(image[40:]), uint64(le.Uint16(image[58:])), uint64(le.Uint16(image[60:]))},
		} {
			if need := t[0] + t[1]*t[2]; t[0] > uint64(len(image)) || need > uint64(len(image)) {
				return nil, short("a binary", need)
			}
		}
		return image, nil
	case bytes.HasPrefix(image, []byte{0x50, 0xed, 0x55, 0xba}):
		if len(image) < fatHeader {
			return nil, short("a fat binary", fatHeader)
		}
		size := binary.LittleEndian.Uint64(image[8:])
		if need := size + uint64(binary.LittleEndian.Uint16(image[6:])); need < size || need > uint64(len(image)) {
			return nil, short("a fat binary", need)
		}
		return image, nil
	}
	text := bytes.TrimRight(image, "\x00")
	if bytes.IndexByte(text, 0) >= 0 || !bytes.Contains(text, []byte(".version")) {
		return nil, fmt.Errorf("%w: neither PTX nor a binary", driver.ErrImage)
	}
	return append(bytes.Clone(text), 0), nil
}

// Function returns a kernel, which is on the device then.
func (m *Module) Function(name string) (driver.Function, error) {
	const call = "Function"
	v := m.v
	if m.closed.Load() {
		return nil, closedError(call, v.index, "module")
	}
	if name == "" || strings.IndexByte(name, 0) >= 0 {
		return nil, &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w: a kernel %q", driver.ErrNotFound, name)}
	}
	if f := m.stays(name); f != nil {
		if err := v.alive(call); err != nil {
			return nil, err
		}
		return f, nil
	}
	f, err := m.function(name)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// stays returns a function of m that stays loaded, nil if it is none.
func (m *Module) stays(name string) *Function {
	if m.of == nil {
		return nil
	}
	m.v.loading.Lock()
	defer m.v.loading.Unlock()
	f := m.of.functions[name]
	if f == nil {
		return nil
	}
	own := *f
	own.m = m
	return &own
}

func (m *Module) function(name string) (*Function, error) {
	const call = "Function"
	v := m.v
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	api := v.d.api
	h, r := api.ModuleFunction(m.h, name)
	if r != Success {
		return nil, v.failed(call, "cuModuleGetFunction", r, name)
	}
	if r := api.FunctionLoad(h); r != Success {
		return nil, v.failed(call, "cuFuncLoad", r, name)
	}
	f := &Function{m: m, h: h, name: name}
	if f.threads, r = api.FunctionAttribute(functionMaxThreads, h); r != Success {
		return nil, v.failed(call, "cuFuncGetAttribute", r, name)
	}
	for i := 0; ; i++ {
		offset, size, r := api.FunctionParam(h, i)
		if r == ErrNotSupported {
			break
		}
		f.known = true
		if r != Success {
			break
		}
		f.params = append(f.params, param{offset, size})
	}
	return f, nil
}

// Close unloads the image.
func (m *Module) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	m.v.d.forget(m)
	if m.of != nil || m.v.lost.Load() != nil {
		return nil
	}
	return m.unload("Close")
}

func (m *Module) unload(call string) error {
	v := m.v
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	return v.fail(call, "cuModuleUnload", v.d.api.ModuleUnload(m.h))
}

// Function is a driver.Function.
type Function struct {
	m       *Module
	h       FunctionHandle
	name    string
	threads int  // the most in a block
	known   bool // params are
	params  []param
}

type param struct{ offset, size int }

// check returns what the driver would not notice: it reads as many bytes as the
// kernel has parameters, from wherever it is told to.
func (f *Function) check(l *driver.Launch) error {
	const call = "Launch"
	v := f.m.v
	if f.m.closed.Load() {
		return closedError(call, v.index, "module of "+f.name)
	}
	if n := l.Block.Len(); n > f.threads {
		return invalid(call, v.index, "%s: %d threads a block, it takes %d", f.name, n, f.threads)
	}
	if l.Cooperative && !v.info.Cooperative {
		return &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w: a cooperative launch of %s", driver.ErrInvalid, f.name)}
	}
	if !f.known {
		return nil
	}
	if n := l.Args.Len(); n != len(f.params) {
		return invalid(call, v.index, "%s: %d parameters, it takes %d", f.name, n, len(f.params))
	}
	total := len(l.Args.Bytes())
	for i, p := range f.params {
		end := total
		if i+1 < len(f.params) {
			end = l.Args.Offset(i + 1)
		}
		if at := l.Args.Offset(i); at != p.offset || end-at < p.size {
			return invalid(call, v.index, "%s: parameter %d is [%d, %d), it takes %d bytes at %d", f.name, i, at, end, p.size, p.offset)
		}
	}
	return nil
}

// Name returns the kernel's name.
func (f *Function) Name() string { return f.name }

// Device returns the device that the kernel was loaded for.
func (f *Function) Device() tensor.Device { return f.m.v.ID() }

// begin begins a call that is not a launch.
func (f *Function) begin(call string) (Context, error) {
	if f.m.closed.Load() {
		return 0, closedError(call, f.m.v.index, "module of "+f.name)
	}
	return f.m.v.begin(call)
}

// SetShared allows launches with up to n bytes of dynamic shared memory.
func (f *Function) SetShared(n int) error {
	const call = "SetShared"
	v := f.m.v
	if n < 0 || n > v.info.SharedMemory {
		return invalid(call, v.index, "%s: %d bytes of shared memory a block, the device has %d", f.name, n, v.info.SharedMemory)
	}
	before, err := f.begin(call)
	if err != nil {
		return err
	}
	defer v.leave(before)
	return v.fail(call, "cuFuncSetAttribute", v.d.api.SetFunctionAttribute(functionMaxDynamic, f.h, n))
}

// Blocks returns how many blocks can be on one multiprocessor.
func (f *Function) Blocks(threads, shared int) (int, error) {
	const call = "Blocks"
	v := f.m.v
	if threads < 1 || shared < 0 {
		return 0, invalid(call, v.index, "%s: blocks of %d threads and %d bytes of shared memory", f.name, threads, shared)
	}
	before, err := f.begin(call)
	if err != nil {
		return 0, err
	}
	defer v.leave(before)
	n, r := v.d.api.Occupancy(f.h, threads, shared)
	return n, v.fail(call, "cuOccupancyMaxActiveBlocksPerMultiprocessor", r)
}

var (
	_ driver.Module   = (*Module)(nil)
	_ driver.Function = (*Function)(nil)
)
