package directway_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds an operation.
const patience = 20 * time.Second

// member is a rank of a group that has direct work. It has an engine and a CPU backend, and sees the
// devices of all ranks and one more.
type member struct {
	*testing.T
	ctx    context.Context
	rank   int
	d      driver.Driver
	g      *group.Engine
	w      *directway.Group
	stream []driver.Stream // the caller's, by device
	close  []interface{ Close() error }
}

// members runs f on every rank of a group on a simulated host whose ranks have connected, and returns their errors.
func members(t *testing.T, ranks int, seed uint64, f func(m *member) error) []error {
	t.Helper()
	return apart(t, ranks, seed, func(m *member) error {
		if err := m.connect(); err != nil {
			return err
		}
		return f(m)
	})
}

// apart is members for ranks that have not connected.
func apart(t *testing.T, ranks int, seed uint64, f func(m *member) error) []error {
	t.Helper()
	machine, err := sim.New(sim.Config{Devices: ranks + 1, Seed: seed, Kernels: simkernels.All()})
	require.NoError(t, err)
	fabric, errs := mem.NewFabric(), make([]error, ranks)
	var wg sync.WaitGroup
	var failed atomic.Bool
	for r := range ranks {
		wg.Go(func() {
			m := &member{T: t, ctx: t.Context(), rank: r}
			if errs[r] = m.join(machine, fabric, ranks); errs[r] == nil {
				errs[r] = f(m)
			}
			if m.g == nil {
				return
			}
			err := m.g.Close()
			for _, c := range slices.Backward(m.close) {
				err = errors.Join(err, c.Close())
			}
			if m.g.Broken() != nil {
				failed.Store(true)
			} else {
				errs[r] = errors.Join(errs[r], err)
			}
		})
	}
	wg.Wait()
	if err := machine.Close(); !failed.Load() {
		require.NoError(t, errors.Join(append(errs, err)...))
	}
	for _, f := range machine.Findings() {
		// Operations that have failed leave something undone.
		var unused *sim.Unused
		var race *sim.Race
		require.True(t, errors.As(f, &unused) || errors.As(f, &race), f)
	}
	return errs
}

func (m *member) join(machine *sim.Machine, fabric *mem.Fabric, ranks int) (err error) {
	if m.d, err = machine.Process(fmt.Sprint("rank ", m.rank)); err != nil {
		return err
	}
	m.close = append(m.close, m.d)
	for i := range m.d.Count() {
		v, err := m.d.Device(i)
		if err != nil {
			return err
		}
		s, err := v.NewStream(driver.StreamOptions{Name: fmt.Sprintf("caller %d.%d", m.rank, i)})
		if err != nil {
			return err
		}
		m.stream, m.close = append(m.stream, s), append(m.close, s)
	}
	m.g, err = group.New(group.Config{
		Rank: m.rank, Size: ranks, Group: "g", Timeout: patience, Driver: m.d, Chunk: 1 << 20, Slots: 2, SharedSlots: 2, KeepPinned: 1 << 20, KeepScratch: 1 << 20,
	})
	if err != nil {
		return err
	}
	m.w = &directway.Group{B: m.g}
	m.g.Ways = append(m.g.Ways, m.w)
	m.g.CPU, err = gloo.New(m.ctx, backend.Options{Rank: m.rank, Size: ranks, Group: "g" + group.CPUGroup, Specific: gloo.Options{Fabric: fabric}})
	if err != nil {
		return err
	}
	if err := cmp.Or(m.g.Meet(m.ctx), m.g.Board.Hide(), m.w.Can()); err != nil {
		return err
	}
	m.g.Start()
	return nil
}

// connect connects the ranks.
func (m *member) connect() error {
	if !errors.Is(m.w.Has(), group.ErrNotAsked) {
		return fmt.Errorf("before the ranks have connected: %w", m.w.Has())
	}
	return cmp.Or(m.w.Ready(m.ctx, work.AllReduce, m.rank, board.Call{Root: -1}), m.w.Has())
}

// issue starts an operation after what the caller's streams have been given.
func (m *member) issue(op work.OpType, c *directway.Call) (*work.Work, error) {
	ctx := driver.WithCallStreams(m.ctx, &driver.CallStreams{Before: m.stream})
	return m.w.Issue(ctx, op, 0, c, board.Call{Root: -1})
}

// where is how a tensor lies.
type where int

const (
	inOrder  where = iota // on the rank's device
	withGaps              // there, with other elements between its own
	elsewhere
	elsewhereWithGaps
	kinds
)

// tensor returns a tensor with these elements. They are still on the way, on the caller's stream.
func (m *member) tensor(d tensor.DType, elements []byte, w where) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	es, step, dev := d.Size(), 1, m.rank
	if w == withGaps || w == elsewhereWithGaps {
		step = 2
	}
	if w >= elsewhere {
		dev = m.g.Size
	}
	n := len(elements) / es
	storage := bytes.Repeat([]byte{0xaa}, max(step*len(elements), es))
	for i := range n {
		copy(storage[i*step*es:], elements[i*es:(i+1)*es])
	}
	v := must.Get(m.d.Device(dev))
	at := must.Get(v.Alloc(len(storage)))
	h := must.Get(m.d.AllocHost(len(storage)))
	m.close = append(m.close, at, h)
	driver.HostAccess(m.d, "filling", driver.Writes(h.Ptr(), len(storage)))
	copy(h.Bytes(), storage)
	must.Do(m.stream[dev].Copy(at.Ptr(), h.Ptr(), len(storage)))
	return must.Get(tensor.OnDevice(d, at, len(storage)/es)).AsStrided([]int{n}, []int{step}, 0)
}

// holds reports where the elements of a tensor are not as wanted, or the bytes between them have changed.
func (m *member) holds(t *tensor.Tensor, want []byte) (err error) {
	defer must.Catch(&err)
	p := place.Of(t)
	raw := make([]byte, p.Hi-p.Lo)
	if len(raw) == 0 {
		return nil
	}
	h := must.Get(m.d.AllocHost(len(raw)))
	defer h.Close()
	s := m.stream[p.Dev]
	must.Do(s.Copy(h.Ptr(), p.Base+driver.Ptr(p.Lo), len(raw)))
	e := must.Get(s.Record())
	defer e.Release()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	must.Do(e.Sync(ctx))
	driver.HostAccess(m.d, "comparing", driver.Reads(h.Ptr(), len(raw)))
	es := t.DType().Size()
	step := t.Strides()[0] * es
	for at := 0; at < len(raw); at += es {
		b := bytes.Repeat([]byte{0xaa}, es)
		if at%step == 0 {
			b = want[at/step*es:][:es]
		}
		if got := h.Bytes()[at:][:es]; !bytes.Equal(got, b) {
			return fmt.Errorf("byte %d of %v is %x, want %x", at, t, got, b)
		}
	}
	return nil
}

// elements returns n small whole numbers, which all dtypes add without rounding. The same arguments
// give the same numbers on every rank.
func elements(d tensor.DType, n int, seed ...int) []byte {
	const period = 997 // the rest repeats
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range seed {
		rng = rand.New(rand.NewPCG(rng.Uint64(), uint64(s)))
	}
	t, err := tensor.New(d, period)
	if err != nil {
		panic(err)
	}
	for i := range period {
		if err := t.SetFloat64(float64(rng.IntN(3)), i); err != nil {
			panic(err)
		}
	}
	return bytes.Repeat(t.Bytes(), n/period+1)[:n*d.Size()]
}

// combined is the plain all-reduce: operand after operand.
func combined(op backend.ReduceOp, d tensor.DType, ranks int, operands ...[]byte) []byte {
	red, err := op.Reduction(d, ranks)
	if err != nil {
		panic(err)
	}
	var sum []byte
	for _, b := range operands {
		b = bytes.Clone(b)
		if red.Before != nil {
			red.Before(b)
		}
		if sum == nil {
			sum = b
		} else {
			red.Combine(sum, b)
		}
	}
	if red.After != nil {
		red.After(sum)
	}
	return sum
}

// trial is one operation with tensors of n elements.
type trial struct {
	d     tensor.DType
	op    backend.ReduceOp
	n     int
	where where
	kinds where // how many of them
	root  int
	id    int
}

// form is in one step or in two, for all_reduces.
func (x trial) form() direct.Form { return direct.Form{TwoShot: x.id%2 == 1} }

// ways are the operations: each starts one, and returns its tensors with what they must have at the end.
var ways = map[string]func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error){
	"all_reduce": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) { return m.allReduce(x, 1) },
	// All tensors of all ranks are combined, those of a rank first.
	"all_reduce of 3 tensors": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		x.op = backend.Max()
		return m.allReduce(x, 3)
	},
	"all_reduce_coalesced": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		c := m.w.NewCall()
		var ts []*tensor.Tensor
		var want [][]byte
		for k := range 3 {
			n := x.n + k
			t, err := m.tensor(x.d, elements(x.d, n, x.id, m.rank, k), (x.where+where(k))%x.kinds)
			if err != nil {
				return nil, nil, nil, err
			}
			ts = append(ts, t)
			c.Parts = append(c.Parts, directway.Part{Out: ts[k:], In: ts[k:], N: n, Op: x.op, Form: x.form()})
			var all [][]byte
			for r := range m.g.Size {
				all = append(all, elements(x.d, n, x.id, r, k))
			}
			want = append(want, combined(x.op, x.d, m.g.Size, all...))
		}
		v, err := m.issue(work.AllReduceCoalesced, c)
		return v, ts, want, err
	},
	"all_gather": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		in, err := m.tensor(x.d, elements(x.d, x.n, x.id, m.rank), x.where)
		if err != nil {
			return nil, nil, nil, err
		}
		c := m.w.NewCall()
		p := directway.Part{In: []*tensor.Tensor{in}, N: x.n}
		want := [][]byte{elements(x.d, x.n, x.id, m.rank)}
		for r := range m.g.Size {
			t, err := m.tensor(x.d, elements(x.d, x.n, -1), (x.where+where(r))%x.kinds)
			if err != nil {
				return nil, nil, nil, err
			}
			p.Out, want = append(p.Out, t), append(want, elements(x.d, x.n, x.id, r))
		}
		c.Parts = append(c.Parts, p)
		v, err := m.issue(work.AllGather, c)
		return v, append([]*tensor.Tensor{in}, p.Out...), want, err
	},
	// The input is this rank's part of the output, or the next rank's.
	"all_gather in place": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		b, part := elements(x.d, x.n*m.g.Size, -1), (m.rank+x.id%2)%m.g.Size
		copy(b[part*x.n*x.d.Size():], elements(x.d, x.n, x.id, m.rank))
		whole, err := m.tensor(x.d, b, x.where&^1%x.kinds)
		if err != nil {
			return nil, nil, nil, err
		}
		in, err := whole.Slice(0, part*x.n, (part+1)*x.n)
		if err != nil {
			return nil, nil, nil, err
		}
		c := m.w.NewCall()
		c.Parts = append(c.Parts, directway.Part{Out: []*tensor.Tensor{whole}, In: []*tensor.Tensor{in}, N: x.n})
		var want []byte
		for r := range m.g.Size {
			want = append(want, elements(x.d, x.n, x.id, r)...)
		}
		v, err := m.issue(work.AllGatherIntoTensor, c)
		return v, []*tensor.Tensor{whole}, [][]byte{want}, err
	},
	"reduce_scatter": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		out, err := m.tensor(x.d, elements(x.d, x.n, -1), x.where)
		if err != nil {
			return nil, nil, nil, err
		}
		c := m.w.NewCall()
		p := directway.Part{Out: []*tensor.Tensor{out}, N: x.n, Op: x.op}
		var mine [][]byte
		ts, want := p.Out, [][]byte{nil}
		for r := range m.g.Size {
			own := elements(x.d, x.n, x.id, m.rank, r) // what this rank has for rank r
			t, err := m.tensor(x.d, own, (x.where+where(r))%x.kinds)
			if err != nil {
				return nil, nil, nil, err
			}
			p.In, ts, want = append(p.In, t), append(ts, t), append(want, own)
			mine = append(mine, elements(x.d, x.n, x.id, r, m.rank))
		}
		want[0] = combined(x.op, x.d, m.g.Size, mine...)
		c.Parts = append(c.Parts, p)
		v, err := m.issue(work.ReduceScatter, c)
		return v, ts, want, err
	},
	"broadcast": func(m *member, x trial) (*work.Work, []*tensor.Tensor, [][]byte, error) {
		var ts []*tensor.Tensor
		var want [][]byte
		for k := range 2 {
			t, err := m.tensor(x.d, elements(x.d, x.n, x.id, m.rank, k), (x.where+where(k))%x.kinds)
			if err != nil {
				return nil, nil, nil, err
			}
			ts, want = append(ts, t), append(want, elements(x.d, x.n, x.id, x.root, 1))
		}
		c := m.w.NewCall()
		p := directway.Part{N: x.n, Form: x.form(), Out: []*tensor.Tensor{ts[1], ts[0]}, Root: x.root}
		if m.rank == x.root {
			p.In, p.Out = p.Out[:1], p.Out[1:]
		}
		c.Parts = append(c.Parts, p)
		v, err := m.issue(work.Broadcast, c)
		return v, ts, want, err
	},
}

func (m *member) newAllReduce(ts []*tensor.Tensor, op backend.ReduceOp, f direct.Form) *directway.Call {
	c := m.w.NewCall(ts...)
	c.Parts = append(c.Parts, directway.Part{Out: ts, In: ts, N: ts[0].Len(), Op: op, Form: f})
	return c
}

func (m *member) allReduce(x trial, tensors int) (*work.Work, []*tensor.Tensor, [][]byte, error) {
	var ts []*tensor.Tensor
	var all, want [][]byte
	for r := range m.g.Size {
		for k := range tensors {
			b := elements(x.d, x.n, x.id, r, k)
			all = append(all, b)
			if r != m.rank {
				continue
			}
			t, err := m.tensor(x.d, b, (x.where+where(k))%x.kinds)
			if err != nil {
				return nil, nil, nil, err
			}
			ts = append(ts, t)
		}
	}
	for range tensors {
		want = append(want, combined(x.op, x.d, m.g.Size, all...))
	}
	v, err := m.issue(work.AllReduce, m.newAllReduce(ts, x.op, x.form()))
	return v, ts, want, err
}

// TestWays compares every operation with the plain one, wherever its tensors lie. They have no elements,
// one, a few, or so many that they go in several steps.
func TestWays(t *testing.T) {
	names := []string{"all_reduce", "all_reduce of 3 tensors", "all_reduce_coalesced", "all_gather", "all_gather in place", "reduce_scatter", "broadcast"}
	require.Len(t, ways, len(names))
	dtypes := []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16, tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64}
	for _, ranks := range []int{2, 3, 8} {
		t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
			errs := members(t, ranks, uint64(ranks), func(m *member) error {
				id := 0
				sizes := []int{0, 1, 40_000, 60}
				if ranks == 3 {
					sizes = append(sizes, slices.Repeat([]int{60}, len(dtypes)-1)...) // each dtype
				}
				for i, n := range sizes {
					most := kinds
					if n > 60 {
						most = 1 // simulated kernels that pack take their time
					}
					for _, name := range names {
						x := trial{d: dtypes[i%len(dtypes)], n: n, where: where(id) % most, kinds: most, root: id % ranks, id: id}
						ops := []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max(), backend.PreMulSum(2), backend.Avg()}
						if !x.d.IsFloat() {
							ops[5] = backend.BXor()
						}
						x.op = ops[id%len(ops)]
						id++
						v, ts, want, err := ways[name](m, x)
						if err == nil {
							err = v.Wait(m.ctx)
						}
						for i := range ts {
							err = cmp.Or(err, m.holds(ts[i], want[i]))
						}
						if err != nil {
							return fmt.Errorf("%s of %d x %v, %v, kind %d, root %d: %w", name, n, x.d, x.op, x.where, x.root, err)
						}
					}
				}
				return nil
			})
			require.NoError(t, errors.Join(errs...))
		})
	}
}

// TestOrder queues operations on one tensor, on the caller's stream, on another one of the caller's and on
// the group's in turn. Each has what the one before has left.
func TestOrder(t *testing.T) {
	const many = 30
	errs := members(t, 2, 9, func(m *member) (err error) {
		defer must.Catch(&err)
		x := must.Get(m.tensor(tensor.Int64, elements(tensor.Int64, 5, m.rank), inOrder))
		want := combined(backend.Sum(), tensor.Int64, 2, elements(tensor.Int64, 5, 0), elements(tensor.Int64, 5, 1))
		v := must.Get(m.d.Device(m.rank))
		second, err := v.NewStream(driver.StreamOptions{Name: "second"})
		if err != nil {
			return err
		}
		m.close = append(m.close, second)
		var last *work.Work
		for k := range many {
			ctx := driver.WithCallStreams(m.ctx, []*driver.CallStreams{
				{Before: m.stream}, {Before: m.stream, In: m.stream[m.rank]}, {Before: []driver.Stream{second}, In: second},
			}[k%3])
			if last, err = m.w.Issue(ctx, work.AllReduce, 0, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{}), board.Call{Root: -1}); err != nil {
				return err
			}
			if k > 0 {
				want = combined(backend.Sum(), tensor.Int64, 2, want, want)
			}
		}
		must.Do(last.Synchronize(m.stream[m.rank]))
		return cmp.Or(m.holds(x, want), last.Wait(m.ctx))
	})
	require.NoError(t, errors.Join(errs...))
}

// TestCulprit has ranks 0 and 1 wait in a kernel for rank 2, which does not come. Whatever ends that,
// their errors name who is to blame, and no operation begins any more.
func TestCulprit(t *testing.T) {
	limit := group.CloseLimit
	group.CloseLimit = 200 * time.Millisecond // rank 2 waits that long for the others, when it leaves
	defer func() { group.CloseLimit = limit }()
	no := errors.New("no more")
	for name, c := range map[string]struct {
		timeout time.Duration
		end     func(m *member) error // on every rank, when ranks 0 and 1 wait
		is      error
		peer    int
		text    string
	}{
		"abort":   {0, func(m *member) error { m.g.Abort(no); return nil }, work.ErrAborted, 1, "no more"},
		"timeout": {3 * time.Second, nil, work.ErrTimeout, 2, "the device of rank 2 has not done its part"},
		"leaving": {0, func(m *member) error { return m.g.Close() }, work.ErrPeerLeft, 2, "rank 2"},
	} {
		t.Run(name, func(t *testing.T) {
			var waiting, ended sync.WaitGroup
			waiting.Add(2)
			ended.Add(2)
			var texts [2]string
			errs := members(t, 3, 4, func(m *member) error {
				if m.rank == 2 {
					waiting.Wait()
					if name == "leaving" {
						return c.end(m)
					}
					ended.Wait()
					return nil
				}
				defer ended.Done()
				if c.timeout > 0 {
					m.g.SetTimeout(c.timeout)
				}
				x, err := m.tensor(tensor.Float32, elements(tensor.Float32, 5, m.rank), inOrder)
				if err != nil {
					waiting.Done()
					return err
				}
				v, err := m.issue(work.AllReduce, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{}))
				waiting.Done()
				if err != nil {
					return err
				}
				if name == "abort" && m.rank == 1 {
					waiting.Wait()
					if err := c.end(m); err != nil {
						return err
					}
				}
				err = v.Wait(m.ctx)
				var e *work.Error
				switch {
				case !errors.Is(err, c.is) || !errors.As(err, &e):
					return fmt.Errorf("%w, want %w", err, c.is)
				case e.Peer != c.peer || e.Rank != m.rank || e.Op != work.AllReduce:
					return fmt.Errorf("rank %d is to blame, want rank %d: %w", e.Peer, c.peer, err)
				}
				texts[m.rank] = err.Error()
				if _, err := m.issue(work.AllReduce, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{})); err == nil {
					return errors.New("the group has failed, and takes an operation")
				}
				return nil
			})
			require.NoError(t, errors.Join(errs[:2]...))
			require.Contains(t, texts[0]+texts[1], c.text)
		})
	}
}

// TestTimeoutWhileMemoryIsFreed has a collective wait because memory is freed. It ends when its time is over, and lets
// kernels go on that CUDA may wait for.
func TestTimeoutWhileMemoryIsFreed(t *testing.T) {
	ended := make(chan struct{})
	errs := members(t, 2, 5, func(m *member) error {
		if m.rank == 1 {
			<-ended
			return nil
		}
		defer close(ended)
		x, err := m.tensor(tensor.Float32, elements(tensor.Float32, 5, m.rank), inOrder)
		if err != nil {
			return err
		}
		m.g.SetTimeout(200 * time.Millisecond)
		issued := make(chan error, 1)
		for !pool.Alone(0, func() {
			go func() {
				v, err := m.issue(work.AllReduce, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{}))
				if err == nil {
					err = v.Wait(m.ctx)
				}
				issued <- err
			}()
			for end := time.Now().Add(patience); m.g.Broken() == nil; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Error("the group goes on")
					return
				}
			}
		}) {
			time.Sleep(time.Millisecond)
		}
		if err := <-issued; !errors.Is(err, work.ErrTimeout) {
			return fmt.Errorf("%w, want a timeout", err)
		}
		return nil
	})
	require.NoError(t, errs[0])
}

// TestScratchIsFreed has a call need more memory than the group keeps. A later one frees it.
func TestScratchIsFreed(t *testing.T) {
	var large, small sync.WaitGroup
	large.Add(2)
	small.Add(2)
	looked := make(chan int64, 2)
	errs := members(t, 2, 6, func(m *member) (err error) {
		defer must.Catch(&err)
		sum := func(n int, at where) {
			x := must.Get(m.tensor(tensor.Float32, elements(tensor.Float32, n, m.rank), at))
			v := must.Get(m.issue(work.AllReduce, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{})))
			must.Do(v.Wait(m.ctx))
		}
		has := func() int64 { return m.d.(*sim.Driver).Machine().Stats().DeviceBytes }
		sum(1<<18+1, elsewhereWithGaps)
		large.Done()
		large.Wait()
		if m.rank == 0 {
			before := has()
			looked <- before
			looked <- before
		}
		before := <-looked
		sum(4, inOrder)
		small.Done()
		small.Wait()
		if after := has(); after > before-1<<20 {
			return fmt.Errorf("devices have %d bytes, before the call %d", after, before)
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}

// heard is a CPU backend whose all_gathers call f with their number when they have ended.
type heard struct {
	backend.Backend
	n int
	f func(n int) error
}

func (h *heard) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	w, err := h.Backend.AllGatherIntoTensor(ctx, out, in, o)
	if err != nil || w.Wait(ctx) != nil {
		return w, err
	}
	h.n++
	return w, h.f(h.n)
}

// TestLastStepFails lets rank 0 fail at the last step of connecting, when rank 1 has connected. A kernel of rank 1 then
// writes to rank 0's memory, which has to be there.
func TestLastStepFails(t *testing.T) {
	steps := 0
	apart(t, 2, 3, func(m *member) error {
		h := &heard{Backend: m.g.CPU, f: func(int) error { return nil }}
		if m.rank == 0 {
			m.g.CPU = h
			defer func() { steps = h.n }()
		}
		return m.connect()
	})
	require.Positive(t, steps)
	no := errors.New("no more")
	issued, freed := make(chan struct{}), make(chan struct{})
	errs := apart(t, 2, 3, func(m *member) (err error) {
		defer must.Catch(&err)
		if m.rank == 0 {
			defer close(freed)
			m.g.CPU = &heard{Backend: m.g.CPU, f: func(n int) error {
				if n < steps {
					return nil
				}
				<-issued
				return no
			}}
			return m.connect()
		}
		if err := m.connect(); err != nil {
			close(issued)
			return err
		}
		x := must.Get(m.tensor(tensor.Int32, elements(tensor.Int32, 5, m.rank), inOrder))
		gate := must.Get(m.d.AllocHost(4))
		m.close = append(m.close, gate)
		gate.Store32(0, 0)
		must.Do(m.stream[m.rank].WaitValue(gate.Ptr(), 1, driver.Equal))
		v, err := m.issue(work.AllReduce, m.newAllReduce([]*tensor.Tensor{x}, backend.Sum(), direct.Form{}))
		close(issued)
		if err != nil {
			return err
		}
		select {
		case <-freed:
		case <-time.After(200 * time.Millisecond): // rank 0 waits
		}
		gate.Store32(0, 1)
		if err := v.Wait(m.ctx); err == nil {
			return errors.New("the operation of rank 1 has ended well")
		}
		return nil
	})
	require.ErrorIs(t, errs[0], no)
	require.NoError(t, errs[1])
}
