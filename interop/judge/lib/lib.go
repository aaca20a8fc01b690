// Command lib is a C library over package pg, for c10d_go.py:
//
//	CGO_ENABLED=1 go build -buildmode c-shared -o libc10dgo.so ./lib
//
// Objects of Go are numbers in C, above 0. A call that fails returns -1 and writes its error's text to err, which has
// room for n bytes. Every call may block, and may come from any thread. A process that has forked may not call.
package main

/*
#include <stdint.h>
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/cgo"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// group is what c10dgo_new makes.
type group struct {
	*pg.ProcessGroup
	store *tcp.Store
}

// operation is what c10dgo_call starts.
type operation struct {
	*work.Work
	sparse []*tensor.Tensor // its sparse tensors, in their order
}

func valueOf[T any](h C.int64_t) T { return cgo.Handle(h).Value().(T) }

func number(v any) C.int64_t { return C.int64_t(cgo.NewHandle(v)) }

// say copies a text to C's memory, cut to n-1 bytes.
func say(text string, to *C.char, n C.int) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(to)), int(n))
	b[copy(b[:n-1], text)] = 0
}

func failed(err error, to *C.char, n C.int) C.int64_t {
	say(err.Error(), to, n)
	return -1
}

// until returns a context for ms milliseconds, 0 for no limit.
func until(ms C.int64_t) (context.Context, context.CancelFunc) {
	if ms <= 0 {
		return context.WithCancel(context.Background())
	}
	return context.WithTimeout(context.Background(), millis(ms))
}

func millis(ms C.int64_t) time.Duration { return time.Duration(ms) * time.Millisecond }

// server is this process's store, for all groups whose rank 0 is here. It ends with the process, so that no group's
// end can come too early for other ranks.
var server = sync.OnceValues(func() (*tcp.Server, error) { return tcp.Listen(context.Background(), "127.0.0.1:0") })

// c10dgo_serve writes the address of this process's store to text.
//
//export c10dgo_serve
func c10dgo_serve(text *C.char, n C.int) C.int64_t {
	s, err := server()
	if err != nil {
		return failed(err, text, n)
	}
	say(s.Addr().String(), text, n)
	return 0
}

// c10dgo_new makes a group over the store at addr, under a prefix. Without a host ranks share memory.
//
//export c10dgo_new
func c10dgo_new(addr, prefix, wire, host *C.char, rank, size, detail C.int, ms C.int64_t, err *C.char, n C.int) C.int64_t {
	ctx, cancel := until(ms)
	defer cancel()
	st, e := tcp.New(ctx, C.GoString(addr), tcp.Options{Timeout: millis(ms)})
	if e != nil {
		return failed(e, err, n)
	}
	g, e := pg.New(ctx, store.Prefix(C.GoString(prefix), st), int(rank), int(size), pg.Options{
		Timeout: millis(ms), Detail: detail != 0,
		BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.Wire(C.GoString(wire)), Host: C.GoString(host)}},
	})
	if e != nil {
		return failed(errors.Join(e, st.Close()), err, n)
	}
	return number(&group{g, st})
}

// c10dgo_close gives the group's operations ms milliseconds to end, and closes it. Other calls with it must have
// returned, and none may follow.
//
//export c10dgo_close
func c10dgo_close(h, ms C.int64_t) {
	g := valueOf[*group](h)
	ctx, cancel := until(max(ms, 1))
	defer cancel()
	_, _ = g.Shutdown(ctx), g.store.Close() // the process may go on: there is nobody to tell
	cgo.Handle(h).Delete()
}

// c10dgo_call starts an operation of a group. args has root or peer, tag, milliseconds, and then two lists of tensors and
// two of numbers, each after its length.
//
//export c10dgo_call
func c10dgo_call(h C.int64_t, name, op *C.char, args *C.int64_t, count C.int, err *C.char, n C.int) C.int64_t {
	var o operation
	reader := arguments{ints: unsafe.Slice((*int64)(unsafe.Pointer(args)), int(count))}
	e := reader.call(&o, valueOf[*group](h).ProcessGroup, C.GoString(name), C.GoString(op))
	if e != nil {
		return failed(e, err, n)
	}
	return number(&o)
}

// c10dgo_monitored is a monitored barrier. It blocks.
//
//export c10dgo_monitored
func c10dgo_monitored(h, ms C.int64_t, err *C.char, n C.int) C.int64_t {
	e := valueOf[*group](h).MonitoredBarrier(context.Background(), pg.CallOptions{Timeout: millis(ms)})
	if e != nil {
		return failed(e, err, n)
	}
	return 0
}

// c10dgo_wait waits for an operation, at most ms milliseconds if that is not 0.
//
//export c10dgo_wait
func c10dgo_wait(h, ms C.int64_t, err *C.char, n C.int) C.int64_t {
	ctx, cancel := until(ms)
	defer cancel()
	if e := valueOf[*operation](h).Wait(ctx); e != nil {
		return failed(e, err, n)
	}
	return 0
}

// c10dgo_done reports whether an operation has ended.
//
//export c10dgo_done
func c10dgo_done(h C.int64_t) C.int64_t {
	if valueOf[*operation](h).IsCompleted() {
		return 1
	}
	return 0
}

// c10dgo_source returns the rank from which an operation received, -1 if there is none.
//
//export c10dgo_source
func c10dgo_source(h C.int64_t) C.int64_t {
	r, err := valueOf[*operation](h).SourceRank()
	if err != nil {
		return -1
	}
	return C.int64_t(r)
}

// c10dgo_entries returns how many entries sparse tensor i of an operation has. Unless they are 0, it copies them to
// indices and values.
//
//export c10dgo_entries
func c10dgo_entries(h, i, indices, values C.int64_t) C.int64_t {
	t := valueOf[*operation](h).sparse[i]
	for p, part := range map[C.int64_t]*tensor.Tensor{indices: t.Indices(), values: t.Values()} {
		if p != 0 {
			_ = part.Pack(memory(int64(p), part.ByteLen())) // the length is the tensor's own
		}
	}
	return C.int64_t(t.NNZ())
}

// c10dgo_free forgets an operation.
//
//export c10dgo_free
func c10dgo_free(h C.int64_t) { cgo.Handle(h).Delete() }

// arguments reads the numbers of a call, front to back.
type arguments struct{ ints []int64 }

func (a *arguments) next() int64 {
	v := a.ints[0]
	a.ints = a.ints[1:]
	return v
}

func (a *arguments) list(n int64) []int {
	v := make([]int, n)
	for i := range v {
		v[i] = int(a.next())
	}
	return v
}

// dtypes are the types by PyTorch's numbers.
var dtypes = func() map[int64]tensor.DType {
	all := map[int64]tensor.DType{}
	for _, d := range tensor.DTypes() {
		all[int64(d.TorchCode())] = d
	}
	return all
}()

// tensor reads a tensor over PyTorch's memory: dimensions, shape, and for a dense one 0, dtype, address and strides. For
// a sparse one it is 1, and its indices and values follow.
func (a *arguments) tensor() (*tensor.Tensor, error) {
	dims := a.next()
	shape := a.list(dims)
	if a.next() == 1 {
		indices, err := a.tensor()
		if err != nil {
			return nil, err
		}
		values, err := a.tensor()
		if err != nil {
			return nil, err
		}
		return tensor.Sparse(indices, values, shape...)
	}
	code, address, strides := a.next(), a.next(), a.list(dims)
	d, ok := dtypes[code]
	if !ok {
		return nil, fmt.Errorf("invalid scalar type: number %d of PyTorch has no dtype here", code)
	}
	if slices.Contains(shape, 0) {
		return tensor.FromBytes(d, nil, shape...)
	}
	last := 0
	for i := range shape {
		last += (shape[i] - 1) * strides[i]
	}
	whole, err := tensor.FromBytes(d, memory(address, (last+1)*d.Size()), last+1)
	if err != nil {
		return nil, err
	}
	return whole.AsStrided(shape, strides, 0)
}

func memory(address int64, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
}

// tensors reads a list of tensors, and adds the sparse ones to o.
func (a *arguments) tensors(o *operation) ([]*tensor.Tensor, error) {
	ts := make([]*tensor.Tensor, a.next())
	for i := range ts {
		t, err := a.tensor()
		if err != nil {
			return nil, err
		}
		if ts[i] = t; t.Layout() == tensor.SparseCOO {
			o.sparse = append(o.sparse, t)
		}
	}
	return ts, nil
}

// only is the tensor of a list of one, which most operations take. Others are c10d's for several devices of one rank.
func only(operation string, ts []*tensor.Tensor) (*tensor.Tensor, error) {
	if len(ts) != 1 {
		return nil, fmt.Errorf("%s takes one tensor, not %d", operation, len(ts))
	}
	return ts[0], nil
}

// call starts the operation of a name. out and in are the lists of tensors.
func (a *arguments) call(o *operation, g *pg.ProcessGroup, name, opName string) (err error) {
	root, tag, limit := int(a.next()), a.next(), time.Duration(a.next())*time.Millisecond
	out, err := a.tensors(o)
	if err != nil {
		return err
	}
	in, err := a.tensors(o)
	if err != nil {
		return err
	}
	outSplits, inSplits := a.list(a.next()), a.list(a.next())
	var op backend.ReduceOp
	if opName != "" {
		if op, err = backend.ParseReduceOp(opName); err != nil {
			return err
		}
	}
	ctx, of, p2p := context.Background(), pg.CallOptions{Timeout: limit}, pg.P2POptions{Tag: uint32(tag), Timeout: limit}
	var dst, src *tensor.Tensor
	switch name {
	case "send", "recv", "recv_any":
		if dst, err = only(name, out); err == nil && (tag < 0 || tag > math.MaxUint32) {
			err = fmt.Errorf("%s: tag %d is not a number of 32 bits", name, tag)
		}
	case "reduce", "scatter", "reduce_scatter":
		dst, err = only(name, out)
	case "all_gather", "all_gather_v", "gather":
		src, err = only(name, in)
	case "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single":
		if dst, err = only(name, out); err == nil {
			src, err = only(name, in)
		}
	}
	if err != nil {
		return err
	}
	switch name {
	case "broadcast", "all_reduce":
		// Several tensors of a rank are the backend's.
		var b backend.Backend
		if b, err = g.Backend(tensor.CPU); err != nil {
			return err
		}
		if name == "broadcast" {
			o.Work, err = b.Broadcast(ctx, out, backend.BroadcastOptions{Root: root, RootTensor: int(tag), Timeout: limit})
		} else {
			o.Work, err = b.AllReduce(ctx, out, backend.AllReduceOptions{Op: op, Timeout: limit})
		}
	case "all_reduce_coalesced":
		o.Work, err = g.AllReduceCoalesced(ctx, out, op, of)
	case "reduce":
		o.Work, err = g.Reduce(ctx, dst, root, op, of)
	case "all_gather":
		o.Work, err = g.AllGather(ctx, out, src, of)
	case "all_gather_v":
		o.Work, err = g.AllGatherV(ctx, out, src, of)
	case "all_gather_into_tensor":
		o.Work, err = g.AllGatherIntoTensor(ctx, dst, src, of)
	case "all_gather_into_tensor_coalesced":
		o.Work, err = g.AllGatherIntoTensorCoalesced(ctx, out, in, of)
	case "all_gather_coalesced": // the outputs of rank 0, of rank 1 and so on
		if len(in) == 0 {
			return fmt.Errorf("%s takes one tensor or more", name)
		}
		o.Work, err = g.AllGatherCoalesced(ctx, slices.Collect(slices.Chunk(out, len(in))), in, of)
	case "gather":
		o.Work, err = g.Gather(ctx, out, src, root, of)
	case "scatter":
		o.Work, err = g.Scatter(ctx, dst, in, root, of)
	case "reduce_scatter":
		o.Work, err = g.ReduceScatter(ctx, dst, in, op, of)
	case "reduce_scatter_tensor":
		o.Work, err = g.ReduceScatterTensor(ctx, dst, src, op, of)
	case "reduce_scatter_tensor_coalesced":
		o.Work, err = g.ReduceScatterTensorCoalesced(ctx, out, in, op, of)
	case "all_to_all":
		o.Work, err = g.AllToAll(ctx, out, in, of)
	case "all_to_all_single":
		if len(outSplits) == 0 {
			outSplits = nil
		}
		if len(inSplits) == 0 {
			inSplits = nil
		}
		o.Work, err = g.AllToAllSingle(ctx, dst, src, outSplits, inSplits, of)
	case "send":
		o.Work, err = g.Send(ctx, dst, root, p2p)
	case "recv":
		o.Work, err = g.Recv(ctx, dst, root, p2p)
	case "recv_any":
		o.Work, err = g.RecvAnySource(ctx, dst, p2p)
	case "barrier":
		o.Work, err = g.BarrierAsync(ctx, pg.BarrierOptions{Timeout: limit})
	default:
		err = fmt.Errorf("%s is no operation of this library", name)
	}
	return err
}

func main() {}
