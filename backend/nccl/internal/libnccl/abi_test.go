//go:build linux && (amd64 || arm64)

package libnccl_test

import (
	"encoding/binary"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// built is testdata/nccl.c as a library.
type built struct {
	libnccl.API
	notes, clear uintptr
}

// build compiles it with definitions.
func build(t *testing.T, defines ...string) string {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("there is no C compiler")
	}
	path := filepath.Join(t.TempDir(), "libnccl.so.2")
	args := append([]string{"-shared", "-fPIC", "-O2", "-o", path, "testdata/nccl.c"}, defines...)
	out, err := exec.Command(cc, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

func open(t *testing.T, path string) *built {
	b := &built{API: must.Get(libnccl.Open(path))}
	h := must.Get(purego.Dlopen(path, purego.RTLD_NOW))
	b.notes, b.clear = must.Get(purego.Dlsym(h, "notes_taken")), must.Get(purego.Dlsym(h, "notes_clear"))
	return b
}

// take returns what the library has noted since the last take.
func (b *built) take() string {
	at, _, _ := purego.SyscallN(b.notes)
	p := *(**byte)(unsafe.Pointer(&at))
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	s := string(unsafe.Slice(p, n))
	purego.SyscallN(b.clear)
	return s
}

// stream has a handle and nothing else.
type stream struct{ driver.Stream }

func (stream) Handle() uintptr       { return 0x77 }
func (stream) Device() tensor.Device { return tensor.Device{} }

func TestCalls(t *testing.T) {
	path := build(t, "-DVERSION=22809", "-DSCALABLE")
	b := open(t, path)
	require.Equal(t, path, b.Path())
	require.Equal(t, "2.28.9", b.Version().String())
	id, r := b.UniqueID()
	require.Equal(t, libnccl.Success, r)
	require.EqualValues(t, 128, id[127])
	other := id
	other[0], other[127] = 50, 60
	c, r := b.CommInit([]libnccl.UniqueID{id}, 300, 299)
	require.Equal(t, libnccl.Success, r)
	require.EqualValues(t, 0x1234567890, c)
	require.Equal(t, "scalable 300 299 id 1..128 config 24 cafebeef 21400 1 -2147483648;", b.take())
	b.CommInit([]libnccl.UniqueID{id, other}, 2, 0)
	require.Equal(t, "scalable 2 0 id 1..128 id 50..60 config 24 cafebeef 21400 1 -2147483648;", b.take())
	part, _ := b.CommSplit(c, 2130503744, 3)
	none, _ := b.CommSplit(c, libnccl.NoColor, 1)
	require.EqualValues(t, 0x99, part)
	require.Zero(t, none)
	require.Equal(t, "split 0x1234567890 2130503744 3 config 24 cafebeef 21400 1 -2147483648;split 0x1234567890 -1 1 config 24 cafebeef 21400 1 -2147483648;", b.take())
	state, r := b.CommAsyncError(c)
	require.Equal(t, []libnccl.Result{libnccl.RemoteError, libnccl.Success}, []libnccl.Result{state, r})
	require.Equal(t, "remote process exited: the last words", b.ErrorText(c, state))
	require.EqualError(t, libnccl.Check(b, c, "AllReduce", state), "ncclAllReduce: remote process exited: the last words")
	b.take()
	s := stream{}
	runtime.LockOSThread()
	b.GroupStart()
	b.AllReduce(0x10, 0x20, 1<<40, libnccl.Float32, libnccl.Avg, c, s)
	b.Broadcast(0x10, 0x20, 3, libnccl.Int8, 1, c, s)
	b.Reduce(0x10, 0x20, 3, libnccl.Int8, libnccl.Max, 1, c, s)
	b.GroupEnd()
	runtime.UnlockOSThread()
	require.Equal(t, "start;allreduce 0x10 0x20 1099511627776 7 4 0x1234567890 0x77;broadcast 0x10 0x20 3 0 1 0x1234567890 0x77;reduce 0x10 0x20 3 0 2 1 0x1234567890 0x77;end;", b.take())
	b.AllGather(0x10, 0x20, 3, libnccl.BFloat16, c, s)
	b.ReduceScatter(0x10, 0x20, 3, libnccl.Uint64, libnccl.Prod, c, s)
	b.Send(0x10, 3, libnccl.Float8E5M2, 7, c, s)
	b.Recv(0x10, 3, libnccl.Float64, 7, c, s)
	require.Equal(t, "allgather 0x10 0x20 3 9 0x1234567890 0x77;reducescatter 0x10 0x20 3 5 1 0x1234567890 0x77;send 0x10 3 11 7 0x1234567890 0x77;recv 0x10 3 8 7 0x1234567890 0x77;", b.take())
	op, _ := b.RedOpPreMulSum(binary.NativeEndian.AppendUint64(nil, math.Float64bits(0.25)), libnccl.Float64, c)
	b.RedOpDestroy(op, c)
	b.CommFinalize(c)
	b.CommDestroy(c)
	b.CommAbort(c)
	require.Equal(t, "premul 0.25 8 1 0x1234567890;drop 5 0x1234567890;finalize 0x1234567890;destroy 0x1234567890;abort 0x1234567890;", b.take())
}

// TestOldLibrary passes the id by value, and has no splits.
func TestOldLibrary(t *testing.T) {
	b := open(t, build(t, "-DVERSION=21706"))
	id, _ := b.UniqueID()
	c, r := b.CommInit([]libnccl.UniqueID{id}, 5, 3)
	require.Equal(t, libnccl.Success, r)
	require.EqualValues(t, 0x1234567890, c)
	require.Equal(t, "config 5 3 id 1..128 config 24 cafebeef 21400 1 -2147483648;", b.take())
	_, r = b.CommSplit(c, 0, 0)
	require.Equal(t, libnccl.InvalidUsage, r)
	_, r = b.CommInit(make([]libnccl.UniqueID, 2), 5, 3)
	require.Equal(t, libnccl.InvalidUsage, r, "several roots")
	require.Equal(t, "other", b.ErrorText(c, libnccl.InternalError))
	require.False(t, b.Version().HasSplit() || b.Version().HasFloat8())
}

func TestRefusedLibraries(t *testing.T) {
	_, err := libnccl.Open(build(t, "-DVERSION=2708"))
	require.ErrorIs(t, err, libnccl.ErrNoLibrary)
	require.ErrorContains(t, err, "is NCCL 2.7.8, want 2.14.0 or later")
	path := filepath.Join(t.TempDir(), "libnccl.so.2")
	_, err = libnccl.Open(path)
	require.ErrorIs(t, err, libnccl.ErrNoLibrary)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, libnccl.Variable)
}

// TestCandidates: an option comes before the variable, and that before Python's packages.
func TestCandidates(t *testing.T) {
	root := t.TempDir()
	there := filepath.Join(root, "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2")
	require.NoError(t, os.MkdirAll(filepath.Dir(there), 0o755))
	require.NoError(t, os.WriteFile(there, nil, 0o644))
	t.Setenv("VIRTUAL_ENV", root)
	t.Setenv(libnccl.Variable, "")
	all := libnccl.Candidates("")
	require.Equal(t, there, all[0])
	require.Equal(t, "libnccl.so.2", all[len(all)-1])
	t.Setenv(libnccl.Variable, "/b")
	require.Equal(t, []string{"/b"}, libnccl.Candidates(""))
	require.Equal(t, []string{"/a"}, libnccl.Candidates("/a"))
}
