package sim

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Machine is a simulated host: devices, their memory and the wires between
// them. Each process of the host gets a Driver of its own. All methods may be
// called from many goroutines.
type Machine struct {
	cfg  Config
	topo Topology
	quit chan struct{}

	mu        sync.Mutex
	kernels   map[string]Kernel
	processes []*Driver
	exports   map[exportKey]*backing
	hostMem   map[*byte]*backing // registered memory by its first byte
	meetings  map[meeting]clock  // what the hosts had done that have come
	nextAddr  driver.Ptr
	nextID    uint64
	used      []uint64 // bytes of each device
	inject    func(Call) error
	skip      func(Call) bool
	calls     int // since Inject
	skips     int // since Skip
	callsOf   map[callKey]int
	skipsOf   map[callKey]int
	closed    bool

	agents   atomic.Pointer[[]*agent] // replaced, never changed
	findings findings
	checker  checker
	group    sync.WaitGroup
}

// closeLimit bounds how long closing waits for operations that still run. Operations whose wait
// can never end do not take that long.
const closeLimit = 5 * time.Second

type callKey struct{ stream, name string }

type exportKey struct {
	owner [16]byte
	id    uint64
}

// agent is one line of the vector clocks: a stream, or a process's host.
type agent struct {
	id     int
	name   string
	d      *Driver
	stream *stream // nil for a host
	log    *entry  // the last entry; only the agent uses it
	head   *entry  // the last entry that the checker has taken; only the checker uses it
}

// New returns a machine. It has to be closed.
func New(c Config) (*Machine, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	c.Devices = orElse(c.Devices, 1)
	c.Memory = orElse(c.Memory, 1<<30)
	if c.Dir != "" {
		if !canShare {
			return nil, fmt.Errorf("sim: memory in files: %w on this system", errors.ErrUnsupported)
		}
		if s, err := os.Stat(c.Dir); err != nil {
			return nil, fmt.Errorf("sim: the folder for shared memory: %w", err)
		} else if !s.IsDir() {
			return nil, fmt.Errorf("sim: %s is no folder", c.Dir)
		}
	}
	m := &Machine{
		cfg: c, topo: c.Topology.withDefaults(), quit: make(chan struct{}),
		kernels: maps.Clone(c.Kernels), exports: make(map[exportKey]*backing),
		hostMem: make(map[*byte]*backing),
		callsOf: make(map[callKey]int), skipsOf: make(map[callKey]int),
		meetings: make(map[meeting]clock), nextAddr: firstAddress, used: make([]uint64, c.Devices),
	}
	if m.kernels == nil {
		m.kernels = make(map[string]Kernel)
	}
	m.agents.Store(new([]*agent))
	if !c.NoCheck || c.Timeline {
		m.checker.m = m
		m.checker.ask = make(chan func())
		m.group.Go(m.checker.run)
	}
	return m, nil
}

// Open returns the Driver of the only process of a new Machine. Closing it
// closes the machine.
func Open(c Config) (*Driver, error) {
	m, err := New(c)
	if err != nil {
		return nil, err
	}
	d, err := m.Process("")
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	d.alone = true
	return d, nil
}

// Process returns the driver of another process of the host. The name shows in
// reports. Processes share the devices, and nothing else: what one allocates the
// others reach through handles only.
func (m *Machine) Process(name string) (*Driver, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, &driver.Error{Call: "Process", Device: -1, Err: driver.ErrClosed}
	}
	d := &Driver{m: m, name: name, abort: make(chan struct{}), streams: make(map[*stream]bool), byHandle: make(map[uintptr]*stream)}
	if _, err := rand.Read(d.owner[:]); err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	d.devices = make([]Device, m.cfg.Devices)
	for i := range d.devices {
		d.devices[i] = Device{d: d, index: i, peers: make([]int, m.cfg.Devices), gone: make(chan struct{})}
	}
	host := "host"
	if name != "" {
		host = "host of " + name
	}
	d.host = m.newAgent(host, d, nil)
	d.tick = 1
	m.processes = append(m.processes, d)
	return d, nil
}

// newAgent adds an agent; the caller holds m.mu.
func (m *Machine) newAgent(name string, d *Driver, s *stream) *agent {
	all := *m.agents.Load()
	a := &agent{id: len(all), name: name, d: d, stream: s}
	a.log = newEntry()
	a.head = a.log
	next := append(slices.Clip(slices.Clone(all)), a)
	m.agents.Store(&next)
	return a
}

// Register adds a kernel that modules loaded later can have.
func (m *Machine) Register(name string, k Kernel) error {
	if name == "" || k == nil {
		return fmt.Errorf("sim: kernel %q is nil or has no name", name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, taken := m.kernels[name]; taken {
		return fmt.Errorf("sim: kernel %q already exists", name)
	}
	m.kernels[name] = k
	return nil
}

// Inject makes calls fail: f is asked before each call that can fail, and the
// call returns its error and does nothing. Nil ends it. Calls are counted from
// 0 anew. f may be called from many goroutines, one after the other.
//
// To try every failure of a program, run it with FailCall(k) for k = 0, 1, ...
// until a run has fewer calls.
func (m *Machine) Inject(f func(Call) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inject, m.calls, m.callsOf = f, 0, make(map[callKey]int)
}

// FailCall returns a function for Inject that makes the k-th call fail with
// err, and those after it too if device is a lost one: err matches
// driver.ErrDeviceLost.
func FailCall(k int, err error) func(Call) error {
	lost := errors.Is(err, driver.ErrDeviceLost)
	return func(c Call) error {
		if c.N == k || lost && c.N > k {
			return err
		}
		return nil
	}
}

// Calls returns how many calls were counted since Inject.
func (m *Machine) Calls() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.calls
}

// Skip makes calls do nothing and succeed: f is asked before each call that
// enqueues. A skipped Record returns an event that has passed. It is there for
// tests of tests: whatever wait or record is left out, somebody has to notice.
// Nil ends it; calls are counted from 0 anew.
func (m *Machine) Skip(f func(Call) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.skip, m.skips, m.skipsOf = f, 0, make(map[callKey]int)
}

// enter is what every call of a driver begins with: it may fail as injected, or
// be left out.
func (d *Driver) enter(call string, device int, s *stream) (skip bool, err error) {
	m := d.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if d.closed {
		return false, &driver.Error{Call: call, Device: device, Err: driver.ErrClosed}
	}
	c := Call{Name: call, Device: device}
	if s != nil {
		c.Stream = s.ag.name
	}
	key := callKey{c.Stream, call}
	c.N, c.K = m.calls, m.callsOf[key]
	m.calls++
	m.callsOf[key]++
	if m.inject != nil {
		if err := m.inject(c); err != nil {
			return false, &driver.Error{Call: call, Device: device, Func: "sim", Code: -1, Name: "injected", Err: err}
		}
	}
	if s != nil {
		c.N, c.K = m.skips, m.skipsOf[key]
		m.skips++
		m.skipsOf[key]++
		return m.skip != nil && m.skip(c), nil
	}
	return false, nil
}

// Lose breaks a device for every process, as a hardware fault would: operations
// that have not begun do not run, events and calls return ErrDeviceLost.
func (m *Machine) Lose(device int, cause error) {
	m.mu.Lock()
	all := slices.Clone(m.processes)
	m.mu.Unlock()
	for _, d := range all {
		d.devices[device].lose(cause)
	}
}

// Settle waits until every operation of every process has ended. It returns a *Stuck if the remaining operations can
// never end: they wait for each other, or for a word that nobody writes. It is for tests: nobody else may use the
// machine meanwhile. Afterwards every host has seen everything, as if it had waited for an event of each stream.
func (m *Machine) Settle(ctx context.Context) error {
	if err := m.settle(ctx, nil); err != nil {
		return err
	}
	m.mu.Lock()
	all := slices.Clone(m.processes)
	m.mu.Unlock()
	var c clock
	for _, d := range all {
		c = c.join(d.streamClocks())
	}
	for _, d := range all {
		d.seen(c)
	}
	return nil
}

// Quiesce waits as Settle does, but to the checker no host has seen anything. It returns nil if
// no operation is left. It returns a *Stuck if the remaining operations wait for a host.
func (m *Machine) Quiesce(ctx context.Context) error { return m.settle(ctx, nil) }

// settle is Quiesce for one process, or for all if it is nil.
func (m *Machine) settle(ctx context.Context, only *Driver) error {
	m.mu.Lock()
	all := slices.Clone(m.processes)
	m.mu.Unlock()
	// Somebody else may write a word, but not if everybody waits here.
	alone := m.cfg.Dir == "" && (only == nil || len(all) == 1)
	if only != nil {
		all = []*Driver{only}
	}
	pause := 20 * time.Microsecond
	for {
		idle, stuck := scan(all, alone)
		if idle {
			return nil
		}
		if stuck != nil {
			return stuck
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("sim: operations still run: %w: %s", context.Cause(ctx), running(all))
		case <-time.After(pause):
			pause = min(2*pause, 2*time.Millisecond)
		}
	}
}

// running describes where the streams are that have operations left.
func running(processes []*Driver) string {
	var at []string
	for _, d := range processes {
		d.mu.Lock()
		for s := range d.streams {
			done := s.done.Load()
			if b := s.blocked.Load(); b != nil {
				at = append(at, b.describe(s))
			} else if n := s.enq.Load(); done != n {
				at = append(at, fmt.Sprintf("stream %s runs operation %d of %d", s.ag.name, done+1, n))
			}
		}
		d.mu.Unlock()
	}
	slices.Sort(at)
	return strings.Join(at, "; ")
}

// scan looks once whether all streams are idle, or all that are not are stuck.
// If the processes are not alone, others may write words.
func scan(processes []*Driver, alone bool) (idle bool, stuck *Stuck) {
	type look struct {
		s    *stream
		done uint64
		b    *block
	}
	var busy []look
	for _, d := range processes {
		d.mu.Lock()
		for s := range d.streams {
			done := s.done.Load()
			if b := s.blocked.Load(); done != s.enq.Load() {
				busy = append(busy, look{s, done, b})
			}
		}
		d.mu.Unlock()
	}
	if len(busy) == 0 {
		return true, nil
	}
	stuck = new(Stuck)
	for _, l := range busy {
		if l.b == nil || l.b.over() || !alone && l.b.foreign() {
			return false, nil
		}
		stuck.Waits = append(stuck.Waits, l.b.describe(l.s))
	}
	for _, l := range busy {
		if l.s.done.Load() != l.done || l.s.blocked.Load() != l.b {
			return false, nil
		}
	}
	slices.Sort(stuck.Waits)
	return false, stuck
}

// Check returns what is wrong with the orders, lifetimes and records so far:
// the findings joined, nil if there are none. Operations that still run count
// only as far as they have come, so Settle comes first.
func (m *Machine) Check() error {
	m.checker.drain()
	return m.findings.err()
}

// Findings returns what Check has as single errors: *Race, *Lifetime, *Unused, ...
func (m *Machine) Findings() []error {
	m.checker.drain()
	return m.findings.all()
}

// Stats counts the open objects, and all that were ever made.
type Stats struct {
	Memories, Hosts, Streams, Events, Graphs, Modules, Mappings, Peers int   // alive
	DeviceBytes, HostBytes                                             int64 // alive

	// Ever made, events apart: a fresh one each time is what Record promises.
	MadeMemories, MadeHosts, MadeStreams, MadeModules int
	Records, Waits                                    int // calls
	Operations                                        int // those that streams were given, with those of launched graphs
	Deepest                                           int // most operations that a stream had been given and had not ended
	Fetches                                           int // copies from another device that a stream of the target's was given: see package driver
}

// Stats returns the machine's counts, all processes together.
func (m *Machine) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	var s Stats
	for _, d := range m.processes {
		d.mu.Lock()
		s.add(&d.stats)
		d.mu.Unlock()
	}
	return s
}

func (s *Stats) add(o *Stats) {
	s.Memories += o.Memories
	s.Hosts += o.Hosts
	s.Streams += o.Streams
	s.Events += o.Events
	s.Graphs += o.Graphs
	s.Modules += o.Modules
	s.Mappings += o.Mappings
	s.Peers += o.Peers
	s.DeviceBytes += o.DeviceBytes
	s.HostBytes += o.HostBytes
	s.MadeMemories += o.MadeMemories
	s.MadeHosts += o.MadeHosts
	s.MadeStreams += o.MadeStreams
	s.MadeModules += o.MadeModules
	s.Records += o.Records
	s.Waits += o.Waits
	s.Operations += o.Operations
	s.Deepest = max(s.Deepest, o.Deepest)
	s.Fetches += o.Fetches
}

// Close closes the processes and the machine. Its error has that of Check, the objects that were
// not closed, and the operations that were stuck. It may be called more than once; later calls
// return nil.
func (m *Machine) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	all := slices.Clone(m.processes)
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	errs := []error{m.settle(ctx, nil)}
	for _, d := range all {
		errs = append(errs, d.finish(ctx))
	}
	m.checker.drain()
	close(m.quit)
	m.group.Wait()
	return errors.Join(append(errs, m.findings.err())...)
}
