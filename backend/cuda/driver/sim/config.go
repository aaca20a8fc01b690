package sim

import (
	"errors"
	"fmt"
	"time"
)

// Semantics is what a wait on an event means when the event is recorded again.
// It makes a difference for RawEvents only: events of package driver are used once.
type Semantics uint8

const (
	// Snapshot is CUDA's rule: a wait is for the record that was the latest when
	// Wait was called.
	Snapshot Semantics = iota
	// LateBinding is the worst that other vendors leave open: a wait is for the
	// record that is the latest when the wait is carried out, and while it lasts.
	LateBinding
)

func (s Semantics) String() string {
	switch s {
	case Snapshot:
		return "snapshot"
	case LateBinding:
		return "late binding"
	}
	return fmt.Sprintf("semantics(%d)", uint8(s))
}

// Config is how a Machine is made. The zero value is one device with random
// delays from seed 0.
type Config struct {
	// Devices is the number of GPUs; 0 means 1.
	Devices int

	// Seed makes the delays and the contents of fresh memory. Print it when a
	// test fails.
	Seed uint64

	// NoDelays lets operations run as fast as they can.
	NoDelays bool

	// Semantics is what RawEvents mean.
	Semantics Semantics

	// Memory is the bytes of each device; 0 means 1 GiB. What is not allocated
	// takes no room.
	Memory uint64

	// Topology says which devices reach each other and how fast everything is;
	// the zero value is NVSwitch.
	Topology Topology

	// Kernels are the functions that modules can have, by name. Register adds more.
	Kernels map[string]Kernel

	// Timeline keeps what Timeline and Makespan need: one entry for each operation.
	Timeline bool

	// NoCheck switches the checker of orders off, for long runs whose order is
	// known to be right. Lifetimes are still checked.
	NoCheck bool

	// Quiet hides copies and fills from Go's race detector, for tests of programs
	// that lack an order on purpose: then only the checker reports it. Kernels of
	// such tests say //go:norace.
	Quiet bool

	// Blocking, if not nil, returns true for calls that return only when the device has done what they
	// enqueue. So do launches with CUDA_LAUNCH_BLOCKING=1 and under profilers, and all calls on a full
	// stream. The Call has its name, device and stream only.
	Blocking func(Call) bool

	// Queues is how many hardware queues a device has for the streams of a process, which get them in turn. A queue
	// does one operation at a time, in the order of the calls. So a stream that waits stops the others of its queue.
	// 0 means a queue for each stream.
	Queues int

	// Dir is a folder that the processes of one simulated host share. Device memory then lies in
	// files there, and other processes can open them by their handles. Every process makes a
	// Machine of the same shape with the same folder. Without it memory is Go memory of this
	// process. The checker knows this process's operations only.
	Dir string
}

// Topology is the wires of a Machine and how fast they are, for the virtual
// clock. Zero fields have the values of an H200 host with NVSwitch, as measured.
type Topology struct {
	// NoPeer returns true where kernels of device from cannot reach the memory
	// of device to. Nil means all can.
	NoPeer func(from, to int) bool

	// Loses returns true where device from is said to reach the memory of device to, but what its copies and
	// fills write there is lost. That happens with some IOMMUs and in some virtual machines. Nil means nothing is.
	Loses func(from, to int) bool

	// Rank is the relative quality of a link, 0 the best. Nil means 0.
	Rank func(from, to int) int

	LinkBandwidth float64 // bytes/s from one device to another, per pair and direction; 0: 390e9
	HostBandwidth float64 // bytes/s between a device and page-locked memory, per direction; 0: 55e9
	Memory        float64 // bytes/s of a device's own memory, for kernels; 0: 3.5e12
	CPUBandwidth  float64 // bytes/s of what the host does with page-locked memory; 0: 50e9

	LinkLatency   time.Duration // 0: 2 us
	HostLatency   time.Duration // 0: 5 us
	LaunchLatency time.Duration // of a kernel; 0: 2 us
}

func orElse[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

func (t Topology) withDefaults() Topology {
	t.LinkBandwidth = orElse(t.LinkBandwidth, 390e9)
	t.HostBandwidth = orElse(t.HostBandwidth, 55e9)
	t.Memory = orElse(t.Memory, 3.5e12)
	t.CPUBandwidth = orElse(t.CPUBandwidth, 50e9)
	t.LinkLatency = orElse(t.LinkLatency, 2*time.Microsecond)
	t.HostLatency = orElse(t.HostLatency, 5*time.Microsecond)
	t.LaunchLatency = orElse(t.LaunchLatency, 2*time.Microsecond)
	return t
}

func (t Topology) peer(from, to int) bool {
	return from == to || t.NoPeer == nil || !t.NoPeer(from, to)
}

const mostDevices = 64

func (c Config) check() error {
	switch {
	case c.Devices < 0 || c.Devices > mostDevices:
		return fmt.Errorf("sim: %d devices, want 1 to %d", c.Devices, mostDevices)
	case c.Semantics > LateBinding:
		return fmt.Errorf("sim: unknown %v", c.Semantics)
	case c.Topology.LinkBandwidth < 0 || c.Topology.HostBandwidth < 0 || c.Topology.Memory < 0 || c.Topology.CPUBandwidth < 0:
		return errors.New("sim: negative bandwidth in the topology")
	case c.Topology.LinkLatency < 0 || c.Topology.HostLatency < 0 || c.Topology.LaunchLatency < 0:
		return errors.New("sim: negative latency in the topology")
	}
	for name, k := range c.Kernels {
		if name == "" || k == nil {
			return fmt.Errorf("sim: kernel %q is nil or has no name", name)
		}
	}
	return nil
}

// Call is one call to a driver of the Machine, for Inject and Skip.
type Call struct {
	Name   string // the method of package driver: "Alloc", "Copy", "Record", ...
	Device int    // -1 if none
	Stream string // the name of the stream, "" if none
	N      int    // counts the calls of all names since Inject or Skip, from 0
	K      int    // counts those of this name on this stream (or on none), from 0
}

func (c Call) String() string {
	s := fmt.Sprintf("call %d: %s", c.N, c.Name)
	if c.Stream != "" {
		return s + " on " + c.Stream
	}
	if c.Device >= 0 {
		return fmt.Sprintf("%s on device %d", s, c.Device)
	}
	return s
}
