package group

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Meet finds out, with the other ranks, what needs no device to be opened.
func (b *Engine) Meet(ctx context.Context) error {
	why := b.Missing
	if why == nil {
		why = NoPeers(b.Driver)
	}
	host := HostIdentity()
	var name string
	b.Board, name = board.New()
	const at = sha256.Size + region.NameLen
	mine := make([]byte, at+8)
	copy(mine, host[:])
	copy(mine[len(host):], name)
	if b.Driver != nil {
		which := crc32.ChecksumIEEE([]byte(VisibleDevices()))
		binary.LittleEndian.PutUint32(mine[at:], which)
		binary.LittleEndian.PutUint32(mine[at+4:], uint32(b.Driver.Count()))
	}
	reason, all, err := b.Hear(ctx, 0, why, mine)
	if err != nil {
		return fmt.Errorf("cuda: meeting the other ranks: %w", err)
	}
	b.Unreachable = reason
	boards := make(map[int]string)
	seen := make(map[uint32]bool)
	for r, x := range all {
		if !bytes.Equal(x[:len(host)], host[:]) {
			continue
		}
		if which := binary.LittleEndian.Uint32(x[at:]); !seen[which] {
			seen[which] = true
			b.Devices += int(binary.LittleEndian.Uint32(x[at+4:]))
		}
		if r < b.Rank {
			b.local++
		}
		if r != b.Rank {
			boards[r] = string(bytes.TrimRight(x[len(host):][:region.NameLen], "\x00"))
		}
	}
	b.Board.Open(b.Rank, boards)
	b.OneHost = len(boards) == b.Size-1
	for r, x := range all {
		if b.Unreachable == nil && !bytes.Equal(x[:len(host)], all[0][:len(host)]) {
			b.Unreachable = fmt.Errorf("rank %d is on another host than rank 0", r)
		}
	}
	return nil
}

// PeerVariable is the environment variable that switches kernels that reach other devices off.
const PeerVariable = "C10D_CUDA_P2P"

// NoPeers returns why kernels of this process do not reach other devices, as far as that is known before the
// devices are opened.
func NoPeers(d driver.Driver) error {
	if os.Getenv(PeerVariable) == "0" {
		return fmt.Errorf("%s is 0", PeerVariable)
	}
	return Lacks(d)
}

// VisibleDevices tells which devices a process has, apart from their number; a variable for tests.
var VisibleDevices = func() string { return os.Getenv("CUDA_VISIBLE_DEVICES") }

// OwnDevice returns the device that is most likely this rank's alone: of the number that the rank has among
// those of its host. It is for ranks that have shown none.
func (b *Engine) OwnDevice() int {
	if b.Driver == nil {
		return 0
	}
	return b.local % max(b.Driver.Count(), 1)
}

// Hear tells the other ranks why this one cannot go on, nil if it can, and something else of the same length on all ranks.
// It returns the first rank's reason, and what else each has told.
func (b *Engine) Hear(ctx context.Context, timeout time.Duration, why error, more []byte) (reason error, all [][]byte, err error) {
	reasons, all, err := b.HearEach(ctx, timeout, why, more)
	return cmp.Or(reasons...), all, err
}

// HearEach is Hear, and returns the reasons of all ranks.
func (b *Engine) HearEach(ctx context.Context, timeout time.Duration, why error, more []byte) (reasons []error, others [][]byte, err error) {
	mine := make([]byte, 1+reasonLen, 1+reasonLen+len(more))
	if why != nil {
		mine[0] = 1
		text := strings.ToValidUTF8(why.Error(), "?")
		copy(mine[1:], strings.ToValidUTF8(text[:min(len(text), reasonLen)], ""))
	}
	mine = append(mine, more...)
	in, err := tensor.Of(mine, len(mine))
	if err != nil {
		return nil, nil, err
	}
	all := make([]byte, len(mine)*b.Size)
	out, err := tensor.Of(all, len(all))
	if err != nil {
		return nil, nil, err
	}
	b.heard++
	met := driver.HostMeets(b.Driver, b.Issuer.Group, b.heard)
	w, err := b.CPU.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{Timeout: timeout})
	if err == nil {
		err = w.Wait(context.Background())
	}
	if err != nil {
		return nil, nil, err
	}
	met()
	reasons = make([]error, b.Size)
	for r := range b.Size {
		x := all[r*len(mine) : (r+1)*len(mine)]
		if x[0] != 0 {
			reasons[r] = fmt.Errorf("rank %d: %s", r, bytes.TrimRight(x[1:1+reasonLen], "\x00"))
		}
		others = append(others, x[1+reasonLen:])
	}
	return reasons, others, nil
}

// reasonLen is how much of a reason the other ranks are told.
const reasonLen = 160

// HostIdentity tells the hosts of a group apart. It is the kernel's boot id, which containers of
// a host have in common, or else the host's name.
var HostIdentity = func() [sha256.Size]byte {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		name, err := os.Hostname()
		if err != nil {
			name = fmt.Sprintf("process %d", os.Getpid())
		}
		id = []byte(name)
	}
	return sha256.Sum256(id)
}

// ErrNotAsked is what Explain says before the ranks have looked at their devices.
var ErrNotAsked = errors.New("whether the devices reach each other is found out by the first collective that can stay on them")

// Together has f run on all ranks, between the group's collectives before this call and those after
// it. Op and print are the collective for which that is needed.
func (b *Engine) Together(ctx context.Context, op work.OpType, print board.Call, f func(q *Operation) error) error {
	if ctx == nil {
		ctx = context.Background()
	}
	q := &Operation{Call: func(q *Operation, _ []*tensor.Tensor) error { return f(q) }}
	if err := b.queueTogether(ctx, op, print, q); err != nil {
		return err
	}
	return q.Work().Wait(context.Background())
}

func (b *Engine) queueTogether(ctx context.Context, op work.OpType, print board.Call, q *Operation) error {
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, 0)
	if err != nil {
		return err
	}
	q.init(b, ctx, info, timeout)
	q.Print = print
	q.Print.Op = op
	if err := b.Enter(ctx, info, q.Print); err != nil {
		return err
	}
	q.watch()
	q.line = b.line
	b.last(q)
	b.pass(q)
	return nil
}

// Share makes the exchange, with the other ranks. If one of them cannot, there is
// none on any rank, and all know why. An error is one of telling each other.
func (b *Engine) Share(ctx context.Context, timeout time.Duration) error {
	if b.Size == 1 {
		return nil
	}
	if !b.OneHost {
		b.Exchange.Store(&hostshm.Exchange{Why: errors.New("the ranks are on several hosts")})
		return nil
	}
	size := hostshm.Bytes(b.Size, b.SharedSlots, b.Chunk)
	why := cmp.Or(b.Missing, b.Limits)
	var r *region.Region
	if why == nil && b.Rank == 0 {
		r, why = region.New(size)
	}
	mine := make([]byte, region.NameLen)
	if r != nil {
		copy(mine, r.Name)
	}
	why, all, err := b.Hear(ctx, timeout, why, mine)
	if err == nil && why == nil {
		if b.Rank != 0 {
			r, why = region.Open(string(bytes.TrimRight(all[0], "\x00")), size)
		}
		var x *hostshm.Exchange
		if why == nil {
			x = hostshm.New(b.Rank, b.Size, b.SharedSlots, b.Chunk, r, b.Driver)
		}
		if why, _, err = b.Hear(ctx, timeout, why, nil); err == nil && why == nil {
			// Who opens the memory has done so.
			b.Exchange.Store(x)
			return r.Hide()
		}
	}
	if r != nil {
		err = errors.Join(err, r.Leave())
	}
	if err == nil {
		b.Exchange.Store(&hostshm.Exchange{Why: why})
	}
	return err
}
