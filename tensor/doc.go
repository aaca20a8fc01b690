/*
Package tensor describes the arrays that ranks exchange.

A trainer has its numbers in Go slices, in a framework's tensors or in device
memory. A process group needs to know three things about them: what the
elements are, in which order they lie, and where. A [Tensor] is that
description. It owns nothing: [Of] makes one over a slice that stays the
caller's, and what an operation writes is found in that slice.

	grad := make([]float32, 12)
	t, err := tensor.Of(grad, 3, 4) // no copy
	...
	w, err := group.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{})
	...
	err = w.Wait(ctx) // grad holds the sum

# Elements

A [DType] is one of PyTorch's element types, under PyTorch's name. Go has no
type for the narrow floating ones: [F16], [BF16], [F8E4M3] and [F8E5M2] hold
their bits and convert to and from float32. All values of them are exact in
float32; the way back rounds to nearest, ties to even, and gives PyTorch's bits
for every number.

[Data] returns the elements of a contiguous tensor as a slice of the matching Go
type, Bytes the same memory as bytes. Float64At and SetFloat64 reach single
elements of any tensor, for code that does not know the dtype when it is
compiled.

# Views

Shape, strides and offset say where elements lie in the storage. Slice, Select,
Transpose, Reshape, AsStrided and ViewAsReal return tensors over the same
storage. None of them copies, and none can reach outside it. Strides count
elements and may be zero or negative; where several elements of a view share
memory, HasOverlap says so.

Pack and Unpack copy between a view and adjacent bytes in row-major order. This
is how operations accept views: they pack, exchange, and write back through the
strides. Runs that lie side by side are copied whole.

Scalars (no dimension, one element) and tensors of no elements are as good as any
other. A tensor of no elements is contiguous whatever its strides.

# Sparse tensors

[Sparse] makes a tensor of the coordinate layout: coordinates in the leading
dimensions, and for each a value or a block of values. A coordinate may occur
several times; its values then add up. Coalesce sorts and adds; [SumSparse] does
so for the tensors of several ranks, in rank order, so that all ranks get the
same bits. The number of entries of an all-reduce's result is known only
afterwards, so SetSparse can give a sparse tensor other entries. Nothing else
about a tensor ever changes, except its elements.

# Devices

A tensor on a device has a [Memory] instead of bytes. Views work as on the CPU;
whatever reads or writes elements (Pack, Data, Fill, Coalesce, ...) returns an
error, and is the business of the package that made the memory.

# Errors

A call whose arguments are wrong returns an [*Error] that names the call and the
offending values and matches [ErrInvalid]. What panics is what panics in Go: a
nil tensor, an index out of range in Dim, and a size that no machine has memory
for; who takes shapes from the network limits them first.

# What it is not

There is no arithmetic beyond what a sparse sum needs, no broadcasting of
shapes, and no allocation on devices.
*/
package tensor
