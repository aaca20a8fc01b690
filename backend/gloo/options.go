package gloo

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/tcp"
)

// Options are this backend's options, for pg.Options.BackendOptions. The zero value takes them from
// environment variables, Gloo's where Gloo has one. All ranks need the same Wire and Sums.
type Options struct {
	// Interfaces are names of network interfaces, which must exist. All ranks need the same number.
	// On Gloo's wire each gets connections of its own, and collectives take turns over them. The
	// native wire uses the first (see Tuning.Lanes for several connections).
	//
	// Empty means GLOO_SOCKET_IFNAME. If that is empty too, the connections use the address by
	// which this host reaches the store (store.LocalAddrOf). With a store on a loopback address
	// no byte leaves the host. If the store has no such address, Gloo's wire uses the address of
	// the host's name, or else 127.0.0.1, as PyTorch does; the native wire listens on all
	// addresses.
	Interfaces []string

	// Address is the address, host name or network interface at which other ranks reach this one on
	// the native wire. Empty means the first of Interfaces.
	Address string

	// Wire is the protocol between the ranks. Empty means the environment variable C10D_WIRE; if
	// that is empty too, WireAuto.
	Wire Wire

	// Sums says what the bits of a sum depend on, on the native wire.
	Sums Sums

	// Host names this host, for the native wire. Ranks with the same Host are a cluster: they try
	// to share memory, and collectives of several clusters go inside, between and inside them.
	// Empty means the environment variable C10D_HOST; if that is empty too, the host's name and
	// boot id. Ranks of one host may use several names to play several hosts.
	Host string

	// Cluster names this rank's cluster within its host, for the native wire. Ranks of one host
	// with different names are in different clusters. Empty means the environment variable
	// C10D_CLUSTER; if that is empty too, the host is one cluster.
	Cluster string

	// Silence is how long another host may acknowledge nothing, until the link to it counts as
	// broken or the host as dead, on both wires. Keep-alive probes ask a host that has nothing
	// to acknowledge. A process that was stopped for as long with messages unread counts as
	// dead too. 0 means 15 seconds, negative means for ever. Systems other than Linux notice
	// it only where no message is under way.
	Silence time.Duration

	// Checksum gives every message of the native wire's connections a CRC-32C. If bytes are changed
	// on the way, the group fails with work.ErrCorrupted, and the error names the link. Without it
	// only the headers of messages are protected: changed bytes of a tensor are noticed by nobody but
	// TCP, whose checksum has 16 bits. It is enough that one rank of a pair sets it. TLS replaces it. The
	// default is false, because large messages take longer with it if the CPU is the limit.
	Checksum bool

	// TLS makes all connections TLS 1.3 with both sides authenticated, and the wire the native one; if
	// a rank does not have it, New returns an error that names the rank. It needs certificates, for use
	// on both sides of a connection, and RootCAs. ClientCAs are RootCAs if nil. A peer's certificate has
	// to be good for ServerName or, if that is empty, for the address that it was reached at. Nil means
	// the TLS of backend.Options.
	TLS *tls.Config

	// Tuning is for measurements and for networks that the defaults do not suit.
	Tuning

	// Fabric, if not nil, connects ranks of one process. They need no network and do not meet
	// in the store, and they run Gloo's algorithms. All ranks need the same.
	Fabric Fabric
}

// Tuning changes how fast the backend is, and never what it computes. All ranks need the same AllReduce and Table.
type Tuning struct {
	// Workers is how many collectives may run at a time. 0 means two for each interface, as in
	// PyTorch.
	Workers int

	// AllReduce is the name of the algorithm that dense all_reduces take, whatever their size: one of
	// AllReduceAlgorithms. Ranks send each other messages for it, also where they share memory. It needs the native wire
	// or a Fabric: with it, WireAuto means WireNative. Empty lets the library choose.
	AllReduce string

	// Table is a file with measured times of algorithms, which "c10d bench -tune" writes. The
	// native wire chooses algorithms by it where ranks do not share memory. Empty means the
	// environment variable C10D_TABLE; if that is empty too, the table in the library.
	Table string

	// LinkSpeed is how fast this rank reaches other clusters, in Mbit/s. A rank with twice the
	// speed carries twice as much of its cluster's traffic. 0 means the environment variable
	// C10D_LINK_SPEED. Without that, the system is asked for the speed of the first of Interfaces.
	// Ranks whose speed nobody knows count as equally fast.
	LinkSpeed int64

	// Lanes is the number of further connections to a peer, which the first message of 512 KiB
	// opens. 0 means 2 to other hosts. Within the host it means 1 if there are 8 CPUs for each of
	// the group's ranks there, and else none. Negative means none. The limit is 64.
	Lanes int

	// Poll is how long a goroutine that waits for messages polls the sockets before it sleeps. 0
	// means 100 us. If this host has more ranks than CPUs, that is multiplied by the ranks for
	// each CPU. Negative means that it does not poll. Only Linux has polling, and not with TLS.
	Poll time.Duration
}

// BackendName returns Name: these are the options of this backend.
func (Options) BackendName() string { return Name }

// MeetsElsewhere reports whether the ranks find each other without the store.
func (o Options) MeetsElsewhere() bool { return o.Fabric != nil }

// tcp returns o as the native wire's transport has them.
func (o *Options) tcp() tcp.Options {
	return tcp.Options{
		Host: o.Address, Lanes: o.Lanes, Poll: o.Poll, Silence: o.Silence, Checksum: o.Checksum, TLS: o.TLS,
	}
}

// Wire is the protocol between the ranks of a group.
type Wire string

const (
	// WireAuto is the native wire if every rank of the group has it, else Gloo's. "" means
	// WireAuto too.
	WireAuto Wire = "auto"
	// WireGloo is Gloo's wire, which PyTorch ranks speak. Results have Gloo's bits.
	WireGloo Wire = "gloo"
	// WireNative is this library's own wire. New returns an error on every rank if one does not
	// have it. The rank does not listen for Gloo's wire. With TLS, WireAuto means WireNative.
	WireNative Wire = "native"
	// WireTCP is WireNative without shared memory.
	WireTCP Wire = "tcp"
)

// ParseWire returns the wire of a name. "" is WireAuto.
func ParseWire(name string) (Wire, error) {
	switch w := Wire(name); w {
	case "":
		return WireAuto, nil
	case WireAuto, WireGloo, WireNative, WireTCP:
		return w, nil
	}
	return "", fmt.Errorf("gloo: unknown wire %q, want %s, %s, %s or %s", name, WireAuto, WireGloo, WireNative, WireTCP)
}

// wireVariable is the environment variable for Options.Wire.
const wireVariable = "C10D_WIRE"

func (o Options) wire() (Wire, error) {
	name := string(o.Wire)
	if name == "" {
		name = os.Getenv(wireVariable)
	}
	return ParseWire(name)
}

// Sums says what the bits of a floating-point sum depend on, on the native wire. All ranks get the
// same bits, and the same call gives the same bits again. On Gloo's wire the bits are Gloo's.
type Sums string

const (
	// SumsFast depends on the operands, their order and the algorithm, and so on the size and on
	// how the ranks are connected. It is the zero value.
	SumsFast Sums = ""
	// SumsInRankOrder adds ((x0 + x1) + x2) and so on. Ranks that share memory always add so.
	SumsInRankOrder Sums = "rank-order"
)

func (s Sums) check() error {
	switch s {
	case SumsFast, SumsInRankOrder:
		return nil
	}
	return fmt.Errorf("gloo: unknown sums %q, want %q or %q", string(s), SumsFast, SumsInRankOrder)
}

// tableVariable is the environment variable for Options.Table.
const tableVariable = "C10D_TABLE"

func (o Options) table() (*choice.Table, error) {
	file := o.Table
	if file == "" {
		file = os.Getenv(tableVariable)
	}
	if file == "" {
		return choice.Default(), nil
	}
	t, err := choice.Load(file)
	if err != nil {
		return nil, fmt.Errorf("gloo: table of algorithms: %w", err)
	}
	return t, nil
}

// The environment variables for Options.Host, Cluster and LinkSpeed.
const (
	hostVariable    = "C10D_HOST"
	clusterVariable = "C10D_CLUSTER"
	speedVariable   = "C10D_LINK_SPEED"
)

// linkSpeed returns the speed of this rank's link, 0 if it is unknown.
func (o Options) linkSpeed(nic string) (int64, error) {
	if o.LinkSpeed < 0 {
		return 0, fmt.Errorf("gloo: Options.LinkSpeed is %d: want Mbit/s", o.LinkSpeed)
	}
	if o.LinkSpeed > 0 {
		return o.LinkSpeed, nil
	}
	if text := os.Getenv(speedVariable); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 1 {
			return 0, fmt.Errorf("gloo: environment variable %s is %q: want Mbit/s, for example 10000", speedVariable, text)
		}
		return n, nil
	}
	if nic == "" {
		return 0, nil
	}
	text, err := os.ReadFile("/sys/class/net/" + filepath.Base(nic) + "/speed")
	if err != nil {
		return 0, nil // the system does not know
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n < 0 {
		return 0, nil
	}
	return n, nil
}

// settings are Options with defaults and the environment's values in place of zeros.
type settings struct {
	Options
	wire  Wire
	table *choice.Table
	only  bool // no other wire than the native one will do

	// join connects the ranks over Options.Fabric; nil without one.
	join func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error)
}

// settings checks o and fills it in for a group.
func (o Options) settings(group backend.Options) (settings, error) {
	set := settings{Options: o}
	by := "Options.Interfaces"
	// Gloo, too, ignores a value of one character.
	if env := os.Getenv(interfacesVariable); len(o.Interfaces) == 0 && len(env) > 1 {
		by = "environment variable " + interfacesVariable
		for name := range strings.SplitSeq(env, ",") {
			set.Interfaces = append(set.Interfaces, strings.TrimSpace(name))
		}
	}
	if o.Fabric == nil {
		if err := checkInterfaces(by, set.Interfaces); err != nil {
			return set, err
		}
	}
	if len(set.Interfaces) == 0 {
		set.Interfaces = []string{""}
	}
	var err error
	if set.wire, err = o.wire(); err != nil {
		return set, err
	}
	if err := o.Sums.check(); err != nil {
		return set, err
	}
	if err := o.checkAllReduce(set.wire); err != nil {
		return set, err
	}
	if set.table, err = o.table(); err != nil {
		return set, err
	}
	set.Cluster = cmp.Or(o.Cluster, os.Getenv(clusterVariable))
	if set.LinkSpeed, err = o.linkSpeed(set.Interfaces[0]); err != nil {
		return set, err
	}
	if set.TLS == nil {
		set.TLS = group.TLS
	}
	if set.TLS != nil && set.wire == WireGloo && o.Fabric == nil {
		return set, errors.New("gloo: Options.Wire or C10D_WIRE is gloo, whose wire has no TLS: choose another wire, or no TLS")
	}
	if o.Fabric != nil {
		if set.join, err = within(o.Fabric); err != nil {
			return set, err
		}
	}
	set.only = set.TLS != nil || o.AllReduce != "" || set.wire == WireNative || set.wire == WireTCP
	return set, nil
}

// interfacesVariable is Gloo's.
const interfacesVariable = "GLOO_SOCKET_IFNAME"

// checkInterfaces returns an error for a name that no interface of this host has. by is where the names
// come from.
func checkInterfaces(by string, names []string) error {
	var there []string
	for _, name := range names {
		if name == "" && !strings.HasSuffix(by, interfacesVariable) {
			continue // as if there were no names
		}
		if there == nil {
			all, err := net.Interfaces()
			if err != nil {
				return fmt.Errorf("gloo: %s: %w", by, err)
			}
			for _, i := range all {
				there = append(there, i.Name)
			}
		}
		if slices.Contains(there, name) {
			continue
		}
		hint := ""
		if strings.HasPrefix(name, "^") || strings.HasPrefix(name, "=") {
			hint = "; as in Gloo, ^ and = have no meaning here: list whole names"
		}
		return fmt.Errorf("gloo: %s: no interface %q (there are %s)%s", by, name, strings.Join(there, ", "), hint)
	}
	return nil
}

// CallbackRing is a name for Options.AllReduce. The tensor is cut into a block for each rank, as evenly as its elements
// allow. All blocks go around the ring of ranks at the same time, each from another rank on. A rank sends 2(size-1)
// messages. A step of a block begins when its message has come. Messages may come in any order: their ends meet the
// steps that wait for them in a callback.Registry.
const CallbackRing = run.CallbackRing

// AllReduceAlgorithms returns the names that Options.AllReduce may have.
func AllReduceAlgorithms() []string { return run.AllReduceAlgorithms() }

// checkAllReduce returns why all-reduces cannot take the algorithm that o names.
func (o Options) checkAllReduce(wire Wire) error {
	name := o.AllReduce
	if name == "" {
		return nil
	}
	if !slices.Contains(AllReduceAlgorithms(), name) {
		return fmt.Errorf("gloo: Options.AllReduce is %q, want one of %s, or none", name, strings.Join(AllReduceAlgorithms(), ", "))
	}
	var ordered []string
	for _, a := range plan.Algorithms(plan.OpAllReduce) {
		if a.Order == plan.RankOrder {
			ordered = append(ordered, a.Name)
		}
	}
	switch {
	case o.Sums == SumsInRankOrder && !slices.Contains(ordered, name):
		return fmt.Errorf("gloo: Options.AllReduce is %q, which does not add in rank order: Options.Sums needs one of %s", name, strings.Join(ordered, ", "))
	case wire == WireGloo && o.Fabric == nil:
		return fmt.Errorf("gloo: Options.AllReduce is %q, and Options.Wire or C10D_WIRE is gloo, whose ranks all have the segmented ring only: choose another wire", name)
	}
	return nil
}
