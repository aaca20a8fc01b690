//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// member is a Go rank with its device.
type member struct {
	ctx    context.Context
	g      *pg.ProcessGroup
	d      driver.Driver
	dev    driver.Device
	stream driver.Stream
	mem    []driver.Memory // of the operation under way
}

// runRank does what a role says.
func runRank(role string) error {
	x := &member{ctx: context.Background()}
	local, err := strconv.Atoi(os.Getenv("LOCAL_RANK"))
	if err != nil {
		return err
	}
	if x.d, err = cuda.Default(); err != nil {
		return err
	}
	if x.dev, err = x.d.Device(local); err != nil {
		return err
	}
	if x.stream, err = x.dev.NewStream(driver.StreamOptions{}); err != nil {
		return err
	}
	o := pg.Options{Backend: "cpu:gloo,cuda:nccl", Timeout: 2 * time.Minute}
	if role == "script" || role == "split" {
		o.Backend, o.PyTorch = "nccl", true
	}
	o.BackendOptions = pg.BackendOptions{nccl.Options{Eager: os.Getenv("BARS_TEST_MODE") == "eager"}}
	if x.g, err = pg.Init(x.ctx, "env://", pg.InitOptions{Options: o}); err != nil {
		return err
	}
	run := map[string]func() error{"script": x.script, "split": x.split, "cpu": x.beside, "time": x.times, "fault": x.fault, "groups": x.groups}[role]
	if run == nil {
		return fmt.Errorf("unknown role %q", role)
	}
	if err := run(); err != nil {
		return err
	}
	return x.g.Close()
}

func load() (all []op, err error) {
	text, err := os.ReadFile(filepath.Join(os.Getenv("BARS_TEST_DIR"), "script.json"))
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	return all, err
}

// values returns the elements that rank.py gives an operation's tensor.
func values(k, rank, n int, dtype string, j int) (*tensor.Tensor, error) {
	d, err := tensor.ParseDType(dtype)
	if err != nil {
		return nil, err
	}
	t, err := tensor.New(d, n)
	if err != nil {
		return nil, err
	}
	for i := range n {
		v := (i*7 + rank*13 + k*29 + j*5) % 17
		f := float64(v % 3)
		switch {
		case dtype == "bool":
			f = float64(v % 2)
		case d.IsFloat():
			f = float64(v-8) * 0.125
		}
		if err := t.SetFloat64(f, i); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// on returns a copy of a tensor on the device.
func (x *member) on(t *tensor.Tensor) (*tensor.Tensor, error) {
	m, err := x.dev.Alloc(t.ByteLen())
	if err != nil {
		return nil, err
	}
	x.mem = append(x.mem, m)
	h, err := x.d.AllocHost(max(t.ByteLen(), 1))
	if err != nil {
		return nil, err
	}
	defer h.Close()
	copy(h.Bytes(), t.Bytes())
	if err := x.stream.Copy(m.Ptr(), h.Ptr(), t.ByteLen()); err != nil {
		return nil, err
	}
	if err := x.sync(); err != nil {
		return nil, err
	}
	return tensor.OnDevice(t.DType(), m, t.Shape()...)
}

// bytes returns the elements of a tensor on the device, after what the stream has been given.
func (x *member) bytes(t *tensor.Tensor) ([]byte, error) {
	h, err := x.d.AllocHost(max(t.ByteLen(), 1))
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if err := x.stream.Copy(h.Ptr(), t.Memory().(driver.Memory).Ptr(), t.ByteLen()); err != nil {
		return nil, err
	}
	if err := x.sync(); err != nil {
		return nil, err
	}
	return bytes.Clone(h.Bytes()[:t.ByteLen()]), nil
}

func (x *member) sync() error {
	e, err := x.stream.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(x.ctx)
}

func (x *member) free() error {
	var errs []error
	for _, m := range x.mem {
		errs = append(errs, m.Close())
	}
	x.mem = nil
	return errors.Join(errs...)
}

var operators = map[string]pg.ReduceOp{"sum": pg.Sum(), "avg": pg.Avg(), "max": pg.Max(), "min": pg.Min(), "product": pg.Product(), "premul": pg.PreMulSum(0.5)}

// do runs an operation. Make returns a tensor of this rank; the results are the tensors that it has written.
func (x *member) do(ctx context.Context, k int, o op, make func(n, j int) (*tensor.Tensor, error)) (results []*tensor.Tensor, err error) {
	var failed error
	one := func(n, j int) *tensor.Tensor {
		t, err := make(n, j)
		failed = errors.Join(failed, err)
		return t
	}
	list := func(n, j int) []*tensor.Tensor {
		ts := []*tensor.Tensor{}
		for range x.g.Size() {
			ts = append(ts, one(n, j))
		}
		return ts
	}
	r, size, red := x.g.Rank(), x.g.Size(), operators[o.Reduce]
	sum := 0
	for _, n := range o.Sizes {
		sum += n
	}
	uneven := func(from func(j int) int) []*tensor.Tensor {
		ts := []*tensor.Tensor{}
		for j, n := range o.Sizes {
			ts = append(ts, one(n, from(j)))
		}
		return ts
	}
	parts := func() []*tensor.Tensor {
		ts := []*tensor.Tensor{}
		for j := range size {
			ts = append(ts, one(o.N, j))
		}
		return ts
	}
	var w *work.Work
	g := x.g
	switch o.Op {
	case "all_reduce":
		results = []*tensor.Tensor{one(o.N, 0)}
		w, err = g.AllReduce(ctx, results[0], red)
	case "broadcast":
		results = []*tensor.Tensor{one(o.N, 0)}
		w, err = g.Broadcast(ctx, results[0], o.Root)
	case "reduce":
		results = []*tensor.Tensor{one(o.N, 0)}
		w, err = g.Reduce(ctx, results[0], o.Root, red)
		if r != o.Root {
			results = nil
		}
	case "all_gather":
		results = list(o.N, 1)
		w, err = g.AllGather(ctx, results, one(o.N, 0))
	case "all_gather_uneven":
		results = uneven(func(int) int { return 1 })
		w, err = g.AllGatherV(ctx, results, one(o.Sizes[r], 0))
	case "all_gather_into_tensor":
		results = []*tensor.Tensor{one(o.N*size, 1)}
		w, err = g.AllGatherIntoTensor(ctx, results[0], one(o.N, 0))
	case "reduce_scatter":
		results = []*tensor.Tensor{one(o.N, 1)}
		w, err = g.ReduceScatter(ctx, results[0], parts(), red)
	case "reduce_scatter_uneven":
		results = []*tensor.Tensor{one(o.Sizes[r], 1)}
		w, err = g.ReduceScatter(ctx, results[0], uneven(func(j int) int { return j }), red)
	case "reduce_scatter_tensor":
		results = []*tensor.Tensor{one(o.N, 1)}
		w, err = g.ReduceScatterTensor(ctx, results[0], one(o.N*size, 0), red)
	case "all_to_all_single":
		results = []*tensor.Tensor{one(o.Sizes[r]*size, 1)}
		w, err = g.AllToAllSingle(ctx, results[0], one(sum, 0), slices.Repeat([]int{o.Sizes[r]}, size), o.Sizes)
	case "gather":
		if r == o.Root {
			results = list(o.N, 1)
		}
		w, err = g.Gather(ctx, results, one(o.N, 0), o.Root)
	case "scatter":
		var in []*tensor.Tensor
		if r == o.Root {
			in = parts()
		}
		results = []*tensor.Tensor{one(o.N, 1)}
		w, err = g.Scatter(ctx, results[0], in, o.Root)
	case "send_recv":
		results = []*tensor.Tensor{one(o.N, 0)}
		switch to := (o.Root + 1) % size; {
		case size > 1 && r == o.Root:
			w, err = g.Send(ctx, results[0], to)
		case size > 1 && r == to:
			w, err = g.Recv(ctx, results[0], o.Root)
		}
	case "batch":
		results = []*tensor.Tensor{one(o.N, 1)}
		var all []*work.Work
		all, err = g.BatchISendIRecv(ctx, []pg.P2P{{Send: one(o.N, 0), Peer: (r + 1) % size}, {Recv: results[0], Peer: (r - 1 + size) % size}})
		for _, v := range all {
			err = errors.Join(err, v.Wait(x.ctx))
		}
	case "barrier":
		err = g.Barrier(x.ctx)
	case "group":
		results = []*tensor.Tensor{one(o.N, 0)}
		var sub *pg.ProcessGroup
		if sub, err = g.NewGroup(x.ctx, o.Ranks); err == nil && sub.IsMember() {
			w, err = sub.AllReduce(ctx, results[0], pg.Sum())
		}
	default:
		err = fmt.Errorf("unknown operation %q", o.Op)
	}
	if err == nil && failed == nil && w != nil {
		err = w.Wait(x.ctx)
	}
	if err = errors.Join(failed, err); err != nil {
		err = fmt.Errorf("operation %d, %s of %s: %w", k, o.Op, o.DType, err)
	}
	return results, err
}

func (x *member) within() context.Context { return cuda.InStream(x.ctx, x.stream) }

// device returns what makes tensors of an operation on the device.
func (x *member) device(k int, o op) func(n, j int) (*tensor.Tensor, error) {
	return func(n, j int) (*tensor.Tensor, error) {
		t, err := values(k, x.g.Rank(), n, o.DType, j)
		if err != nil {
			return nil, err
		}
		return x.on(t)
	}
}

// script prints a digest of each operation's results, as rank.py does.
func (x *member) script() error {
	all, err := load()
	if err != nil {
		return err
	}
	for k, o := range all {
		results, err := x.do(x.within(), k, o, x.device(k, o))
		if err != nil {
			return err
		}
		h := sha256.New()
		for _, t := range results {
			b, err := x.bytes(t)
			if err != nil {
				return err
			}
			h.Write(b)
		}
		fmt.Println(k, o.Op, o.DType, hex.EncodeToString(h.Sum(nil))[:16])
		if err := x.free(); err != nil {
			return err
		}
	}
	return x.g.Barrier(x.ctx)
}

// split prints the sum of each part of splits into two parts and into one, as rank.py does.
func (x *member) split() error {
	whole := make([]int, x.g.Size())
	parts := make([][]int, 2)
	for r := range whole {
		whole[r] = r
		parts[r%2] = append(parts[r%2], r)
	}
	for _, lists := range [][][]int{parts, {whole}} {
		part, err := x.g.SplitRanks(x.ctx, lists)
		if err != nil {
			return err
		}
		v, err := tensor.Of([]float32{float32(x.g.Rank() + 1)}, 1)
		if err != nil {
			return err
		}
		if v, err = x.on(v); err != nil {
			return err
		}
		if err := pg.Wait(part.AllReduce(x.within(), v, pg.Sum())); err != nil {
			return err
		}
		b, err := x.bytes(v)
		if err != nil {
			return err
		}
		fmt.Printf("split %d %.1f\n", len(lists), math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return x.g.Barrier(x.ctx)
}

// beside does each operation on the device and in CPU memory. Sums of a few multiples of 1/8 are exact; products of
// short floats are not.
func (x *member) beside() error {
	all, err := load()
	if err != nil {
		return err
	}
	done := 0
	for k, o := range all {
		if o.Op == "group" || o.Reduce == "product" && o.DType[len(o.DType)-2:] == "16" {
			continue
		}
		got, err := x.do(x.within(), k, o, x.device(k, o))
		if err != nil {
			return err
		}
		want, err := x.do(x.ctx, k, o, func(n, j int) (*tensor.Tensor, error) { return values(k, x.g.Rank(), n, o.DType, j) })
		if err != nil {
			return err
		}
		for i, t := range got {
			b, err := x.bytes(t)
			if err != nil {
				return err
			}
			if !bytes.Equal(b, want[i].Bytes()) {
				return fmt.Errorf("operation %d, %s of %s, %s: tensor %d differs from that of backend gloo", k, o.Op, o.DType, o.Reduce, i)
			}
		}
		done++
		if err := x.free(); err != nil {
			return err
		}
	}
	fmt.Println("compared", done)
	return nil
}

// times prints what rank.py prints.
func (x *member) times() error {
	for power := 2; power < 31; power += 4 {
		n := 1 << power
		m, err := x.dev.Alloc(n)
		if err != nil {
			return err
		}
		x.mem = append(x.mem, m)
		if err := x.stream.Memset(m.Ptr(), 0, n); err != nil {
			return err
		}
		t, err := tensor.OnDevice(tensor.Float32, m, n/4)
		if err != nil {
			return err
		}
		calls := 200
		if power >= 24 {
			calls = 20
		}
		ctx := x.within()
		row := func() error {
			for range calls {
				if _, err := x.g.AllReduce(ctx, t, pg.Sum()); err != nil {
					return err
				}
			}
			return nil
		}
		if err := errors.Join(row(), x.sync()); err != nil {
			return err
		}
		graph, err := driver.Capture(x.stream, row)
		if err != nil {
			return err
		}
		if err := errors.Join(graph.Launch(x.stream), x.sync()); err != nil {
			return err
		}
		for _, how := range []string{"queued", "graph"} {
			var whole, host []time.Duration
			for range 5 {
				if err := x.g.Barrier(x.ctx, pg.BarrierOptions{Device: tensor.CUDA}); err != nil {
					return err
				}
				begun := time.Now()
				if how == "graph" {
					err = graph.Launch(x.stream)
				} else {
					err = row()
				}
				issued := time.Since(begun)
				if err = errors.Join(err, x.sync()); err != nil {
					return err
				}
				whole, host = append(whole, time.Since(begun)), append(host, issued)
			}
			slices.Sort(whole)
			slices.Sort(host)
			if x.g.Rank() == 0 {
				fmt.Println("time", how, n, host[2].Seconds()*1e6/float64(calls), whole[2].Seconds()*1e6/float64(calls))
			}
		}
		if err := errors.Join(graph.Close(), x.free()); err != nil {
			return err
		}
	}
	return nil
}

// fault is an all_reduce in which rank 1 fails. The others print when their error came, and make a group of one rank.
func (x *member) fault() error {
	how := os.Getenv("BARS_TEST_FAULT")
	t, err := values(0, x.g.Rank(), 1<<20, "float32", 0)
	if err == nil {
		t, err = x.on(t)
	}
	if err == nil {
		err = pg.Wait(x.g.AllReduce(x.within(), t, pg.Sum()))
	}
	if err != nil {
		return err
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGUSR1)
	fmt.Println("ready")
	if x.g.Rank() == 1 {
		if how != "cancel" {
			<-told // or is killed, or stopped
			if how == "panic" {
				panic("as asked")
			}
			return nil
		}
		// It calls, and cancels before one of the others, so it waits for rank 0.
		ctx, cancel := context.WithCancel(x.ctx)
		<-told
		cancel()
		_, err := x.g.AllReduce(cuda.InStream(ctx, x.stream), t, pg.Sum())
		x.g.Abort(err)
		return nil
	}
	err = pg.Wait(x.g.AllReduce(x.within(), t, pg.Sum(), pg.CallOptions{Timeout: faultTimeout}))
	if err == nil {
		return errors.New("an all_reduce without rank 1 has succeeded")
	}
	fmt.Printf("failed %d %q\n", time.Now().UnixMicro(), err.Error())
	x.g.Close()
	o := pg.Options{Backend: "nccl", BackendOptions: pg.BackendOptions{nccl.Options{}}, Timeout: time.Minute}
	alone, err := pg.Init(x.ctx, "file://"+filepath.Join(os.Getenv("BARS_TEST_DIR"), fmt.Sprint("again-", how, os.Getpid())), pg.InitOptions{Options: o, Rank: 0, Size: 1})
	if err == nil {
		err = pg.Wait(alone.AllReduce(x.within(), t, pg.Sum()))
	}
	if err != nil {
		return err
	}
	fmt.Println("again")
	return alone.Close()
}

// groups makes and closes groups, and prints how much memory of the device was free before and after.
func (x *member) groups() error {
	t, err := values(0, x.g.Rank(), 1<<10, "float32", 0)
	if err == nil {
		t, err = x.on(t)
	}
	if err != nil {
		return err
	}
	everyone := make([]int, x.g.Size())
	for r := range everyone {
		everyone[r] = r
	}
	var before, after uint64
	for i := range 200 {
		sub, err := x.g.NewGroup(x.ctx, everyone)
		if err == nil {
			err = pg.Wait(sub.AllReduce(x.within(), t, pg.Sum()))
		}
		if err == nil {
			err = sub.Close()
		}
		if err == nil && i == 9 {
			before, _, err = x.dev.MemInfo()
		}
		if err != nil {
			return fmt.Errorf("group %d: %w", i, err)
		}
	}
	if after, _, err = x.dev.MemInfo(); err != nil {
		return err
	}
	fmt.Println("free", before, after)
	return nil
}
