// Package backend is for authors of backends. It has the operations with their options, the operators of
// reductions, and the registries in which a process group finds the engines that do its work.
//
// A program imports package pg instead, which has the operators and the options of calls. It meets these here:
//
//   - [Explanation] of pg.ProcessGroup.Explain, with [Link], [Cluster] and [Choice]
//   - the errors [ArgumentError], [UnsupportedError] and [ErrExhausted]
//   - [ParseReduceOp], and [Custom], the wider form of [CustomOf]
//   - [Backend] of pg.ProcessGroup.Backend, for several tensors of one rank
//
// # Backends
//
// A Backend runs c10d's operations for the tensors of one or more device types.
// A group asks for backends by a string, as in PyTorch:
//
//	"gloo"                every device that gloo can serve
//	"cpu:gloo,cuda:cuda"  one backend for each device type
//	""                    the default map, as far as backends are linked in
//
// A backend registers itself under its name, usually from an init function, so
// that importing its package is enough. Write one by embedding Unsupported and
// adding what it does:
//
//	type tracing struct {
//		backend.Unsupported
//		...
//	}
//
//	func init() {
//		err := backend.Register(backend.Registration{
//			Name: "tracing", Devices: []tensor.DeviceType{tensor.CPU}, New: newTracing,
//		})
//		...
//	}
//
// Options that only one backend has are a SpecificOptions. New gets them in Options.Specific, and
// asserts their type.
//
// # Calls and their errors
//
// A call with a wrong shape, dtype, root or operator, or with tensors that share memory where they
// must not (see [CheckMemory]), is refused at once with an
// *ArgumentError. Nothing was sent, no byte changed, and no sequence number was used. PyTorch finds some of these only
// when the result is waited for. What happens later is the Work's error.
//
// c10d's lists with exactly one tensor are single tensors here; operations that
// take several tensors of a rank (AllReduce, Broadcast) and the coalesced forms
// take lists.
package backend
