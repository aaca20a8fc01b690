//go:build !android && (amd64 || arm64)

package libnccl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// function is one of NCCL's, an index into names and table.
type function int

const (
	fnGetVersion function = iota
	fnGetUniqueID
	fnCommInitRankConfig
	fnCommFinalize
	fnCommDestroy
	fnCommAbort
	fnCommGetAsyncError
	fnGetErrorString
	fnGroupStart
	fnGroupEnd
	fnAllReduce
	fnBroadcast
	fnReduce
	fnAllGather
	fnReduceScatter
	fnSend
	fnRecv
	fnRedOpCreatePreMulSum
	fnRedOpDestroy
	fnGetLastError
	fnCommSplit
	fnCommInitRankScalable
	functions
)

// names are the functions' names. Not every version has those after fnRedOpDestroy.
var names = [functions]string{
	"ncclGetVersion", "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclCommGetAsyncError",
	"ncclGetErrorString", "ncclGroupStart", "ncclGroupEnd", "ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter",
	"ncclSend", "ncclRecv", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy", "ncclGetLastError", "ncclCommSplit", "ncclCommInitRankScalable",
}

// table is an API.
type table struct {
	at      [functions]uintptr
	path    string
	version Version
}

var opened struct {
	sync.Mutex
	byPath map[string]*table
}

// Open returns the library at path. Without a path it is the first of Candidates that can be loaded. A library stays
// loaded.
func Open(path string) (API, error) {
	opened.Lock()
	defer opened.Unlock()
	// The reason why a library cannot be loaded is told to the thread that tried.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var errs []error
	tried := Candidates(path)
	for _, name := range tried {
		if t := opened.byPath[name]; t != nil {
			return t, nil
		}
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		t, err := resolve(name, h)
		if err != nil {
			return nil, err
		}
		if opened.byPath == nil {
			opened.byPath = make(map[string]*table)
		}
		opened.byPath[name] = t
		return t, nil
	}
	return nil, missing(tried, errs[len(errs)-1])
}

// resolve finds the functions of a library.
func resolve(path string, h uintptr) (*table, error) {
	t := &table{path: path}
	var lacks error
	for i, name := range names {
		p, err := purego.Dlsym(h, name)
		if err != nil && function(i) <= fnRedOpDestroy {
			lacks = errors.Join(lacks, err)
		}
		t.at[i] = p
	}
	if t.at[fnGetVersion] != 0 {
		f := newFrame()
		defer f.free()
		if r := t.call(fnGetVersion, f, f.out(0)); r == Success {
			t.version = Version(int32(f.outs[0]))
		}
	}
	switch {
	case t.version != 0 && t.version < oldest:
		return nil, fmt.Errorf("%w: %s is NCCL %v, want %v or later", ErrNoLibrary, path, t.version, oldest)
	case lacks != nil:
		return nil, fmt.Errorf("%w: %s is no NCCL of version %v or later: %w", ErrNoLibrary, path, oldest, lacks)
	}
	return t, nil
}

// frame has the arguments of one call and what it returns. It lies in Go's heap, which does not move as stacks do.
type frame struct {
	args   [22]uintptr
	outs   [2]uint64
	config [configSize]byte
	ids    []UniqueID
	scalar [8]byte
}

var frames = sync.Pool{New: func() any { return new(frame) }}

func newFrame() *frame { return frames.Get().(*frame) }

func (f *frame) free() {
	f.ids = nil
	frames.Put(f)
}

// out returns the address of result i, cleared.
func (f *frame) out(i int) uintptr {
	f.outs[i] = 0
	return uintptr(unsafe.Pointer(&f.outs[i]))
}

// setting returns the address of an ncclConfig_t of version 2.14, which all later ones take. What is newer keeps its
// default.
func (f *frame) setting() uintptr {
	clear(f.config[:])
	binary.NativeEndian.PutUint64(f.config[0:], configSize)
	binary.NativeEndian.PutUint32(f.config[8:], configMagic)
	binary.NativeEndian.PutUint32(f.config[12:], configVersion)
	binary.NativeEndian.PutUint32(f.config[16:], 1) // blocking: else a split writes its result after the call
	unset := int32(unsetInt)
	binary.NativeEndian.PutUint32(f.config[20:], uint32(unset))
	return uintptr(unsafe.Pointer(&f.config[0]))
}

// call calls a function. Memory of Go that args has the addresses of is f's.
func (t *table) call(fn function, f *frame, args ...uintptr) Result {
	n := copy(f.args[:], args)
	r, _, _ := purego.SyscallN(t.at[fn], f.args[:n]...)
	runtime.KeepAlive(f)
	return Result(int32(r))
}

// plain is call without memory of Go.
func (t *table) plain(fn function, args ...uintptr) Result {
	f := newFrame()
	defer f.free()
	return t.call(fn, f, args...)
}

// number returns an int32 as C passes it.
func number[T ~int | ~int32](n T) uintptr { return uintptr(uint32(int32(n))) }

func (t *table) Path() string { return t.path }

func (t *table) Version() Version { return t.version }

func (t *table) UniqueID() (UniqueID, Result) {
	f := newFrame()
	defer f.free()
	f.ids = make([]UniqueID, 1)
	r := t.call(fnGetUniqueID, f, uintptr(unsafe.Pointer(&f.ids[0])))
	return f.ids[0], r
}

func (t *table) CommInit(ids []UniqueID, size, rank int) (Comm, Result) {
	f := newFrame()
	defer f.free()
	f.ids = append([]UniqueID(nil), ids...)
	at, comm, setting := uintptr(unsafe.Pointer(&f.ids[0])), f.out(0), f.setting()
	var r Result
	switch {
	case t.at[fnCommInitRankScalable] != 0:
		r = t.call(fnCommInitRankScalable, f, comm, number(size), number(rank), number(len(ids)), at, setting)
	case len(ids) > 1:
		return 0, InvalidUsage
	case runtime.GOARCH == "arm64": // a copy of a large structure is passed by its address
		r = t.call(fnCommInitRankConfig, f, comm, number(size), at, number(rank), setting)
	default: // it lies on the stack, where the arguments begin that no register has: behind six
		args := []uintptr{comm, number(size), number(rank), setting, 0, 0}
		for i := 0; i < len(ids[0]); i += 8 {
			args = append(args, uintptr(binary.NativeEndian.Uint64(ids[0][i:])))
		}
		r = t.call(fnCommInitRankConfig, f, args...)
	}
	return Comm(f.outs[0]), r
}

func (t *table) CommSplit(c Comm, color, key int) (Comm, Result) {
	if t.at[fnCommSplit] == 0 {
		return 0, InvalidUsage
	}
	f := newFrame()
	defer f.free()
	r := t.call(fnCommSplit, f, uintptr(c), number(color), number(key), f.out(0), f.setting())
	return Comm(f.outs[0]), r
}

func (t *table) CommFinalize(c Comm) Result { return t.plain(fnCommFinalize, uintptr(c)) }

func (t *table) CommDestroy(c Comm) Result { return t.plain(fnCommDestroy, uintptr(c)) }

func (t *table) CommAbort(c Comm) Result { return t.plain(fnCommAbort, uintptr(c)) }

func (t *table) CommAsyncError(c Comm) (state, r Result) {
	f := newFrame()
	defer f.free()
	r = t.call(fnCommGetAsyncError, f, uintptr(c), f.out(0))
	return Result(int32(f.outs[0])), r
}

func (t *table) ErrorText(c Comm, r Result) string {
	text := t.text(fnGetErrorString, number(r))
	if t.at[fnGetLastError] != 0 {
		if last := t.text(fnGetLastError, uintptr(c)); last != "" {
			text += ": " + last
		}
	}
	return text
}

// text calls a function that returns a string.
func (t *table) text(fn function, arg uintptr) string {
	f := newFrame()
	defer f.free()
	f.args[0] = arg
	f.args[1], _, _ = purego.SyscallN(t.at[fn], f.args[:1]...)
	if f.args[1] == 0 {
		return ""
	}
	b := *(**byte)(unsafe.Pointer(&f.args[1]))
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(b), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(b, n))
}

func (t *table) GroupStart() Result { return t.plain(fnGroupStart) }

func (t *table) GroupEnd() Result { return t.plain(fnGroupEnd) }

func (t *table) AllReduce(send, recv driver.Ptr, count int, d DataType, op RedOp, c Comm, s driver.Stream) Result {
	return t.plain(fnAllReduce, uintptr(send), uintptr(recv), uintptr(count), number(d), number(op), uintptr(c), s.Handle())
}

func (t *table) Broadcast(send, recv driver.Ptr, count int, d DataType, root int, c Comm, s driver.Stream) Result {
	return t.plain(fnBroadcast, uintptr(send), uintptr(recv), uintptr(count), number(d), number(root), uintptr(c), s.Handle())
}

func (t *table) Reduce(send, recv driver.Ptr, count int, d DataType, op RedOp, root int, c Comm, s driver.Stream) Result {
	return t.plain(fnReduce, uintptr(send), uintptr(recv), uintptr(count), number(d), number(op), number(root), uintptr(c), s.Handle())
}

func (t *table) AllGather(send, recv driver.Ptr, count int, d DataType, c Comm, s driver.Stream) Result {
	return t.plain(fnAllGather, uintptr(send), uintptr(recv), uintptr(count), number(d), uintptr(c), s.Handle())
}

func (t *table) ReduceScatter(send, recv driver.Ptr, count int, d DataType, op RedOp, c Comm, s driver.Stream) Result {
	return t.plain(fnReduceScatter, uintptr(send), uintptr(recv), uintptr(count), number(d), number(op), uintptr(c), s.Handle())
}

func (t *table) Send(p driver.Ptr, count int, d DataType, peer int, c Comm, s driver.Stream) Result {
	return t.plain(fnSend, uintptr(p), uintptr(count), number(d), number(peer), uintptr(c), s.Handle())
}

func (t *table) Recv(p driver.Ptr, count int, d DataType, peer int, c Comm, s driver.Stream) Result {
	return t.plain(fnRecv, uintptr(p), uintptr(count), number(d), number(peer), uintptr(c), s.Handle())
}

func (t *table) RedOpPreMulSum(scalar []byte, d DataType, c Comm) (RedOp, Result) {
	f := newFrame()
	defer f.free()
	copy(f.scalar[:], scalar)
	r := t.call(fnRedOpCreatePreMulSum, f, f.out(0), uintptr(unsafe.Pointer(&f.scalar)), number(d), scalarHostImmediate, uintptr(c))
	return RedOp(int32(f.outs[0])), r
}

func (t *table) RedOpDestroy(op RedOp, c Comm) Result {
	return t.plain(fnRedOpDestroy, number(op), uintptr(c))
}
