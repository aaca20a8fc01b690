package edges_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/internal/must"
)

// buffer is memory of a random program, and what a program that does one thing
// after the other would have in it.
type buffer struct {
	ptr  driver.Ptr
	host driver.HostMemory // nil for device memory
	want []byte
}

// TestRandomPrograms runs random operations on random streams and hosts over common memory, batch
// after batch, with a caller's stream between. The outcome has to be that of one operation after
// the other. The simulator sees whether an order is missing.
func TestRandomPrograms(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64) {
		rng := random(t, seed)
		r := newRig(t, 1+rng.IntN(3), seed)
		runRandom(r, rng, 1+rng.IntN(5), 12)
		require.NoError(t, r.close())
	})
}

type job struct {
	p    *edges.Pending
	turn int
	do   func()
}

func runRandom(r *rig, rng *rand.Rand, batches, length int) {
	var streams []driver.Stream
	for i := range 2 + rng.IntN(4) {
		streams = append(streams, r.stream(rng.IntN(len(r.devices)), fmt.Sprint("s", i)))
	}
	caller := r.stream(0, "caller")
	var all, hosts []*buffer
	const n = 256
	fill := r.t.Batch()
	for i := range 4 + rng.IntN(3) {
		b := &buffer{want: make([]byte, n)}
		if i < 2 {
			b.host = r.host(n)
			b.ptr = b.host.Ptr()
			hosts = append(hosts, b)
		} else {
			b.ptr = r.alloc(rng.IntN(len(r.devices)), n)
		}
		fill.Memset(streams[rng.IntN(len(streams))], b.ptr, byte(i), n)
		for j := range b.want {
			b.want[j] = byte(i)
		}
		all = append(all, b)
	}
	p, err := fill.Run()
	require.NoError(r, err)
	pendings := []*edges.Pending{p}

	var workers sync.WaitGroup
	lines := make([]*edges.Host, 2)
	jobs := make([]chan job, 2)
	errs := make([]error, 2)
	for i := range lines {
		lines[i] = must.Get(r.t.Host(fmt.Sprint("h", i)))
		jobs[i] = make(chan job, batches*length)
		workers.Go(func() {
			for j := range jobs[i] {
				if err := j.p.Begin(r.ctx, j.turn); err != nil {
					errs[i] = err
				} else {
					j.do()
				}
				j.p.End(j.turn)
			}
		})
	}

	piece := func() (*buffer, int, int) {
		lo := rng.IntN(n)
		return all[rng.IntN(len(all))], lo, lo + 1 + rng.IntN(n-lo)
	}
	for range batches {
		if rng.IntN(2) == 0 {
			// The caller's own work, which the tracker does not see.
			x, lo, hi := piece()
			b := r.t.Batch()
			b.After(caller, driver.Writes(x.ptr+driver.Ptr(lo), hi-lo))
			p := must.Get(b.Run())
			require.NoError(r, p.Sync(r.ctx), "nothing to wait for")
			p.Release()
			v := byte(rng.Uint32())
			require.NoError(r, caller.Memset(x.ptr+driver.Ptr(lo), v, hi-lo))
			for i := lo; i < hi; i++ {
				x.want[i] = v
			}
			b = r.t.Batch()
			b.Before(caller, driver.Writes(x.ptr+driver.Ptr(lo), hi-lo))
			random1(r, rng, b, streams, piece)
			// What the batch does not use stays to be ordered: the next batch
			// would not know. A read of it all does so.
			y := all[rng.IntN(len(all))]
			for y == x {
				y = all[rng.IntN(len(all))]
			}
			b.Copy(streams[0], y.ptr, x.ptr, n)
			copy(y.want, x.want)
			p = must.Get(b.Run())
			pendings = append(pendings, p)
		}
		b := r.t.Batch()
		var turns []func(p *edges.Pending)
		for range length {
			if rng.IntN(4) > 0 {
				random1(r, rng, b, streams, piece)
				continue
			}
			line := rng.IntN(len(lines))
			x, y := hosts[rng.IntN(2)], hosts[rng.IntN(2)]
			turn := b.Host(lines[line], driver.Reads(x.ptr, n), driver.Writes(y.ptr, n/2))
			change := func(x, y []byte) {
				for i := range n / 2 {
					y[i] = 5*y[i] + x[n-1-i]
				}
			}
			change(x.want, y.want)
			turns = append(turns, func(p *edges.Pending) {
				jobs[line] <- job{p, turn, func() { change(x.host.Bytes(), y.host.Bytes()) }}
			})
		}
		p := must.Get(b.Run())
		for _, f := range turns {
			f(p)
		}
		pendings = append(pendings, p)
		if rng.IntN(3) == 0 {
			must.Get(pendings[rng.IntN(len(pendings))].Done())
		}
	}
	for i := range jobs {
		close(jobs[i])
	}
	workers.Wait()
	for i := range errs {
		require.NoError(r, errs[i])
	}
	for _, p := range pendings {
		require.NoError(r, p.Sync(r.ctx))
		p.Release()
	}
	end := must.Get(caller.Record())
	require.NoError(r, end.Sync(r.ctx))
	end.Release()
	for i, b := range all {
		if got := r.bytes(streams[0], b.ptr, n); !bytes.Equal(b.want, got) {
			r.Errorf("buffer %d holds\n%x, want\n%x\n%v", i, got, b.want, r.m.Check())
		}
	}
}

// random1 appends one operation to a batch and does it to what is wanted.
func random1(r *rig, rng *rand.Rand, b *edges.Batch, streams []driver.Stream, piece func() (*buffer, int, int)) {
	s := streams[rng.IntN(len(streams))]
	x, lo, hi := piece()
	switch rng.IntN(3) {
	case 0:
		v := byte(rng.Uint32())
		b.Memset(s, x.ptr+driver.Ptr(lo), v, hi-lo)
		for i := lo; i < hi; i++ {
			x.want[i] = v
		}
	case 1:
		y, at, _ := piece()
		for y == x {
			y, at, _ = piece()
		}
		n := min(hi-lo, len(y.want)-at)
		b.Copy(s, y.ptr+driver.Ptr(at), x.ptr+driver.Ptr(lo), n)
		copy(y.want[at:at+n], x.want[lo:])
	case 2:
		y, at, _ := piece()
		for y == x {
			y, at, _ = piece()
		}
		n := min(hi-lo, len(y.want)-at)
		dst, src := x.ptr+driver.Ptr(lo), y.ptr+driver.Ptr(at)
		b.Launch(s, &driver.Launch{
			Function: r.mix[s.Device().Index], Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
			Args:   new(driver.Args).Ptr(dst).Ptr(src).Int64(int64(n)),
			Access: []driver.Access{driver.Writes(dst, n), driver.Reads(src, n)},
		})
		for i := range n {
			x.want[lo+i] = 3*x.want[lo+i] + y.want[at+i]
		}
	}
}
