// Package tensor describes the arrays that ranks exchange.
//
// A trainer has its numbers in Go slices, in a framework's tensors or in device
// memory. A process group needs three facts about them: the type of the elements, their
// order in memory, and where that memory is. A [Tensor] has these facts. It does not own
// memory: [Of] makes one over a slice, and an operation writes its results into that slice.
//
//	grad := make([]float32, 12)
//	t, err := tensor.Of(grad, 3, 4) // no copy
//	...
//	w, err := group.AllReduce(ctx, t, pg.Sum())
//	...
//	err = w.Wait(ctx) // grad holds the sum
//
// # Elements
//
// A [DType] is one of PyTorch's element types, under PyTorch's name. Go has no
// type for the narrow floating ones: [F16], [BF16], [F8E4M3] and [F8E5M2] hold
// their bits and convert to and from float32. Every value of them is exact in
// float32. The conversion from float32 rounds to nearest, ties to even, and gives
// PyTorch's bits for every number.
//
// [Data] returns the elements of a contiguous tensor as a slice of the matching Go
// type, Bytes the same memory as bytes. Float64At and SetFloat64 read and write single
// elements of any tensor, for code that does not know the dtype at compile time.
//
// # Views
//
// Shape, strides and offset say where elements are in the storage. Slice, Select,
// Transpose, Reshape, AsStrided and ViewAsReal return tensors over the same
// storage. None of them copies, and none can reach outside it. Strides count
// elements and may be zero or negative. HasOverlap says whether elements of a view share
// memory, and Overlaps whether two tensors do.
//
// Pack and Unpack copy between a view and adjacent bytes in row-major order. Operations
// use them for views: they pack, exchange, and write back through the strides.
//
// Scalars (no dimension, one element) and tensors without elements are valid everywhere.
// A tensor without elements is contiguous whatever its strides.
//
// # Sparse tensors
//
// [Sparse] makes a tensor of the coordinate layout: coordinates in the leading
// dimensions, and for each a value or a block of values. A coordinate may occur
// several times; its values are then added. Coalesce sorts and adds. [SumSparse] does
// so for the tensors of several ranks, in rank order, so that all ranks get the
// same bits. The number of entries of an all-reduce's result is known only
// afterwards, so SetSparse can replace the entries of a sparse tensor. Nothing else
// about a tensor ever changes, except its elements.
//
// # Devices
//
// A tensor on a device has a [Memory] instead of bytes. Views work as on the CPU.
// Calls that read or write elements (Pack, Data, Fill, Coalesce, ...) return an
// error; the package that made the memory has calls for that.
//
// # Errors
//
// A call with wrong arguments returns an [*Error] that names the call and the values and matches
// [ErrInvalid]. A call panics only where Go code would: on a nil tensor, an index out of range in
// Dim, or a size beyond all memory. Programs that take shapes from a network must limit them
// first.
//
// # Limits
//
// There is no arithmetic beyond the sum of sparse tensors, no broadcasting of
// shapes, and no allocation on devices.
package tensor
