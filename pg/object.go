package pg

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Codec turns values into bytes and back. The default passes bytes on and encodes others as JSON; unlike pickle, it runs
// no code that a peer chose.
type Codec[T any] interface {
	Encode(v T) ([]byte, error)
	Decode(b []byte) (T, error)
}

// plain passes bytes on as they are, and encodes other values as JSON.
type plain[T any] struct{}

func (plain[T]) Encode(v T) ([]byte, error) {
	if b, ok := any(v).([]byte); ok {
		return b, nil
	}
	return json.Marshal(v)
}

func (plain[T]) Decode(b []byte) (v T, err error) {
	if p, ok := any(&v).(*[]byte); ok {
		*p = b
		return v, nil
	}
	return v, json.Unmarshal(b, &v)
}

// codec returns the codec of a call.
func codec[T any](codecs []Codec[T]) Codec[T] {
	if c := option.Last(codecs); c != nil {
		return c
	}
	return plain[T]{}
}

// maxObject is the largest encoded object, in bytes, that a rank accepts from another.
const maxObject = 1 << 30

// ObjectError tells which rank's object could not be sent or read.
type ObjectError struct {
	Op   string
	Rank int // whose object, in the group
	Err  error

	group string
	names *work.Names
}

func (e *ObjectError) Error() string {
	whose := e.names.Rank(e.Rank)
	if e.names != nil && e.names.GlobalRanks != nil {
		whose += " of " + e.names.Group(e.group)
	}
	return fmt.Sprintf("pg: %s: object of %s: %v", e.Op, whose, e.Err)
}

// nameObject adds to an *ObjectError what it calls the group and its ranks.
func (g *ProcessGroup) nameObject(err *error) {
	var e *ObjectError
	if errors.As(*err, &e) {
		e.group, e.names = g.name, g.now().names
	}
}

// Unwrap returns the cause.
func (e *ObjectError) Unwrap() error { return e.Err }

// The object functions block, as in c10d.
//
// An object that cannot be encoded is an *ObjectError on its own rank and on the ranks that
// expect it. They receive the error's text in its place, after a mark that no encoding may begin
// with. The group can be used on. A PyTorch rank gets the same bytes, and its unpickler refuses
// them.

// failedMark begins the bytes that stand for an object that could not be encoded. No pickle and
// no JSON begins with a zero byte.
const failedMark = "\x00c10d-go: not encoded \x9a\x61\xd4\x0e\xb7\x38\x5c\xf2: "

// maxReason is how many bytes of an encoding error go to other ranks.
const maxReason = 4 << 10

// failed returns the bytes to send for an object that could not be encoded.
func failed(err error) []byte {
	why := err.Error()
	return []byte(failedMark + why[:min(len(why), maxReason)])
}

// reason returns the error in bytes from failed, and nil for an object.
func reason(b []byte) error {
	why, bad := bytes.CutPrefix(b, []byte(failedMark))
	if !bad {
		return nil
	}
	return fmt.Errorf("it could not be encoded there: %s", strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return '?'
	}, string(why)))
}

// AllGatherObject returns all ranks' v, in rank order, of at most 4 GiB.
func AllGatherObject[T any](ctx context.Context, g *ProcessGroup, v T, codecs ...Codec[T]) (_ []T, err error) {
	const op = "AllGatherObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	mine, sizes, own, err := exchangeSizes(ctx, g, op, v, c)
	if err != nil {
		return nil, err
	}
	blocks, err := exchange(g, op, sizes, func(lengths []int64, even bool) ([][]byte, error) {
		gather := g.AllGatherV
		if even {
			gather = g.AllGather
		}
		blocks := makeBlocks(lengths)
		return blocks, g.staged(ctx, Slices(blocks...), list(Slice(padded(mine, lengths[g.now().rank]))), func(out, in []*tensor.Tensor) (*work.Work, error) {
			return gather(ctx, out, in[0])
		})
	})
	if err != nil {
		return nil, errors.Join(own, err)
	}
	if own != nil {
		return nil, own
	}
	return decodeAll(op, blocks, sizes, c)
}

// GatherObject returns all ranks' v on rank root, and nil elsewhere.
func GatherObject[T any](ctx context.Context, g *ProcessGroup, v T, root int, codecs ...Codec[T]) (_ []T, err error) {
	const op = "GatherObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	if _, err := g.GlobalRank(root); err != nil {
		return nil, err
	}
	mine, sizes, own, err := exchangeSizes(ctx, g, op, v, c)
	if err != nil {
		return nil, err
	}
	blocks, err := exchange(g, op, sizes, func(lengths []int64, even bool) (blocks [][]byte, err error) {
		gather := g.GatherV
		if even {
			gather = g.Gather
		}
		if g.now().rank == root {
			blocks = makeBlocks(lengths)
		}
		return blocks, g.staged(ctx, Slices(blocks...), list(Slice(padded(mine, lengths[g.now().rank]))), func(out, in []*tensor.Tensor) (*work.Work, error) {
			return gather(ctx, out, in[0], root)
		})
	})
	if own != nil {
		err = errors.Join(own, err)
	}
	if err != nil || g.now().rank != root {
		return nil, err
	}
	return decodeAll(op, blocks, sizes, c)
}

// BroadcastObject returns rank root's vs. All pass as many.
func BroadcastObject[T any](ctx context.Context, g *ProcessGroup, vs []T, root int, codecs ...Codec[T]) (_ []T, err error) {
	const op = "BroadcastObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	if _, err := g.GlobalRank(root); err != nil {
		return nil, err
	}
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	sizes := make([]int64, len(vs))
	var all []byte
	var own error
	if g.now().rank == root {
		all, own = encodeList(op, g.now().rank, vs, sizes, c)
	}
	if err := g.broadcastStaged(ctx, Slice(sizes), root); err != nil {
		return nil, errors.Join(own, err)
	}
	total, err := sum(op, root, sizes)
	if err != nil {
		return nil, err
	}
	if g.now().rank != root {
		all = make([]byte, total)
	}
	if err := g.broadcastStaged(ctx, Slice(all), root); err != nil {
		return nil, errors.Join(own, err)
	}
	if own != nil {
		return nil, own
	}
	return decodeList(op, root, all, sizes, c)
}

// ScatterObject returns vs[r] of rank root on rank r. Other ranks pass nil.
func ScatterObject[T any](ctx context.Context, g *ProcessGroup, vs []T, root int, codecs ...Codec[T]) (_ T, err error) {
	const op = "ScatterObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	var none T
	if _, err := g.GlobalRank(root); err != nil {
		return none, err
	}
	if !g.IsMember() {
		return none, ErrNotMember
	}
	ranks := g.now().size
	var blocks [][]byte
	var sizes []int64
	var own error
	if g.now().rank == root {
		sizes = make([]int64, ranks)
		var all []byte
		if len(vs) == ranks {
			all, own = encodeList(op, root, vs, sizes, c)
		} else {
			own = &ObjectError{Op: op, Rank: root, Err: fmt.Errorf("%d objects for %d ranks", len(vs), ranks)}
		}
		if own != nil { // every rank hears why
			why := failed(own.(*ObjectError).Err)
			blocks = slices.Repeat([][]byte{why}, ranks)
			for r := range sizes {
				sizes[r] = int64(len(why))
			}
		} else {
			blocks = split(all, sizes)
		}
	}
	var mine []byte
	err = errors.ErrUnsupported
	if g.now().world.alone() {
		mine, err = scatterBlocks(ctx, g, op, root, blocks, sizes)
	}
	if errors.Is(err, errors.ErrUnsupported) {
		mine, err = scatterPadded(ctx, g, op, root, blocks, sizes)
	}
	switch {
	case err != nil && own != nil:
		return none, errors.Join(own, err)
	case err != nil:
		return none, err
	case own != nil:
		return none, own
	}
	out, err := decodeList(op, root, mine, []int64{int64(len(mine))}, c)
	if err != nil {
		return none, err
	}
	return out[0], nil
}

// scatterBlocks returns this rank's block of the root's.
func scatterBlocks(ctx context.Context, g *ProcessGroup, op string, root int, blocks [][]byte, sizes []int64) ([]byte, error) {
	size := make([]int64, 1)
	if err := g.scatterStaged(ctx, Slice(size), Parts(sizes, len(sizes)), root); err != nil {
		return nil, err
	}
	total, err := sum(op, root, size)
	if err != nil {
		return nil, err
	}
	// Nobody but the root sends anything.
	out, in := make([][]byte, g.now().size), blocks
	if out[root] = make([]byte, total); in == nil {
		in = make([][]byte, len(out))
	}
	err = g.staged(ctx, Slices(out...), Slices(in...), func(out, in []*tensor.Tensor) (*work.Work, error) {
		return g.AllToAll(ctx, out, in)
	})
	return out[root], err
}

// scatterPadded is scatterBlocks as PyTorch does it: blocks of one length, and then the sizes.
func scatterPadded(ctx context.Context, g *ProcessGroup, op string, root int, blocks [][]byte, sizes []int64) ([]byte, error) {
	widest := []int64{0}
	if g.now().rank == root {
		widest[0] = slices.Max(sizes)
	}
	if err := g.broadcastStaged(ctx, Slice(widest), root); err != nil {
		return nil, err
	}
	if _, err := sum(op, root, widest); err != nil {
		return nil, err
	}
	lengths := slices.Repeat(widest, g.now().size)
	if err := checkTotal(op, lengths); err != nil {
		return nil, err
	}
	var longest [][]byte
	if g.now().rank == root {
		longest = makeBlocks(lengths)
		for r, b := range blocks {
			copy(longest[r], b)
		}
	}
	mine, size := make([]byte, widest[0]), make([]int64, 1)
	if err := g.scatterStaged(ctx, Slice(mine), Slices(longest...), root); err != nil {
		return nil, err
	}
	if err := g.scatterStaged(ctx, Slice(size), Parts(sizes, len(sizes)), root); err != nil {
		return nil, err
	}
	if size[0] < 0 || size[0] > widest[0] {
		return nil, &ObjectError{Op: op, Rank: root, Err: fmt.Errorf("length %d is not within the %d bytes sent", size[0], widest[0])}
	}
	return mine[:size[0]], nil
}

// SendObject sends vs to rank dst, which receives as many.
func SendObject[T any](ctx context.Context, g *ProcessGroup, vs []T, dst int, codecs ...Codec[T]) (err error) {
	const op = "SendObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	sizes := make([]int64, len(vs))
	all, own := encodeList(op, g.now().rank, vs, sizes, c)
	if err := g.sendStaged(ctx, Slice(sizes), dst); err != nil {
		return errors.Join(own, err)
	}
	if err := g.sendStaged(ctx, Slice(all), dst); err != nil {
		return errors.Join(own, err)
	}
	return own
}

// RecvObject receives n objects from rank src.
func RecvObject[T any](ctx context.Context, g *ProcessGroup, n, src int, codecs ...Codec[T]) (_ []T, err error) {
	const op = "RecvObject"
	c := codec(codecs)
	defer g.nameObject(&err)
	if n < 0 {
		return nil, fmt.Errorf("pg: %s: negative count %d", op, n)
	}
	sizes := make([]int64, n)
	if err := g.recvStaged(ctx, Slice(sizes), src); err != nil {
		return nil, err
	}
	total, err := sum(op, src, sizes)
	if err != nil {
		return nil, err
	}
	all := make([]byte, total)
	if err := g.recvStaged(ctx, Slice(all), src); err != nil {
		return nil, err
	}
	return decodeList(op, src, all, sizes, c)
}

// exchangeSizes encodes v and tells every rank how long each one's is. Own is why v could not be
// encoded; mine then says so, and the ranks go on.
func exchangeSizes[T any](ctx context.Context, g *ProcessGroup, op string, v T, c Codec[T]) (mine []byte, sizes []int64, own, err error) {
	if !g.IsMember() {
		return nil, nil, nil, ErrNotMember
	}
	rank, size := g.now().rank, make([]int64, 1)
	mine, own = encodeList(op, rank, []T{v}, size, c)
	sizes = make([]int64, g.now().size)
	if err := g.staged(ctx, Parts(sizes, len(sizes)), list(Slice(size)), func(out, in []*tensor.Tensor) (*work.Work, error) {
		return g.AllGather(ctx, out, in[0])
	}); err != nil {
		return nil, nil, nil, errors.Join(own, err)
	}
	for r := range sizes {
		if _, err := sum(op, r, sizes[r:r+1]); err != nil {
			return nil, nil, nil, err
		}
	}
	return mine, sizes, own, nil
}

// exchange calls gather with the lengths that the ranks send: sizes, or the largest one for all if PyTorch ranks
// are in the group or its backend refuses other lengths. It refuses them on every rank alike.
func exchange(g *ProcessGroup, op string, sizes []int64, gather func(lengths []int64, even bool) ([][]byte, error)) ([][]byte, error) {
	if g.now().world.alone() {
		if err := checkTotal(op, sizes); err != nil {
			return nil, err
		}
		blocks, err := gather(sizes, false)
		if !errors.Is(err, errors.ErrUnsupported) {
			return blocks, err
		}
	}
	lengths := slices.Repeat([]int64{slices.Max(sizes)}, len(sizes))
	if err := checkTotal(op, lengths); err != nil {
		return nil, err
	}
	return gather(lengths, true)
}

// padded returns b with zeros up to length n.
func padded(b []byte, n int64) []byte { return append(b, make([]byte, n-int64(len(b)))...) }

// maxTotal is how many bytes the ranks may send in one call, with padding.
const maxTotal int64 = 4 << 30

// checkTotal refuses lengths, the same on all ranks, that are too much together. Each is at most maxObject.
func checkTotal(op string, lengths []int64) error {
	total := int64(0)
	for _, n := range lengths {
		total += n
	}
	if total > min(maxTotal, math.MaxInt) {
		return fmt.Errorf("pg: %s: the objects of %d ranks take %d bytes, over the limit of %d: send fewer or smaller ones, or tensors",
			op, len(lengths), total, min(maxTotal, math.MaxInt))
	}
	return nil
}

// encodeList encodes the objects one after the other. If one cannot be encoded, it returns an
// *ObjectError and what to send instead: the reason as the first object, the others empty.
func encodeList[T any](op string, rank int, vs []T, sizes []int64, c Codec[T]) ([]byte, error) {
	var all []byte
	for i, v := range vs {
		b, err := c.Encode(v)
		switch {
		case err != nil:
		case len(b) > maxObject-len(all):
			err = fmt.Errorf("%d bytes are over the limit of %d", len(b)+len(all), maxObject)
		case reason(b) != nil:
			err = errors.New("its encoding begins with the mark of objects that could not be encoded")
		}
		if err != nil {
			instead := failed(err)
			clear(sizes)
			sizes[0] = int64(len(instead))
			return instead, &ObjectError{Op: op, Rank: rank, Err: err}
		}
		sizes[i] = int64(len(b))
		all = append(all, b...)
	}
	return all, nil
}

func decodeList[T any](op string, rank int, all []byte, sizes []int64, c Codec[T]) ([]T, error) {
	out := make([]T, len(sizes))
	for i, n := range sizes {
		if err := reason(all[:n]); err != nil {
			return nil, &ObjectError{Op: op, Rank: rank, Err: err}
		}
		v, err := c.Decode(all[:n:n])
		if err != nil {
			return nil, &ObjectError{Op: op, Rank: rank, Err: err}
		}
		out[i], all = v, all[n:]
	}
	return out, nil
}

// decodeAll decodes the first sizes[r] bytes of each block.
func decodeAll[T any](op string, blocks [][]byte, sizes []int64, c Codec[T]) ([]T, error) {
	for r, n := range sizes { // of several errors, every rank returns this one
		if err := reason(blocks[r][:n]); err != nil {
			return nil, &ObjectError{Op: op, Rank: r, Err: err}
		}
	}
	out := make([]T, len(sizes))
	for r := range sizes {
		v, err := decodeList(op, r, blocks[r], sizes[r:r+1], c)
		if err != nil {
			return nil, err
		}
		out[r] = v[0]
	}
	return out, nil
}

// sum adds lengths that came from rank and refuses what no rank sends.
func sum(op string, rank int, sizes []int64) (int, error) {
	total := int64(0)
	for _, n := range sizes {
		if n < 0 || n > maxObject-total {
			return 0, &ObjectError{Op: op, Rank: rank, Err: fmt.Errorf("announced length %d; the limit is %d in all", n, maxObject)}
		}
		total += n
	}
	return int(total), nil
}

// makeBlocks returns blocks of the given lengths, one behind the other.
func makeBlocks(lengths []int64) [][]byte {
	total := int64(0)
	for _, n := range lengths {
		total += n
	}
	return split(make([]byte, total), lengths)
}

// split cuts b into blocks of the given lengths.
func split(b []byte, lengths []int64) [][]byte {
	blocks := make([][]byte, len(lengths))
	for i, n := range lengths {
		blocks[i], b = b[:n:n], b[n:]
	}
	return blocks
}

func list(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }
