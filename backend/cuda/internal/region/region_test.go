package region_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/must"
)

const size = 3 * region.PageSize

// lonely is for systems whose processes share no memory.
const lonely = runtime.GOOS != "linux"

func newRegion(t *testing.T) *region.Region {
	t.Helper()
	return must.Get(region.New(size))
}

// otherProcesses has this process open regions as another one does.
func otherProcesses(t *testing.T) {
	if lonely {
		t.Skip("processes share no memory on this system")
	}
	region.OwnProcess = false
	t.Cleanup(func() { region.OwnProcess = true })
}

// TestOneProcess: ranks of one process have one mapping, which is there until the last one leaves.
func TestOneProcess(t *testing.T) {
	a := newRegion(t)
	require.Equal(t, make([]byte, size), a.Bytes)
	require.Len(t, a.Name, region.NameLen)
	_, err := region.Open(a.Name, size+1)
	require.ErrorContains(t, err, fmt.Sprintf("shared memory has %d bytes, want %d", size, size+1))
	b, err := region.Open(a.Name, size)
	require.NoError(t, err)
	require.Same(t, a, b)
	require.NoError(t, a.Leave())
	b.Word(8).Store(7) // it is still mapped
	require.EqualValues(t, 7, b.Bytes[8]|b.Bytes[11])
	name := b.Name
	require.NoError(t, b.Leave())
	require.Error(t, must.Err(region.Open(name, size)))
	require.ErrorContains(t, must.Err(region.Open("", size)), "there is none")
}

// TestOtherMapping: two mappings of one region have the same bytes. Nobody can make the region smaller.
func TestOtherMapping(t *testing.T) {
	otherProcesses(t)
	a := newRegion(t)
	b, err := region.Open(a.Name, size)
	require.NoError(t, err)
	require.NotSame(t, &a.Bytes[0], &b.Bytes[0])
	a.Word(0).Store(1)
	b.Word(size - 4).Store(2)
	require.EqualValues(t, 1, b.Word(0).Load())
	require.EqualValues(t, 2, a.Word(size-4).Load())
	_, err = region.Open(a.Name, size-region.PageSize)
	require.ErrorContains(t, err, fmt.Sprintf("has %d bytes", size))
	require.NotEmpty(t, shrunk(a.Name), "the file can be cut under the mappings' feet")
	b.Word(size - 4).Store(3)

	// Without a name nobody can come any more, and who is there stays.
	require.NoError(t, a.Hide())
	require.NoError(t, a.Hide())
	require.ErrorContains(t, must.Err(region.Open(a.Name, size)), "asking another process")
	require.EqualValues(t, 3, a.Word(size-4).Load())
	require.NoError(t, a.Leave())
	require.EqualValues(t, 3, b.Word(size-4).Load())
	require.NoError(t, b.Leave())
}

// shrunk tries to make a region of this process smaller, and returns why that did not work.
func shrunk(name string) string {
	for _, e := range must.Get(os.ReadDir("/proc/self/fd")) {
		path := "/proc/self/fd/" + e.Name()
		if of, err := os.Readlink(path); err != nil || !strings.Contains(of, name) {
			continue
		}
		if err := os.Truncate(path, 0); err != nil {
			return err.Error()
		}
	}
	return ""
}

// TestKilled: a region of a process that is killed leaves nothing behind: no name, no file and no memory.
func TestKilled(t *testing.T) {
	const child = "C10D_TEST_REGION"
	if os.Getenv(child) != "" {
		r, err := region.New(size)
		if err == nil {
			r.Word(0).Store(5)
			fmt.Println("region", r.Name)
		} else {
			fmt.Println("no region:", err)
		}
		select {} // until it is killed
	}
	if lonely {
		t.Skip("processes share no memory on this system")
	}
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "-test.run=^TestKilled$", "-test.v")
	cmd.Env = append(os.Environ(), child+"=1")
	out := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	var name string
	for lines := bufio.NewScanner(out); name == "" && lines.Scan(); {
		if _, rest, ok := strings.Cut(lines.Text(), "region "); ok {
			name = rest
		}
	}
	r, err := region.Open(name, size)
	require.NoError(t, err, "while it lives: %q", name)
	require.EqualValues(t, 5, r.Word(0).Load())
	require.Error(t, must.Err(region.Open(name, 2*size)))
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.EqualValues(t, 5, r.Word(0).Load(), "who has mapped it keeps it")
	require.NoError(t, r.Leave())
	require.ErrorContains(t, must.Err(region.Open(name, size)), "asking another process")
	for _, dir := range []string{"/dev/shm", os.TempDir()} {
		files := must.Get(os.ReadDir(dir))
		for _, f := range files {
			require.NotContains(t, f.Name(), name, "in %s", dir)
		}
	}
}

// TestHostileNames: a name that comes from another rank opens its region or nothing.
func TestHostileNames(t *testing.T) {
	otherProcesses(t)
	for _, name := range []string{"1", "../1/2", strings.Repeat("9", 1<<16), "a\x00b", strings.Repeat("0", region.NameLen)} {
		require.ErrorContains(t, must.Err(region.Open(name, size)), "asking another process", "%.40q", name)
	}
}

// TestRefused: an error of the system ends New and Open, is in their error, and leaves no descriptor.
func TestRefused(t *testing.T) {
	otherProcesses(t)
	open := func() int {
		return len(must.Get(os.ReadDir("/proc/self/fd")))
	}
	a := newRegion(t)
	before := region.Before
	defer func() { region.Before = before }()
	refused := errors.New("refused")
	left := open()
	for _, call := range []string{"memfd_create", "fallocate", "mmap", "open"} {
		asked := 0
		region.Before = func(c string, n int) error {
			require.Equal(t, size, n)
			if c != call {
				return nil
			}
			asked++
			return refused
		}
		if call != "open" {
			require.ErrorIs(t, must.Err(region.New(size)), refused, call)
		}
		if call == "open" || call == "mmap" {
			require.ErrorIs(t, must.Err(region.Open(a.Name, size)), refused, call)
		}
		require.NotZero(t, asked, call)
		// Who has passed the file closes the connection when it has gone.
		require.Eventually(t, func() bool { return open() == left }, time.Minute, time.Millisecond, call)
	}
	require.NoError(t, a.Leave())
	require.Equal(t, left-2, open(), "the file and its socket")
}

// TestLock: a region is page-locked once for each driver, until the last user of the driver unlocks it.
func TestLock(t *testing.T) {
	r := newRegion(t)
	for range 2 {
		d := must.Get(sim.Open(sim.Config{}))
		m := must.Get(r.Lock(d))
		require.Same(t, m, must.Get(r.Lock(d)))
		m.Store32(4, 0x01020304)
		require.EqualValues(t, 0x01020304, r.Word(4).Load())
		require.True(t, bytes.Equal(m.Bytes(), r.Bytes))
		require.NoError(t, r.Unlock(d))
		require.Equal(t, 1, d.Machine().Stats().Hosts)
		require.NoError(t, r.Unlock(d))
		require.Zero(t, d.Machine().Stats().Hosts)
		require.NoError(t, d.Close()) // it finds what is still locked
	}
	require.NoError(t, r.Leave())
}
