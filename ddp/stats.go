package ddp

import "time"

// Times are the parts of an iteration on this rank.
type Times struct {
	Forward  time.Duration // from Begin to Backward, or to the first Ready
	Backward time.Duration // from there to Finish: computing
	Comm     time.Duration // from the first launch of a bucket to Finish's end
	Overlap  time.Duration // the part of Comm that was hidden behind Backward
}

// Stats are c10d's run-time statistics. Iterations 1 to 10 and every hundredth are measured. With
// parameters on a device they are the times to enqueue, not the device's.
type Stats struct {
	Iterations int   // that reduced gradients
	Samples    int   // that were measured to the end
	Last       Times // of the latest sample
	Mean       Times // over all samples
}

// Stats returns the statistics so far.
func (d *DDP) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Stats{Iterations: d.synced, Samples: d.stats.samples, Last: d.stats.last}
	if n := time.Duration(s.Samples); n > 0 {
		t := d.stats.total
		s.Mean = Times{Forward: t.Forward / n, Backward: t.Backward / n, Comm: t.Comm / n, Overlap: t.Overlap / n}
	}
	return s
}

type stats struct {
	on      bool // this iteration is measured
	samples int
	last    Times
	total   Times

	forwardAt, backwardAt, computedAt, commAt time.Time
}

func (s *stats) begin(iteration int) {
	s.on = iteration <= 10 || iteration%100 == 0
	s.backwardAt, s.commAt = time.Time{}, time.Time{}
	s.mark(&s.forwardAt)
}

func (s *stats) mark(at *time.Time) {
	if s.on {
		*at = time.Now()
	}
}

func (s *stats) backward() {
	if s.backwardAt.IsZero() {
		s.mark(&s.backwardAt)
	}
}

func (s *stats) computed() { s.mark(&s.computedAt) }

func (s *stats) communicate() {
	if s.commAt.IsZero() {
		s.mark(&s.commAt)
	}
}

func (s *stats) end() {
	if !s.on {
		return
	}
	s.on = false
	s.backward()
	s.communicate()
	t := Times{
		Forward:  s.backwardAt.Sub(s.forwardAt),
		Backward: max(0, s.computedAt.Sub(s.backwardAt)),
		Comm:     time.Since(s.commAt),
		Overlap:  max(0, s.computedAt.Sub(s.commAt)),
	}
	s.last = t
	s.samples++
	s.total.Forward += t.Forward
	s.total.Backward += t.Backward
	s.total.Comm += t.Comm
	s.total.Overlap += t.Overlap
}
