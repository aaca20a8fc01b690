package tcp

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
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
				data.do(other, 0, &request{query: qWait, keys: []string{"/k", "/q"}})
			}
			rest, err := readRequest(r, d, limits)
			if err != nil {
				break
			}
			require.NoError(t, limits.check(rest))
			again := must.Get(rest.append(nil, d))
			back, err := readRequest(bufio.NewReader(bytes.NewReader(again)), d, limits)
			require.NoError(t, err)
			require.Equal(t, rest, back)

			if rest.query == qListKeys {
				keys, size, _, err := data.list(p, 0)
				require.True(t, err != nil || len(keys) == len(data.keys) && size <= limits.Message)
				continue
			}
			_, err = data.do(p, 0, rest)
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
			for name, q := range data.queues {
				require.NotEmpty(t, q)
				size += cost(name, nil)
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

// FuzzNative gives the bytes of a native connection to the server's side, frame by frame, and
// checks the replies: one for each request that does not wait, with the length in its frame.
func FuzzNative(f *testing.F) {
	addGolden(f, true, func(l line) {
		if l.dialect == v2d {
			f.Add(l.bytes)
		}
	})
	give, err := (&request{query: qGiveUp, num: 1}).append(nil, native)
	require.NoError(f, err)
	f.Add(cat(3, "/k", 3, "/l", give, 6, uint64(2), "/k", "/l", 13, u32(7), 1, "/k", "v"))
	f.Add(cat(int(qQueueTake), "/q", 14, "/q", "v", 16, "/q"))
	f.Fuzz(func(t *testing.T, b []byte) {
		limits := Limits{Key: 16, Value: 64, Keys: 8, Message: 128}
		r := bufio.NewReader(bytes.NewReader(b))
		data := newData(limits, 1000)
		p := &peer{dialect: native}
		asked := make(map[uint32]*request)
		for id := uint32(0); ; id++ {
			req, err := readRequest(r, native, limits)
			if err != nil {
				break
			}
			require.Len(t, must.Get(req.append(nil, native)), req.size())
			if req.query == qListKeys {
				continue // which a session answers
			}
			if req.query != qGiveUp {
				asked[id] = req.clone()
			}
			require.NoError(t, must.Err(data.do(p, id, req)), "nothing that can be read ends the connection")
			held := 0
			for _, w := range p.waits {
				held += w.req.held()
			}
			require.Equal(t, held, p.held)
			require.LessOrEqual(t, held, limits.Message)
		}
		var out bytes.Buffer
		for more := true; more; {
			sent := p.out.take()
			if before := out.Len(); sent.size > 0 {
				require.NoError(t, sent.send(&out))
				require.Equal(t, sent.size, out.Len()-before)
			}
			if data.sent(p, sent.pieces) > 0 {
				require.NoError(t, data.answer(p))
			}
			more = sent.held
		}
		answers := bufio.NewReader(&out)
		for {
			n, err := readUint32(answers)
			if err != nil {
				break
			}
			id := must.Get(readUint32(answers))
			status := must.Get(answers.ReadByte())
			req := asked[id]
			require.NotNil(t, req, "a second reply, or one to no request")
			delete(asked, id)
			got := must.Get(readNative(answers, req.query, len(req.keys), status, n-frameHead))
			require.Equal(t, status == done, got.err == nil)
		}
		require.Len(t, p.waits, len(asked))
		for id := range asked {
			require.Contains(t, p.waits, id)
		}
		data.leave(p)
		require.Empty(t, data.waits)
		require.Zero(t, p.waited)
		require.Zero(t, p.held)
	})
}

// FuzzReplies gives a server's bytes to the client's readers.
func FuzzReplies(f *testing.F) {
	addGolden(f, false, func(l line) { f.Add(l.bytes) })
	f.Add(append(u64(1<<62), 1, 2, 3))
	f.Fuzz(func(t *testing.T, b []byte) {
		reader := func() *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }
		if v, err := readBlob(reader(), unframed); err == nil {
			require.Equal(t, cat(string(v)), b[:8+len(v)])
		}
		r := reader()
		if n, err := readInt64(r); err == nil {
			all, err := readBlobs(r, n, unframed)
			if err == nil {
				require.Len(t, all, int(n))
			}
		}
		for q := range qQueueTake + 1 {
			for status := range tooLarge + 2 {
				const keys = 3
				n := uint32(len(b) - len(b)/4) // another reply follows
				all := bytes.NewReader(b)
				r := bufio.NewReaderSize(all, 16)
				got, err := readNative(r, q, keys, status, n)
				// Beyond its frame a reply reads a number at most, and what the buffer has.
				require.LessOrEqual(t, len(b)-all.Len()-r.Buffered(), int(n)+8)
				if err == nil && status == done {
					require.EqualValues(t, n, got.size(q))
				}
				if err == nil {
					require.Equal(t, status != done, got.err != nil)
					require.LessOrEqual(t, len(got.missing), keys)
				}
			}
		}
		if flag, err := readFlag(reader()); err == nil {
			require.LessOrEqual(t, flag, byte(1))
		}
	})
}

// noConn is a connection with nothing behind it.
type noConn struct{ net.Conn }

func (noConn) SetReadDeadline(time.Time) error  { return nil }
func (noConn) SetWriteDeadline(time.Time) error { return nil }
func (noConn) SetDeadline(time.Time) error      { return nil }
func (noConn) Read([]byte) (int, error)         { return 0, io.EOF }
func (noConn) Write(b []byte) (int, error)      { return len(b), nil }

// FuzzOpening holds the two dialects apart, whatever comes.
func FuzzOpening(f *testing.F) {
	f.Add(opening)
	f.Add([]byte{0, 1, 2, 3, 4})
	f.Add([]byte{3})
	f.Add([]byte{0x16})
	f.Add([]byte(tlsBegin))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &session{server: &Server{}, conn: noConn{}, raw: noConn{}}
		err := c.open(bufio.NewReader(bytes.NewReader(b)))
		switch {
		case len(b) == 0 || b[0] == 0 && len(b) < len(opening):
			require.Error(t, err)
		case bytes.HasPrefix(b, opening):
			require.NoError(t, err)
			require.Equal(t, pytorch, c.peer.dialect)
		case b[0] == 0x16: // a client with TLS
			require.Error(t, err)
		default:
			require.NoError(t, err)
			require.Equal(t, torch1, c.peer.dialect)
		}
	})
}
