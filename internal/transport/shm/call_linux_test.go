package shm_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// calls keeps what a rank calls.
type calls struct {
	g    *shm.Group
	next uint32
	last transport.Call
}

// begin is how the caller of a group begins an operation with some words.
func (c *calls) begin(word uint64) {
	call := transport.Call{What: [2]uint64{1, word}}
	call.Follow(c.last.What, c.last.History)
	c.g.Enter(c.next, &call)
	c.g.Begin(c.next, call.History)
	c.last = call
	c.next++
}

func called(g *shm.Group) *calls {
	g.Describe(func(what [2]uint64) string { return fmt.Sprintf("call %d", what[1]) })
	return &calls{g: g}
}

// ended is for comparing the calls that have been made.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// TestCalls has the last rank take another root than the others, and say so. Pieces fit each other, as far
// as their numbers go. All ranks end with an error: in that call, in a barrier after it, or when
// they settle.
func TestCalls(t *testing.T) {
	const n = 5000
	ops := map[string]func(g *shm.Group, root int, get func(n int) []byte) error{
		"broadcast": func(g *shm.Group, root int, get func(n int) []byte) error { return g.Broadcast(get(n), root, late()) },
		"reduce": func(g *shm.Group, root int, get func(n int) []byte) error {
			var out []byte
			if g.Rank() == root {
				out = get(n)
			}
			return g.Reduce(out, get(n), root, by(1, mix(1)), late())
		},
		"gather": func(g *shm.Group, root int, get func(n int) []byte) error {
			var out []byte
			if g.Rank() == root {
				out = get(n * g.Size())
			}
			return g.Gather(out, get(n), root, late())
		},
		"scatter": func(g *shm.Group, root int, get func(n int) []byte) error {
			var in []byte
			if g.Rank() == root {
				in = get(n * g.Size())
			}
			return g.Scatter(get(n), in, root, late())
		},
	}
	for _, ranks := range []int{2, 4} {
		for _, mode := range []string{"staged", "direct", "alloc"} {
			for _, end := range []string{"barrier", "settle", "more of it"} {
				for name, op := range ops {
					t.Run(fmt.Sprint(name, ", ", ranks, " ranks, ", mode, ", ", end), func(t *testing.T) {
						gs := join(t, ranks, shm.Options{OneShot: 100}.From(map[string]int64{"staged": -1, "direct": 1, "alloc": -1}[mode]))
						errs := make([]error, ranks)
						var wg sync.WaitGroup
						run := func(f func(r int, g *shm.Group) error) {
							for r, g := range gs {
								wg.Go(func() {
									if errs[r] == nil {
										errs[r] = f(r, g)
									}
								})
							}
							wg.Wait()
						}
						all := make([]*calls, ranks)
						get := make([]func(n int) []byte, ranks)
						run(func(r int, g *shm.Group) error {
							all[r] = called(g)
							get[r] = func(n int) []byte { return make([]byte, n) }
							if mode != "alloc" {
								return nil
							}
							g.SetMapped(1)
							whole, err := g.Alloc(1<<20, late())
							t.Cleanup(func() { assert.NoError(t, g.Free(whole)) })
							b := whole
							get[r] = func(n int) []byte {
								part := b[:n:n]
								b = b[n:]
								return part
							}
							return err
						})
						call := func(r int, g *shm.Group) error {
							root := 0
							if r == ranks-1 {
								root = 1
							}
							all[r].begin(uint64(root))
							return op(g, root, get[r])
						}
						run(call)
						run(func(r int, g *shm.Group) error {
							switch end {
							case "barrier":
								all[r].begin(7)
								return g.Barrier(late())
							case "more of it":
								for range 6 {
									if err := call(r, g); err != nil {
										return err
									}
								}
							}
							return g.CompareCalls(t.Context())
						})
						said := 0
						for r, err := range errs {
							var at *shm.RankError
							assert.ErrorAs(t, err, &at, "rank %d", r)
							if errors.Is(err, shm.ErrMismatch) {
								said++
								assert.ErrorContains(t, err, " called call 0, rank", "rank %d", r)
								assert.ErrorContains(t, err, fmt.Sprintf("rank %d called call 1", ranks-1), "rank %d", r)
								assert.ErrorContains(t, err, "as collective number 0 ", "rank %d", r)
							} else {
								assert.ErrorIs(t, err, shm.ErrAborted, "rank %d", r)
							}
						}
						assert.Positive(t, said)
					})
				}
			}
		}
	}
}

// Calls long ago are not known any more, but a rank still finds that there was one.
func TestCallsLongAgo(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	a, b := called(gs[0]), called(gs[1])
	a.begin(1)
	b.begin(2)
	for range 1000 {
		a.begin(5)
		b.begin(5)
	}
	require.ErrorContains(t, gs[0].CompareCalls(ended()), "rank 0 and rank 1 both called call 5 as collective number 941, but an earlier call of theirs differs")
	require.ErrorIs(t, gs[1].CompareCalls(ended()), shm.ErrMismatch)
}

func TestSettle(t *testing.T) {
	gs := join(t, 3, shm.Options{})
	require.NoError(t, gs[0].CompareCalls(t.Context()), "nothing has been called")
	var all []*calls
	for _, g := range gs {
		all = append(all, called(g))
	}
	all[0].begin(1)
	all[1].begin(1)
	require.NoError(t, gs[0].CompareCalls(ended()), "rank 2 has not called it")
	done := make(chan error)
	go func() { done <- gs[0].CompareCalls(t.Context()) }()
	all[2].begin(1)
	require.NoError(t, <-done)

	// One that has left counts as far as it came.
	all[0].begin(2)
	all[1].begin(2)
	require.NoError(t, gs[2].Close())
	require.NoError(t, gs[0].CompareCalls(t.Context()))
	all[1].begin(3)
	require.NoError(t, gs[1].Close())
	all[0].begin(4)
	require.ErrorContains(t, gs[0].CompareCalls(t.Context()), "as collective number 2 rank 0 called call 4, rank 1 called call 3")
	require.ErrorContains(t, gs[0].Barrier(late()), "rank 1 called call 3")
	require.NoError(t, gs[0].Close())
	require.ErrorIs(t, gs[0].CompareCalls(t.Context()), shm.ErrClosed)
}

// Whatever another rank writes where its calls are, looking at it does no harm.
func TestGarbageCalls(t *testing.T) {
	rng := must.Rand(t)
	for range 50 {
		gs := join(t, 2, shm.Options{})
		mine := called(gs[0])
		for range rng.IntN(100) {
			mine.begin(rng.Uint64())
		}
		gs[1].Scribble(rng)
		if err := gs[0].CompareCalls(ended()); err != nil {
			require.ErrorIs(t, err, shm.ErrMismatch)
		}
	}
}
