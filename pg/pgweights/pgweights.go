// Package pgweights sends a model's parameters from one rank of a process group to all others, by broadcasts. Tensors may
// be on devices. In a group of backend nccl or cuda the parameters go from device memory to device memory, without the
// hosts.
//
//	err := pgweights.Publish(ctx, g, version, params) // on the publisher's rank
//
//	version, err := pgweights.Receive(ctx, g, 0, func(p pgweights.Param) (*tensor.Tensor, error) { // on all others
//		return model[p.Name], nil
//	})
//
// Package weights does it over TCP, without a group and in CPU memory: receivers come and go, deltas are short, and
// a reader sees whole versions alone. Here all ranks take part in each version. The receiver says where it goes:
// into the tensors in use, or into a second set, so that it can serve meanwhile.
//
// # Calls
//
// Publish is a broadcast of the list of parameters, and one of each parameter. The list is an object (pg.BroadcastObject).
// It goes over the CPU's backend if the group has one, as "cpu:gloo,cuda:nccl" has, and then a receiver that waits for the
// next version uses no device. The calls come after the streams that their context names (cuda.WithStreams). When Publish
// and Receive return, the parameters have come.
//
// Receive waits for the publisher until the group's timeout. A call that fails after the list has been sent aborts the
// group, since other ranks may wait for this one.
//
// # A publisher in PyTorch
//
// The publisher may be a rank of PyTorch, with gloo or NCCL. Device is "cuda" if the group has no backend for the CPU.
//
//	def publish(version, params, group=None, device="cpu"):
//	    import json, torch, torch.distributed as dist
//	    me, params = dist.get_rank(), [(name, t.detach().contiguous()) for name, t in params]
//	    text = json.dumps({"version": version, "params": [
//	        {"name": name, "dtype": str(t.dtype)[6:], "shape": list(t.shape)} for name, t in params]}).encode()
//	    dist.broadcast(torch.tensor([len(text)], device=device), me, group)
//	    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), me, group)
//	    for _, t in params:
//	        dist.broadcast(t, me, group)
package pgweights

import (
	"context"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Named is a parameter to publish.
type Named struct {
	Name   string
	Tensor *tensor.Tensor
}

// Param describes a parameter that comes.
type Param struct {
	Name  string
	DType tensor.DType
	Shape []int
}

// list is what the publisher broadcasts first, in JSON.
type list struct {
	Version uint64   `json:"version"`
	Params  []listed `json:"params"`
}

type listed struct {
	Name  string `json:"name"`
	DType string `json:"dtype"`
	Shape []int  `json:"shape"`
}

// Publish sends a version of the parameters to the other ranks of the group, which call Receive. The tensors belong to
// Publish until it returns.
func Publish(ctx context.Context, g *pg.ProcessGroup, version uint64, params []Named) error {
	fail := func(err error) error { return fmt.Errorf("pgweights: Publish: version %d: %w", version, err) }
	l := list{Version: version, Params: make([]listed, len(params))}
	ts := make([]*tensor.Tensor, len(params))
	for i, p := range params {
		if p.Tensor == nil || p.Tensor.Layout() != tensor.Strided {
			return fail(fmt.Errorf("parameter %q is no dense tensor", p.Name))
		}
		l.Params[i] = listed{p.Name, p.Tensor.DType().String(), p.Tensor.Shape()}
		ts[i] = p.Tensor
	}
	if _, err := pg.BroadcastObject(ctx, g, []list{l}, g.Rank()); err != nil {
		return fail(err)
	}
	if err := broadcast(ctx, g, ts, g.Rank()); err != nil {
		err = fail(err)
		g.Abort(err)
		return err
	}
	return nil
}

// Receive waits for the next version of rank root. Place returns the tensor for each parameter, in the publisher's order:
// of its dtype and shape, on any device of the group. After an error some of the tensors may have the new elements.
func Receive(ctx context.Context, g *pg.ProcessGroup, root int, place func(Param) (*tensor.Tensor, error)) (version uint64, err error) {
	got, err := pg.BroadcastObject(ctx, g, make([]list, 1), root)
	if err != nil {
		return 0, fmt.Errorf("pgweights: Receive: %w", err)
	}
	l := got[0]
	ts := make([]*tensor.Tensor, len(l.Params))
	for i, p := range l.Params {
		if ts[i], err = placed(p, place); err != nil {
			err = fmt.Errorf("parameter %.100q: %w", p.Name, err)
			break
		}
	}
	if err == nil {
		err = broadcast(ctx, g, ts, root)
	}
	if err != nil {
		err = fmt.Errorf("pgweights: Receive: version %d: %w", l.Version, err)
		g.Abort(err)
		return 0, err
	}
	return l.Version, nil
}

// placed returns the tensor for a parameter.
func placed(l listed, place func(Param) (*tensor.Tensor, error)) (*tensor.Tensor, error) {
	d, err := tensor.ParseDType(l.DType)
	if err != nil {
		return nil, err
	}
	t, err := place(Param{l.Name, d, slices.Clone(l.Shape)})
	switch {
	case err != nil:
		return nil, err
	case t == nil:
		return nil, fmt.Errorf("there is no tensor for it")
	case t.DType() != d || !slices.Equal(t.Shape(), l.Shape):
		return nil, fmt.Errorf("it is of %v %v, the tensor for it of %v %v", d, l.Shape, t.DType(), t.Shape())
	}
	return t, nil
}

// underway is how many broadcasts a rank has started at most before it waits for the first of them.
const underway = 32

// broadcast broadcasts tensors in their order.
func broadcast(ctx context.Context, g *pg.ProcessGroup, ts []*tensor.Tensor, root int) error {
	var works []*work.Work
	for _, t := range ts {
		w, err := g.Broadcast(ctx, t, root)
		if err != nil {
			return err
		}
		if works = append(works, w); len(works) == underway {
			if err := works[0].Wait(ctx); err != nil {
				return err
			}
			works = works[1:]
		}
	}
	for _, w := range works {
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
