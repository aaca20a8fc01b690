//go:build !android && (amd64 || arm64)

package nvidia

import (
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestCall calls functions of the C library through what calls CUDA's.
func TestCall(t *testing.T) {
	c, err := purego.Dlopen("libc.so.6", purego.RTLD_NOW)
	if err != nil {
		t.Skip(err)
	}
	a := new(api)
	a.at[fnInit] = must.Get(symbol(c, "abs"))
	// It writes 8 bytes to its argument.
	a.at[fnMemAlloc] = must.Get(symbol(c, "time"))
	require.EqualValues(t, 7, a.call1(fnInit, ^uintptr(6)), "abs(-7)")
	before := time.Now().Unix()
	now, _ := a.get(fnMemAlloc, 0, 0, 0, 1)
	// The seconds of time begin with a tick, up to 10 ms late.
	require.GreaterOrEqual(t, int64(now), before-1)
	require.LessOrEqual(t, int64(now), time.Now().Unix())
	if maxAllocs < 0 {
		return
	}
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		a.call1(fnInit, 5)
		a.get(fnMemAlloc, 0, 0, 0, 1)
	}))
}

// TestConnect reads what connect has told the C library.
func TestConnect(t *testing.T) {
	getenv := must.Get(symbol(purego.RTLD_DEFAULT, "getenv"))
	get := func() string {
		name := []byte(connections + "\x00")
		p, _, _ := purego.SyscallN(getenv, uintptr(unsafe.Pointer(&name[0])))
		require.NotZero(t, p)
		var value []byte
		for c := *(**byte)(unsafe.Pointer(&p)); *c != 0; c = (*byte)(unsafe.Add(unsafe.Pointer(c), 1)) {
			value = append(value, *c)
		}
		return string(value)
	}
	for _, c := range []struct {
		asked, want string
		queues      int
	}{{"3", "3", 3}, {"17", "17", 17}, {"100", "100", 32}, {"many", "many", 0}, {"-1", "-1", 0}, {"", "32", 32}} {
		t.Setenv(connections, c.asked)
		require.Equal(t, c.queues, connect())
		require.Equal(t, c.want, get())
	}
	require.Empty(t, os.Getenv(connections), "children get what the program's own environment says")
}
