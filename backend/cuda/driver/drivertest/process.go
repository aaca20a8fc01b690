package drivertest

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// roleVariable tells a process that it is a child, and which.
const roleVariable = "C10D_DRIVERTEST_CHILD"

// message is one line between the processes.
type message struct {
	Handle string `json:",omitempty"` // in hex
	Path   string `json:",omitempty"`
	Len    int    `json:",omitempty"`
	Rounds int    `json:",omitempty"`
	Error  string `json:",omitempty"`
}

// Child does the other process's part in the tests with two processes, if this
// process was started for that, and then exits. Else it does nothing. TestMain
// calls it before anything else.
func Child(open func() (driver.Driver, error)) {
	role := os.Getenv(roleVariable)
	if role == "" {
		return
	}
	c := &child{in: json.NewDecoder(os.Stdin), out: json.NewEncoder(os.Stdout)}
	err := c.run(role, open)
	m := message{}
	if err != nil {
		m.Error = err.Error()
	}
	if c.out.Encode(m) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

type child struct {
	in  *json.Decoder
	out *json.Encoder
	ctx context.Context
}

func (c *child) run(role string, open func() (driver.Driver, error)) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c.ctx = ctx
	var m message
	if err := c.in.Decode(&m); err != nil {
		return err
	}
	d, err := open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	v, err := d.Device(0)
	if err != nil {
		return err
	}
	s, err := v.NewStream(driver.StreamOptions{Name: "child"})
	if err != nil {
		return err
	}
	defer s.Close()
	switch role {
	case "memory":
		return c.memory(d, v, s, m)
	case "words":
		return c.words(d, v, s, m)
	}
	return fmt.Errorf("unknown role %q", role)
}

// finish waits for what is on the stream.
func (c *child) finish(s driver.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(c.ctx)
}

// memory opens the parent's memory, compares it and writes something else.
func (c *child) memory(d driver.Driver, v driver.Device, s driver.Stream, m message) error {
	b, err := hex.DecodeString(m.Handle)
	if err != nil {
		return err
	}
	var h driver.MemoryHandle
	if err := h.UnmarshalBinary(b); err != nil {
		return err
	}
	mem, err := v.OpenMemory(h)
	if err != nil {
		return err
	}
	defer mem.Close()
	if mem.Len() != m.Len || mem.Device() != v.ID() {
		return fmt.Errorf("opened %d bytes on %v, want %d on %v", mem.Len(), mem.Device(), m.Len, v.ID())
	}
	if _, err := mem.Export(); !errors.Is(err, driver.ErrInvalid) {
		return fmt.Errorf("exporting opened memory: %v, want it refused", err)
	}
	host, err := d.AllocHost(m.Len)
	if err != nil {
		return err
	}
	defer host.Close()
	if err := s.Copy(host.Ptr(), mem.Ptr(), m.Len); err != nil {
		return err
	}
	if err := c.finish(s); err != nil {
		return err
	}
	if !slices.Equal(host.Bytes(), pattern(m.Len, 1)) {
		return errors.New("the parent's bytes are not there")
	}
	copy(host.Bytes(), pattern(m.Len, 2))
	if err := s.Copy(mem.Ptr(), host.Ptr(), m.Len); err != nil {
		return err
	}
	return c.finish(s)
}

// Places in the memory that the processes share.
const (
	fromParent, fromChild = 0, 64 // words
	dataAt, dataLen       = 4096, 4096
)

// words answers each of the parent's rounds: when its word comes, it moves the
// parent's bytes through device memory to another place and sets its own word.
func (c *child) words(d driver.Driver, v driver.Device, s driver.Stream, m message) error {
	b, unmap, err := mapFile(m.Path, m.Len)
	if err != nil {
		return err
	}
	defer unmap()
	h, err := d.RegisterHost(b)
	if err != nil {
		return err
	}
	defer h.Close()
	mem, err := v.Alloc(dataLen)
	if err != nil {
		return err
	}
	defer mem.Close()
	for i := range uint32(m.Rounds) {
		err := errors.Join(
			s.WaitValue(h.Ptr()+fromParent, i+1, driver.AtLeast),
			s.Copy(mem.Ptr(), h.Ptr()+dataAt, dataLen),
			s.Copy(h.Ptr()+dataAt+dataLen, mem.Ptr(), dataLen),
			s.WriteValue(h.Ptr()+fromChild, i+1),
		)
		if err != nil {
			return err
		}
	}
	return c.finish(s)
}

// other is a child as the parent sees it.
type other struct {
	t   *suite
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// start starts a child.
func (t *suite) start(role string, m message) *other {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.ctx, self, "-test.run=^$")
	cmd.Env = append(append(os.Environ(), t.Child(t.T, t.d)...), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	o := &other{t, cmd, in, bufio.NewScanner(out)}
	t.keep(o)
	require.NoError(t, json.NewEncoder(in).Encode(m))
	return o
}

// needChild skips the test where there is no other process.
func (t *suite) needChild() {
	if t.Child == nil {
		t.Skip("one process only")
	}
}

// answer reads the child's next line.
func (o *other) answer() {
	o.t.Helper()
	if !o.out.Scan() {
		o.t.Fatalf("the other process ended without an answer: %v", o.out.Err())
	}
	var m message
	require.NoError(o.t, json.Unmarshal(o.out.Bytes(), &m), "%s", o.out.Bytes())
	require.Empty(o.t, m.Error, "the other process")
}

// Close waits for the child's end.
func (o *other) Close() error {
	o.in.Close()
	return o.cmd.Wait()
}

func testOtherMemory(t *suite) {
	t.needChild()
	v := t.device(0)
	s := t.stream(v)
	const n = 1<<20 + 5
	for _, offset := range []int{0, 768} {
		m := t.alloc(v, n)
		require.NoError(t, s.Memset(m.Ptr(), 0, n))
		part := n - 2*offset
		b, err := v.Borrow(m.Ptr()+driver.Ptr(offset), part)
		require.NoError(t, err)
		t.put(s, b.Ptr(), pattern(part, 1))
		h, err := b.Export()
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		require.NoError(t, err)
		text, err := h.MarshalBinary()
		require.NoError(t, err)
		o := t.start("memory", message{Handle: hex.EncodeToString(text), Len: part})
		o.answer()
		require.Equal(t, pattern(part, 2), t.get(s, b.Ptr(), part), "what the other process wrote")
		all := t.get(s, m.Ptr(), n)
		require.Equal(t, make([]byte, offset), all[:offset], "and nothing else")
		require.Equal(t, make([]byte, offset), all[n-offset:], "and nothing else")
	}
}

func testOtherWords(t *suite) {
	t.needChild()
	const n, rounds = 1 << 16, 30
	path := filepath.Join(t.memoryDir(), "shared")
	require.NoError(t, os.WriteFile(path, make([]byte, n), 0o600))
	b, unmap, err := mapFile(path, n)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.keep(closer(unmap))
	h, err := t.d.RegisterHost(b)
	require.NoError(t, err)
	t.keep(h)
	v := t.device(0)
	s := t.stream(v)
	m, fill := t.alloc(v, dataLen), t.function(v, Fill)
	o := t.start("words", message{Path: path, Len: n, Rounds: rounds})
	back := t.host(rounds * dataLen)
	for i := range uint32(rounds) {
		t.fill(s, fill, m.Ptr(), i, dataLen/4)
		require.NoError(t, s.Copy(h.Ptr()+dataAt, m.Ptr(), dataLen))
		require.NoError(t, s.WriteValue(h.Ptr()+fromParent, i+1))
		require.NoError(t, s.WaitValue(h.Ptr()+fromChild, i+1, driver.AtLeast))
		require.NoError(t, s.Copy(back.Ptr()+driver.Ptr(i*dataLen), h.Ptr()+dataAt+dataLen, dataLen))
	}
	t.finish(s)
	for i := range rounds {
		require.Equal(t, repeat(uint32(i), dataLen/4), back.Bytes()[i*dataLen:(i+1)*dataLen], "round %d", i)
	}
	o.answer()
}

// memoryDir returns a folder for files that are memory. The pages of others may
// not be locked: Linux refuses it for those that a file system writes back.
func (t *suite) memoryDir() string {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err != nil || !info.IsDir() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "drivertest")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

type closer func() error

func (c closer) Close() error { return c() }

// pages returns n zero bytes that begin at a page.
func pages(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (page - 1))
	return b[skip : skip+n : skip+n]
}
