package ddp

import (
	"context"
	"errors"
	"runtime"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// allocator is a group with memory that the ranks of a host share; *pg.ProcessGroup implements it.
type allocator interface {
	Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error)
	Free(t *tensor.Tensor) error
}

// sharedMemory has the buffers of buckets in memory of Alloc. The garbage collector does not manage
// that memory, so it is freed with the DDP. It must not refer to the DDP.
type sharedMemory struct {
	group   allocator
	buffers []*tensor.Tensor
	works   []*work.Work // of each bucket, the last all-reduce
}

// shareMemory has buckets lie in memory of Alloc, if the program cannot keep them: it sees them as views
// or in hooks.
func (d *DDP) shareMemory() {
	a, ok := d.g.(allocator)
	if !ok || d.o.GradientAsBucketView || d.o.Hook != nil || d.o.PyTorch {
		return
	}
	d.shared = &sharedMemory{group: a}
	runtime.AddCleanup(d, (*sharedMemory).release, d.shared)
}

// alloc returns n zeros. They are in ordinary memory if a rank has no more of the other.
func (s *sharedMemory) alloc(ctx context.Context, dtype tensor.DType, n int) (*tensor.Tensor, error) {
	t, err := s.group.Alloc(ctx, dtype, n)
	switch {
	case errors.Is(err, backend.ErrExhausted):
		return tensor.New(dtype, n)
	case err != nil:
		return nil, err
	}
	s.buffers = append(s.buffers, t)
	return t, nil
}

// replace frees the first n buffers, whose operations have ended.
func (s *sharedMemory) replace(n int) error {
	var errs []error
	for _, t := range s.buffers[:n] {
		errs = append(errs, s.group.Free(t))
	}
	s.buffers = s.buffers[n:]
	return errors.Join(errs...)
}

// release frees everything when nobody has the DDP. If an operation is under way even so, the memory
// stays.
func (s *sharedMemory) release() {
	for _, w := range s.works {
		if w != nil && !w.IsCompleted() {
			return
		}
	}
	_ = s.replace(len(s.buffers))
}
