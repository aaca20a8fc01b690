package cuda

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/internal/registry"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// call is a collective that has been checked, on its way to one of the works. All works read the same fields.
type call struct {
	b       *Backend
	ctx     context.Context
	op      work.OpType
	timeout time.Duration
	print   board.Call

	// Out are the tensors that are written, In those that are only read. The order is that of the operation's row.
	out, in []*tensor.Tensor
	result  []*tensor.Tensor // of the Work; nil means out
	parts   int              // collectives of a coalesced call; 0 means one
	bytes   int              // for the table of ways: of the buffer, or of one rank's block
	reduce  backend.ReduceOp // of operations that reduce
	root    int
	first   int  // of a broadcast: the number in out of the root's source, and elsewhere of the first to have the data
	uneven  bool // tensors differ in length from rank to rank

	way     *ways.Range      // see chosen
	cluster *clusterway.Call // see between
	kept    bool             // somebody has the call after issue has returned
}

// calls keeps calls for later ones.
var calls = sync.Pool{New: func() any { return new(call) }}

// newCall returns a call of an operation.
func (b *Backend) newCall(ctx context.Context, op work.OpType, timeout time.Duration, print board.Call) *call {
	c := calls.Get().(*call)
	*c = call{b: b, ctx: ctx, op: op, timeout: timeout, print: print}
	return c
}

// row returns what the operation is.
func (c *call) row() *operation { return &operations[c.op] }

// kind is what works are registered for.
type kind struct {
	op     work.OpType
	layout tensor.Layout
}

func (k kind) String() string { return fmt.Sprintf("%v of %v tensors", k.op, k.layout) }

// works has the ways of all operations. A work's Can has the same answer on all ranks.
var works registry.Table[kind, way]

// way does calls.
type way interface {
	// Meet asks the other ranks what Can needs to know. The first calls of a group do that, on all ranks alike.
	Meet(c *call) error

	// Can returns nil if the way does the call, else the reason why not. It asks nobody, and changes nothing.
	Can(c *call) error

	// OnDevice reports whether tensors in CPU memory are copied to this rank's device for such a call.
	OnDevice(c *call) bool

	// Issue starts the call.
	Issue(c *call) (*work.Work, error)

	// How says for Explain how the call goes.
	How(c *call) string
}

// alone is a way whose Can asks nobody.
type alone struct{}

func (alone) Meet(*call) error { return nil }

func (c *call) kind() kind {
	k := kind{c.op, tensor.Strided}
	if len(c.out) > 0 {
		k.layout = c.out[0].Layout()
	}
	return k
}

// wanted returns the only work that the options allow, and the option that says so. An option names works for dense
// tensors.
func (c *call) wanted() (name, option string) {
	switch o := &c.b.options; {
	case c.op == work.AllReduce && !c.print.Sparse:
		return o.AllReduce, "Options.AllReduce"
	case c.op == work.Broadcast && o.Broadcast == BroadcastDirect:
		return DirectWork, "Options.Broadcast"
	case c.op == work.Broadcast && o.Broadcast != "":
		return HostWork, "Options.Broadcast"
	}
	return "", ""
}

// choose returns the work that does the call, with why those of a higher priority do not. Ask has works meet first.
func (c *call) choose(ask bool) (w registry.Work[way], not registry.Refusals, err error) {
	wanted, option := c.wanted()
	for _, w := range works.Of(c.kind()) {
		if wanted != "" && w.Name != wanted {
			continue
		}
		var why error
		if ask {
			why = w.Do.Meet(c)
		}
		if why = cmp.Or(why, w.Do.Can(c)); why == nil {
			return w, not, nil
		}
		if wanted != "" {
			return w, nil, fmt.Errorf("%v work %q, which %s asks for: %w", c.op, wanted, option, why)
		}
		if !ask {
			not.Add(w.Name, why)
		}
	}
	switch t := c.out; {
	case wanted != "":
		err = fmt.Errorf("no %v work is called %q", c.op, wanted)
	case len(works.Of(c.kind())) == 0:
		err = fmt.Errorf("unsupported layout %v on device type %v", t[0].Layout(), t[0].Device().Type)
	case ask:
		_, not, _ = c.choose(false)
		err = fmt.Errorf("no %v work for %v: %s", c.op, t[0], strings.Join(not, "; "))
	default:
		err = fmt.Errorf("no %v work: %s", c.op, strings.Join(not, "; "))
	}
	return w, not, err
}

// issue starts a call in the first way that can do it. The caller does not use the call any more.
func (b *Backend) issue(c *call) (*work.Work, error) {
	defer c.free()
	w, _, err := c.choose(true)
	if err != nil {
		return nil, c.refused(err)
	}
	if !c.print.Sparse && someOnCPU(c.out, c.in) && b.shadows(w.Do.OnDevice(c), c.out, c.in) {
		return b.mixCall(c)
	}
	return w.Do.Issue(c)
}

// free keeps the call for a later one, unless somebody has it.
func (c *call) free() {
	if !c.kept {
		*c = call{}
		calls.Put(c)
	}
}

// mixCall is issue with shadows of the tensors in CPU memory.
func (b *Backend) mixCall(c *call) (*work.Work, error) {
	again := *c
	result := c.results()
	return b.mix(c.ctx, c.op, c.out, result, [][]*tensor.Tensor{c.out, c.in}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
		x := calls.Get().(*call)
		*x = again
		x.ctx, x.out, x.in, x.result, x.way, x.cluster = ctx, l[0], l[1], nil, nil, nil
		return b.issue(x)
	})
}

// results returns the tensors that the Work has.
func (c *call) results() []*tensor.Tensor {
	if c.result != nil {
		return c.result
	}
	return c.out
}

// refused is the error of a call that no work does because of err. If the group has failed, it is
// the group's error.
func (c *call) refused(err error) error {
	if c.b.g.Broken() != nil || c.ctx.Err() != nil {
		if _, _, err := c.b.g.Admit(c.ctx, c.op, 0); err != nil {
			return err
		}
	}
	return bad(c.op, "%v", err)
}

// tensor returns a tensor of the call, nil if it has none.
func (c *call) tensor() *tensor.Tensor {
	switch {
	case len(c.out) > 0:
		return c.out[0]
	case len(c.in) > 0:
		return c.in[0]
	}
	return nil
}

// device returns the device of this rank's kernels, if the call is the first one that needs it.
func (c *call) device() int {
	if t := c.tensor(); t != nil && t.Device().Type == tensor.CUDA {
		return t.Device().Index
	}
	return c.b.g.OwnDevice()
}

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: Name, Op: op, What: fmt.Sprintf(format, args...)}
}

// dense checks a strided tensor, in CPU memory or in that of the driver's devices.
func (b *Backend) dense(op work.OpType, name string, t *tensor.Tensor) error {
	g := b.g
	switch {
	case t == nil:
		return bad(op, "%s is nil", name)
	case t.Layout() != tensor.Strided:
		return bad(op, "only supports dense tensors, %s is %v", name, t)
	case inCPU(t):
		return nil
	case t.Device().Type != tensor.CUDA:
		return bad(op, "unsupported device type %v of %s", t.Device().Type, name)
	case g.Missing != nil:
		return bad(op, "no device for %s: %v", name, g.Missing)
	case t.Device().Index < 0 || t.Device().Index >= g.Driver.Count():
		return bad(op, "%s is on %v, the driver %s has %d devices", name, t.Device(), g.Driver.Name(), g.Driver.Count())
	}
	if _, ok := t.Memory().(interface{ Ptr() driver.Ptr }); !ok {
		return bad(op, "%s lies in a %T, want memory of package driver", name, t.Memory())
	}
	return nil
}
