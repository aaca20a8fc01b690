package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/store"
)

// Three ranks agree on a leader and read the address it publishes.
func Example() {
	ctx := context.Background()
	s := store.NewHash()
	defer s.Close()

	rank := func(r int) (string, error) {
		me := fmt.Sprint("rank ", r)
		leader, err := s.CompareSet(ctx, "leader", nil, []byte(me))
		if err != nil {
			return "", err
		}
		if string(leader) == me {
			if err := s.Set(ctx, "address", []byte("10.0.0.1:4000")); err != nil {
				return "", err
			}
		}
		address, err := s.Get(ctx, "address") // waits for the leader
		if err != nil {
			return "", err
		}
		return string(address), store.Barrier(ctx, s, "ready", 3)
	}

	addresses := make([]string, 3)
	var wg sync.WaitGroup
	for r := range addresses {
		wg.Go(func() {
			var err error
			if addresses[r], err = rank(r); err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(addresses)
	// Output: [10.0.0.1:4000 10.0.0.1:4000 10.0.0.1:4000]
}

// A wait says what it missed, and its error tells a timeout from the rest.
func ExampleError() {
	s := store.NewHash()
	defer s.Close()
	ctx := context.Background()
	_ = s.Set(ctx, "rank_0", nil)
	s.SetTimeout(time.Millisecond)
	err := s.Wait(ctx, "rank_0", "rank_1", "rank_2")
	var e *store.Error
	if errors.Is(err, store.ErrTimeout) && errors.As(err, &e) {
		fmt.Println("missing:", e.Keys)
	}
	// Output: missing: [rank_1 rank_2]
}

// Two groups use the same names in one store.
func ExamplePrefix() {
	ctx := context.Background()
	s := store.NewHash()
	defer s.Close()
	for _, group := range []string{"group_0", "group_1"} {
		if err := store.Prefix(group, s).Set(ctx, "size", []byte("4")); err != nil {
			fmt.Println(err)
		}
	}
	keys, err := s.ListKeys(ctx)
	slices.Sort(keys)
	fmt.Println(keys, err)
	// Output: [group_0/size group_1/size] <nil>
}

// Processes on one machine share a file; the last to leave removes it. A Python
// process would write torch.distributed.FileStore(path, 2).
func ExampleNewFile() {
	dir, err := os.MkdirTemp("", "store")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "job-7")

	ctx := context.Background()
	a, err := store.NewFile(path, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	b, err := store.NewFile(path, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := a.Set(ctx, "greeting", []byte("hello")); err != nil {
		fmt.Println(err)
	}
	v, err := b.Get(ctx, "greeting")
	fmt.Println(string(v), err)

	a.Close()
	b.Close()
	_, err = os.Stat(path)
	fmt.Println(errors.Is(err, os.ErrNotExist))
	// Output:
	// hello <nil>
	// true
}
