package sim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// LeaveOut finds out whether a program needs each of its calls that order something.
// It runs the program once as it is. Then it runs it again for each such call, without
// that call and on a machine of its own. It returns the calls that were left out, and the
// ones that nobody missed: neither the program nor the machine's Close returned an error.
// The names are those of methods, by
// default Record, Wait, WaitValue and WriteValue. The error is that of the
// program as it is.
//
// A call is known by its stream, its name, and its number among the calls of that stream
// and name. So a program may have many goroutines, if each stream has a name of its own and
// is given the same calls in every run. Every wait of the program has to end when
// what it waits for does not come; Quiesce helps.
//
// Nobody misses a call if a later one does the same. One such call is an event at the end of a
// batch, if somebody waits for the event of a later batch. Another is a counter that is written
// again.
func LeaveOut(c Config, run func(m *Machine) error, names ...string) (tried, unmissed []Call, err error) {
	if len(names) == 0 {
		names = []string{"Record", "Wait", "WaitValue", "WriteValue"}
	}
	once := func(c Config, skip func(Call) bool) error {
		m, err := New(c)
		if err != nil {
			return err
		}
		m.Skip(skip)
		err = run(m)
		return errors.Join(err, m.Close())
	}
	err = once(c, func(call Call) bool {
		if slices.Contains(names, call.Name) {
			tried = append(tried, call)
		}
		return false
	})
	if err != nil {
		return nil, nil, err
	}
	c.Quiet = true
	for _, out := range tried {
		c.Seed++
		err := once(c, func(call Call) bool {
			return call.K == out.K && call.Name == out.Name && call.Stream == out.Stream
		})
		if err == nil {
			unmissed = append(unmissed, out)
		}
	}
	return tried, unmissed, nil
}

// FailEach runs a program again and again and lets another of its calls fail each time, until a
// run has no more calls; it returns how many there were. It returns an error in four cases: the
// program succeeds although a call failed; it returns another error than cause; it leaves
// something open; it leaves streams that can never go on. What is open is what Machine.Stats
// counts when the program has returned. Orders are not checked: a program that gives up need not
// keep them.
func FailEach(c Config, cause error, run func(m *Machine) error) (calls int, err error) {
	c.NoCheck, c.Quiet = true, true
	for k := 0; ; k++ {
		failed, err := failOnce(c, k, cause, run)
		if err != nil {
			return k, fmt.Errorf("sim: with failure of call %d: %w", k, err)
		}
		if !failed {
			return k, nil
		}
		c.Seed++
	}
}

func failOnce(c Config, k int, cause error, run func(m *Machine) error) (failed bool, err error) {
	m, err := New(c)
	if err != nil {
		return false, err
	}
	defer m.Close()
	var which Call
	fail := FailCall(k, cause)
	m.Inject(func(c Call) error {
		err := fail(c)
		if err != nil && !failed {
			failed, which = true, c
		}
		return err
	})
	err = run(m)
	m.Inject(nil)
	switch {
	case !failed && err != nil:
		return failed, err
	case failed && err == nil:
		return failed, fmt.Errorf("%v failed and the program did not notice", which)
	case failed && !errors.Is(err, cause):
		return failed, fmt.Errorf("%v failed with %w, the program with %w", which, cause, err)
	}
	if open := m.Stats().open(); open != "" {
		return failed, fmt.Errorf("%v failed, and open are %s", which, open)
	}
	var stuck *Stuck
	if err := m.Close(); errors.As(err, &stuck) {
		return failed, fmt.Errorf("%v failed: %w", which, err)
	}
	return failed, nil
}

// open says what is alive.
func (s Stats) open() string {
	var text []string
	for _, x := range []struct {
		n    int
		what string
	}{
		{s.Memories, "memories"}, {s.Hosts, "page-locked memories"}, {s.Streams, "streams"}, {s.Events, "events"}, {s.Graphs, "graphs"},
		{s.Modules, "modules"}, {s.Mappings, "mappings"}, {s.Peers, "peer accesses"},
	} {
		if x.n != 0 {
			text = append(text, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}
	return strings.Join(text, ", ")
}
