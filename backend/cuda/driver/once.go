package driver

import "sync"

// Once keeps the answer to a question about a device, for all who ask. The zero value is ready.
type Once struct {
	mu       sync.Mutex
	answered bool
	answer   error
}

// Do returns the answer. The first callers ask for it with f, one at a time, until it knows the answer. What f returns
// without knowing it is returned to that caller only.
func (o *Once) Do(f func() (answer error, known bool)) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.answered {
		return o.answer
	}
	answer, known := f()
	if known {
		o.answered, o.answer = true, answer
	}
	return answer
}
