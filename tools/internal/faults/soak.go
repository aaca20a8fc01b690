package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Use is what rank 0 of a soak uses at the beginning of an epoch, and what it has done until then.
type Use struct {
	After      float64 `json:"after"` // seconds since the process began
	Memory     int     `json:"memory"`
	Heap       int     `json:"heap"`
	Files      int     `json:"files"`
	Goroutines int     `json:"goroutines"`
	Keys       int64   `json:"keys"` // in the store, of all ranks
	Operations int     `json:"operations"`
	Groups     int     `json:"groups"`
}

var processBegan = time.Now()

// use adds what the process uses to a line. Heap counts what is in use after a collection, memory is what the system says.
func (s *stepper) use(line *said) error {
	n, err := resources()
	if err != nil {
		return err
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	u := &Use{After: time.Since(processBegan).Seconds(), Heap: int(m.HeapAlloc), Goroutines: n[0], Files: n[1], Operations: s.done, Groups: s.groups}
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return err
	}
	if _, err := fmt.Sscan(string(statm), new(int), &u.Memory); err != nil {
		return err
	}
	u.Memory *= os.Getpagesize()
	if u.Keys, err = s.st.NumKeys(context.Background()); err != nil {
		return err
	}
	line.Use = u
	return nil
}

// RandomSoak draws a trial of four ranks that lasts so long. A fault comes every 1 to 5 s, and a process for each that dies.
func RandomSoak(w Wire, seed uint64, lasts time.Duration) Trial {
	r := rand.New(rand.NewPCG(seed, 3))
	t := Trial{Wire: w, Store: TCPStore, Seed: seed, Ranks: 4, Soak: true}
	kinds := []Fault{Kill, Stop, Panic, Exit, Cancel}
	for at := time.Duration(0); at < lasts; {
		e := Event{Fault: kinds[r.IntN(len(kinds))], After: time.Second + time.Duration(r.IntN(4000))*time.Millisecond, Pick: r.IntN(1 << 16)}
		next := Event{Fault: Newcomer, After: time.Duration(r.IntN(3000)) * time.Millisecond}
		t.Events = append(t.Events, e)
		switch at += e.After; e.Fault {
		case Cancel:
			continue
		case Stop:
			next.Fault = Resume
		}
		t.Events = append(t.Events, next)
		at += next.After
	}
	return t
}

// usual returns medians of memory, which programs have in bursts, and the least of what is counted: a smaller group has less.
func usual(uses []Use) Use {
	middle := func(f func(Use) int) int {
		var all []int
		for _, u := range uses {
			all = append(all, f(u))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	x := uses[0]
	for _, u := range uses[1:] {
		x.Files, x.Goroutines, x.Keys = min(x.Files, u.Files), min(x.Goroutines, u.Goroutines), min(x.Keys, u.Keys)
	}
	x.Memory, x.Heap = middle(func(u Use) int { return u.Memory }), middle(func(u Use) int { return u.Heap })
	return x
}

// thirds returns what rank 0 used in the first third of the epochs after a few, and in the last.
func (x *Outcome) thirds() (first, last Use, ok bool) {
	const warmUp = 5
	if len(x.Uses) < warmUp+6 {
		return first, last, false
	}
	uses := x.Uses[warmUp:]
	n := len(uses) / 3
	return usual(uses[:n]), usual(uses[len(uses)-n:]), true
}

// keysLeft is the number of keys that an epoch may leave in the store: its view, for members that come late, and
// keys of groups whose making a death has ended.
const keysLeft = 4

// Growth returns what rank 0 uses more of in the end than in the beginning. A tenth of the memory, and 2 MiB, may be chance.
func (x *Outcome) Growth() (all []string) {
	first, last, ok := x.thirds()
	if !ok {
		return []string{fmt.Sprintf("%d epochs are too few to tell whether memory grows", len(x.Uses))}
	}
	for _, c := range []struct {
		what        string
		first, last int
		chance      int
	}{
		{"bytes of memory", first.Memory, last.Memory, first.Memory/10 + 2<<20},
		{"bytes of heap", first.Heap, last.Heap, first.Heap/10 + 2<<20},
		{"descriptors", first.Files, last.Files, 0},
		{"goroutines", first.Goroutines, last.Goroutines, 2},
		{"keys in the store", int(first.Keys), int(last.Keys), keysLeft * len(x.Uses)},
	} {
		if c.last > c.first+c.chance {
			all = append(all, fmt.Sprintf("rank 0 has %d %s, and had %d", c.last, c.what, c.first))
		}
	}
	return all
}

// SoakTable returns a Markdown table of soaks.
func SoakTable(all []*Outcome) string {
	var b strings.Builder
	b.WriteString("| wire | epochs | operations | sub-groups | deaths | returns | memory | heap | descriptors | goroutines | keys |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, x := range all {
		first, last, _ := x.thirds()
		var end Use
		if len(x.Uses) > 0 {
			end = x.Uses[len(x.Uses)-1]
		}
		h := x.Happened
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d | %s | %s | %d, %d | %d, %d | %d, %d |\n", x.Wire, x.Epochs, end.Operations, end.Groups,
			h[Kill]+h[Panic]+h[Exit], h[Newcomer], mebibytes(first.Memory, last.Memory), mebibytes(first.Heap, last.Heap),
			first.Files, last.Files, first.Goroutines, last.Goroutines, first.Keys, last.Keys)
	}
	return b.String()
}

func mebibytes(first, last int) string {
	return fmt.Sprintf("%.1f, %.1f MiB", float64(first)/(1<<20), float64(last)/(1<<20))
}
