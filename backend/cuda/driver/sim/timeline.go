package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Step is one operation on the virtual clock.
type Step struct {
	Stream     string
	Operation  string
	Start, End time.Duration
}

// Timeline returns when each operation would have run on hardware like the Topology's.
// Copies between two places follow one another, and so do kernels and fills of one device.
// Anything else runs when the operations that it is ordered after have ended. It depends on the orders that the program made, not on how the
// goroutines ran, so it is the same in each run. It needs Config.Timeline, and
// everything must have settled.
func (m *Machine) Timeline() ([]Step, error) {
	if !m.cfg.Timeline {
		return nil, errors.New("sim: Config.Timeline is off")
	}
	var log []*entry
	m.checker.do(func() { log = slices.Clone(m.checker.timeline) })
	return m.schedule(log), nil
}

// Makespan returns when the last operation of the Timeline ends.
func (m *Machine) Makespan() (time.Duration, error) {
	steps, err := m.Timeline()
	var last time.Duration
	for _, s := range steps {
		last = max(last, s.End)
	}
	return last, err
}

// schedule gives every entry its time: of those whose predecessors have theirs,
// the one that can start first comes next.
func (m *Machine) schedule(log []*entry) []Step {
	byAgent := make(map[int][]*entry)
	agents := 0
	for _, e := range log {
		byAgent[e.agent.id] = append(byAgent[e.agent.id], e)
		agents = max(agents, e.agent.id+1)
	}
	ends := make([][]time.Duration, agents) // of each agent's entries so far
	free := make(map[string]time.Duration)  // when a wire or a device is free

	// ready returns when the agent's next entry can start, false if that is not known.
	ready := func(a int) (time.Duration, bool) {
		i := len(ends[a])
		e := byAgent[a][i]
		var at time.Duration
		if i > 0 {
			at = ends[a][i-1]
		}
		for o, n := range e.clock {
			if n == 0 || o == a || o >= agents {
				continue
			}
			// The other agent's last entry up to step n.
			all := byAgent[o]
			j, _ := slices.BinarySearchFunc(all, n, func(x *entry, n uint32) int {
				if x.tick <= n {
					return -1
				}
				return 1
			})
			if j > len(ends[o]) {
				return 0, false
			}
			if j > 0 {
				at = max(at, ends[o][j-1])
			}
		}
		return at, true
	}

	var steps []Step
	last := make([]int, agents) // each agent's last step
	for {
		best, bestAt := -1, time.Duration(0)
		for a := range agents {
			if len(ends[a]) == len(byAgent[a]) {
				continue
			}
			if at, ok := ready(a); ok && (best < 0 || at < bestAt) {
				best, bestAt = a, at
			}
		}
		if best < 0 {
			return steps
		}
		i := len(ends[best])
		e := byAgent[best][i]
		// A kernel has an entry for each use of memory; the first one has the cost.
		again := i > 0 && byAgent[best][i-1].op == e.op
		cost, on := time.Duration(0), ""
		if !again {
			cost, on = m.cost(e.op)
		}
		start := bestAt
		if on != "" {
			start = max(start, free[on])
			free[on] = start + cost
		}
		ends[best] = append(ends[best], start+cost)
		if again {
			steps[last[best]].End = max(steps[last[best]].End, start)
			continue
		}
		last[best] = len(steps)
		steps = append(steps, Step{e.agent.name, e.op.String(), start, start + cost})
	}
}

// cost returns how long an operation takes, and what it has for itself meanwhile.
func (m *Machine) cost(o *op) (time.Duration, string) {
	t := m.topo
	over := func(n int, bandwidth float64) time.Duration {
		return time.Duration(float64(n) / bandwidth * float64(time.Second))
	}
	switch o.kind {
	case opCopy:
		dst, src := o.spans[0], o.spans[1]
		n, from, to := dst.len, src.b.device, dst.b.device
		switch {
		case from < 0 && to < 0:
			return t.HostLatency + over(n, t.CPUBandwidth), "host"
		case from < 0 || to < 0:
			return t.HostLatency + over(n, t.HostBandwidth), fmt.Sprint(from, to)
		case from == to:
			return t.LaunchLatency + over(2*n, t.Memory), fmt.Sprint("device ", to)
		case !m.topo.peer(from, to):
			return 2*t.HostLatency + 2*over(n, t.HostBandwidth), fmt.Sprint(from, to)
		}
		return t.LinkLatency + over(n, t.LinkBandwidth), fmt.Sprint(from, to)
	case opMemset:
		return t.LaunchLatency + over(o.spans[0].len, t.Memory), fmt.Sprint("device ", o.s.dev.index)
	case opLaunch:
		cost := t.LaunchLatency
		for _, s := range o.spans {
			switch {
			case s.b.device < 0:
				cost += over(s.len, t.HostBandwidth)
			case s.b.device == o.s.dev.index:
				cost += over(s.len, t.Memory)
			default:
				cost += over(s.len, t.LinkBandwidth)
			}
		}
		return cost, fmt.Sprint("device ", o.s.dev.index)
	case opHost:
		n := 0
		for _, s := range o.spans {
			n += s.len
		}
		return over(n, t.CPUBandwidth), ""
	}
	return 0, ""
}
