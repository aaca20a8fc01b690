// Package pgtest runs process groups inside one test: every rank is a goroutine, and messages go
// through memory, without a network.
//
//	func TestMyTrainer(t *testing.T) {
//		pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
//			// this is rank g.Rank() of 4
//		})
//	}
//
// The groups are the gloo backend's, with its algorithms; only the transport differs. A Job can
// also simulate a rank that dies or stops.
package pgtest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

// Timeout is the limit of an operation in a test group. It is generous: a test
// that reaches it hangs.
const Timeout = 20 * time.Second

// Job is a set of ranks in one process.
type Job struct {
	Size   int
	Store  store.Store
	fabric gloo.Fabric
}

// NewJob returns a job of size ranks with a new store.
func NewJob(size int) *Job {
	return &Job{Size: size, Store: store.NewHash(), fabric: gloo.NewFabric()}
}

// Fabric returns the transport of the job's messages. The default group is called "0", and "0@N" in
// epoch N.
func (j *Job) Fabric() gloo.Fabric { return j.fabric }

// Kill makes a rank of the default group die.
func (j *Job) Kill(rank int) { j.fabric.Kill("0", rank) }

// Freeze makes a rank of the default group stop.
func (j *Job) Freeze(rank int) { j.fabric.Freeze("0", rank) }

// Options are the options with which a rank of the job calls pg.New.
func (j *Job) Options() pg.Options {
	return pg.Options{
		Timeout: Timeout, Backend: "cpu:" + gloo.Name,
		BackendOptions: pg.BackendOptions{gloo.Options{Fabric: j.fabric}},
	}
}

// Join makes rank's default group.
func (j *Job) Join(ctx context.Context, rank int) (*pg.ProcessGroup, error) {
	return pg.New(ctx, j.Store, rank, j.Size, j.Options())
}

// Close frees the job's store.
func (j *Job) Close() error { return j.Store.Close() }

// Run calls f once for each of size ranks, each in its own goroutine, and closes the groups when
// all have returned. f may call t.FailNow in that goroutine only. When f does not return
// normally, Run aborts the rank's group, so that the other ranks do not wait for it.
func Run(t *testing.T, size int, f func(t *testing.T, g *pg.ProcessGroup)) {
	t.Helper()
	j := NewJob(size)
	defer j.Close()
	groups := make([]*pg.ProcessGroup, size)
	for r := range groups {
		g, err := j.Join(t.Context(), r)
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
		groups[r] = g
	}
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			done := false
			defer func() {
				if !done {
					g.Abort(fmt.Errorf("pgtest: rank %d gave up", r))
				}
			}()
			f(t, g)
			done = true
		})
	}
	wg.Wait()
	for _, g := range groups {
		wg.Go(func() {
			if err := g.Close(); err != nil {
				t.Errorf("rank %d: close: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
}
