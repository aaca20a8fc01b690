package tcp

import "sync"

// pending holds the ranks that a Join waits for.
type pending struct {
	mu   sync.Mutex
	lock *sync.Mutex // of why; nil before Join
	why  []error     // by rank, nil for those that are connected
}

func (p *pending) watch(lock *sync.Mutex, why []error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lock, p.why = lock, why
}

// Missing returns the ranks that Join has not connected yet, and why. It may be called while
// Join runs.
func (e *Endpoint) Missing() []Missing {
	p := &e.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lock == nil {
		return nil
	}
	p.lock.Lock()
	defer p.lock.Unlock()
	var all []Missing
	for r, err := range p.why {
		if err != nil {
			all = append(all, Missing{r, err})
		}
	}
	return all
}
