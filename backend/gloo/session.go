package gloo

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/work"
)

// session has what the ranks of a group share: connections, shared memory, and the route of
// collectives over them. connect makes one. A session fails as one and is closed as one. Only the
// session keeps meshes and routes.
type session struct {
	rank, size int
	meshes     []transport.Mesh // one for each network interface
	native     bool             // all ranks have this library's wire
	tcp        *tcp.Mesh        // the mesh of the native wire, else nil
	shared     *shm.Group       // nil unless all ranks share memory
	clusters   *clusters        // nil unless the ranks of each of several clusters share memory
	direct     messageMesh      // carries sends and receives if some go through memory, else nil
	layout     *plan.Layout     // the clusters; nil if each rank is one, or if that is unknown
	parts      int              // how many clusters there are; 0 if unknown
	hosts      int              // 0 if unknown
	why        string           // why the ranks have this wire

	// What all ranks have alike:
	table *choice.Table
	sums  Sums

	route   route
	lists   listRoute // nil unless the route takes lists
	planner planner

	trace        func(e *engine, s *cluster.Step, begins bool) // for tests; else nil
	log          *slog.Logger
	onFailure    func(*work.Error) // may be nil
	mismatchTold atomic.Bool       // an operation has returned how the ranks disagree
	checks       bool              // see backend.Options.Checks
	inquiries    []*inquiry        // one for each mesh

	dead atomic.Pointer[transport.Fault] // of the first rank that has died while no operation needed it
	told sync.Once                       // of tellFirst

	closed   chan struct{} // by close
	watchers sync.WaitGroup
}

// note tells a test of a step.
func (e *engine) note(s *cluster.Step, begins bool) {
	if f := e.session.trace; f != nil {
		f(e, s, begins)
	}
}

// watch makes the failure of one mesh the failure of all.
func (s *session) watch() {
	if len(s.meshes) < 2 {
		return
	}
	for _, m := range s.meshes {
		s.watchers.Go(func() {
			select {
			case <-s.closed:
			case <-m.Failed():
				for _, other := range s.meshes {
					if other != m {
						other.Abort(m.Fault())
					}
				}
			}
		})
	}
}

// close ends what is under way and frees the connections and the memory.
func (s *session) close() error {
	var errs []error
	if s.direct != nil {
		errs = append(errs, s.direct.Close())
	}
	for _, m := range s.meshes {
		errs = append(errs, m.Close())
	}
	close(s.closed)
	s.watchers.Wait()
	for _, q := range s.inquiries {
		q.close()
	}
	return errors.Join(errs...)
}

// setProgress tells the other ranks, should they ask, how far this rank is.
func (s *session) setProgress(issued, completed uint64) {
	for _, m := range s.meshes {
		m.SetProgress(issued, completed)
	}
}

// enter has the native wires compare a call of this rank with the calls of the others.
func (s *session) enter(number uint64, tag uint32, call *transport.Call, op work.OpType, seq uint64) {
	if g := s.memory(); g != nil {
		g.Enter(uint32(number), call)
	}
	if s.shared == nil && s.tcp != nil {
		s.tcp.Enter(tag, *call, uint8(op), seq)
	}
}

// meshFor returns the mesh for an operation with a tag: operations take turns over the interfaces.
func (s *session) meshFor(tag uint32) transport.Mesh { return s.meshes[tag%uint32(len(s.meshes))] }

// meshOfMessages returns the mesh for a send or a receive.
func (s *session) meshOfMessages(tag uint32) transport.Mesh {
	if s.direct != nil {
		return s.direct
	}
	return s.meshFor(tag)
}

// moveBySelf makes a mesh move data by itself, without a goroutine that waits for it.
func moveBySelf(m transport.Mesh) {
	if h, ok := m.(transport.Poller); ok {
		h.ResumeReaders()
	}
}

// tellWithin is how long the first error of a group that has failed may wait for tellFirst.
const tellWithin = 50 * time.Millisecond

// tellFirst waits until the other ranks have been sent the fault, before an operation returns it. Many programs end
// with their first error. Other ranks would otherwise take this rank for the one that died.
func (s *session) tellFirst() {
	if s.fault() == nil {
		return
	}
	s.told.Do(func() {
		limit := time.NewTimer(tellWithin)
		defer limit.Stop()
		for _, m := range s.meshes {
			if t, ok := m.(interface{ Told() <-chan struct{} }); ok && m.Fault() != nil {
				select {
				case <-t.Told():
				case <-limit.C:
					return
				}
			}
		}
	})
}

// fault returns what ended the group, nil while it works.
func (s *session) fault() *transport.Fault {
	for _, m := range s.meshes {
		if f := m.Fault(); f != nil {
			return f
		}
	}
	return nil
}

// end ends the group with f on all ranks.
func (s *session) end(f transport.Fault) {
	for _, m := range s.meshes {
		g := f
		m.Abort(&g)
	}
}

// memory returns the memory that this rank shares with others of its host, nil if it shares none.
func (s *session) memory() *shm.Group {
	if s.clusters != nil {
		return s.clusters.local
	}
	return s.shared
}
