package driver

import "sync"

// Once keeps the answer to a question about a device, for all who ask. The zero value is ready.
type Once struct {
	mu       sync.Mutex
	asked    *sync.Cond // a question has ended; not mu alone, because a question may take long
	asking   bool
	answered bool
	answer   error
}

// Do returns the answer. The first callers ask for it with f, one at a time, until it knows the answer. What f returns
// without knowing it is returned to that caller only.
func (o *Once) Do(f func() (answer error, known bool)) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked == nil {
		o.asked = sync.NewCond(&o.mu)
	}
	for o.asking {
		o.asked.Wait()
	}
	if o.answered {
		return o.answer
	}
	answer, known := o.ask(f)
	if known {
		o.answered, o.answer = true, answer
	}
	return answer
}

// ask calls f without the lock, which the caller holds.
func (o *Once) ask(f func() (error, bool)) (answer error, known bool) {
	o.asking = true
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.asking = false
		o.asked.Broadcast()
	}()
	return f()
}
