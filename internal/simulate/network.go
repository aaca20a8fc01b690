package simulate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
)

// Network has the costs of messages and arithmetic. A bandwidth or a time of zero costs
// nothing.
type Network struct {
	Latency   time.Duration // of a message's first byte between two hosts
	Bandwidth float64       // bytes a second of a network interface, each way
	NICs      int           // interfaces of a host, assigned to its ranks in turn; 0 means 1
	Overhead  time.Duration // CPU time of a message, on each side
	Eager     int64         // longest message that leaves before its receive is posted; 0 means any

	LocalLatency   time.Duration // of a message between ranks of a host
	LocalBandwidth float64       // bytes a second of one such message
	Memory         float64       // bytes a second of all such messages of a host together

	Reduce float64 // bytes a second that a rank reduces
	Copy   float64 // bytes a second that a rank copies
}

// Stragglers makes ranks and messages unequal. The zero value leaves them equal.
type Stragglers struct {
	Seed   uint64
	Count  int           // number of slow ranks, chosen by the seed
	Slow   float64       // factor of their CPU times; below 1 means 1
	Late   time.Duration // delay of their start
	Jitter time.Duration // largest random addition to the latency between hosts
}

// Job is a network with ranks.
type Job struct {
	Network
	Stragglers
	Layout *plan.Layout // nil: one rank a host
}

// ps is a time in picoseconds: a message of a byte at 400 Gbit/s takes 20.
type ps = int64

func picoseconds(d time.Duration) ps { return ps(d) * 1000 }

// forever is later than anything.
const forever ps = math.MaxInt64

func duration(t ps) time.Duration { return time.Duration((t + 500) / 1000) }

// cost is the time for each byte, in picoseconds.
type cost float64

func costOf(bandwidth float64) cost {
	if bandwidth == 0 {
		return 0
	}
	return cost(1e12 / bandwidth)
}

func (c cost) of(bytes int64) ps { return ps(math.Round(float64(c) * float64(bytes))) }

// Check checks the values of a job with the given number of ranks.
func (j *Job) Check(ranks int) error {
	for _, v := range []struct {
		name  string
		value float64
	}{
		{"latency", float64(j.Latency)}, {"bandwidth", j.Bandwidth}, {"overhead", float64(j.Overhead)},
		{"number of interfaces", float64(j.NICs)}, {"eager limit", float64(j.Eager)},
		{"local latency", float64(j.LocalLatency)}, {"local bandwidth", j.LocalBandwidth},
		{"memory bandwidth", j.Memory}, {"reduction bandwidth", j.Reduce}, {"copy bandwidth", j.Copy},
		{"number of stragglers", float64(j.Count)}, {"slowness", j.Slow}, {"lateness", float64(j.Late)}, {"jitter", float64(j.Jitter)},
	} {
		if v.value < 0 || math.IsNaN(v.value) || math.IsInf(v.value, 0) {
			return fmt.Errorf("simulate: a %s of %v, want 0 or more", v.name, v.value)
		}
	}
	for _, bw := range []float64{j.Bandwidth, j.LocalBandwidth, j.Memory, j.Reduce, j.Copy} {
		if bw != 0 && bw < 1 {
			return fmt.Errorf("simulate: a bandwidth of %v bytes a second, want 1 or more", bw)
		}
	}
	switch {
	case ranks < 1 || ranks > maxRanks:
		return fmt.Errorf("simulate: %d ranks, want 1 to %d", ranks, maxRanks)
	case j.Count > ranks:
		return fmt.Errorf("simulate: %d stragglers among %d ranks", j.Count, ranks)
	case j.Layout != nil && j.Layout.Ranks() != ranks:
		return fmt.Errorf("simulate: a layout of %d ranks for %d", j.Layout.Ranks(), ranks)
	}
	return nil
}

// maxRanks limits the memory that a run allocates before it begins to about 2 GiB.
const maxRanks = 1 << 16

// slow chooses the stragglers.
func (s Stragglers) slow(ranks int, rng *rand.Rand) []bool {
	slow := make([]bool, ranks)
	for _, r := range rng.Perm(ranks)[:s.Count] {
		slow[r] = true
	}
	return slow
}
