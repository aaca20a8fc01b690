package plan

// Buffer names one of the memories that a plan works on.
type Buffer uint8

// The buffers of a plan.
const (
	Out     Buffer = iota // the result, and for in-place operations the input
	In                    // the input where it is apart from the result
	Scratch               // memory of the executor
)

// Kind is what a step does.
type Kind uint8

// The steps. Send and Recv post a request and go on; Wait ends one.
const (
	Send   Kind = iota // post Buf[Off:Off+Len] to Peer as request Req
	Recv               // post a receive from Peer into Buf[Off:Off+Len] as request Req
	Wait               // wait for request Req, which is free for another post afterwards
	Reduce             // Buf[Off:Off+Len] = op(Buf[Off:Off+Len], Src[SrcOff:SrcOff+Len])
	Copy               // Buf[Off:Off+Len] = Src[SrcOff:SrcOff+Len]
)

// Step is one instruction of a plan. Offsets and lengths are in bytes.
type Step struct {
	Kind     Kind
	Buf, Src Buffer
	Peer     int32
	Req      int32
	Off, Len int64
	SrcOff   int64
}

// Plan is the steps of one rank in one collective, in order. It is immutable, so it can be cached
// and run from many goroutines.
type Plan struct {
	Steps    []Step
	Requests int   // how many requests are outstanding at most: Req is below it
	Scratch  int64 // bytes of scratch memory
}
