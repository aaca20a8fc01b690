package gloo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/internal/waiting"
)

// record is what a rank of this library publishes for the others, under a key beside its Gloo
// address.
type record struct {
	Version int    `json:"version"`
	Host    string `json:"host"` // the same for ranks on one host
	Cluster string `json:"cluster,omitempty"`
	Device  string `json:"device,omitempty"` // kind of device; "" is the CPU
	NIC     string `json:"nic,omitempty"`    // network interface
	Speed   int64  `json:"speed,omitempty"`  // of it, in Mbit/s; 0 is unknown
	TCP     string `json:"tcp"`              // address of its tcp.Endpoint
	Shm     string `json:"shm,omitempty"`    // address of its shm.Endpoint
	NoShm   string `json:"no_shm,omitempty"`
	Table   string `json:"table"` // fingerprint of its table of algorithms
	Sums    Sums   `json:"sums,omitempty"`
	Reduce  string `json:"all_reduce,omitempty"` // Options.AllReduce
	Only    bool   `json:"only,omitempty"`       // it takes no other wire
}

// recordVersion changes when ranks of different releases could not talk to each
// other natively. Fields that only some releases know are ignored by the others.
const recordVersion = 8

// maxRecord bounds what a rank may publish.
const maxRecord = 64 << 10

// native is one rank's way to the transports of this library.
type native struct {
	only       bool // there is no other wire for this rank
	secure     bool // with TLS
	rank, size int
	tcp        *tcp.Endpoint
	shm        *shm.Endpoint
	record     record
	all        []record // nil until all ranks are known to have one
	why        string   // why there is no native wire
	log        *slog.Logger
}

func newNative(o settings, rank, size int) (*native, error) {
	n := &native{only: o.only, secure: o.TLS != nil, rank: rank, size: size}
	var err error
	if n.tcp, err = tcp.Listen(o.tcp()); err != nil {
		return nil, err
	}
	n.record = record{Version: recordVersion, TCP: n.tcp.Addr(), Table: o.table.Fingerprint(), Sums: o.Sums, Reduce: o.AllReduce, Only: o.only}
	if n.record.Host = cmp.Or(o.Host, os.Getenv(hostVariable)); n.record.Host == "" {
		n.record.Host, _ = os.Hostname()
		if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
			n.record.Host += "/" + strings.TrimSpace(string(id))
		}
	}
	n.record.Cluster, n.record.NIC, n.record.Speed = o.Cluster, o.Interfaces[0], o.LinkSpeed
	if o.wire == WireTCP {
		n.record.NoShm = "asked for TCP"
	} else if n.shm, err = shm.NewEndpoint(); err != nil {
		n.record.NoShm = err.Error()
	} else {
		n.record.Shm = n.shm.Addr()
	}
	return n, nil
}

// close frees what has not gone into a group.
func (n *native) close() {
	if n.tcp != nil {
		n.tcp.Close()
	}
	if n.shm != nil {
		n.shm.Close()
	}
}

// connect is for rendezvous.Native.
func (n *native) connect(ctx context.Context, records [][]byte) (transport.Mesh, error) {
	all, err := parseRecords(records)
	if errors.Is(err, errForeign) {
		return nil, n.decline(all, err)
	}
	if err != nil {
		return nil, err
	}
	addrs := make([]string, n.size)
	for r, have := range all {
		if have.Table != n.record.Table {
			return nil, fmt.Errorf("gloo: rank %d has another table of algorithms (Options.Table) than rank %d", r, n.rank)
		}
		if have.Sums != n.record.Sums {
			return nil, fmt.Errorf("gloo: Options.Sums is %q on rank %d and %q on rank %d", have.Sums, r, n.record.Sums, n.rank)
		}
		if have.Reduce != n.record.Reduce {
			return nil, fmt.Errorf("gloo: Options.AllReduce is %q on rank %d and %q on rank %d", have.Reduce, r, n.record.Reduce, n.rank)
		}
		addrs[r] = have.TCP
	}
	n.all = all
	e := n.tcp
	n.tcp = nil // Join closes it
	stop := waiting.Start(ctx, n.log, joining(e))
	mesh, err := e.Join(ctx, n.rank, addrs)
	stop()
	if err != nil {
		return nil, err
	}
	mesh.Describe(run.Describe)
	return mesh, nil
}

// decline takes Gloo's wire because of err, or returns an error if a rank takes only
// the native one. Records that cannot be used are zero.
func (n *native) decline(all []record, err error) error {
	switch only := slices.IndexFunc(all, func(r record) bool { return r.Only }); {
	case n.secure:
		return fmt.Errorf("%w, and TLS allows no other (set the same TLS and C10D_WIRE on every rank; PyTorch has neither)", err)
	case n.only:
		return err
	case only >= 0:
		return fmt.Errorf("%w, and rank %d takes no other: it has TLS or Options.AllReduce, or its Options.Wire or C10D_WIRE is native or tcp", err, only)
	}
	n.why = err.Error()
	return nil
}

// layout returns the clusters of the group. Every rank finds the same.
func (n *native) layout() *cluster.Layout {
	members := make([]cluster.Member, n.size)
	for r, have := range n.all {
		members[r] = cluster.Member{Host: have.Host, Cluster: have.Cluster, Device: have.Device, NIC: have.NIC, Speed: have.Speed}
	}
	return cluster.Find(members)
}

// hosts returns how many hosts the ranks are on.
func (n *native) hosts() int {
	all := map[string]bool{}
	for _, have := range n.all {
		all[have.Host] = true
	}
	return len(all)
}

// parseRecords returns the records of all ranks. With errForeign it returns the records that it
// could read; the error names the first rank without one.
func parseRecords(records [][]byte) ([]record, error) {
	all := make([]record, len(records))
	var foreign error
	for r, v := range records {
		switch {
		case v == nil:
			foreign = cmp.Or(foreign, fmt.Errorf("%w: rank %d has not", errForeign, r))
			continue
		case len(v) > maxRecord:
			return nil, fmt.Errorf("gloo: rank %d published a record of %d bytes, want at most %d", r, len(v), maxRecord)
		}
		if err := json.Unmarshal(v, &all[r]); err != nil {
			return nil, fmt.Errorf("gloo: record of rank %d: %w", r, err)
		}
		if all[r].Version != recordVersion {
			foreign = cmp.Or(foreign, fmt.Errorf("%w: rank %d has version %d of it, this release %d", errForeign, r, all[r].Version, recordVersion))
			all[r] = record{Only: all[r].Only}
		}
	}
	return all, foreign
}

// errForeign says that a rank does not have the native wire.
var errForeign = errors.New("gloo: not every rank has the native wire")

// joinLimit bounds the attempt to share memory, which takes milliseconds where it succeeds.
const joinLimit = 10 * time.Second

// share makes the groups of ranks that share memory, one a cluster, and returns this
// cluster's, nil if it has one rank alone; or why there are none. All ranks of all clusters
// come to the same answer. If they cannot even say so over the mesh, the error is
// not errApart.
func (n *native) share(ctx context.Context, m transport.Mesh, layout *cluster.Layout) (*shm.Group, error) {
	host := layout.Members(layout.Cluster(n.rank))
	addrs := make([]string, len(host))
	for r, a := range n.all {
		if a.Shm == "" && len(layout.Members(layout.Cluster(r))) > 1 {
			return nil, fmt.Errorf("%w: rank %d: %s", errApart, r, a.NoShm)
		}
	}
	for i, r := range host {
		addrs[i] = n.all[r].Shm
	}
	v := newVote(m)
	joining, cancel := context.WithTimeout(ctx, joinLimit)
	defer cancel()
	joining, stop := context.WithCancelCause(joining)
	defer stop(nil)
	defer waiting.Start(ctx, n.log, v.report)()
	heard := make(chan error, 1)
	go func() { heard <- v.hear(ctx, stop) }()
	var g *shm.Group
	var err error
	if len(host) > 1 {
		g, err = n.shm.Join(joining, slices.Index(host, n.rank), addrs, shm.Options{})
	}
	if err == nil && g != nil {
		g.Describe(run.Describe)
	}
	v.cast(err)
	if others := <-heard; others != nil {
		err = others
	}
	if e := v.end(ctx); e != nil {
		err = e
	}
	if err == nil {
		return g, nil
	}
	if g != nil {
		g.Close()
	}
	if f := m.Fault(); f != nil {
		return nil, f
	}
	return nil, fmt.Errorf("%w: %w", errApart, err)
}

// errApart says that the ranks do not share memory.
var errApart = errors.New("the ranks do not share memory")

// joining says which ranks have published their addresses but are not connected.
func joining(e *tcp.Endpoint) waiting.Report {
	return func(context.Context) (string, []slog.Attr) {
		var ranks []int
		var each []string
		for _, m := range e.Missing() {
			ranks = append(ranks, m.Rank)
			each = append(each, fmt.Sprintf("rank %d published its address: %v", m.Rank, m.Err))
		}
		if len(ranks) == 0 {
			return "", nil
		}
		return "waiting for " + waiting.Ranks(ranks) + " to connect", []slog.Attr{slog.String("missing", waiting.Some(each))}
	}
}
