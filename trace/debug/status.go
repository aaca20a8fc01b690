package debug

import (
	"cmp"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// Status is what a rank does.
type Status struct {
	Rank    int         `json:"rank"` // in the default group
	Size    int         `json:"size"`
	Host    string      `json:"host"`
	PID     int         `json:"pid"`
	Program string      `json:"program"`
	Now     time.Time   `json:"now"`
	State   string      `json:"state,omitempty"` // of a rank without groups
	Groups  []Group     `json:"groups"`
	Pending []Operation `json:"pending"`         // oldest first
	Recent  []Operation `json:"recent"`          // that have ended, oldest first, at most 64
	Dropped uint64      `json:"dropped"`         // operations that the recorder had no place for
	Log     []Line      `json:"log"`             // last lines, oldest first
	Dumps   string      `json:"dumps,omitempty"` // prefix of the recorder's files
	Token   string      `json:"token,omitempty"` // the field token of a POST
}

// Group is a group that the rank is in.
type Group struct {
	Name        string                `json:"name"`
	Description string                `json:"description,omitempty"`
	Epoch       int                   `json:"epoch"`
	Rank        int                   `json:"rank"`
	Ranks       []int                 `json:"ranks"` // in the default group; in a JobStatus the launcher's, as Status.Rank
	TimeoutMS   int64                 `json:"timeout_ms"`
	Collectives uint64                `json:"collectives"` // called
	Messages    uint64                `json:"messages"`    // called
	Explain     []backend.Explanation `json:"explain,omitempty"`
	Probes      []backend.Probe       `json:"probes,omitempty"`
	Busy        bool                  `json:"busy,omitempty"` // the backends did not answer within a second
}

// Operation is a call of the rank.
type Operation struct {
	Record     uint64        `json:"record"` // numbers the rank's operations from 0
	Group      string        `json:"group"`
	Op         string        `json:"op"`
	P2P        bool          `json:"p2p,omitempty"`
	Peer       int           `json:"peer"` // of a send or receive, -1 if there is none
	Seq        uint64        `json:"seq"`
	Collective uint64        `json:"collective"`
	DType      string        `json:"dtype,omitempty"`
	Bytes      int64         `json:"bytes"`
	Shape      []int         `json:"shape,omitempty"`
	Route      string        `json:"route,omitempty"`
	State      string        `json:"state"` // called, running, done or failed
	Called     time.Time     `json:"called"`
	Took       time.Duration `json:"took_ns"` // from the call to the end, or until now
	TimeoutMS  int64         `json:"timeout_ms"`
	Error      string        `json:"error,omitempty"`
	Site       string        `json:"site,omitempty"`  // the program's line, with trace.Options.Stacks
	Stack      []string      `json:"stack,omitempty"` // the same, with the calls that led there
}

// mostRecent is how many ended operations a Status has.
const mostRecent = 64

// probeFor is how long a page waits for a group, and probeEvery how often it asks one.
const (
	probeFor   = time.Second
	probeEvery = time.Second
)

// States of a rank without groups that does not wait for others.
const (
	stateOff    = "operations are not recorded (trace.Off)"
	stateClosed = "all groups are closed"
)

// statusOf returns what the recorder knows now.
func (p *Page) statusOf() *Status {
	r := p.recorder
	host, _ := os.Hostname()
	s := &Status{
		Rank: p.options.Rank, Size: p.options.Size, Host: host, PID: os.Getpid(), Program: filepath.Base(os.Args[0]), Now: time.Now(),
		Dropped: r.Dropped(), Dumps: r.Prefix(), Token: p.token, Pending: []Operation{}, Recent: []Operation{}, Log: p.options.Log.lines(),
	}
	groups := r.Groups()
	s.Groups = p.probes.of(groups)
	for i, g := range groups {
		if i == 0 || g.ID == 0 {
			s.Rank, s.Size = g.Ranks[g.Rank], max(len(g.Ranks), p.options.Size)
		}
	}
	switch {
	case r == trace.Off:
		s.State = stateOff
	case len(groups) == 0 && r.Joined():
		s.State = stateClosed
	case len(groups) == 0:
		s.State = "the default group is not made yet: this rank waits for others"
	}
	for _, o := range slices.Backward(r.Operations()) {
		if o.Ended.IsZero() {
			s.Pending = append(s.Pending, operationOf(&o, s.Now))
		} else if len(s.Recent) < mostRecent {
			s.Recent = append(s.Recent, operationOf(&o, s.Now))
		}
	}
	slices.Reverse(s.Pending)
	slices.Reverse(s.Recent)
	return s
}

// shared is the answer to visitors that ask at once.
type shared[T any] struct {
	mu    sync.Mutex
	began time.Time // look
	last  T
	query string // of text
	text  []byte
}

// answer looks, unless another has begun to look since this visitor came. Visitors that have gone get nothing.
func (s *shared[T]) answer(w http.ResponseWriter, r *http.Request, look func() T, page func(T) view) {
	came := time.Now()
	s.mu.Lock()
	if r.Context().Err() == nil && !s.began.After(came) {
		s.began, s.text = time.Now(), nil
		s.last = look()
	}
	if r.Context().Err() == nil && (s.text == nil || s.query != r.URL.RawQuery) {
		s.query, s.text = r.URL.RawQuery, textOf(r, s.last, page(s.last))
	}
	text := s.text
	s.mu.Unlock()
	write(w, r, text)
}

func operationOf(o *trace.Operation, now time.Time) Operation {
	x := Operation{
		Record: o.Record, Group: o.Group.Name, Op: o.Op.String(), P2P: o.Op.IsP2P(), Peer: o.Peer, Seq: o.Seq, Collective: o.Collective, Bytes: o.Bytes(),
		Route: o.Route(), State: "called", Called: o.Called, Took: now.Sub(o.Called), TimeoutMS: cmp.Or(o.Timeout, o.Group.Timeout).Milliseconds(),
	}
	switch o.Op {
	case work.Send, work.Recv, work.RecvAnySource:
	default:
		x.Peer = -1
	}
	if side := &o.In; o.In.Tensors > 0 || o.Out.Tensors > 0 {
		if side.Tensors == 0 {
			side = &o.Out
		}
		x.DType, x.Shape = o.DType().String(), side.Dims()
	}
	switch {
	case o.Err != nil:
		x.State, x.Error = "failed", o.Err.Error()
	case !o.Ended.IsZero():
		x.State = "done"
	case !o.Began.IsZero():
		x.State = "running"
	}
	if !o.Ended.IsZero() {
		x.Took = o.Ended.Sub(o.Called)
	}
	for _, f := range o.Frames() {
		line := filepath.Base(f.File) + ":" + itoa(f.Line) + " " + f.Function[strings.LastIndexByte(f.Function, '/')+1:]
		x.Stack = append(x.Stack, line)
		if x.Site == "" && !strings.HasPrefix(f.Function, library) {
			x.Site = line
		}
	}
	return x
}

// library is the package whose calls are not the program's.
const library = "github.com/c10d-go/c10d/pg."

// probes asks groups what they wait for, one at a time and not too often.
type probes struct {
	mu    sync.Mutex
	known map[*trace.Group]*probe
}

type probe struct {
	at   time.Time     // when it was asked
	done chan struct{} // closed when it has answered
	last Group         // the last answer; under probes.mu
}

// of describes groups. Those that do not answer soon have the last answer, and are marked as busy.
func (p *probes) of(groups []*trace.Group) []Group {
	late := time.NewTimer(probeFor)
	defer late.Stop()
	p.mu.Lock()
	if p.known == nil {
		p.known = make(map[*trace.Group]*probe)
	}
	for g := range p.known {
		if !slices.Contains(groups, g) {
			delete(p.known, g)
		}
	}
	for _, g := range groups {
		k := p.known[g]
		if k == nil {
			k = &probe{done: make(chan struct{})}
			close(k.done)
			p.known[g] = k
		}
		if isClosed(k.done) && time.Since(k.at) > probeEvery {
			k.at, k.done = time.Now(), make(chan struct{})
			go p.ask(g, k, k.done)
		}
	}
	waits := make([]chan struct{}, len(groups))
	for i, g := range groups {
		waits[i] = p.known[g].done
	}
	p.mu.Unlock()
	all := make([]Group, len(groups))
	expired := false
	for i, g := range groups {
		if !expired {
			select {
			case <-waits[i]:
			case <-late.C:
				expired = true
			}
		}
		p.mu.Lock()
		if k := p.known[g]; k != nil {
			all[i] = k.last
		}
		p.mu.Unlock()
		x := &all[i]
		x.Busy = !isClosed(waits[i])
		x.Name, x.Description, x.Epoch, x.Rank, x.Ranks, x.TimeoutMS = g.Name, g.Description, g.Epoch, g.Rank, g.Ranks, g.Timeout.Milliseconds()
		x.Collectives, x.Messages = g.Calls()
	}
	return all
}

// ask asks a group.
func (p *probes) ask(g *trace.Group, k *probe, done chan struct{}) {
	defer close(done)
	var x Group
	defer func() {
		if r := recover(); r != nil {
			return // the page must not end the program
		}
		p.mu.Lock()
		k.last = x
		p.mu.Unlock()
	}()
	if g.Explain != nil {
		x.Explain = g.Explain()
	}
	if g.Probe != nil {
		x.Probes = g.Probe()
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
