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

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Codec turns values into bytes and back. Unlike Python's pickle, which c10d
// uses, decoding with JSON, Bytes and gobcodec.Codec runs no code that a peer chose.
// The framing around the bytes is c10d's, so a PyTorch rank can be on the other
// side if both agree on the codec.
type Codec[T any] interface {
	Encode(v T) ([]byte, error)
	Decode(b []byte) (T, error)
}

// JSON encodes values as JSON.
type JSON[T any] struct{}

// Encode returns v as JSON.
func (JSON[T]) Encode(v T) ([]byte, error) { return json.Marshal(v) }

// Decode reads JSON.
func (JSON[T]) Decode(b []byte) (v T, err error) { return v, json.Unmarshal(b, &v) }

// Bytes passes bytes on as they are.
type Bytes struct{}

// Encode returns b.
func (Bytes) Encode(b []byte) ([]byte, error) { return b, nil }

// Decode returns b.
func (Bytes) Decode(b []byte) ([]byte, error) { return b, nil }

// MaxObject is the largest encoded object, in bytes, that a rank accepts from another.
const MaxObject = 1 << 30

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

// AllGatherObject returns every rank's v, in rank order. The encoded objects take at most 4 GiB in all.
func AllGatherObject[T any](ctx context.Context, g *ProcessGroup, v T, c Codec[T]) (_ []T, err error) {
	const op = "AllGatherObject"
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
		blocks, in := makeBlocks(lengths), flatTensor(padded(mine, lengths[g.now().rank]))
		return blocks, await(ctx)(gather(ctx, tensors(blocks), in, backend.AllGatherOptions{}))
	})
	if err != nil {
		return nil, errors.Join(own, err)
	}
	if own != nil {
		return nil, own
	}
	return decodeAll(op, blocks, sizes, c)
}

// GatherObject returns every rank's v, in rank order, on rank root, and nil elsewhere. The encoded objects
// take at most 4 GiB in all.
func GatherObject[T any](ctx context.Context, g *ProcessGroup, v T, root int, c Codec[T]) (_ []T, err error) {
	const op = "GatherObject"
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
		in := flatTensor(padded(mine, lengths[g.now().rank]))
		return blocks, await(ctx)(gather(ctx, tensors(blocks), in, backend.GatherOptions{Root: root}))
	})
	if own != nil {
		err = errors.Join(own, err)
	}
	if err != nil || g.now().rank != root {
		return nil, err
	}
	return decodeAll(op, blocks, sizes, c)
}

// BroadcastObject returns rank root's vs on every rank. Every rank passes a
// list of the same length; its values matter on the root only.
func BroadcastObject[T any](ctx context.Context, g *ProcessGroup, vs []T, root int, c Codec[T]) (_ []T, err error) {
	const op = "BroadcastObject"
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
	o := backend.BroadcastOptions{Root: root}
	if err := await(ctx)(g.Broadcast(ctx, list(flatTensor(sizes)), o)); err != nil {
		return nil, errors.Join(own, err)
	}
	total, err := sum(op, root, sizes)
	if err != nil {
		return nil, err
	}
	if g.now().rank != root {
		all = make([]byte, total)
	}
	if err := await(ctx)(g.Broadcast(ctx, list(flatTensor(all)), o)); err != nil {
		return nil, errors.Join(own, err)
	}
	if own != nil {
		return nil, own
	}
	return decodeList(op, root, all, sizes, c)
}

// ScatterObject returns vs[r] of rank root on rank r. Other ranks pass nil. Beside PyTorch ranks, and with a
// backend that has no AllToAll, every object is padded to the longest one; together they take at most 4 GiB.
func ScatterObject[T any](ctx context.Context, g *ProcessGroup, vs []T, root int, c Codec[T]) (_ T, err error) {
	const op = "ScatterObject"
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
	if err := await(ctx)(g.Scatter(ctx, flatTensor(size), cut(sizes, len(sizes)), backend.ScatterOptions{Root: root})); err != nil {
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
	err = await(ctx)(g.AllToAll(ctx, tensors(out), tensors(in), backend.AllToAllOptions{}))
	return out[root], err
}

// scatterPadded is scatterBlocks as PyTorch does it: blocks of one length, and then the sizes.
func scatterPadded(ctx context.Context, g *ProcessGroup, op string, root int, blocks [][]byte, sizes []int64) ([]byte, error) {
	widest := []int64{0}
	if g.now().rank == root {
		widest[0] = slices.Max(sizes)
	}
	if err := await(ctx)(g.Broadcast(ctx, list(flatTensor(widest)), backend.BroadcastOptions{Root: root})); err != nil {
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
	o := backend.ScatterOptions{Root: root}
	if err := await(ctx)(g.Scatter(ctx, flatTensor(mine), tensors(longest), o)); err != nil {
		return nil, err
	}
	if err := await(ctx)(g.Scatter(ctx, flatTensor(size), cut(sizes, len(sizes)), o)); err != nil {
		return nil, err
	}
	if size[0] < 0 || size[0] > widest[0] {
		return nil, &ObjectError{Op: op, Rank: root, Err: fmt.Errorf("length %d is not within the %d bytes sent", size[0], widest[0])}
	}
	return mine[:size[0]], nil
}

// SendObject sends vs to rank dst, which must receive a list of the same length.
func SendObject[T any](ctx context.Context, g *ProcessGroup, vs []T, dst int, c Codec[T], o backend.P2POptions) (err error) {
	const op = "SendObject"
	defer g.nameObject(&err)
	sizes := make([]int64, len(vs))
	all, own := encodeList(op, g.now().rank, vs, sizes, c)
	if err := await(ctx)(g.Send(ctx, flatTensor(sizes), dst, o)); err != nil {
		return errors.Join(own, err)
	}
	if err := await(ctx)(g.Send(ctx, flatTensor(all), dst, o)); err != nil {
		return errors.Join(own, err)
	}
	return own
}

// RecvObject receives n objects from rank src.
func RecvObject[T any](ctx context.Context, g *ProcessGroup, n, src int, c Codec[T], o backend.P2POptions) (_ []T, err error) {
	const op = "RecvObject"
	defer g.nameObject(&err)
	if n < 0 {
		return nil, fmt.Errorf("pg: %s: negative count %d", op, n)
	}
	sizes := make([]int64, n)
	if err := await(ctx)(g.Recv(ctx, flatTensor(sizes), src, o)); err != nil {
		return nil, err
	}
	total, err := sum(op, src, sizes)
	if err != nil {
		return nil, err
	}
	all := make([]byte, total)
	if err := await(ctx)(g.Recv(ctx, flatTensor(all), src, o)); err != nil {
		return nil, err
	}
	return decodeList(op, src, all, sizes, c)
}

// await waits for the Work that an operation returned.
func await(ctx context.Context) func(*work.Work, error) error {
	return func(w *work.Work, err error) error {
		if err != nil {
			return err
		}
		return w.Wait(ctx)
	}
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
	if err := await(ctx)(g.AllGather(ctx, cut(sizes, len(sizes)), flatTensor(size), backend.AllGatherOptions{})); err != nil {
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

// checkTotal refuses lengths, the same on all ranks, that are too much together. Each is at most MaxObject.
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
		case len(b) > MaxObject-len(all):
			err = fmt.Errorf("%d bytes are over the limit of %d", len(b)+len(all), MaxObject)
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
		if n < 0 || n > MaxObject-total {
			return 0, &ObjectError{Op: op, Rank: rank, Err: fmt.Errorf("announced length %d; the limit is %d in all", n, MaxObject)}
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

// tensors returns a tensor for each block.
func tensors(blocks [][]byte) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, len(blocks))
	for i, b := range blocks {
		ts[i] = flatTensor(b)
	}
	return ts
}

// cut returns n tensors over equal parts of b, none for 0.
func cut[T tensor.Element](b []T, n int) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, n)
	for i := range ts {
		part := len(b) / n
		ts[i] = flatTensor(b[i*part : (i+1)*part])
	}
	return ts
}

func list(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }

func flatTensor[T tensor.Element](v []T) *tensor.Tensor {
	t, err := tensor.Of(v)
	if err != nil {
		panic(err) // the shape is the length
	}
	return t
}
