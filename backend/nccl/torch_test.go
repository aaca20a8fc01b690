package nccl_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/ncclsim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgweights"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// A torchRank does what a rank of PyTorch's NCCL backend does: it writes and reads the keys that were captured from
// PyTorch 2.11, and makes the calls of NCCL in its order. It knows nothing of packages nccl and pg.
type torchRank struct {
	*job
	rank   int
	st     store.Store // without prefixes
	api    libnccl.API
	dev    driver.Device
	stream driver.Stream
	comms  map[string]libnccl.Comm
	word   driver.Memory
}

// job is ranks of both kinds at one TCP store.
type job struct {
	testing.TB
	ctx    context.Context
	server *tcp.Server
	m      *sim.Machine
	lib    *ncclsim.Library
	calls  calls
	size   int
	keys   []string
}

func (x *torchRank) check(r libnccl.Result) {
	if r != libnccl.Success {
		must.Do(fmt.Errorf("PyTorch's rank %d: %v", x.rank, r))
	}
}

// comm has a communicator under a key of the store, and makes it first: the owner offers the id.
func (x *torchRank) comm(key string, size, rank int) libnccl.Comm {
	if c, ok := x.comms[key]; ok {
		return c
	}
	if rank == 0 {
		id, r := x.api.UniqueID()
		x.check(r)
		must.Do(x.st.Set(x.ctx, key, id[:]))
	}
	c, r := x.api.CommInit([]libnccl.UniqueID{libnccl.UniqueID(must.Get(x.st.Get(x.ctx, key)))}, size, rank)
	x.check(r)
	x.comms[key] = c
	return c
}

func (x *torchRank) allReduce(c libnccl.Comm, n int) {
	x.check(x.api.AllReduce(x.word.Ptr(), x.word.Ptr(), n, libnccl.Float32, libnccl.Sum, c, x.stream))
}

// number sets and reads the first number of the rank's memory.
func (x *torchRank) set(v float32) {
	h := must.Get(x.m0().AllocHost(4))
	defer h.Close()
	x.m0().HostAccess("set", driver.Writes(h.Ptr(), 4))
	copy(h.Bytes(), floats(v).Bytes())
	must.Do(x.stream.Copy(x.word.Ptr(), h.Ptr(), 4))
	x.sync()
}

func (x *torchRank) get() float32 {
	h := must.Get(x.m0().AllocHost(4))
	defer h.Close()
	must.Do(x.stream.Copy(h.Ptr(), x.word.Ptr(), 4))
	x.sync()
	x.m0().HostAccess("get", driver.Reads(h.Ptr(), 4))
	return sim.Slice[float32](h.Bytes())[0]
}

func (x *torchRank) sync() {
	e := must.Get(x.stream.Record())
	must.Do(e.Sync(x.ctx))
	e.Release()
}

func (x *torchRank) m0() *sim.Driver { return x.api.(*process).d }

// process is the API of a process with its driver.
type process struct {
	libnccl.API
	d *sim.Driver
}

// goRank is a rank of this library.
type goRank struct {
	*job
	rank   int
	g      *pg.ProcessGroup
	d      *sim.Driver
	dev    driver.Device
	stream driver.Stream
	mem    []driver.Memory
}

func (x *goRank) on(v ...float32) *tensor.Tensor {
	m := must.Get(x.dev.Alloc(4 * len(v)))
	x.mem = append(x.mem, m)
	h := must.Get(x.d.AllocHost(4 * len(v)))
	defer h.Close()
	x.d.HostAccess("on", driver.Writes(h.Ptr(), h.Len()))
	copy(h.Bytes(), floats(v...).Bytes())
	must.Do(x.stream.Copy(m.Ptr(), h.Ptr(), h.Len()))
	x.sync()
	return must.Get(tensor.OnDevice(tensor.Float32, m, len(v)))
}

func (x *goRank) get(t *tensor.Tensor) float32 {
	h := must.Get(x.d.AllocHost(t.ByteLen()))
	defer h.Close()
	must.Do(x.stream.Copy(h.Ptr(), at(t), t.ByteLen()))
	x.sync()
	x.d.HostAccess("get", driver.Reads(h.Ptr(), h.Len()))
	return sim.Slice[float32](h.Bytes())[0]
}

func (x *goRank) sync() {
	e := must.Get(x.stream.Record())
	must.Do(e.Sync(x.ctx))
	e.Release()
}

func (x *goRank) within() context.Context {
	return driver.WithCallStreams(x.ctx, &driver.CallStreams{Before: []driver.Stream{x.stream}, In: x.stream})
}

// play has a job of a rank of each kind. The Go rank has number own.
func play(t *testing.T, size, own int, o pg.Options, own1 nccl.Options, torch func(x *torchRank), ours func(x *goRank)) *job {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m := must.Get(sim.New(sim.Config{Devices: size}))
	j := &job{TB: t, ctx: ctx, m: m, lib: must.Get(ncclsim.New(m)), size: size, server: must.Get(tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{}))}
	defer j.server.Close()
	j.lib.Trace = j.calls.trace
	errs := make([]error, size)
	var ranks sync.WaitGroup
	for r := range size {
		d := must.Get(m.Process(fmt.Sprint("rank ", r)))
		dev := must.Get(d.Device(r))
		stream := must.Get(dev.NewStream(driver.StreamOptions{Name: "own"}))
		st := must.Get(tcp.New(ctx, j.server.Addr().String(), tcp.Options{WorldSize: size, CountOnly: true}))
		ranks.Go(func() {
			defer must.Catch(&errs[r])
			defer stream.Close()
			defer st.Close()
			if r != own {
				x := &torchRank{job: j, rank: r, st: st, api: &process{j.lib.API(0), d}, dev: dev, stream: stream, comms: map[string]libnccl.Comm{}, word: must.Get(dev.Alloc(64))}
				leave := must.Get(dev.(driver.Enterer).Enter())
				defer leave()
				must.Do(stream.Memset(x.word.Ptr(), 0, 64))
				torch(x)
				for _, c := range x.comms {
					x.check(x.api.CommAbort(c)) // as PyTorch 2.6
				}
				x.sync()
				must.Do(x.word.Close())
				return
			}
			n := own1.With(j.lib.API(0))
			n.Driver, n.Device = d, dev.ID()
			opts := o
			opts.BackendOptions = pg.BackendOptions{n}
			x := &goRank{job: j, rank: r, d: d, dev: dev, stream: stream}
			x.g = must.Get(pg.New(ctx, store.Prefix("default_pg", st), r, size, opts))
			ours(x)
			x.sync()
			must.Do(x.g.Close())
			for _, m := range x.mem {
				must.Do(m.Close())
			}
		})
	}
	ranks.Wait()
	for r, err := range errs {
		require.NoError(t, err, "rank %d", r)
	}
	st := must.Get(tcp.New(context.Background(), j.server.Addr().String(), tcp.Options{}))
	defer st.Close()
	for _, k := range must.Get(st.ListKeys(context.Background())) {
		if strings.Contains(k, "//") && !strings.Contains(k, "c10d-go") {
			j.keys = append(j.keys, k)
		}
	}
	slices.Sort(j.keys)
	require.Empty(t, j.lib.Violations())
	require.Zero(t, j.lib.Open())
	require.NoError(t, m.Close())
	return j
}

// TestLazyJob is captured: all_reduce, barrier, send/recv 0 to 1, new_group([0, 1]) and an all_reduce in it.
func TestLazyJob(t *testing.T) {
	for own := range 2 {
		j := play(t, 2, own, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{}, func(x *torchRank) {
			c := x.comm("default_pg/0//cuda//0", 2, x.rank)
			x.set(2)
			x.allReduce(c, 1)
			require.EqualValues(x, 3, x.get())
			x.allReduce(c, 1) // a barrier
			x.sync()
			p := x.comm("default_pg/0//cuda//0:1", 2, x.rank)
			if x.rank == 0 {
				x.check(x.api.Send(x.word.Ptr(), 1, libnccl.Float32, 1, p, x.stream))
			} else {
				x.check(x.api.Recv(x.word.Ptr(), 1, libnccl.Float32, 0, p, x.stream))
			}
			x.sync()
			x.set(5)
			x.allReduce(x.comm("default_pg/0//1//cuda//0", 2, x.rank), 1)
			require.EqualValues(x, 7, x.get())
		}, func(x *goRank) {
			v := x.on(1)
			must.Do(pg.Wait(x.g.AllReduce(x.within(), v, pg.Sum())))
			require.EqualValues(x, 3, x.get(v))
			must.Do(x.g.Barrier(x.ctx))
			if x.rank == 0 {
				must.Do(pg.Wait(x.g.Send(x.within(), v, 1)))
			} else {
				must.Do(pg.Wait(x.g.Recv(x.within(), v, 0)))
			}
			sub := must.Get(x.g.NewGroup(x.ctx, []int{0, 1}))
			v = x.on(2)
			must.Do(pg.Wait(sub.AllReduce(x.within(), v, pg.Sum())))
			require.EqualValues(x, 7, x.get(v))
			must.Do(sub.Close())
		})
		require.Equal(t, []string{"default_pg/0//1//cuda//0", "default_pg/0//cuda//0", "default_pg/0//cuda//0:1"}, j.keys)
	}
}

// TestEagerJob is captured: one key, and sub-groups by splits in which the ranks outside take part.
func TestEagerJob(t *testing.T) {
	for own := range 3 {
		j := play(t, 3, own, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{Eager: true}, func(x *torchRank) {
			c := x.comm("default_pg/0//cuda//0", 3, x.rank)
			for g, ranks := range [][]int{{0, 1}, {1, 2}, {0, 2}} {
				color, key := libnccl.NoColor, x.rank
				if i := slices.Index(ranks, x.rank); i >= 0 {
					color, key = nccl.Color(ranks), i
				}
				sub, r := x.api.CommSplit(c, color, key)
				x.check(r)
				if sub != 0 {
					x.comms[fmt.Sprint(g)] = sub
					x.set(2)
					x.allReduce(sub, 1)
					x.get()
				}
			}
			x.allReduce(c, 1)
			x.sync()
		}, func(x *goRank) {
			for _, ranks := range [][]int{{0, 1}, {1, 2}, {0, 2}} {
				sub := must.Get(x.g.NewGroup(x.ctx, ranks))
				if sub.IsMember() {
					v := x.on(1)
					must.Do(pg.Wait(sub.AllReduce(x.within(), v, pg.Sum())))
					require.EqualValues(x, 3, x.get(v))
				}
			}
			must.Do(x.g.Barrier(x.ctx))
		})
		require.Equal(t, []string{"default_pg/0//cuda//0"}, j.keys)
		require.Equal(t, 3, strings.Count(j.calls.take(own), "CommSplit"))
	}
}

// TestSplitGroup: split_group is one split of the parent's communicator, in which each part has its lowest rank as its
// color. The second split is of a part.
func TestSplitGroup(t *testing.T) {
	lists := [][]int{{2, 0}, {3}}
	for own := range 4 { // rank 1 is in no part
		j := play(t, 4, own, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{Eager: true}, func(x *torchRank) {
			c := x.comm("default_pg/0//cuda//0", 4, x.rank)
			color, key := x.rank, 0
			switch x.rank {
			case 1:
				color = libnccl.NoColor
			case 2:
				color, key = 0, 1
			}
			sub, r := x.api.CommSplit(c, color, key)
			x.check(r)
			if sub != 0 {
				x.comms["part"] = sub
			}
			if x.rank == 0 || x.rank == 2 {
				x.set(float32(x.rank))
				x.allReduce(sub, 1)
				require.EqualValues(x, 2, x.get())
				if x.comms["part of it"], r = x.api.CommSplit(sub, key, 0); r != libnccl.Success {
					x.check(r)
				}
			}
			x.allReduce(c, 1)
			x.sync()
		}, func(x *goRank) {
			sub := must.Get(x.g.SplitRanks(x.ctx, lists))
			require.Equal(x, x.rank != 1, sub.IsMember())
			if x.rank == 0 || x.rank == 2 {
				v := x.on(float32(x.rank))
				must.Do(pg.Wait(sub.AllReduce(x.within(), v, pg.Sum())))
				require.EqualValues(x, 2, x.get(v))
				require.Equal(x, 1, must.Get(sub.SplitRanks(x.ctx, [][]int{{0}, {1}})).Size())
			}
			must.Do(x.g.Barrier(x.ctx))
		})
		require.Equal(t, []string{"default_pg/0//cuda//0"}, j.keys)
	}
}

// TestSplitBesideGloo: which keys PyTorch's gloo has for the parts is not known.
func TestSplitBesideGloo(t *testing.T) {
	play(t, 1, 0, pg.Options{Backend: "cpu:gloo,cuda:nccl", PyTorch: true}, nccl.Options{Eager: true}, nil, func(x *goRank) {
		_, err := x.g.SplitRanks(x.ctx, [][]int{{0}})
		require.ErrorIs(x, err, errors.ErrUnsupported)
		require.ErrorContains(x, err, "its parts of backend gloo is not known")
	})
}

// TestSplitAmongGo splits an eager group of Go ranks by colors, with the ranks in another order.
func TestSplitAmongGo(t *testing.T) {
	among(t, 4, true, pg.Options{}, func(ctx context.Context, x *goRank) {
		part := must.Get(x.g.Split(ctx, []int{0, 5, 0, -1}[x.rank], -x.rank))
		require.Equal(t, []int{1, 0, 0, -1}[x.rank], part.Rank())
		if x.rank == 0 || x.rank == 2 {
			v := x.on(float32(x.rank))
			must.Do(pg.Wait(part.Broadcast(x.within(), v, 0)))
			require.EqualValues(t, 2, x.get(v))
		}
		must.Do(x.g.Barrier(ctx))
	})
}

// TestObjects sends objects in a group that has no backend for the CPU: sizes first, then bytes as long as the longest.
func TestObjects(t *testing.T) {
	j := play(t, 2, 1, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{}, func(x *torchRank) {
		c := x.comm("default_pg/0//cuda//0", 2, x.rank)
		m := must.Get(x.dev.Alloc(256))
		must.Do(x.stream.Memset(m.Ptr(), 0, 256))
		must.Do(x.stream.Memset(m.Ptr(), 2, 1)) // an object of two bytes
		x.check(x.api.AllGather(m.Ptr(), m.Ptr()+64, 1, libnccl.Int64, c, x.stream))
		must.Do(x.stream.Memset(m.Ptr(), '1', 2)) // which is 11
		x.check(x.api.AllGather(m.Ptr(), m.Ptr()+64, 3, libnccl.Uint8, c, x.stream))
		x.sync()
		must.Do(m.Close())
	}, func(x *goRank) {
		require.Equal(x, []int{11, 345}, must.Get(pg.AllGatherObject(x.ctx, x.g, 345)))
	})
	require.Equal(t, "CommInit 1 of 2, 1 ids; AllGather 1 int64; AllGather 3 uint8; CommFinalize; CommAbort", j.calls.take(1))
}

// TestWeights has a publisher of PyTorch's and one of Go's send parameters into device memory.
func TestWeights(t *testing.T) {
	const text = `{"version": 7, "params": [{"name": "w", "dtype": "float32", "shape": [4]}, {"name": "b", "dtype": "float32", "shape": []}]}`
	receive := func(x *goRank) {
		own := map[string]*tensor.Tensor{}
		version := must.Get(pgweights.Receive(x.within(), x.g, 0, func(p pgweights.Param) (_ *tensor.Tensor, err error) {
			n := 1
			for _, k := range p.Shape {
				n *= k
			}
			own[p.Name], err = tensor.OnDevice(p.DType, x.on(make([]float32, n)...).Memory(), p.Shape...)
			return own[p.Name], err
		}))
		require.EqualValues(x, 7, version)
		require.EqualValues(x, 2, x.get(own["w"]))
		require.EqualValues(x, 3, x.get(own["b"]))
	}
	j := play(t, 2, 1, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{}, func(x *torchRank) {
		c := x.comm("default_pg/0//cuda//0", 2, x.rank)
		list := must.Get(x.dev.Alloc(256))
		defer list.Close()
		h := must.Get(x.m0().AllocHost(256))
		defer h.Close()
		x.m0().HostAccess("list", driver.Writes(h.Ptr(), h.Len()))
		binary.LittleEndian.PutUint64(h.Bytes(), uint64(len(text)))
		copy(h.Bytes()[8:], text)
		must.Do(x.stream.Copy(list.Ptr(), h.Ptr(), h.Len()))
		x.sync()
		broadcast := func(p driver.Ptr, n int, d libnccl.DataType) { x.check(x.api.Broadcast(p, p, n, d, 0, c, x.stream)) }
		broadcast(list.Ptr(), 1, libnccl.Int64)
		broadcast(list.Ptr()+8, len(text), libnccl.Uint8)
		x.set(2)
		broadcast(x.word.Ptr(), 4, libnccl.Float32)
		x.set(3)
		broadcast(x.word.Ptr(), 1, libnccl.Float32)
		x.sync()
	}, receive)
	require.Equal(t, fmt.Sprintf("CommInit 1 of 2, 1 ids; Broadcast 1 int64 root 0; Broadcast %d uint8 root 0; Broadcast 4 float32 root 0; Broadcast 1 float32 root 0; CommFinalize; CommAbort", len(text)), j.calls.take(1))

	among(t, 3, false, pg.Options{}, func(ctx context.Context, x *goRank) {
		if x.rank > 0 {
			receive(x)
			return
		}
		b := must.Get(tensor.OnDevice(tensor.Float32, x.on(3).Memory()))
		must.Do(pgweights.Publish(x.within(), x.g, 7, []pgweights.Named{{Name: "w", Tensor: x.on(2, 4, 6, 8)}, {Name: "b", Tensor: b}}))
	})
}

// TestBatch has the messages of a batch in one group of NCCL's, on the group's communicator.
func TestBatch(t *testing.T) {
	j := play(t, 2, 0, pg.Options{Backend: "nccl", PyTorch: true}, nccl.Options{}, func(x *torchRank) {
		c := x.comm("default_pg/0//cuda//0", 2, x.rank)
		x.set(7)
		x.api.GroupStart()
		x.check(x.api.Send(x.word.Ptr(), 1, libnccl.Float32, 0, c, x.stream))
		x.check(x.api.Recv(x.word.Ptr()+32, 1, libnccl.Float32, 0, c, x.stream))
		x.check(x.api.GroupEnd())
		x.sync()
	}, func(x *goRank) {
		a, b := x.on(1), x.on(0)
		for _, w := range must.Get(x.g.BatchISendIRecv(x.within(), []pg.P2P{{Send: a, Peer: 1}, {Recv: b, Peer: 1}})) {
			must.Do(w.Wait(x.ctx))
		}
		require.EqualValues(x, 7, x.get(b))
	})
	require.Equal(t, []string{"default_pg/0//cuda//0"}, j.keys)
}

// among makes a group of Go ranks on devices alone, and calls f on each. It closes the group.
func among(t *testing.T, size int, eager bool, o pg.Options, f func(ctx context.Context, x *goRank)) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m := must.Get(sim.New(sim.Config{Devices: size}))
	lib := must.Get(ncclsim.New(m))
	st := store.NewHash()
	defer st.Close()
	errs := make([]error, size)
	var ranks sync.WaitGroup
	for r := range size {
		d := must.Get(m.Process(fmt.Sprint("rank ", r)))
		ranks.Go(func() {
			defer must.Catch(&errs[r])
			dev, o := must.Get(d.Device(r)), o
			x := &goRank{job: &job{TB: t, ctx: ctx}, rank: r, d: d, dev: dev, stream: must.Get(dev.NewStream(driver.StreamOptions{}))}
			defer x.stream.Close()
			o.Backend = "nccl"
			own := nccl.Options{Eager: eager}.With(lib.API(0))
			own.Driver, own.Device = d, dev.ID()
			o.BackendOptions = pg.BackendOptions{own}
			x.g = must.Get(pg.New(ctx, st, r, size, o))
			f(ctx, x)
			x.sync()
			must.Do(x.g.Close())
			for _, m := range x.mem {
				must.Do(m.Close())
			}
		})
	}
	ranks.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Empty(t, lib.Violations())
	require.Zero(t, lib.Open())
	require.NoError(t, m.Close())
}

// TestReconfigure: the ranks that are left make another communicator.
func TestReconfigure(t *testing.T) {
	among(t, 3, false, pg.Options{Elastic: true}, func(ctx context.Context, x *goRank) {
		v := x.on(1)
		must.Do(pg.Wait(x.g.AllReduce(x.within(), v, pg.Sum())))
		require.EqualValues(t, 3, x.get(v))
		if x.rank == 2 {
			return
		}
		view := must.Get(x.g.Reconfigure(ctx))
		require.Equal(t, []int{0, 1}, view.IDs)
		must.Do(pg.Wait(x.g.AllReduce(x.within(), v, pg.Sum())))
		require.EqualValues(t, 6, x.get(v))
		require.Equal(t, []int{10, 11}, must.Get(pg.AllGatherObject(ctx, x.g, 10+x.rank)))
	})
}

// TestDetail compares calls before they run, in a group that has devices alone.
func TestDetail(t *testing.T) {
	among(t, 2, false, pg.Options{Detail: true}, func(ctx context.Context, x *goRank) {
		part := must.Get(x.g.Split(ctx, x.rank, 0))
		require.Equal(t, 1, part.Size())
		v := x.on(make([]float32, 4+x.rank)...)
		require.ErrorContains(t, pg.Wait(x.g.AllReduce(x.within(), v, pg.Sum())), "on cuda")
		must.Do(pg.Wait(x.g.AllReduce(x.within(), x.on(1), pg.Sum())))
		must.Do(x.g.Barrier(ctx))
	})
}
