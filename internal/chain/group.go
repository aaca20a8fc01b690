package chain

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/internal/callback"
)

// Group is a list of ranks of a mesh. All members call the same collectives in the same order.
// Any number may be under way.
type Group struct {
	n       *Node
	name    string
	members []int
	p       int // this rank's place

	mu     sync.Mutex
	seq    uint64
	closed bool
}

// Errors of groups and their operations.
var (
	ErrNotMember = errors.New("this rank is no member")
	ErrMismatch  = errors.New("the members disagree on sizes or shapes")
)

// Group returns the group of members, ranks of the mesh. All members use the same name and list.
// A node can use a name once.
func (n *Node) Group(name string, members []int) (*Group, error) {
	p := slices.Index(members, n.mesh.Rank())
	sorted := slices.Sorted(slices.Values(members))
	switch {
	case len(name) > maxName:
		return nil, fmt.Errorf("chain: a group's name of %d bytes, the limit is %d", len(name), maxName)
	case len(members) == 0 || sorted[0] < 0 || sorted[len(sorted)-1] >= n.mesh.Size() || len(slices.Compact(sorted)) != len(members):
		return nil, fmt.Errorf("chain: group %q of ranks %v in a mesh of %d", name, members, n.mesh.Size())
	case p < 0:
		return nil, fmt.Errorf("chain: group %q of ranks %v: %w", name, members, ErrNotMember)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, errClosed
	}
	if n.groups[name] != nil {
		return nil, fmt.Errorf("chain: group %q exists already", name)
	}
	g := &Group{n: n, name: name, members: slices.Clone(members), p: p}
	n.groups[name] = g
	return g, nil
}

// Close ends the group's chains on this rank. Later messages for it are refused.
func (g *Group) Close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	err := fmt.Errorf("chain: group %q is closed", g.name)
	g.n.registry.EndGroup(groupKey(kindStep, g.name), err)
	g.n.registry.EndGroup(groupKey(kindRaw, g.name), err)
}

// collective is one operation under way.
type collective struct {
	*Chain
	g   *Group
	seq uint64
}

// begin starts a collective that is bounded by ctx. The caller releases it once everything is
// posted.
func (g *Group) begin(ctx context.Context) *collective {
	g.mu.Lock()
	c := &collective{Chain: newChain(g.n.run), g: g, seq: g.seq}
	g.seq++
	closed := g.closed
	g.mu.Unlock()
	c.pending = 1
	stop := context.AfterFunc(ctx, func() {
		c.fail(fmt.Errorf("chain: group %q seq %d on rank %d: %w", g.name, c.seq, g.n.mesh.Rank(), context.Cause(ctx)))
	})
	key := groupKey(kindStep, g.name)
	c.failed = func(err error) {
		// Only the rank that noticed the error tells the others.
		var told *remoteError
		if !errors.As(err, &told) {
			for _, r := range g.members {
				if r != g.n.mesh.Rank() {
					g.n.post(r, message{head: head{kind: kindFail, seq: c.seq}, name: g.name, data: reason(err), done: func(error) {}})
				}
			}
		}
		g.n.registry.EndCollective(key, c.seq, err)
	}
	c.cleanup = func(err error) {
		stop()
		g.n.registry.EndCollective(key, c.seq, err)
	}
	if closed {
		c.fail(fmt.Errorf("chain: group %q is closed", g.name))
	}
	return c
}

// remoteError is the error of a collective on another rank.
type remoteError struct {
	rank int
	text string
}

func (e *remoteError) Error() string { return fmt.Sprintf("chain: rank %d failed: %s", e.rank, e.text) }

// reason is the text of an error for other ranks.
func reason(err error) []byte {
	s := err.Error()
	return []byte(s[:min(len(s), 1024)])
}

// on makes a worker call f with the value of a step. The chain fails with f's error.
func (c *collective) on(step uint32, f func(value []byte) error) {
	c.hold(1)
	k := callback.Key{Group: groupKey(kindStep, c.g.name), Seq: c.seq, Step: step}
	err := c.g.n.registry.SetCallback(k, func(value []byte, err error) {
		if err != nil {
			if c.broken() {
				err = nil // this is the consequence
			}
			c.release(err)
			return
		}
		c.run(func() {
			if c.broken() {
				c.release(nil)
				return
			}
			c.release(f(value))
		})
	})
	if err != nil {
		if c.broken() {
			err = nil
		}
		c.release(err)
		return
	}
	if from := c.g.before(); c.g.n.hasLeft(from) {
		c.g.abandon(from)
	}
}

// before is the rank from which all values of collectives come.
func (g *Group) before() int { return g.members[(g.p-1+len(g.members))%len(g.members)] }

// abandon ends the callbacks that wait for a rank that has left.
func (g *Group) abandon(rank int) {
	err := fmt.Errorf("chain: rank %d has closed its node", rank)
	if rank == g.before() {
		key := groupKey(kindStep, g.name)
		g.n.registry.Abandon(func(k callback.Key) bool { return k.Group == key }, err)
	}
	key, p := groupKey(kindRaw, g.name), uint32(slices.Index(g.members, rank))
	g.n.registry.Abandon(func(k callback.Key) bool { return k.Group == key && k.Step == p }, err)
}

// send sends data to the member at place p of the group, as the value of step. data must not
// change until the chain has ended.
func (c *collective) send(p int, step uint32, data []byte) {
	c.hold(1)
	c.g.n.post(c.g.members[p], message{head: head{kind: kindStep, step: step, seq: c.seq}, name: c.g.name, data: data, done: c.release})
}

func (c *collective) next() int { return (c.g.p + 1) % len(c.g.members) }

// fits returns an error that names the sender if a value has the wrong size.
func (c *collective) fits(what string, value []byte, want int) error {
	if len(value) == want {
		return nil
	}
	return fmt.Errorf("chain: group %q seq %d: %d bytes of %s from rank %d, want %d: %w",
		c.g.name, c.seq, len(value), what, c.g.before(), want, ErrMismatch)
}

// chunk returns the range of chunk i of n elements in parts: the first n mod
// parts chunks have one more than the others.
func chunk(n, parts, i int) (from, to int) {
	size, more := n/parts, n%parts
	from = i*size + min(i, more)
	to = from + size
	if i < more {
		to++
	}
	return from, to
}

// AllReduce combines the members' src into every member's dst. combine computes dst = dst op src,
// with the local operand first. finish, which may be nil, is called once for each part of the
// result. Both work on elements of elem bytes. The buffers are the same or do not overlap. If
// they differ, src does not change.
//
// It is a ring for any number of members and elements. The elements are cut into a chunk for each
// member. Each chunk travels around the ring once to be combined and once to be copied: 2(N-1)
// messages a member.
func (g *Group) AllReduce(ctx context.Context, dst, src []byte, elem int, combine func(dst, src []byte), finish func(b []byte)) *Chain {
	c := g.begin(ctx)
	switch {
	case elem <= 0 || len(src)%elem != 0:
		c.release(fmt.Errorf("chain: all-reduce of %d bytes in elements of %d", len(src), elem))
		return c.Chain
	case len(dst) != len(src):
		c.release(fmt.Errorf("chain: all-reduce of %d bytes into %d", len(src), len(dst)))
		return c.Chain
	}
	n := len(g.members)
	part := func(b []byte, step int) []byte {
		i := ((g.p-step)%n + n) % n
		from, to := chunk(len(b)/elem, n, i)
		return b[from*elem : to*elem]
	}
	if n == 1 {
		copy(dst, src)
		if finish != nil {
			finish(dst)
		}
		c.release(nil)
		return c.Chain
	}
	for step := 1; step <= 2*n-2; step++ {
		c.on(uint32(step), func(value []byte) error {
			if err := c.fits("all-reduce", value, len(part(src, step))); err != nil {
				return err
			}
			switch {
			case step < n-1:
				combine(value, part(src, step))
			case step == n-1:
				combine(value, part(src, step))
				if finish != nil {
					finish(value)
				}
				copy(part(dst, step), value)
			default:
				copy(part(dst, step), value)
			}
			if step < 2*n-2 {
				c.send(c.next(), uint32(step+1), value)
			}
			return nil
		})
	}
	c.send(c.next(), 1, part(src, 0))
	c.release(nil)
	return c.Chain
}

// broadcastChunk is the size of a broadcast's messages. Inner members send one chunk while they
// receive the next.
const broadcastChunk = 256 << 10

// Broadcast copies the buffer of the member at place root to all members. It goes down a chain of
// all members in chunks, so each sends and receives it once.
func (g *Group) Broadcast(ctx context.Context, buf []byte, root int) *Chain {
	c := g.begin(ctx)
	n := len(g.members)
	if root < 0 || root >= n {
		c.release(fmt.Errorf("chain: broadcast from member %d of %d", root, n))
		return c.Chain
	}
	place := (g.p - root + n) % n
	chunks := max(1, (len(buf)+broadcastChunk-1)/broadcastChunk)
	part := func(i int) []byte {
		return buf[min(i*broadcastChunk, len(buf)):min((i+1)*broadcastChunk, len(buf))]
	}
	for i := range chunks {
		switch {
		case n == 1:
		case place == 0:
			c.send(c.next(), uint32(i), part(i))
		default:
			c.on(uint32(i), func(value []byte) error {
				if err := c.fits("broadcast", value, len(part(i))); err != nil {
					return err
				}
				copy(part(i), value)
				if place < n-1 {
					c.send(c.next(), uint32(i), value)
				}
				return nil
			})
		}
	}
	c.release(nil)
	return c.Chain
}

// Array is an array in memory, in C order.
type Array struct {
	Shape []int
	Data  []byte
}

func (a Array) bytes(elem int) (int, error) {
	n := elem
	for _, d := range a.Shape {
		if d < 0 || d > 0 && n > maxArray/d {
			return 0, fmt.Errorf("chain: an array of shape %v", a.Shape)
		}
		n *= d
	}
	if len(a.Data) != n {
		return 0, fmt.Errorf("chain: %d bytes for an array of shape %v with elements of %d", len(a.Data), a.Shape, elem)
	}
	return n, nil
}

const (
	maxArray = min(1<<40, math.MaxInt)
	maxAxes  = 64
)

// rows describes an array's place in one that is longer along an axis: outer times a run of
// bytes.
func rows(shape []int, axis, elem int) (outer, run int) {
	outer, run = 1, elem
	for i, d := range shape {
		if i < axis {
			outer *= d
		} else {
			run *= d
		}
	}
	return outer, run
}

// AllGather concatenates the members' arrays, all of in's shape, along an axis into out on every
// member. Each array travels once around the ring.
func (g *Group) AllGather(ctx context.Context, out, in Array, axis, elem int) *Chain {
	c := g.begin(ctx)
	shapes := make([][]int, len(g.members))
	for i := range shapes {
		shapes[i] = in.Shape
	}
	size, err := in.bytes(elem)
	if err == nil {
		err = checkAxis(in.Shape, axis, elem)
	}
	if err == nil {
		var total int
		total, err = out.bytes(elem)
		want := slices.Clone(in.Shape)
		if err == nil {
			want[axis] *= len(g.members)
			if total != size*len(g.members) || !slices.Equal(out.Shape, want) {
				err = fmt.Errorf("chain: all-gather into an array of shape %v, want %v", out.Shape, want)
			}
		}
	}
	if err != nil {
		c.release(err)
		return c.Chain
	}
	c.circulate(0, shapes, out, in, axis, elem)
	c.release(nil)
	return c.Chain
}

func checkAxis(shape []int, axis, elem int) error {
	if axis < 0 || axis >= len(shape) || len(shape) > maxAxes || elem <= 0 {
		return fmt.Errorf("chain: all-gather along axis %d of an array of shape %v with elements of %d", axis, shape, elem)
	}
	return nil
}

// AllGatherAny is AllGather for arrays whose extents along the axis differ or are zero. The
// shapes are sent first. result is valid once the chain has ended without an error.
func (g *Group) AllGatherAny(ctx context.Context, in Array, axis, elem int) (result *Array, chain *Chain) {
	c := g.begin(ctx)
	result = new(Array)
	_, err := in.bytes(elem)
	if err == nil {
		err = checkAxis(in.Shape, axis, elem)
	}
	if err != nil {
		c.release(err)
		return result, c.Chain
	}
	n := len(g.members)
	shapes := make([][]int, n)
	shapes[g.p] = slices.Clone(in.Shape)
	var mu sync.Mutex
	known := 1
	place := func() error {
		total := slices.Clone(in.Shape)
		total[axis] = 0
		for i, s := range shapes {
			same := len(s) == len(in.Shape)
			for d := range in.Shape {
				same = same && (d == axis || s[d] == in.Shape[d])
			}
			if !same {
				return fmt.Errorf("chain: group %q seq %d: an array of shape %v on rank %d, of %v on rank %d: %w",
					g.name, c.seq, s, g.members[i], in.Shape, g.members[g.p], ErrMismatch)
			}
			if total[axis] > maxArray-s[axis] {
				return fmt.Errorf("chain: arrays too long along axis %d", axis)
			}
			total[axis] += s[axis]
		}
		outer, run := rows(total, axis, elem)
		*result = Array{Shape: total, Data: make([]byte, outer*run)}
		c.circulate(n-1, shapes, *result, in, axis, elem)
		return nil
	}
	if n == 1 {
		c.release(place())
		return result, c.Chain
	}
	for step := range n - 1 {
		c.on(uint32(step), func(value []byte) error {
			s, err := parseShape(value)
			if err != nil {
				return fmt.Errorf("%w: %w", err, ErrMismatch)
			}
			if step < n-2 {
				c.send(c.next(), uint32(step+1), value)
			}
			mu.Lock()
			shapes[(g.p-step-1+n)%n] = s
			known++
			all := known == n
			mu.Unlock()
			if all {
				return place()
			}
			return nil
		})
	}
	c.send(c.next(), 0, shapeBytes(in.Shape))
	c.release(nil)
	return result, c.Chain
}

// circulate sends every member's array around the ring, in steps from first on.
func (c *collective) circulate(first int, shapes [][]int, out, in Array, axis, elem int) {
	g, n := c.g, len(c.g.members)
	_, whole := rows(out.Shape, axis, elem)
	put := func(member int, data []byte) {
		at := 0
		for i := range member {
			_, run := rows(shapes[i], axis, elem)
			at += run
		}
		outer, run := rows(shapes[member], axis, elem)
		for o := range outer {
			copy(out.Data[o*whole+at:o*whole+at+run], data[o*run:(o+1)*run])
		}
	}
	put(g.p, in.Data)
	if n == 1 {
		return
	}
	for step := range n - 1 {
		member := (g.p - step - 1 + n) % n
		outer, run := rows(shapes[member], axis, elem)
		c.on(uint32(first+step), func(value []byte) error {
			if err := c.fits("all-gather", value, outer*run); err != nil {
				return err
			}
			put(member, value)
			if step < n-2 {
				c.send(c.next(), uint32(first+step+1), value)
			}
			return nil
		})
	}
	c.send(c.next(), uint32(first), in.Data)
}

func shapeBytes(shape []int) []byte {
	b := make([]byte, 0, 8*len(shape))
	for _, d := range shape {
		b = binary.LittleEndian.AppendUint64(b, uint64(d))
	}
	return b
}

func parseShape(b []byte) ([]int, error) {
	if len(b)%8 != 0 || len(b) > 8*maxAxes {
		return nil, fmt.Errorf("chain: a shape of %d bytes", len(b))
	}
	s := make([]int, len(b)/8)
	for i := range s {
		d := binary.LittleEndian.Uint64(b[8*i:])
		if d > maxArray {
			return nil, fmt.Errorf("chain: an extent of %d", d)
		}
		s[i] = int(d)
	}
	return s, nil
}

// Send sends data to the member at place p, under a key. When the chain has ended, data may be
// used again.
func (g *Group) Send(p int, key uint64, data []byte) *Chain {
	c := newChain(g.n.run)
	c.pending = 1
	if p < 0 || p >= len(g.members) {
		c.release(fmt.Errorf("chain: send to member %d of %d", p, len(g.members)))
		return c
	}
	g.n.post(g.members[p], message{head: head{kind: kindRaw, step: uint32(g.p), seq: key}, name: g.name, data: data, done: c.release})
	return c
}

// Recv makes a worker call f with the data that the member at place p sends
// under a key, or the error. After that the key may be used again.
func (g *Group) Recv(p int, key uint64, f func(data []byte, err error)) error {
	if p < 0 || p >= len(g.members) {
		return fmt.Errorf("chain: receive from member %d of %d", p, len(g.members))
	}
	k := callback.Key{Group: groupKey(kindRaw, g.name), Seq: key, Step: uint32(p)}
	err := g.n.registry.SetCallback(k, func(data []byte, err error) {
		if err == nil {
			g.n.registry.Forget(k)
		}
		g.n.run(func() { f(data, err) })
	})
	if err == nil && g.n.hasLeft(g.members[p]) {
		g.abandon(g.members[p])
	}
	return err
}
