package redis

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestWaitsAskTogether: any number of waits cost one question in each pause. Each ends when its own keys are there.
func TestWaitsAskTogether(t *testing.T) {
	s := connect(t, "redis://"+plainServer(t).addr, Options{})
	const waits = 40
	var wg sync.WaitGroup
	got, errs := make([]string, waits), make([]error, waits)
	for i := range waits {
		wg.Go(func() {
			defer must.Catch(&errs[i])
			key := string(rune('A' + i))
			switch i % 3 {
			case 0:
				got[i] = string(must.Get(s.Get(t.Context(), key)))
			case 1:
				got[i] = string(must.Get(s.MultiGet(t.Context(), []string{key, key}))[1])
			default:
				must.Do(s.Wait(t.Context(), key))
				got[i] = string(must.Get(s.Get(t.Context(), key)))
			}
		})
	}
	require.Eventually(t, func() bool {
		s.watch.mu.Lock()
		defer s.watch.mu.Unlock()
		return len(s.watch.all) == waits
	}, time.Minute, time.Millisecond)
	begun, before := time.Now(), s.client.PoolStats().Hits
	time.Sleep(20 * lastPoll)
	pauses := uint32(time.Since(begun) / lastPoll)
	require.LessOrEqual(t, s.client.PoolStats().Hits-before, pauses+10, "the first pauses are shorter")
	for i := range waits {
		must.Do(s.Set(t.Context(), string(rune('A'+i)), []byte{byte(i)}))
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for i := range waits {
		require.Equal(t, string([]byte{byte(i)}), got[i])
	}
}
