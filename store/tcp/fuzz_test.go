package tcp

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
)

// addGolden seeds a fuzzer with what PyTorch sends in one direction.
func addGolden(f *testing.F, requests bool, seed func(line)) {
	for _, b := range golden(f) {
		for _, l := range b.lines {
			if l.request == requests && len(l.bytes) < 100 {
				seed(l)
			}
		}
	}
}

// FuzzServer gives a whole connection's bytes to the server's side: the
// opening, the requests in either dialect, and what they do.
func FuzzServer(f *testing.F) {
	addGolden(f, true, func(l line) {
		f.Add(l.dialect == v2d, l.bytes)
	})
	f.Fuzz(func(t *testing.T, modern bool, b []byte) {
		d := v1d
		if modern {
			d = v2d
		}
		limits := Limits{Key: 16, Value: 64, Keys: 8, Message: 128}
		r := bufio.NewReader(bytes.NewReader(b))
		data := newData(limits, 1000)
		p := &peer{dialect: d}
		other := &peer{dialect: v2d}
		for {
			if other.wait == nil {
				data.do(other, &request{query: qWait, keys: []string{"/k", "/q"}})
			}
			rest, err := readRequest(r, d, limits)
			if err != nil {
				break
			}
			require.NoError(t, limits.check(rest))
			again, err := rest.append(nil, d)
			require.NoError(t, err)
			back, err := readRequest(bufio.NewReader(bytes.NewReader(again)), d, limits)
			require.NoError(t, err)
			require.Equal(t, rest, back)

			_, err = data.do(p, rest)
			p.out.take()
			require.LessOrEqual(t, data.bytes, int64(1000))
			if err != nil {
				break
			}
			var size int64
			for k, v := range data.keys {
				require.LessOrEqual(t, len(v), limits.Message)
				size += cost(k, v)
			}
			for _, q := range data.queues {
				require.NotEmpty(t, q)
				for _, v := range q {
					size += cost("", v)
				}
			}
			require.Equal(t, size, data.bytes)
		}
		data.leave(p)
		data.leave(other)
		require.Empty(t, data.waits)
	})
}

// FuzzReplies gives a server's bytes to the client's readers.
func FuzzReplies(f *testing.F) {
	addGolden(f, false, func(l line) { f.Add(l.bytes) })
	f.Add(append(u64(1<<62), 1, 2, 3))
	f.Fuzz(func(t *testing.T, b []byte) {
		reader := func() *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }
		if v, err := readBlob(reader()); err == nil {
			require.Equal(t, cat(string(v)), b[:8+len(v)])
		}
		r := reader()
		if n, err := readInt64(r); err == nil {
			all, err := readBlobs(r, n)
			if err == nil {
				require.Len(t, all, int(n))
			}
		}
		if flag, err := readFlag(reader()); err == nil {
			require.LessOrEqual(t, flag, byte(1))
		}
	})
}

// FuzzToken gives a stranger's bytes to both sides of the token handshake.
func FuzzToken(f *testing.F) {
	f.Add([]byte(hello))
	f.Add(append([]byte(hello), make([]byte, 64)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		stream := func() io.ReadWriter {
			return struct {
				io.Reader
				io.Writer
			}{bytes.NewReader(b), io.Discard}
		}
		require.Error(t, admit(stream(), "secret"))
		require.Error(t, authenticate(stream(), "secret"))
	})
}

// noConn is a connection with nothing behind it.
type noConn struct{ net.Conn }

func (noConn) SetReadDeadline(time.Time) error { return nil }

// FuzzOpening holds the two dialects apart, whatever comes.
func FuzzOpening(f *testing.F) {
	f.Add(opening)
	f.Add([]byte{0, 1, 2, 3, 4})
	f.Add([]byte{3})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &session{server: &Server{}, conn: noConn{}}
		err := c.open(bufio.NewReader(bytes.NewReader(b)))
		switch {
		case len(b) == 0 || b[0] == 0 && len(b) < len(opening):
			require.Error(t, err)
		case bytes.HasPrefix(b, opening):
			require.NoError(t, err)
			require.Equal(t, store.DialectV2, c.peer.dialect)
		default:
			require.NoError(t, err)
			require.Equal(t, store.DialectV1, c.peer.dialect)
		}
	})
}
