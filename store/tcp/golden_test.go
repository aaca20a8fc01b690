package tcp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// block is one call of testdata/golden.txt.
type block struct {
	title string
	lines []line
}

type line struct {
	dialect *dialect
	second  bool // of the second client
	request bool
	bytes   []byte
}

func golden(t testing.TB) []block {
	text, err := os.ReadFile("testdata/golden.txt")
	require.NoError(t, err)
	var blocks []block
	for l := range strings.Lines(string(text)) {
		l = strings.TrimSpace(l)
		if title, ok := strings.CutPrefix(l, "## "); ok {
			blocks = append(blocks, block{title: title})
			continue
		}
		if l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		f := strings.Fields(l)
		mark := f[1]
		digits, cut := strings.CutSuffix(strings.Join(f[2:], ""), "...")
		b, err := hex.DecodeString(digits)
		require.NoError(t, err, l)
		if cut {
			b = append(b, bytes.Repeat([]byte("B"), 3021-len(b))...)
		}
		last := &blocks[len(blocks)-1]
		last.lines = append(last.lines, line{dialects[f[0]], mark[0] == 'b', strings.HasSuffix(mark, ">"), b})
	}
	require.Len(t, blocks, 42)
	return blocks
}

// The server answers the requests of PyTorch's clients as PyTorch's servers do.
func TestGoldenServer(t *testing.T) {
	for name, d := range dialects {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, ServerOptions{}).Addr().String()
			var clients [2]*raw
			for _, b := range golden(t) {
				if strings.HasPrefix(b.title, "construct") {
					clients[0] = dialRaw(t, addr)
				}
				t.Log(b.title)
				for _, l := range b.lines {
					if l.dialect != d {
						continue
					}
					c := &clients[0]
					if l.second {
						c = &clients[1]
						if *c == nil {
							*c = dialRaw(t, addr)
							if d == pytorch {
								(*c).send(opening)
							}
						}
					}
					switch {
					case l.request:
						(*c).send(l.bytes)
						if l.second {
							(*c).open(d) // what it set is there for the first
						}
					case b.title == "list_keys()":
						expectList(*c, l.bytes)
					default:
						(*c).expect(l.bytes...)
					}
				}
			}
			clients[0].open(d)
		})
	}
}

// expectList expects a reply to LIST_KEYS in any order.
func expectList(c *raw, want []byte) {
	got := make([]byte, len(want))
	must.Get(io.ReadFull(c.r, got))
	require.Equal(c, keysOf(c, want), keysOf(c, got))
}

func keysOf(t testing.TB, b []byte) []string {
	n, b := b[0], b[8:]
	var keys []string
	for range n {
		keys = append(keys, string(b[8:8+b[0]]))
		b = b[8+b[0]:]
	}
	require.Empty(t, b)
	slices.Sort(keys)
	return keys
}

// The client sends, for the same calls, what PyTorch's clients send, and
// understands the replies. Only behind a request without reply it sends one
// more, to learn that it was carried out.
func TestGoldenClient(t *testing.T) {
	for name, d := range dialects {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", local)
			require.NoError(t, err)
			defer ln.Close()
			var conn *raw
			accept := func() {
				c := must.Get(ln.Accept())
				t.Cleanup(func() { c.Close() })
				require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
				conn = &raw{t, c, nil}
			}
			var s *Store
			for _, b := range golden(t) {
				var lines []line
				for _, l := range b.lines {
					if l.dialect == d && (!l.second || strings.HasPrefix(b.title, "other client")) {
						lines = append(lines, l)
					}
				}
				joining := strings.HasPrefix(b.title, "construct")
				if len(lines) == 0 && !joining {
					continue
				}
				t.Log(b.title)
				call := calls[b.title]
				require.NotNil(t, call, b.title)
				ctx := newExpiring(t) // in the calls that time out, once their request is here
				done := go1(func() error {
					if joining {
						if s != nil {
							s.Close()
						}
						size := 0
						if strings.Contains(b.title, "world_size") {
							size = 2
						}
						var err error
						s, err = New(t.Context(), ln.Addr().String(), Options{dialect: d, Timeout: patience, WorldSize: size})
						if err == nil {
							s.queues.Store(has)
							s.listing.Store(has)
							s.patient()
						}
						return err
					}
					return call(ctx, s)
				})
				if joining || d == torch1 && strings.HasPrefix(b.title, "num_keys() right after") {
					accept() // an old client gives up its connection with a wait
				}
				for i, l := range lines {
					if !l.request {
						conn.send(l.bytes)
						continue
					}
					got := make([]byte, len(l.bytes))
					n := 0
					if i == 0 && timeOuts[b.title] {
						// The wait, behind which the new dialect has CANCEL_WAIT.
						n = 1 + 8 + 8 + int(l.bytes[9])
						must.Get(io.ReadFull(conn, got[:n]))
						ctx.expire()
					}
					must.Get(io.ReadFull(conn, got[n:]))
					if joining && bytes.HasPrefix(l.bytes, opening) {
						require.Equal(t, l.bytes[:6], got[:6])
						require.GreaterOrEqual(t, got[8], byte(0x80), "the nonce must be safe for an old server")
						lines[i+1].bytes = got[6:]
						continue
					}
					require.Equal(t, l.bytes, got)
					if i == len(lines)-1 && !strings.Contains(b.title, "time-out") {
						confirm(t, conn, d)
					}
				}
				require.NoError(t, await(t, done), b.title)
			}
			require.NoError(t, s.Close())
			require.Empty(t, must.Get(io.ReadAll(conn)))
		})
	}
}

// confirm takes the request behind a SET, for the number of keys, and answers it.
func confirm(t *testing.T, conn *raw, d *dialect) {
	got := make([]byte, 1)
	must.Get(io.ReadFull(conn, got))
	require.Equal(t, []byte{byte(d.number(qNumKeys))}, got)
	conn.send(u64(1))
}

type callFunc func(context.Context, *Store) error

// gives is a call and its result.
func gives[T any](want T, call func(context.Context, *Store) (T, error)) callFunc {
	return func(ctx context.Context, s *Store) error {
		got, err := call(ctx, s)
		if err == nil && !reflect.DeepEqual(want, got) {
			err = fmt.Errorf("got %v, want %v", got, want)
		}
		return err
	}
}

// timeOuts are the blocks whose call ends for lack of time.
var timeOuts = map[string]bool{`wait(["never"],0.4 s): time-out`: true, `wait with a zero time-out on a missing key`: true}

// timesOut is a wait that has to fail for lack of time.
func timesOut(key string) callFunc {
	return func(ctx context.Context, s *Store) error {
		if err := s.Wait(ctx, key); !errors.Is(err, store.ErrTimeout) {
			return fmt.Errorf("the wait ended with %v", err)
		}
		return nil
	}
}

func set(key, value string) callFunc {
	return func(ctx context.Context, s *Store) error { return s.Set(ctx, key, []byte(value)) }
}

func get(key, want string) callFunc {
	return gives([]byte(want), func(ctx context.Context, s *Store) ([]byte, error) { return s.Get(ctx, key) })
}

func add(key string, delta, want int64) callFunc {
	return gives(want, func(ctx context.Context, s *Store) (int64, error) { return s.Add(ctx, key, delta) })
}

func check(want bool, keys ...string) callFunc {
	return gives(want, func(ctx context.Context, s *Store) (bool, error) { return s.Check(ctx, keys...) })
}

func wait(keys ...string) callFunc {
	return func(ctx context.Context, s *Store) error { return s.Wait(ctx, keys...) }
}

func compareSet(key, expected, desired, want string) callFunc {
	return gives([]byte(want), func(ctx context.Context, s *Store) ([]byte, error) {
		return s.CompareSet(ctx, key, []byte(expected), []byte(desired))
	})
}

func numKeys(want int64) callFunc {
	return gives(want, func(ctx context.Context, s *Store) (int64, error) { return s.NumKeys(ctx) })
}

func del(key string, want bool) callFunc {
	return gives(want, func(ctx context.Context, s *Store) (bool, error) { return s.Delete(ctx, key) })
}

func appendTo(key, value string) callFunc {
	return func(ctx context.Context, s *Store) error { return s.Append(ctx, key, []byte(value)) }
}

func push(key, value string) callFunc {
	return func(ctx context.Context, s *Store) error { return s.QueuePush(ctx, key, []byte(value)) }
}

func pop(key string, block bool, want string) callFunc {
	return gives([]byte(want), func(ctx context.Context, s *Store) ([]byte, error) { return s.QueuePop(ctx, key, block) })
}

func queueLen(key string, want int64) callFunc {
	return gives(want, func(ctx context.Context, s *Store) (int64, error) { return s.QueueLen(ctx, key) })
}

// byDialect is a call with a result that differs because the old dialect has
// fewer calls before it.
func byDialect(v1, v2 callFunc) callFunc {
	return func(ctx context.Context, s *Store) error {
		if s.dialer.dialect == torch1 {
			return v1(ctx, s)
		}
		return v2(ctx, s)
	}
}

// calls are the blocks' titles in Go.
var calls = map[string]callFunc{
	`construct, no world size`:                       wait(),
	`construct, world_size=2, wait_for_workers=True`: wait(),
	`set("k1","hello")`:                              set("k1", "hello"),
	`set("empty","")`:                                set("empty", ""),
	`set("","x"): empty key`:                         set("", "x"),
	`get("k1")`:                                      get("k1", "hello"),
	`get("empty")`:                                   get("empty", ""),
	`add("ctr",5)`:                                   add("ctr", 5, 5),
	`add("ctr",-7)`:                                  add("ctr", -7, -2),
	`get("ctr")`:                                     get("ctr", "-2"),
	`check(["k1"])`:                                  check(true, "k1"),
	`check(["k1","nope"])`:                           check(false, "k1", "nope"),
	`check([])`:                                      check(true),
	`wait(["k1"])`:                                   wait("k1"),
	`wait([])`:                                       wait(),
	`wait(["k1","late"]) while another client sets "late" 0.3 s later`: wait("k1", "late"),
	`compare_set("cs","","new"): key missing, empty expected`:          compareSet("cs", "", "new", "new"),
	`compare_set("cs2","exp","new"): key missing, other expected`:      compareSet("cs2", "exp", "new", "exp"),
	`compare_set("cs","new","n2"): match`:                              compareSet("cs", "new", "n2", "n2"),
	`compare_set("cs","wrong","n3"): mismatch`:                         compareSet("cs", "wrong", "n3", "n2"),
	`num_keys()`:             numKeys(7),
	`delete_key("k1")`:       del("k1", true),
	`delete_key("k1") again`: del("k1", false),
	`append("ap","ab")`:      appendTo("ap", "ab"),
	`append("ap","cd")`:      appendTo("ap", "cd"),
	`get("ap")`:              get("ap", "abcd"),
	`multi_set(["m1","m2"],["x","yy"])`: func(ctx context.Context, s *Store) error {
		return s.MultiSet(ctx, []string{"m1", "m2"}, [][]byte{[]byte("x"), []byte("yy")})
	},
	`multi_get(["m1","m2"])`: gives([][]byte{[]byte("x"), []byte("yy")}, func(ctx context.Context, s *Store) ([][]byte, error) {
		return s.MultiGet(ctx, []string{"m1", "m2"})
	}),
	`queue_push("q","a")`:        push("q", "a"),
	`queue_push("q","bb")`:       push("q", "bb"),
	`queue_len("q")`:             queueLen("q", 2),
	`queue_pop("q")`:             pop("q", true, "a"),
	`queue_pop("q",block=False)`: pop("q", false, "bb"),
	`queue_pop("q",block=False) on an empty queue`: func(ctx context.Context, s *Store) error {
		if _, err := s.QueuePop(ctx, "q", false); !errors.Is(err, store.ErrQueueEmpty) {
			return fmt.Errorf("the pop ended with %v", err)
		}
		return nil
	},
	`queue_len("nosuch")`: queueLen("nosuch", 0),
	`list_keys()`: gives([]string{"", "ap", "cs", "ctr", "empty", "late", "m1", "m2"}, func(ctx context.Context, s *Store) ([]string, error) {
		keys, err := s.ListKeys(ctx)
		slices.Sort(keys)
		return keys, err
	}),
	`set("big", 3000 bytes)`:                     set("big", strings.Repeat("B", 3000)),
	`wait(["never"],0.4 s): time-out`:            timesOut("never"),
	`num_keys() right after the time-out`:        byDialect(numKeys(7), numKeys(10)),
	`other client sets "never"`:                  set("never", "1"),
	`num_keys() after that`:                      byDialect(numKeys(8), numKeys(11)),
	`wait with a zero time-out on a missing key`: timesOut("never2"),
}
