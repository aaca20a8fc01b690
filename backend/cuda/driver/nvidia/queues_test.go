package nvidia

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
)

// BenchmarkQueues prints how many hardware queues copies have. It has more and more streams wait
// for a word, each with a copy behind the wait, until the same copy of another stream stands
// still. CUDA_DEVICE_MAX_CONNECTIONS=8 is what CUDA has by itself.
func BenchmarkQueues(b *testing.B) {
	d, err := Open()
	if err != nil {
		b.Skip(err)
	}
	defer d.Close()
	for b.Loop() {
		queues(b, d)
	}
}

func queues(b *testing.B, d driver.Driver) {
	const (
		streams = 40
		bytes   = 64 << 10
		begin   = 0  // the word that they wait for
		seen    = 64 // the word that the other one writes
		limit   = 100 * time.Millisecond
	)
	near := must.Get(d.Device(0))
	far := must.Get(d.Device(d.Count() - 1))
	words := must.Get(d.AllocHost(4096))
	defer words.Close()
	host := must.Get(d.AllocHost(bytes))
	defer host.Close()
	mine := must.Get(near.Alloc(bytes))
	defer mine.Close()
	theirs := must.Get(far.Alloc(bytes))
	defer theirs.Close()
	kinds := []struct {
		name     string
		dst, src driver.Ptr
	}{
		{"to page-locked memory", host.Ptr(), mine.Ptr()},
		{"from page-locked memory", mine.Ptr(), host.Ptr()},
		{"sent to another device", theirs.Ptr(), mine.Ptr()},
		{"fetched from another device", mine.Ptr(), theirs.Ptr()},
	}
	if d.Count() == 1 {
		kinds = kinds[:2]
	}
	for _, k := range kinds {
		var all []driver.Stream
		for range streams {
			s := must.Get(near.NewStream())
			all = append(all, s)
		}
		words.Store32(begin, 0)
		last, found := all[streams-1], "over 38"
		for i, s := range all[:streams-1] {
			require.NoError(b, s.WaitValue(words.Ptr()+begin, 1, driver.AtLeast))
			require.NoError(b, s.Copy(k.dst, k.src, bytes))
			require.NoError(b, last.Copy(k.dst, k.src, bytes))
			require.NoError(b, last.WriteValue(words.Ptr()+seen, uint32(i+1)))
			for start := time.Now(); words.Load32(seen) != uint32(i+1) && time.Since(start) < limit; {
			}
			if words.Load32(seen) != uint32(i+1) {
				found = fmt.Sprint(i + 1)
				break
			}
		}
		fmt.Printf("%-28s %s\n", k.name, found)
		words.Store32(begin, 1)
		for _, s := range all {
			e := must.Get(s.Record())
			require.NoError(b, e.Sync(b.Context()))
			e.Release()
			require.NoError(b, s.Close())
		}
		words.Store32(seen, 0)
	}
}

// TestFirstCommands has many threads make streams and give them their first commands at
// the same time. All commands but those of one thread wait for a word that nobody has
// written yet. Those of that thread get through.
func TestFirstCommands(t *testing.T) {
	d, err := Open()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	near := must.Get(d.Device(0))
	far := must.Get(d.Device(d.Count() - 1))
	const streams, line = 8, 64
	words := must.Get(d.AllocHost((streams + 1) * line))
	host := must.Get(d.AllocHost(streams * line))
	mine := must.Get(near.Alloc(streams * line))
	theirs, err := far.Alloc(streams * line)
	require.NoError(t, err)
	kinds := []func(s driver.Stream, at driver.Ptr) error{
		func(s driver.Stream, at driver.Ptr) error { return s.Copy(host.Ptr()+at, mine.Ptr()+at, line) },
		func(s driver.Stream, at driver.Ptr) error { return s.Copy(mine.Ptr()+at, host.Ptr()+at, line) },
		func(s driver.Stream, at driver.Ptr) error { return s.Copy(theirs.Ptr()+at, mine.Ptr()+at, line) },
		func(s driver.Stream, at driver.Ptr) error { return s.Memset(mine.Ptr()+at, 1, line) },
	}
	const gate = streams * line // the word that all but the last wait for
	for round := range 400 {
		clear(words.Bytes())
		all := make([]driver.Stream, streams)
		var ready atomic.Int32
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() {
				for ready.Add(1); ready.Load() < streams; {
					runtime.Gosched()
				}
				s, err := near.NewStream()
				if !assert.NoError(t, err) {
					return
				}
				all[i] = s
				if i < streams-1 {
					assert.NoError(t, s.WaitValue(words.Ptr()+gate, 1, driver.AtLeast))
				}
				at := driver.Ptr(i * line)
				assert.NoError(t, kinds[round%len(kinds)](s, at))
				assert.NoError(t, s.WriteValue(words.Ptr()+at, 1))
			})
		}
		wg.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		free := driver.AwaitWord(ctx, words, (streams-1)*line, 1, driver.Equal)
		cancel()
		words.Store32(gate, 1)
		for i, s := range all {
			require.NoError(t, driver.AwaitWord(t.Context(), words, i*line, 1, driver.Equal))
			require.NoError(t, s.Close())
		}
		require.NoError(t, free, "round %d", round)
	}
	for _, c := range []interface{ Close() error }{words, host, mine, theirs, d} {
		require.NoError(t, c.Close())
	}
}
