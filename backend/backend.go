package backend

import (
	"context"
	"crypto/tls"
	"log/slog"
	"time"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// DefaultTimeout is the time an operation may take when neither it nor its
// group says otherwise: c10d's half hour.
const DefaultTimeout = 30 * time.Minute

// Backend is one engine of a process group: it runs the operations for the
// tensors of one or more device types. Ranks are the group's, from 0.
//
// Every member must issue the same collectives in the same order on a group;
// nothing else matches calls across ranks. Calls of one group must therefore
// not race each other; send and receive may. A call returns as soon as the
// operation is queued. Its error says that the call was wrong: nothing was
// sent, no byte changed and no sequence number was used. What happened on the
// wire is the Work's error. The call's context bounds the operation.
//
// The tensors of a call belong to the backend until the Work has ended; lists
// of them are copied. They may have any strides. [CheckMemory] says which of them may
// share memory, and refuses other calls.
//
// Embed Unsupported to write a backend that does not do everything.
type Backend interface {
	Name() string
	Rank() int
	Size() int

	// Seq returns how many operations have been issued.
	Seq() uint64

	// SetTimeout sets the limit of later operations; 0 or less means DefaultTimeout.
	SetTimeout(d time.Duration)

	// Broadcast gives every tensor on every rank the elements of tensor
	// number RootTensor of rank Root.
	Broadcast(ctx context.Context, ts []*tensor.Tensor, o BroadcastOptions) (*work.Work, error)

	// AllReduce combines all the tensors of all the ranks, which have one
	// shape, and puts the result in each of them. A single sparse tensor per
	// rank is summed with the others', whatever entries each has.
	AllReduce(ctx context.Context, ts []*tensor.Tensor, o AllReduceOptions) (*work.Work, error)

	// AllReduceCoalesced combines ts[i] with every other rank's ts[i], for all
	// i at once. The tensors have one dtype; shapes may differ.
	AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o AllReduceOptions) (*work.Work, error)

	// Reduce combines t of all ranks into rank Root's. What other ranks' t
	// holds afterwards is undefined, as in c10d.
	Reduce(ctx context.Context, t *tensor.Tensor, o ReduceOptions) (*work.Work, error)

	// AllGather copies rank i's in to every rank's out[i].
	AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o AllGatherOptions) (*work.Work, error)

	// AllGatherV is AllGather where the ranks' inputs may differ in shape;
	// out[i] has the shape of rank i's.
	AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o AllGatherOptions) (*work.Work, error)

	// AllGatherIntoTensor copies rank i's in to part i of every rank's out.
	// The shape of out is in's with the first dimension times the group's
	// size, or in's with the size as a new first dimension.
	AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o AllGatherOptions) (*work.Work, error)

	// AllGatherCoalesced does AllGather for several inputs at once: out[i][k]
	// becomes rank i's in[k]. One dtype.
	AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o AllGatherOptions) (*work.Work, error)

	// AllGatherIntoTensorCoalesced does AllGatherIntoTensor for each pair at once. One dtype.
	AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o AllGatherOptions) (*work.Work, error)

	// Gather copies rank i's in to out[i] on rank Root. Other ranks pass no out.
	Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o GatherOptions) (*work.Work, error)

	// GatherV is Gather where the ranks' inputs may differ in shape.
	GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o GatherOptions) (*work.Work, error)

	// Scatter copies in[i] of rank Root to rank i's out. Other ranks pass no in.
	Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o ScatterOptions) (*work.Work, error)

	// ReduceScatter combines in[r] of all ranks into rank r's out.
	ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o ReduceScatterOptions) (*work.Work, error)

	// ReduceScatterTensor combines part r of all ranks' in, cut along the
	// first dimension, into rank r's out. The shapes
	// are those of AllGatherIntoTensor, with in as the large tensor.
	ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o ReduceScatterOptions) (*work.Work, error)

	// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair at once.
	ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o ReduceScatterOptions) (*work.Work, error)

	// AllToAll copies rank i's in[j] to rank j's out[i]. Shapes may differ
	// from pair to pair.
	AllToAll(ctx context.Context, out, in []*tensor.Tensor, o AllToAllOptions) (*work.Work, error)

	// AllToAllSingle cuts in along the first dimension into one part for each
	// rank, and puts together out from the parts that come. inSplits and
	// outSplits are the parts' sizes; nil means equal parts.
	AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o AllToAllOptions) (*work.Work, error)

	// Send sends t to rank dst. Sends and receives match by (pair, tag) in order.
	Send(ctx context.Context, t *tensor.Tensor, dst int, o P2POptions) (*work.Work, error)

	// Recv receives into t from rank src.
	Recv(ctx context.Context, t *tensor.Tensor, src int, o P2POptions) (*work.Work, error)

	// RecvAnySource receives into t from the first rank that sends on the tag.
	RecvAnySource(ctx context.Context, t *tensor.Tensor, o P2POptions) (*work.Work, error)

	// Barrier ends when every rank has come to it and all earlier collectives
	// of this rank have ended. It does not wait for sends and receives.
	Barrier(ctx context.Context, o BarrierOptions) (*work.Work, error)

	// MonitoredBarrier is a barrier through rank 0 whose error names the ranks
	// that did not come. It blocks.
	MonitoredBarrier(ctx context.Context, o MonitoredBarrierOptions) error

	// Abort ends all operations with cause, on every rank. The group is of no
	// more use; Close it. If cause is the error of an operation of this group (a
	// *work.Error), the other ranks are told of that operation's fault instead of an abort.
	Abort(cause error)

	// Close ends pending operations with work.ErrClosed, tells the other ranks, and frees the
	// backend's resources, all within about a second. Wait for operations before, or call
	// Shutdown. It may be called more than once.
	Close() error
}

// Shutdowner is a backend that can wait for its operations before it closes.
type Shutdowner interface {
	// Shutdown refuses new operations, waits until those that were issued have ended, and
	// closes the backend. When ctx ends first it closes the backend at once, and returns an
	// error that wraps ctx's.
	Shutdown(ctx context.Context) error
}

// Shutdown calls b.Shutdown, or b.Close if there is none.
func Shutdown(ctx context.Context, b Backend) error {
	if s, ok := b.(Shutdowner); ok {
		return s.Shutdown(ctx)
	}
	return b.Close()
}

// Meeting knows the ranks that are making a group. Ranks are numbered as in the group.
type Meeting interface {
	// Lacks sets the function that says which ranks this one waits for at a moment. Nil means none.
	Lacks(func() []int)

	// Silent is for a rank whose time has run out and that lacks some ranks. It returns which ranks
	// keep the group from being made: they have stopped, or never came. Other ranks wait for those
	// themselves. It returns none if that is not known.
	Silent(lacking []int) []int
}

// Options is what a backend is made with, c10d's DistributedBackendOptions.
type Options struct {
	// Store is for this backend alone: its keys are already under the group's
	// and the device's prefix.
	Store store.Store

	Rank, Size int

	// Timeout is the limit of an operation (see BroadcastOptions) and of the rendezvous; 0 or less means
	// DefaultTimeout.
	Timeout time.Duration

	Group string      // the group's name
	Names *work.Names // what its errors and log lines call it and its ranks; may be nil; must not change

	// Device is the first device type that the backend serves in this group.
	Device tensor.DeviceType

	// Logger gets a line at level Warn when this rank has waited for 10 s for others, and
	// more of them at growing intervals. Nil means slog.Default().
	Logger *slog.Logger

	// LastSeen says what is known of a rank that has not come to the group's meeting, by
	// its rank in the group: "it has not joined the store". It is for messages. Nil, and an empty
	// text, mean that nothing is known.
	LastSeen func(ctx context.Context, rank int) string

	// Meeting, if not nil, finds out which rank keeps this group from being made. All ranks are of
	// this library then.
	Meeting Meeting

	// Checks says that the group's collectives compare the calls of another group, as package detail's do.
	// Its texts do not count them, and an operation that times out lets the other group say why first.
	Checks bool

	// TLS, if not nil, makes the ranks encrypt their messages and prove who they are. A backend that cannot do so over a
	// connection returns an error.
	TLS *tls.Config

	// Specific are the options of the backend's own type, or nil.
	Specific SpecificOptions

	// Parent is the backend of the same name of the group whose ranks all take part in making this one: the default
	// group, or a group that is split. Ranks are this group's ranks there. Parent is nil in the default group, and in
	// groups that only their members make.
	Parent Backend
	Ranks  []int

	// Parts says that Parent's ranks make several groups at once, one for each part of a split.
	Parts bool

	// Failed, if not nil, is called when the group fails, before the first operation
	// that fails by it ends, perhaps with locks held and perhaps more than once. It must
	// not call the backend. A backend may ignore it.
	Failed func(*work.Error)
}

// SpecificOptions are the options that only one backend has, as gloo.Options and cuda.Options. A
// backend outside this module gives its options type this method.
type SpecificOptions interface {
	// BackendName returns the name that the backend is registered as.
	BackendName() string
}

// BroadcastOptions are the options of Broadcast. In every options struct Timeout counts from the
// time when the operation begins to run, after the earlier ones. 0 means the group's timeout. The
// call's context counts from the call. An operation ends at most 0.3 s after its time or its context's deadline, or
// a tenth of the time if that is more. In between it may still succeed. Before the time is over the other ranks
// are asked who is missing. A process that waits for a CPU may be later.
type BroadcastOptions struct {
	Root       int
	RootTensor int // which of the root's tensors is sent
	Timeout    time.Duration
}

// AllReduceOptions are the options of AllReduce and AllReduceCoalesced.
type AllReduceOptions struct {
	Op      ReduceOp
	Timeout time.Duration
}

// ReduceOptions are the options of Reduce.
type ReduceOptions struct {
	Op      ReduceOp
	Root    int
	Timeout time.Duration
}

// AllGatherOptions are the options of the AllGather family.
type AllGatherOptions struct{ Timeout time.Duration }

// GatherOptions are the options of Gather and GatherV.
type GatherOptions struct {
	Root    int
	Timeout time.Duration
}

// Prompt is a backend whose calls return soon, whatever other ranks and devices do. Package pg records
// such a call when it has returned, which costs less. It records a call of another backend before, so that
// the recorder shows a call that does not return. What the program's own functions do in a call, such as those of a
// registered work, is up to the program.
type Prompt interface {
	// Prompt does nothing: it says that the calls are prompt.
	Prompt()
}

// ScatterOptions are the options of Scatter.
type ScatterOptions struct {
	Root    int
	Timeout time.Duration
}

// ReduceScatterOptions are the options of the ReduceScatter family.
type ReduceScatterOptions struct {
	Op      ReduceOp
	Timeout time.Duration
}

// AllToAllOptions are the options of AllToAll and AllToAllSingle.
type AllToAllOptions struct{ Timeout time.Duration }

// P2POptions are the options of Send, Recv and RecvAnySource.
type P2POptions struct {
	Tag     uint32
	Timeout time.Duration
}

// BarrierOptions are the options of Barrier.
type BarrierOptions struct {
	Device  tensor.DeviceType // chooses the backend of a group that has several; CPU also stands for no choice
	Timeout time.Duration
}

// MonitoredBarrierOptions are the options of MonitoredBarrier. Its error always
// names every missing rank, as c10d's does with wait_all_ranks.
type MonitoredBarrierOptions struct {
	Timeout time.Duration // 0 means the group's timeout, as in all options; c10d's 0 fails at once
}
