package pg_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// stage is an epoch of a scenario: which processes are in it, and how it ends.
type stage struct {
	in  []int
	end ending
}

// ending is what a process does at the end of an epoch, before Reconfigure. first says that it is
// the first process of the epoch.
type ending func(g *pg.ProcessGroup, first bool) error

// planned is the end of an epoch without a fault.
func planned(*pg.ProcessGroup, bool) error { return nil }

// failsWith calls all_reduce, and checks what it says of rank 0.
func failsWith(g *pg.ProcessGroup, kind error, text string) error {
	err := wait(g.AllReduce(context.Background(), vec(1000), pg.Sum()))
	return saysOfRank0(err, kind, text)
}

func saysOfRank0(err, kind error, text string) error {
	var e *pg.EpochError
	if !errors.Is(err, kind) || !errors.As(err, &e) || !slices.Equal(e.Suspects, []int{0}) {
		return fmt.Errorf("want an epoch error that matches %v and names rank 0: %w", kind, err)
	}
	if e.Done != 3 { // those before the barrier of exchange
		return fmt.Errorf("%d collectives are known to be complete, want 3: %w", e.Done, err)
	}
	if !strings.Contains(err.Error(), text) {
		return fmt.Errorf("want %q in: %w", text, err)
	}
	return nil
}

// errStop is the cause of what the first process does.
var errStop = errors.New("the user pressed stop")

func aborted(g *pg.ProcessGroup, first bool) error {
	if first {
		g.Abort(errStop)
	}
	return failsWith(g, work.ErrAborted, errStop.Error())
}

// cancelled cancels a call that the last rank does not make. Rank 0 has sent it a message before,
// which nobody takes.
func cancelled(g *pg.ProcessGroup, first bool) (err error) {
	defer must.Catch(&err)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	last := g.Size() - 1
	switch g.Rank() {
	case 0:
		old := must.Get(g.Send(ctx, vec(3), last, pg.P2POptions{Tag: 5}))
		defer func() { <-old.Done() }()
		w := must.Get(g.AllReduce(ctx, vec(1000), pg.Sum()))
		cancel(errStop)
		return saysOfRank0(w.Wait(context.Background()), work.ErrCanceled, errStop.Error())
	case last:
		return saysOfRank0(wait(g.Recv(ctx, vec(1), 0, pg.P2POptions{Tag: 6})), work.ErrCanceled, errStop.Error())
	}
	return failsWith(g, work.ErrCanceled, errStop.Error())
}

// cancelledBefore calls a collective with a context that has ended. The other ranks wait in it.
func cancelledBefore(g *pg.ProcessGroup, first bool) error {
	if !first {
		return failsWith(g, work.ErrCanceled, errStop.Error())
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errStop)
	_, err := g.AllReduce(ctx, vec(1000), pg.Sum())
	if !errors.Is(err, work.ErrCanceled) || !errors.Is(err, errStop) {
		return fmt.Errorf("a call with a context that has ended: %w", err)
	}
	return nil
}

// late is a rank that does not come before the others' time is over.
func late(g *pg.ProcessGroup, first bool) error {
	if first {
		return saysOfRank0(wait(g.RecvAnySource(context.Background(), vec(1), pg.P2POptions{Tag: 9})), work.ErrTimeout, "")
	}
	return saysOfRank0(wait(g.AllReduce(context.Background(), vec(10), pg.Sum(), pg.CallOptions{Timeout: 6 * time.Second})), work.ErrTimeout, "")
}

// TestScenarios are those of c10d's tests of reconfigure, and more, on every wire. In each epoch all
// processes check an all_reduce, a broadcast and messages in a ring.
func TestScenarios(t *testing.T) {
	all := []int{0, 1, 2}
	for name, stages := range map[string][]stage{
		"identity":              {{all, planned}, {all, planned}, {all, planned}},
		"shrink last":           {{all, planned}, {[]int{0, 1}, planned}},
		"shrink middle":         {{all, planned}, {[]int{0, 2}, planned}},
		"down, up and down":     {{all, planned}, {[]int{0}, planned}, {all, planned}, {[]int{2}, planned}},
		"one to all":            {{[]int{0}, planned}, {all, planned}},
		"late join":             {{[]int{0, 1}, planned}, {all, planned}},
		"merge":                 {{[]int{0}, planned}, {all, planned}},
		"abort":                 {{all, aborted}, {all, aborted}, {all, planned}},
		"cancel":                {{all, cancelled}, {all, cancelled}, {all, planned}},
		"cancel before a call":  {{all, cancelledBefore}, {all, planned}},
		"revoke by timeout":     {{all, late}, {all, planned}},
		"abort, and one leaves": {{all, aborted}, {[]int{1, 2}, planned}, {all, planned}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, wire := range []gloo.Wire{gloo.WireNative, gloo.WireTCP, gloo.WireGloo} {
				t.Run(string(wire), func(t *testing.T) {
					if wire == gloo.WireNative && runtime.GOOS != "linux" {
						t.Skip("memory is shared on Linux only")
					}
					st := store.NewHash()
					defer st.Close()
					errs := make([]error, len(all))
					var wg sync.WaitGroup
					for p := range all {
						wg.Go(func() {
							if name == "merge" && p > 0 {
								errs[p] = elsewhere(st, wire, p)
							}
							if errs[p] == nil {
								errs[p] = act(st, wire, p, stages)
							}
							if errs[p] != nil {
								errs[p] = fmt.Errorf("process %d: %w", p, errs[p])
							}
						})
					}
					wg.Wait()
					require.NoError(t, errors.Join(errs...))
				})
			}
		})
	}
}

// scenarioOptions are the options of a scenario's groups.
func scenarioOptions(wire gloo.Wire) pg.Options {
	return pg.Options{
		Timeout: pgtest.Timeout, Elastic: true, Backend: "cpu:" + gloo.Name,
		BackendOptions: pg.BackendOptions{gloo.Options{Wire: wire}},
	}
}

// elsewhere is the group that processes 1 and 2 have before they merge with that of process 0.
func elsewhere(st store.Store, wire gloo.Wire, p int) (err error) {
	defer must.Catch(&err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*pgtest.Timeout)
	defer cancel()
	o := scenarioOptions(wire)
	o.Name = "elsewhere"
	g := must.Get(pg.New(ctx, st, p-1, 2, o))
	return errors.Join(exchange(ctx, g, 0, p, []int{1, 2}), g.Close())
}

// act is process p of a scenario.
func act(st store.Store, wire gloo.Wire, p int, stages []stage) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*pgtest.Timeout)
	defer cancel()
	o := scenarioOptions(wire)
	var g *pg.ProcessGroup
	defer func() {
		if g != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	var ids []int // of the last epoch, if they are known
	for i, s := range stages {
		here := slices.Index(s.in, p)
		var v pg.View
		switch {
		case i == 0 && here >= 0:
			g, err = pg.New(ctx, st, here, len(s.in), o)
			v.IDs = []int{0, 1, 2}[:len(s.in)]
		case here < 0 && g != nil:
			err = g.Close()
			g, ids = nil, nil
		case here >= 0 && g == nil:
			g, err = pg.Join(ctx, st, o)
		case here >= 0 && !slices.ContainsFunc(s.in, func(x int) bool { return !slices.Contains(stages[i-1].in, x) }):
			v, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: len(s.in), Max: 1})
		case here >= 0:
			v, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: len(s.in)})
		}
		if err != nil {
			return fmt.Errorf("epoch %d: %w", i, err)
		}
		if here < 0 {
			continue
		}
		for _, a := range v.Left {
			ids = slices.DeleteFunc(ids, func(id int) bool { return id == a.ID })
		}
		if ids != nil && !slices.Equal(ids, v.IDs[:len(ids)]) {
			return fmt.Errorf("epoch %d: members are %v after %v: %+v", i, v.IDs, ids, v)
		}
		for _, r := range v.Joined {
			if v.IDs[r] < len(stages[0].in) || slices.Contains(ids, v.IDs[r]) {
				return fmt.Errorf("epoch %d: the id of rank %d is used again: %+v", i, r, v)
			}
		}
		ids = v.IDs
		if err := exchange(ctx, g, i, p, s.in); err != nil {
			return fmt.Errorf("epoch %d: %w", i, err)
		}
		// All have left the barrier before one ends the epoch.
		met := func(x int) string { return fmt.Sprintf("met/%d/%d", i, x) }
		if err := st.Set(ctx, met(p), nil); err != nil {
			return err
		}
		for _, x := range s.in {
			if err := st.Wait(ctx, met(x)); err != nil {
				return err
			}
		}
		if err := s.end(g, g.Rank() == 0); err != nil {
			return fmt.Errorf("end of epoch %d: %w", i, err)
		}
	}
	return nil
}

// exchange checks operations of an epoch. Their data are those of no other epoch.
func exchange(ctx context.Context, g *pg.ProcessGroup, epoch, p int, in []int) (err error) {
	defer must.Catch(&err)
	own, want := int64(100*epoch+1<<p), int64(0)
	for _, x := range in {
		want += int64(100*epoch + 1<<x)
	}
	v := []int64{own}
	must.Do(pg.Wait(g.AllReduce(ctx, pg.Slice(v), pg.Sum())))
	if v[0] != want || g.Size() != len(in) {
		return fmt.Errorf("%d ranks add up to %d, %v to %d", g.Size(), v[0], in, want)
	}
	root := []int64{own}
	must.Do(pg.Wait(g.Broadcast(ctx, pg.Slice(root), g.Size()-1)))
	all := make([]int64, g.Size())
	must.Do(pg.Wait(g.AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice([]int64{own}))))
	if root[0] != all[g.Size()-1] {
		return fmt.Errorf("broadcast gives %d, all_gather %v", root[0], all)
	}
	if n := g.Size(); n > 1 {
		got := []int64{0}
		t := must.Get(tensor.Of(got, 1))
		mine := must.Get(tensor.Of([]int64{own}, 1))
		o := backend.P2POptions{Tag: 5}
		s := must.Get(g.Send(ctx, mine, (g.Rank()+1)%n, pg.P2POptions{Tag: o.Tag, Timeout: o.Timeout}))
		must.Do(wait(g.Recv(ctx, t, (g.Rank()+n-1)%n, pg.P2POptions{Tag: o.Tag, Timeout: o.Timeout})))
		must.Do(s.Wait(ctx))
		if got[0] != all[(g.Rank()+n-1)%n] {
			return fmt.Errorf("rank %d received %d, want that of the rank before in %v", g.Rank(), got[0], all)
		}
	}
	return g.Barrier(ctx)
}

// TestReusedID: a process gets the rank, and so the id, of a member that has left. It is not taken for
// that member, and disturbs nobody. It has to call Join, and gets an id of its own.
func TestReusedID(t *testing.T) {
	t.Parallel()
	st := store.NewHash()
	defer st.Close()
	o := scenarioOptions(gloo.WireTCP)
	ctx, cancel := context.WithTimeout(context.Background(), 2*pgtest.Timeout)
	defer cancel()
	again := make(chan bool)
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for r := range 3 {
		wg.Go(func() {
			errs[r] = func() (err error) {
				defer must.Catch(&err)
				g, err := pg.New(ctx, st, r, 3, o)
				if err != nil {
					return err
				}
				defer func() { g.Close() }()
				must.Do(exchange(ctx, g, 0, r, []int{0, 1, 2}))
				if r == 2 {
					must.Do(g.Close())
					soon, cancel := context.WithTimeout(ctx, 5*time.Second)
					defer cancel()
					_, err := pg.New(soon, st, 2, 3, o)
					var missing *pg.MeetingError
					if !errors.As(err, &missing) || !slices.Equal(missing.Missing, []int{0, 1}) {
						return fmt.Errorf("want an error that names the missing ranks 0 and 1: %w", err)
					}
					close(again)
					g = must.Get(pg.Join(ctx, st, o))
					return exchange(ctx, g, 2, 3, []int{0, 1, 3})
				}
				v, err := g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 2, Max: 1})
				if err != nil || !slices.Equal(v.IDs, []int{0, 1}) {
					return fmt.Errorf("members %v: %w", v.IDs, err)
				}
				<-again
				must.Do(exchange(ctx, g, 1, r, []int{0, 1}))
				if v, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 3}); err != nil || !slices.Equal(v.IDs, []int{0, 1, 3}) {
					return fmt.Errorf("members %v: %w", v.IDs, err)
				}
				return exchange(ctx, g, 2, r, []int{0, 1, 3})
			}()
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}
