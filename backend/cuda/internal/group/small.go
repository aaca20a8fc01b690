package group

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
)

// mostAtOnce is up to how many bytes one kernel does the device's part of an all-reduce, with the threads of one block.
// Decision 63 has the measurement.
const mostAtOnce = 128 << 10

// small is an all-reduce through the exchange that is one kernel to the device. The kernel copies the operand to the
// rank's slot, waits for the host, and copies the common slot. It says so in words of the operation's own memory. Only
// this rank's host looks at them, so the other ranks need not do the same.
type small struct {
	*shared
	launch driver.Launch
	args   driver.Args
	access [4]driver.Access
}

// Where the words are.
const (
	wordArrived = iota * 128 // the kernel has copied the operand
	wordRelease              // the host lets it go on
	wordTaken                // it has copied the result
	wordsBytes
)

// small returns the program of the operation if it is small enough, nil if the streams copy. Ranks that share a device
// copy, because a kernel that waits keeps those of other processes waiting. So do ranks that share a process: in an
// allocation, for example, the driver may hold one of them up until another's kernel has ended, which waits for it.
func (s *shared) small(o *Operation) Program {
	b, x, dev := o.B, s.x, o.Legs[0].Src.Dev
	if s.chunks > 1 || s.bytes() > mostAtOnce || dev != b.OwnDevice() {
		return nil
	}
	if x.Small.Load() == nil {
		f, err := b.exchanger(x, o, dev)
		x.Small.Store(&hostshm.Small{Kernel: f, Why: err})
	}
	k := x.Small.Load()
	if k.Why != nil {
		return nil
	}
	return &small{shared: s, launch: driver.Launch{Function: k.Kernel, Grid: driver.Dim{X: 1}}}
}

// exchanger returns the kernel for small all-reduces on the rank's device, or why there is none.
func (b *Engine) exchanger(x *hostshm.Exchange, o *Operation, dev int) (driver.Function, error) {
	if err := Lacks(b.Driver); err != nil {
		return nil, err
	}
	if !x.Region.Alone() {
		return nil, errors.New("ranks share a process")
	}
	if b.Devices < b.Size {
		return nil, fmt.Errorf("the %d ranks have %d devices", b.Size, b.Devices)
	}
	if err := b.SeesWords(o.Ctx, o.Left(), dev); err != nil {
		return nil, err
	}
	return b.Packer(dev).module.Function(kernels.Exchange)
}

// Stage implements Program.
func (s *small) Stage(o *Operation) error {
	h, err := o.Pin(wordsBytes)
	for at := 0; err == nil && at < wordsBytes; at += wordRelease {
		h.Store32(at, 0)
	}
	return err
}

// Fill implements Program. To the tracker the kernel writes the common slot: the hosts do while it waits.
func (s *small) Fill(o *Operation, b *edges.Batch) error {
	x, p, w, n := s.x, o.Legs[0].Src, o.staging.Ptr(), s.bytes()
	at, in, out := p.Base+driver.Ptr(p.Lo), x.Ptr(x.In(x.Rank, s.first)), x.Ptr(x.Out(s.first))
	s.args.Ptr(at).Ptr(in).Ptr(out).Uint64(uint64(n)).Ptr(w + wordArrived).Ptr(w + wordRelease).Ptr(w + wordTaken)
	s.args.Uint32(1).Uint64(uint64(o.Left()))
	s.access = [...]driver.Access{driver.Writes(at, n), driver.Writes(in, n), driver.Writes(out, n), driver.Shares(w, wordsBytes)}
	s.launch.Args, s.launch.Access, s.launch.Block.X = &s.args, s.access[:], uint32(min((n/16+32)&^31, kernels.Block))
	b.Launch(p.Up, &s.launch)
	return nil
}

// Run implements Program.
func (s *small) Run(o *Operation) error {
	err := s.meet(o)
	if err == nil {
		err = s.word(o, o, wordArrived)
	}
	if err == nil {
		err = s.combine(o, nil)
	}
	if err == nil {
		s.release(o)
		err = s.word(o, leaving{o}, wordTaken) // a word costs the driver nothing, an event that is asked again and again does
	}
	return err
}

// Err implements Program.
func (s *small) Err() error { return nil }

// word waits for a word of the kernel.
func (s *small) word(o *Operation, asked hostshm.Asker, at int) (err error) {
	for w := (hostshm.Watch{Eager: s.x.Eager}); o.staging.Load32(at) == 0 && err == nil; {
		err = w.Poll(asked)
	}
	return err
}

// release lets the kernel go on, also when the operation has failed.
func (s *small) release(o *Operation) {
	if o.staging != nil {
		o.staging.Store32(wordRelease, 1)
	}
}

// leaving is an operation that has only to leave the device: what becomes of the group does not matter to it.
type leaving struct{ o *Operation }

func (l leaving) Ask() error {
	if err := l.o.expired(); err != nil {
		return fmt.Errorf("%w, waiting for the device", err)
	}
	return nil
}

func (l leaving) AskDriver() error { return cmp.Or(l.Ask(), l.o.Legs[0].Src.Up.Err()) }
