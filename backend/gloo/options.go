package gloo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/tcp"
)

// Options are the backend's own options, for pg.Options.BackendOptions["gloo"].
// The zero value takes them from Gloo's environment variables.
type Options struct {
	// Interfaces are names of network interfaces; each gets connections of its
	// own, and collectives take turns over them. All ranks need the same
	// number. Empty means GLOO_SOCKET_IFNAME, and without that the address by which
	// this host reaches the store (store.LocalAddrOf): if that is a loopback address,
	// nothing leaves the host. Where the store cannot tell, Gloo's wire takes the
	// address of the host's name, or 127.0.0.1 if that cannot be bound, as PyTorch
	// does, and the native wire all addresses.
	Interfaces []string

	// Workers is how many collectives may run at a time; 0 means two for each
	// interface, as in PyTorch.
	Workers int

	// Wire is how the ranks talk to each other. Empty means the environment
	// variable C10D_WIRE, and without that WireAuto.
	Wire Wire

	// Sums is what the bits of a sum depend on, on the native wire. All ranks need
	// the same.
	Sums Sums

	// Sparse is how sparse tensors are all-reduced, on the native wire; empty lets the
	// library choose. All ranks need the same.
	Sparse Sparse

	// Copy is how many copies large data take between ranks that share memory. Empty means
	// the environment variable C10D_COPY, and without that CopyAuto.
	Copy Copy

	// Table is a file with measured times of algorithms, made by "c10d bench
	// -tune", by which the native wire chooses between them where ranks do not
	// share memory. Empty means the environment variable C10D_TABLE, and without that
	// the table in the library. All ranks need the same.
	Table string

	// TCP are the native wire's connections. An empty Host stands for the first
	// of Interfaces. TLS, if nil, is that of backend.Options. With TLS the group takes
	// the native wire, or New returns an error that names a rank without it.
	TCP tcp.Options

	// Host is what ranks on one host have the same, for the native wire: they
	// try to share memory, and collectives between hosts go in two levels. Empty means
	// the environment variable C10D_HOST, and without that whatever tells this
	// host from others. One host can play several by it.
	Host string

	// Join connects the ranks instead of the rendezvous over the store, for
	// groups that need no network; they run Gloo's algorithms. index counts the
	// interfaces.
	Join func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error)
}

// MeetsElsewhere reports whether the ranks find each other without the store.
func (o Options) MeetsElsewhere() bool { return o.Join != nil }

// Wire is how the ranks of a group talk to each other.
type Wire string

const (
	// WireAuto, which "" stands for too, takes the native wire if every rank of
	// the group has it, else Gloo's.
	WireAuto Wire = "auto"
	// WireGloo is Gloo's, which PyTorch ranks understand. Results then have
	// Gloo's bits.
	WireGloo Wire = "gloo"
	// WireNative is this library's own. A group with a rank that does not have it
	// cannot be made then: New returns an error on every rank. Nothing listens for
	// Gloo's wire. With TLS, WireAuto is WireNative too.
	WireNative Wire = "native"
	// WireTCP is WireNative without shared memory.
	WireTCP Wire = "tcp"
)

// ParseWire reads the name of a wire; "" is WireAuto.
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

// Copy is how data get from one rank's memory into another's where ranks share memory, on
// the native wire.
type Copy string

const (
	// CopyAuto copies large data once, straight out of the other process, if the
	// kernel lets every rank of the host read the memory of every other. "" stands for it
	// too, unless C10D_COPY says otherwise.
	CopyAuto Copy = "auto"
	// CopyStaged copies into the shared memory and out of it, whatever the size. It is enough
	// that one rank of a host says so.
	CopyStaged Copy = "staged"
)

// copyVariable is the environment variable for Options.Copy.
const copyVariable = "C10D_COPY"

func (o Options) copies() (Copy, error) {
	switch c := cmp.Or(o.Copy, Copy(os.Getenv(copyVariable)), CopyAuto); c {
	case CopyAuto, CopyStaged:
		return c, nil
	default:
		return "", fmt.Errorf("gloo: unknown copy %q, want %s or %s", string(c), CopyAuto, CopyStaged)
	}
}

// Sums is what the bits of a floating-point sum depend on, on the native wire.
// (On Gloo's they are Gloo's.) Whatever it is, all ranks get the same bits, and
// the same call gives them again.
type Sums string

const (
	// SumsFast depend on the algorithm too, and so on sizes and on how the ranks
	// are connected. It is the zero value.
	SumsFast Sums = ""
	// SumsInRankOrder are ((x0 + x1) + x2) and so on. Ranks that share memory
	// always add so.
	SumsInRankOrder Sums = "rank order"
	// SumsExact are as if computed without an error and rounded once, for Sum and
	// Avg of floats: they do not depend on the order, nor on the number of ranks as
	// long as what these have to add is the same. Other operators are applied in rank
	// order.
	SumsExact Sums = "exact"
)

func (s Sums) check() error {
	switch s {
	case SumsFast, SumsInRankOrder, SumsExact:
		return nil
	}
	return fmt.Errorf("gloo: unknown sums %q, want %q, %q or %q", string(s), SumsFast, SumsInRankOrder, SumsExact)
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

// Sparse is how groups on the native wire all-reduce sparse tensors. Whatever
// it is, all ranks get the same bits. Entries of one coordinate are added in the
// order of the ranks, or as SumsExact says; the dense form adds as the group's
// all-reduce of dense tensors does.
type Sparse string

const (
	// SparseAuto chooses by how many entries the ranks have together, and by how
	// many of their coordinates are the same. It is the zero value.
	SparseAuto Sparse = ""
	// SparseGather gives every rank all entries of all ranks to add up: the fewest
	// messages.
	SparseGather Sparse = "gather"
	// SparseOwners cuts the coordinates into ranges, one for each rank to add up:
	// the fewest additions, and what is spread is as short as the result.
	SparseOwners Sparse = "owners"
	// SparseDense has owners find out which coordinates there are; the values of
	// all of these are then all-reduced as a dense tensor, with zeros where a rank has none.
	SparseDense Sparse = "dense"
)

func (s Sparse) check() error {
	switch s {
	case SparseAuto, SparseGather, SparseOwners, SparseDense:
		return nil
	}
	return fmt.Errorf("gloo: unknown form of sparse all-reduce %q, want %q, %q, %q or none", string(s), SparseGather, SparseOwners, SparseDense)
}

// hostVariable is the environment variable for Options.Host.
const hostVariable = "C10D_HOST"

// settings are Options with the environment's values in place of zeros.
type settings struct {
	Options
	wire  Wire
	table *choice.Table
	only  bool // no other wire than the native one will do
}

// settings checks o and fills it in for a group.
func (o Options) settings(group backend.Options) (settings, error) {
	set := settings{Options: o}
	// Gloo, too, ignores a value of one character.
	if env := os.Getenv("GLOO_SOCKET_IFNAME"); len(o.Interfaces) == 0 && len(env) > 1 {
		set.Interfaces = strings.Split(env, ",")
	}
	if len(set.Interfaces) == 0 {
		set.Interfaces = []string{""}
	}
	var err error
	if set.wire, err = o.wire(); err != nil {
		return set, err
	}
	if set.Copy, err = o.copies(); err != nil {
		return set, err
	}
	if err := o.Sums.check(); err != nil {
		return set, err
	}
	if err := o.Sparse.check(); err != nil {
		return set, err
	}
	if set.table, err = o.table(); err != nil {
		return set, err
	}
	if set.TCP.TLS == nil {
		set.TCP.TLS = group.TLS
	}
	if set.TCP.TLS != nil && set.wire == WireGloo && o.Join == nil {
		return set, errors.New("gloo: Options.Wire or C10D_WIRE is gloo, whose wire has no TLS: choose another wire, or no TLS")
	}
	set.only = set.TCP.TLS != nil || set.wire == WireNative || set.wire == WireTCP
	return set, nil
}

// workers returns how many collectives may run at a time.
func (set settings) workers(s *session) int {
	switch {
	case s.shared != nil || s.levels != nil:
		return 1 // collectives in shared memory run in the order of the calls
	case set.Workers > 0:
		return set.Workers
	}
	return 2 * len(s.meshes)
}
