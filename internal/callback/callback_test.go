package callback

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 2 * time.Minute

func seeded(t testing.TB) *rand.Rand {
	n := uint64(time.Now().UnixNano())
	if s := os.Getenv("C10D_SEED"); s != "" {
		var err error
		n, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("C10D_SEED=%d", n)
	return rand.New(rand.NewPCG(n, 0))
}

// A Match against queues in maps, step by step.
func TestMatchAgainstModel(t *testing.T) {
	rng := seeded(t)
	type value struct{ n, size int }
	m := Match[int, value, int]{Values: 20, Bytes: 1000}
	values, takers := map[int][]value{}, map[int][]int{}
	bytes, count, waiting := 0, 0, 0
	for i := range 100_000 {
		k := rng.IntN(5)
		switch rng.IntN(9) {
		case 0, 1, 2, 3:
			v := value{i, rng.IntN(120)}
			c, ok, err := m.Put(k, v, int64(v.size))
			switch {
			case len(takers[k]) > 0:
				require.NoError(t, err)
				require.True(t, ok)
				require.Equal(t, takers[k][0], c)
				takers[k] = takers[k][1:]
				waiting--
			case count == 20 || bytes+v.size > 1000:
				var full *FullError
				require.ErrorAs(t, err, &full)
				require.Equal(t, FullError{count, 20, int64(bytes), 1000}, *full)
			default:
				require.NoError(t, err)
				require.False(t, ok)
				values[k] = append(values[k], v)
				count, bytes = count+1, bytes+v.size
			}
		case 4, 5, 6, 7:
			v, ok := m.Take(k, i)
			require.Equal(t, len(values[k]) > 0, ok)
			if ok {
				require.Equal(t, values[k][0], v)
				count, bytes = count-1, bytes-v.size
				values[k] = values[k][1:]
			} else {
				takers[k] = append(takers[k], i)
				waiting++
			}
		case 8:
			if rng.IntN(100) > 0 {
				continue
			}
			var vs []value
			var cs []int
			m.Drop(func(key int) bool { return key == k }, func(_ int, v value) { vs = append(vs, v) }, func(_ int, c int) { cs = append(cs, c) })
			require.Empty(t, append([]value{}, values[k]...)[len(vs):])
			require.Equal(t, len(takers[k]), len(cs))
			for j := range vs {
				require.Equal(t, values[k][j], vs[j])
				bytes -= vs[j].size
			}
			count, waiting = count-len(vs), waiting-len(cs)
			delete(values, k)
			delete(takers, k)
		}
		a, b, c := m.Waiting()
		require.Equal(t, []int{count, bytes, waiting}, []int{a, int(b), c})
		v, ok := m.Value(k)
		require.Equal(t, len(values[k]) > 0, ok)
		if ok {
			require.Equal(t, values[k][0], v)
		}
		c, ok = m.Taker(k)
		require.Equal(t, len(takers[k]) > 0, ok)
		if ok {
			require.Equal(t, takers[k][0], c)
		}
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	m := Match[uint64, int, int]{Values: 100, Bytes: 100}
	k := uint64(0)
	round := func() {
		for range 4 {
			k++
			m.Put(k, 1, 1)
			m.Put(k, 2, 1)
			m.Take(k+1, 3)
			m.Take(k, 4)
			m.Take(k, 5)
			m.Put(k+1, 6, 1)
		}
	}
	for range 1000 {
		round()
	}
	require.Zero(t, testing.AllocsPerRun(1000, round))
	a, b, c := m.Waiting()
	require.Zero(t, a+int(b)+c)
}

// F-35: value first, callback first, and both at once, 10^5 times in parallel:
// each callback runs once with its own value, outside the lock.
func TestF35EachRunsOnce(t *testing.T) {
	const n = 100_000
	r := NewRegistry(Limits{Values: n})
	ran := make([]atomic.Int32, n)
	rng := seeded(t)
	orders := [2][]int{rng.Perm(n), rng.Perm(n)}
	var wg, all sync.WaitGroup
	all.Add(n)
	for half, order := range orders {
		for part := range 4 {
			wg.Go(func() {
				for i := part; i < n; i += 4 {
					k := Key{"g", uint64(order[i]) / 16, uint32(order[i]) % 16}
					if half == 0 {
						value := binary.LittleEndian.AppendUint64(nil, uint64(order[i]))
						if err := r.SetValue(context.Background(), k, value); err != nil {
							t.Errorf("SetValue: %v", err)
						}
						continue
					}
					err := r.SetCallback(k, func(value []byte, err error) {
						defer all.Done()
						if err != nil {
							t.Errorf("callback: %v", err)
							return
						}
						ran[binary.LittleEndian.Uint64(value)].Add(1)
						r.Waiting() // it would hang if the lock were held
					})
					if err != nil {
						t.Errorf("SetCallback: %v", err)
					}
				}
			})
		}
	}
	wg.Wait()
	all.Wait()
	for i := range ran {
		require.EqualValues(t, 1, ran[i].Load(), "value %d", i)
	}
	v, b, c := r.Waiting()
	require.Zero(t, v+int(b)+c)
}

// F-35: a second value or callback is refused and changes nothing, before and
// after the two have met.
func TestF35DuplicatesAreRefused(t *testing.T) {
	r := NewRegistry(Limits{})
	ctx := context.Background()
	k := Key{"g", 3, 1}
	require.NoError(t, r.SetValue(ctx, k, []byte("first")))
	err := r.SetValue(ctx, k, []byte("second"))
	require.ErrorIs(t, err, ErrDuplicate)
	require.ErrorContains(t, err, `callback: value of group "g" seq 3 step 1`)
	var got string
	require.NoError(t, r.SetCallback(k, func(v []byte, err error) { got = string(v) }))
	require.Equal(t, "first", got)
	require.ErrorIs(t, r.SetValue(ctx, k, nil), ErrDuplicate)
	require.ErrorIs(t, r.SetCallback(k, func([]byte, error) { t.Error("ran") }), ErrDuplicate)

	k.Step = 2
	require.NoError(t, r.SetCallback(k, func(v []byte, err error) { got = string(v) }))
	require.ErrorIs(t, r.SetCallback(k, func([]byte, error) { t.Error("ran") }), ErrDuplicate)
	require.NoError(t, r.SetValue(ctx, k, []byte("third")))
	require.Equal(t, "third", got)

	r.Forget(k)
	require.NoError(t, r.SetValue(ctx, k, []byte("again")))
}

// F-38: what nobody waits for is bounded in number and bytes; nothing is lost.
func TestF38BoundedQueue(t *testing.T) {
	for name, limits := range map[string]Limits{"values": {Values: 3, Bytes: 1 << 20}, "bytes": {Values: 100, Bytes: 30}} {
		t.Run(name, func(t *testing.T) {
			r := NewRegistry(limits)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			const n = 200
			high := 0
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := range n {
					if err := r.SetValue(ctx, Key{"g", 0, uint32(i)}, make([]byte, 10)); err != nil {
						t.Errorf("SetValue: %v", err)
					}
				}
			})
			for got := 0; got < n; {
				values, bytes, _ := r.Waiting()
				high = max(high, values)
				require.LessOrEqual(t, bytes, limits.Bytes)
				if values < 3 && got+values < n {
					runtime.Gosched()
					continue
				}
				for range values {
					require.NoError(t, r.SetCallback(Key{"g", 0, uint32(got)}, func(_ []byte, err error) {
						if err == nil {
							got++
						}
					}))
				}
			}
			wg.Wait()
			require.Equal(t, 3, high)
		})
	}
}

// A value that has no room goes through once its own callback is there.
func TestF38OwnCallbackMakesRoom(t *testing.T) {
	r := NewRegistry(Limits{Values: 1})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, r.SetValue(ctx, Key{"g", 0, 1}, nil))
	done := make(chan error, 1)
	go func() { done <- r.SetValue(ctx, Key{"g", 0, 2}, []byte("x")) }()
	got := make(chan string, 1)
	require.NoError(t, r.SetCallback(Key{"g", 0, 2}, func(v []byte, err error) { got <- string(v) }))
	require.Equal(t, "x", <-got)
	require.NoError(t, <-done)

	short, stop := context.WithCancel(ctx)
	stop()
	err := r.SetValue(short, Key{"g", 0, 3}, nil)
	require.ErrorIs(t, err, context.Canceled)
	var full *FullError
	require.ErrorAs(t, err, &full)
	require.ErrorIs(t, NewRegistry(Limits{Bytes: 4}).SetValue(ctx, Key{}, make([]byte, 5)), ErrTooLarge)
}

// F-39: an end, of a collective, a group or everything, reaches each callback
// that waits and each SetValue that waits, and leaves nothing.
func TestF39Ends(t *testing.T) {
	cause := errors.New("rank 3 died")
	for name, end := range map[string]func(r *Registry){
		"collective": func(r *Registry) { r.EndCollective("g", 7, cause) },
		"group":      func(r *Registry) { r.EndGroup("g", cause) },
		"all":        func(r *Registry) { r.End(cause) },
	} {
		t.Run(name, func(t *testing.T) {
			r := NewRegistry(Limits{Values: 2})
			ctx := context.Background()
			errs := make(chan error, 3)
			for step := range 3 {
				require.NoError(t, r.SetCallback(Key{"g", 7, uint32(step)}, func(v []byte, err error) { errs <- err }))
			}
			require.NoError(t, r.SetValue(ctx, Key{"g", 7, 10}, nil))
			require.NoError(t, r.SetValue(ctx, Key{"g", 7, 11}, nil))
			waits := make(chan error, 1)
			go func() { waits <- r.SetValue(ctx, Key{"g", 7, 12}, nil) }()
			for parked := 0; parked == 0; runtime.Gosched() {
				r.mu.Lock()
				parked = r.parked
				r.mu.Unlock()
			}
			end(r)
			for range 3 {
				require.ErrorIs(t, <-errs, cause)
			}
			require.ErrorIs(t, <-waits, cause)
			require.ErrorIs(t, r.SetCallback(Key{"g", 7, 20}, nil), cause)
			v, b, c := r.Waiting()
			require.Zero(t, v+int(b)+c)
			if name == "collective" {
				require.NoError(t, r.SetValue(ctx, Key{"g", 8, 0}, nil))
			}
			if name != "all" {
				require.NoError(t, r.SetValue(ctx, Key{"h", 7, 0}, nil))
			}
		})
	}
}

// F-44: what comes for a collective that is over is late, however many there were.
func TestF44LateIsRefused(t *testing.T) {
	r := NewRegistry(Limits{})
	ctx := context.Background()
	for seq := range uint64(10_000) {
		r.EndCollective("g", seq^1, nil) // in another order than they were begun
	}
	require.Empty(t, r.over["g"].some)
	require.EqualValues(t, 10_000, r.over["g"].low)
	require.ErrorIs(t, r.SetValue(ctx, Key{"g", 77, 0}, nil), ErrLate)
	require.ErrorIs(t, r.SetCallback(Key{"g", 9_999, 0}, nil), ErrLate)
	require.NoError(t, r.SetValue(ctx, Key{"g", 10_000, 0}, nil))
	r.EndGroup("g", nil)
	require.ErrorIs(t, r.SetValue(ctx, Key{"g", 10_000, 0}, nil), ErrEnded)
}

func TestAbandonKeepsValues(t *testing.T) {
	r := NewRegistry(Limits{})
	cause := errors.New("left")
	errs := make(chan error, 1)
	require.NoError(t, r.SetValue(context.Background(), Key{"g", 0, 1}, []byte("v")))
	require.NoError(t, r.SetCallback(Key{"g", 0, 2}, func(_ []byte, err error) { errs <- err }))
	r.Abandon(func(k Key) bool { return k.Group == "g" }, cause)
	require.ErrorIs(t, <-errs, cause)
	got := ""
	require.NoError(t, r.SetCallback(Key{"g", 0, 1}, func(v []byte, _ error) { got = string(v) }))
	require.Equal(t, "v", got)
}

func BenchmarkRegistry(b *testing.B) {
	r := NewRegistry(Limits{})
	ctx := context.Background()
	b.ReportAllocs()
	i := uint64(0)
	for b.Loop() {
		k := Key{"g", i, 0}
		r.SetCallback(k, func([]byte, error) {})
		r.SetValue(ctx, k, nil)
		r.EndCollective("g", i, nil)
		i++
	}
}

func BenchmarkMatch(b *testing.B) {
	m := Match[uint64, int, int]{Values: 10, Bytes: 10}
	b.ReportAllocs()
	k := uint64(0)
	for b.Loop() {
		k++
		m.Take(k, 1)
		m.Put(k, 2, 1)
	}
}

func ExampleRegistry() {
	r := NewRegistry(Limits{})
	key := Key{Group: "all", Seq: 1, Step: 2}
	r.SetValue(context.Background(), key, []byte("early"))
	r.SetCallback(key, func(value []byte, err error) { fmt.Println(string(value), err) })
	r.SetCallback(Key{Group: "all", Seq: 1, Step: 3}, func(_ []byte, err error) { fmt.Println(err) })
	r.End(errors.New("rank 3 died"))
	// Output:
	// early <nil>
	// callback: callback of group "all" seq 1 step 3: rank 3 died
}
