package meet

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/c10d-go/c10d/store"
)

// What meetings, notices and epochs need of a store.

const (
	// LastWord bounds the calls of a process that gives up or leaves. Time without a CPU does not count.
	LastWord = 500 * time.Millisecond

	// never is a value that nobody writes.
	never = "\x00"

	// window is how many keys are looked at at a time.
	window = 32
)

// Look returns the values of keys, "" for missing ones. It does not wait for them.
func Look(ctx context.Context, st store.Store, keys ...string) ([]string, error) {
	values := make([]string, len(keys))
	errs := make([]error, min(window, len(keys)))
	var wg sync.WaitGroup
	for w := range errs {
		wg.Go(func() {
			for i := w; i < len(keys) && errs[w] == nil; i += window {
				var b []byte
				b, errs[w] = st.CompareSet(ctx, keys[i], []byte(never), []byte(never))
				if string(b) != never {
					values[i] = string(b)
				}
			}
		})
	}
	wg.Wait()
	return values, errors.Join(errs...)
}

// Once sets a key that is written once, and wakes those that wait for it. It returns what the key holds then.
func Once(ctx context.Context, st store.Store, key string, value []byte) ([]byte, error) {
	held, err := st.CompareSet(ctx, key, nil, value)
	if err == nil && bytes.Equal(held, value) {
		err = st.Set(ctx, key, value) // PyTorch's servers wake nobody for a CompareSet
	}
	return held, err
}

// Will makes the store set key, if it holds expected, once this process is gone. It does nothing in a store without wills.
func Will(ctx context.Context, st store.Store, key string, expected, desired []byte) error {
	if err := store.SetWill(ctx, st, key, expected, desired); !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}
