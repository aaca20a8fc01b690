// Package libnccl calls the functions of NCCL's library, which it loads when the program runs.
//
// An [API] calls the functions and nothing else. Open has one over libnccl.so.2. Package ncclsim is another one, on
// simulated devices. The caller keeps NCCL's rules of threads: a communicator has the current device of the thread
// of its init, and a group begins and ends on one thread.
package libnccl

import (
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Comm is an ncclComm_t, 0 is none.
type Comm uintptr

// UniqueID is an ncclUniqueId.
type UniqueID [128]byte

// Result is an ncclResult_t.
type Result int32

// Results that are told apart here.
const (
	Success         Result = 0
	SystemError     Result = 2
	InternalError   Result = 3
	InvalidArgument Result = 4
	InvalidUsage    Result = 5
	RemoteError     Result = 6
	InProgress      Result = 7
)

var resultNames = [...]string{
	"success", "CUDA error", "system error", "internal error", "invalid argument", "invalid usage", "remote error", "in progress", "timeout",
}

func (r Result) String() string {
	if r >= 0 && int(r) < len(resultNames) {
		return resultNames[r]
	}
	return fmt.Sprintf("result %d", int32(r))
}

// DataType is an ncclDataType_t.
type DataType int32

// The types. Those of float8 came with NCCL 2.24.
const (
	Int8 DataType = iota
	Uint8
	Int32
	Uint32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16
	Float8E4M3
	Float8E5M2
)

var typeSizes = [...]int{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}

// Size returns the bytes of an element.
func (t DataType) Size() int { return typeSizes[t] }

// RedOp is an ncclRedOp_t: one of the constants, or what RedOpCreatePreMulSum has made.
type RedOp int32

// The operators.
const (
	Sum RedOp = iota
	Prod
	Max
	Min
	Avg
)

// NoColor is the color of a rank that gets no communicator from CommSplit.
const NoColor = -1

// Version is NCCL's code of a version: 22809 is 2.28.9.
type Version int

func (v Version) String() string {
	n := int(v)
	if n < 10000 { // before 2.9
		return fmt.Sprintf("%d.%d.%d", n/1000, n/100%10, n%100)
	}
	return fmt.Sprintf("%d.%d.%d", n/10000, n/100%100, n%100)
}

// Versions from which NCCL has what is used here.
const (
	oldest              Version = 21400 // ncclCommInitRankConfig
	ScalableVersion     Version = 22300 // several roots
	TorchPairsVersion   Version = 22600 // PyTorch 2.7 and later come with it
	LowestRankVersion   Version = 22800 // PyTorch 2.11 comes with it: the color of a part is its lowest rank
	float8Version       Version = 22400
	splitVersion        Version = 21800
	configVersion               = 21400 // of the structure that is passed
	configMagic                 = 0xcafebeef
	configSize                  = 24
	unsetInt                    = -1 << 31
	scalarHostImmediate         = 1
)

// HasFloat8 reports whether the version has float8 types.
func (v Version) HasFloat8() bool { return v >= float8Version }

// HasSplit reports whether the version has CommSplit.
func (v Version) HasSplit() bool { return v >= splitVersion }

// API calls NCCL's functions. Where a method says nothing else it is the function of nearly that name.
type API interface {
	// Path is where the library was found.
	Path() string

	Version() Version
	UniqueID() (UniqueID, Result)

	// CommInit is CommInitRankScalable, or CommInitRankConfig if there is one id and the library has no other. The
	// communicator is of use once CommAsyncError says Success.
	CommInit(ids []UniqueID, size, rank int) (Comm, Result)
	CommSplit(c Comm, color, key int) (Comm, Result)
	CommFinalize(c Comm) Result
	CommDestroy(c Comm) Result
	CommAbort(c Comm) Result
	CommAsyncError(c Comm) (state, r Result)

	// ErrorText is GetErrorString, and GetLastError after a colon if there is one.
	ErrorText(c Comm, r Result) string

	GroupStart() Result
	GroupEnd() Result

	AllReduce(send, recv driver.Ptr, count int, t DataType, op RedOp, c Comm, s driver.Stream) Result
	Broadcast(send, recv driver.Ptr, count int, t DataType, root int, c Comm, s driver.Stream) Result
	Reduce(send, recv driver.Ptr, count int, t DataType, op RedOp, root int, c Comm, s driver.Stream) Result
	AllGather(send, recv driver.Ptr, count int, t DataType, c Comm, s driver.Stream) Result
	ReduceScatter(send, recv driver.Ptr, count int, t DataType, op RedOp, c Comm, s driver.Stream) Result
	Send(p driver.Ptr, count int, t DataType, peer int, c Comm, s driver.Stream) Result
	Recv(p driver.Ptr, count int, t DataType, peer int, c Comm, s driver.Stream) Result

	// RedOpPreMulSum has the scalar, of the type, in the host's memory.
	RedOpPreMulSum(scalar []byte, t DataType, c Comm) (RedOp, Result)
	RedOpDestroy(op RedOp, c Comm) Result
}

// Error is a call that has failed.
type Error struct {
	Call   string
	Result Result
	Text   string // what NCCL says
}

func (e *Error) Error() string {
	text := strings.TrimSpace(e.Text)
	if text == "" {
		text = e.Result.String()
	}
	return fmt.Sprintf("%s: %s", e.Call, text)
}

// Check returns an error for a result that is not Success. A call in progress is one: its kernel would come after the event
// that stands for its end.
func Check(a API, c Comm, call string, r Result) error {
	switch r {
	case Success:
		return nil
	case InProgress:
		return &Error{Call: "nccl" + call, Result: r, Text: "it does not block, as this library needs: do not set NCCL_COMM_BLOCKING to 0"}
	}
	return &Error{Call: "nccl" + call, Result: r, Text: a.ErrorText(c, r)}
}
