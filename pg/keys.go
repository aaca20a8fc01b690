package pg

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/store"
)

// tidier deletes the keys that the making of a group leaves in the store.
//
// A rank may delete such a key when all ranks have read it. So each rank that has made the group
// writes which keys it has written, and counts itself. The last one deletes the keys of all. If a
// rank does not come so far, the keys stay. PyTorch's ranks do not count themselves, so the keys
// of a group with PyTorch ranks stay, too.
type tidier struct {
	mu      sync.Mutex
	written []string // keys in world.store

	cancel context.CancelFunc
	ended  chan struct{} // nil if there is nothing to do
}

const (
	// tidyLimit bounds the work of a tidier, tidyGrace what Close waits for it, without the time in which this process
	// has no CPU.
	tidyLimit = 30 * time.Second
	tidyGrace = 500 * time.Millisecond

	// tidyWindow is how many keys are deleted at a time.
	tidyWindow = 32
)

// noted is store.Prefix. The tidier notes the keys that are written through the view. Keys of st
// begin with within in world.store.
func (t *tidier) noted(prefix string, st store.Store, within string) store.Store {
	view := store.Prefix(prefix, st)
	if n, ok := view.(interface{ Note(func(key string)) }); ok {
		n.Note(func(key string) { t.note(within + key) })
	}
	return view
}

// note notes a key of world.store that is written.
func (t *tidier) note(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.written, key) {
		t.written = append(t.written, key)
	}
}

func metKey(group string) string            { return "c10d-go/met/" + group }
func writtenKey(group string, r int) string { return metKey(group) + "/" + strconv.Itoa(r) }

// tidy starts the tidier of a group that this rank has made.
func (g *epoch) tidy(s groupSpec) {
	w, t := g.world, &g.tidier
	t.mu.Lock()
	alone := w.size == 1 && len(t.written) == 0
	t.mu.Unlock()
	if !w.ours || alone || s.compared && g.rank < 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), tidyLimit)
	t.cancel, t.ended = cancel, make(chan struct{})
	isRoot := w.root == nil
	go func() {
		defer close(t.ended)
		defer cancel()
		_ = g.tidyNow(ctx, s, isRoot) // the group works without
	}()
}

// wait returns when the tidier has ended, and ends it if that takes long.
func (t *tidier) wait() {
	if t.ended == nil {
		return
	}
	select {
	case <-t.ended:
		return
	default:
	}
	late, cancel := cputime.WithTimeout(context.Background(), tidyGrace)
	defer cancel()
	defer context.AfterFunc(late, t.cancel)()
	<-t.ended
}

func (g *epoch) tidyNow(ctx context.Context, s groupSpec, isRoot bool) error {
	w := g.world
	if g.rank >= 0 {
		g.tidier.mu.Lock()
		text, err := json.Marshal(encodeKeys(g.tidier.written))
		g.tidier.mu.Unlock()
		if err == nil {
			err = w.store.Set(ctx, writtenKey(s.key, g.rank), text)
		}
		if err != nil {
			return err
		}
	}
	count := w.size
	if s.local || s.compared {
		count = len(s.ranks)
	}
	if n, err := w.store.Add(ctx, metKey(s.key), 1); err != nil || n != int64(count) {
		return err
	}
	lists := make([]string, len(s.ranks))
	for r := range lists {
		lists[r] = writtenKey(s.key, r)
	}
	texts, err := w.store.MultiGet(ctx, lists)
	if err != nil {
		return err
	}
	keys := append(lists, metKey(s.key))
	for _, text := range texts {
		var written [][]byte
		if err := json.Unmarshal(text, &written); err != nil {
			return err
		}
		for _, key := range written {
			keys = append(keys, string(key))
		}
	}
	if w.compares && !isRoot && !s.compared {
		keys = append(keys, listKey(s.key))
	}
	if isRoot {
		if err := deleteAll(ctx, w.begunIn, w.begun); err != nil {
			return err
		}
	}
	return deleteAll(ctx, w.store, keys)
}

// encodeKeys makes keys of any bytes fit for JSON.
func encodeKeys(keys []string) [][]byte {
	var b [][]byte
	for _, key := range keys {
		b = append(b, []byte(key))
	}
	return b
}

// deleteAll deletes keys, some at a time. It returns the first error.
func deleteAll(ctx context.Context, st store.Store, keys []string) (err error) {
	var wg sync.WaitGroup
	var once sync.Once
	for i := range min(tidyWindow, len(keys)) {
		wg.Go(func() {
			for ; i < len(keys); i += tidyWindow {
				if _, e := st.Delete(ctx, keys[i]); e != nil {
					once.Do(func() { err = e })
					return
				}
			}
		})
	}
	wg.Wait()
	return err
}
