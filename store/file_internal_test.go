package store

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// FuzzReadRecord checks that whatever is read was there: the records of a file
// written again are the file's bytes.
func FuzzReadRecord(f *testing.F) {
	f.Add([]byte("\x09\x00\x00\x00refcount/\x01\x00\x00\x001\x02\x00\x00\x00/k\x02\x00\x00\x00v1\x03\x00\x00\x00-/k\x00\x00\x00\x00"))
	f.Add([]byte("\x02\x00\x00\x00/k\xff\xff\xff\x3f"))
	f.Add([]byte("\xff\xff\xff\xff"))
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		var written []byte
		for left := int64(len(data)); left > 0; {
			rec, n, err := readRecord(r, left)
			if err != nil {
				return
			}
			require.Positive(t, n)
			require.NotEmpty(t, rec.key)
			left -= n
			written = appendRecord(written, rec)
			require.True(t, bytes.HasPrefix(data, written))
		}
		require.Equal(t, string(data), string(written))
	})
}

func newTestFile(t *testing.T) *File {
	f, err := NewFile(filepath.Join(t.TempDir(), "store"), 1)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// settle is long enough for a goroutine to come to its wait, and no test fails
// if it is not.
const settle = 30 * time.Millisecond

// TestFilesThatAreNoStore: NewFile names what the path has instead, and does not wait for the
// rest of a record. A store whose first writer died is still told apart.
func TestFilesThatAreNoStore(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no file store")
	}
	for name, test := range map[string]struct{ text, want string }{
		"text":         {"127.0.0.1 localhost\n", `the file is no store: it begins with "127.0.0.1 loc"`},
		"binary":       {"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00", "the file is no store"},
		"zeros":        {strings.Repeat("\x00", 64), "the file is no store"},
		"short length": {"\x03\x00\x00\x00abc\x00\x00\x00\x00", "the file is no store"},
		"dead writer":  {"\x09\x00\x00\x00refc", errTorn.Error()},
		"own key":      {"\x02\x00\x00\x00/k", errTorn.Error()},
		"two bytes":    {"\x02\x00", errTorn.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "f")
			require.NoError(t, os.WriteFile(path, []byte(test.text), 0o644))
			_, err := NewFile(path, 1)
			require.ErrorContains(t, err, test.want)
			require.ErrorContains(t, err, path)
			require.Equal(t, test.text, string(must.Get(os.ReadFile(path))), "the file was changed")
		})
	}
}

func TestFileRecordCompletedLate(t *testing.T) {
	f := newTestFile(t)
	f.patience = time.Hour
	rec := appendRecord(nil, record{"/late", []byte("value")})
	file, err := os.OpenFile(f.path, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer file.Close()
	must.Get(file.Write(rec[:7]))

	got := make(chan string, 1)
	go func() {
		v, err := f.Get(t.Context(), "late")
		got <- string(v)
		if err != nil {
			t.Error(err)
		}
	}()
	time.Sleep(settle)
	must.Get(file.Write(rec[7:]))
	require.Equal(t, "value", must.Receive(t, "Get", got))
}

// patience bounds what the tests wait for.
const patience = 20 * time.Second

func TestFileLockHeldByAnother(t *testing.T) {
	f := newTestFile(t)
	other := must.Get(os.Open(f.path))
	defer other.Close()
	require.True(t, must.Get(flock(other, true)))

	ctx, cancel := context.WithCancelCause(t.Context())
	waiting := make(chan error, 1)
	go func() { waiting <- f.Set(ctx, "k", nil) }()
	waits := func() {
		t.Helper()
		require.Eventually(t, func() bool { return len(f.turn) == 1 }, patience, time.Millisecond)
	}
	waits()
	cancel(ErrTimeout)
	err := must.Receive(t, "Set, which waits for the lock", waiting)
	require.ErrorIs(t, err, ErrTimeout)
	require.ErrorContains(t, err, "lock")
	f.SetTimeout(settle)
	require.ErrorIs(t, must.Err(f.Check(t.Context(), "k")), ErrTimeout)

	f.SetTimeout(-1)
	ctx, cancel = context.WithCancelCause(t.Context())
	cancelled, ended := make(chan error, 1), make(chan error, 1)
	go func() { cancelled <- f.Set(ctx, "k", nil) }()
	waits()
	cancel(nil)
	require.ErrorIs(t, must.Receive(t, "Set, which was cancelled", cancelled), context.Canceled)

	go func() { ended <- f.Set(t.Context(), "k", nil) }()
	waits()
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	require.ErrorIs(t, must.Receive(t, "Set of a store that closes", ended), ErrClosed)
	require.NoError(t, other.Close())
	require.NoError(t, must.Receive(t, "Close", closed))
	require.NoFileExists(t, f.path)
}
