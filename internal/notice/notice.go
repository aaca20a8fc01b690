// Package notice lets ranks that make a group together tell each other why it cannot be made.
//
//	ctx, cancel := context.WithCancelCause(ctx)
//	n, err := notice.Join(ctx, notice.Config{Store: st, Ranks: ranks, Rank: rank}, cancel)
//	err = connect(ctx)
//	if err != nil {
//		n.Post(notice.Fault{Rank: rank, Text: err.Error()})
//	}
//	n.Close()
//
// # How it works
//
// Every rank waits for the key "first". The first rank that fails writes there which rank is at
// fault and why, and all waiting ranks fail with that. A rank also leaves a will (store.Willer)
// that writes the key when its process ends. In a store without wills the others notice a death by
// what else it breaks, or at their deadline.
//
// A rank whose time runs out does not know the culprit: the ranks that it lacks may lack others
// themselves. It writes "first" as a question. Every rank that runs writes to here/RANK which ranks
// it lacks. At fault are the ranks that some rank lacks and that have not answered: they have
// stopped, or never came. The rank that asked writes them to "last", for all to read.
//
// The keys must be the group's own: a fault of an earlier run would end this one. All of them
// are left in the store if the group fails, none otherwise.
package notice

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/lag"
	"github.com/c10d-go/c10d/store"
)

const (
	// Ranks have answerRounds rounds to answer a question, and more while answers come. A rank that
	// runs takes a round trip, or up to 50 ms with a store that polls. The rest is for other hosts
	// whose CPUs are busy. On a host with busy CPUs rounds take longer, see lag.WithTimeout.
	answerRounds = 4
	answerRound  = 250 * time.Millisecond

	// silentLimit bounds Silent.
	silentLimit = 2 * time.Second

	// callLimit bounds a call of the store after the group has failed.
	callLimit = 500 * time.Millisecond

	// foreignPatience is how long a rank waits before it listens in a store of PyTorch, where that
	// takes a connection. Most groups are made in milliseconds.
	foreignPatience = 250 * time.Millisecond

	// maxText bounds a fault's text: a will with the key has to fit into 4 KiB.
	maxText = 2 << 10
)

// Config says which rank of which group this is. All fields but Foreign are required.
type Config struct {
	Store store.Store // for the group alone
	Ranks []int       // the members' ranks in the default group, by rank in the group
	Rank  int         // this rank in the group

	// Foreign says that PyTorch ranks may be in the group. This rank then leaves no will and posts
	// nothing. It only hears what Tell writes.
	Foreign bool
}

// Fault is why a group cannot be made. Its ranks are those of the default group, because the ranks
// may not agree on the group's.
type Fault struct {
	Rank int    `json:"rank"`           // which is at fault, -1 if unknown
	By   int    `json:"by"`             // the rank that says so, -1 if the store does
	Gone bool   `json:"gone,omitempty"` // Rank's connection to the store has ended
	Late bool   `json:"late,omitempty"` // time ran out
	Kind string `json:"kind,omitempty"` // the caller's name for the kind of error
	Text string `json:"text"`

	place int // Rank's place in the group, counted from 1; 0 if it has none
	by    int // By's place
}

func (f *Fault) Error() string {
	if f.By < 0 || f.By == f.Rank {
		return f.Text
	}
	return fmt.Sprintf("%s (noticed by %s)", f.Text, rankText(cmp.Or(f.by, f.By+1)-1, f.By))
}

// rankText names a rank of a group, which is another one of the default group.
func rankText(rank, global int) string {
	if rank == global {
		return fmt.Sprintf("rank %d", rank)
	}
	return fmt.Sprintf("rank %d (global rank %d)", rank, global)
}

// Culprit returns the rank at fault as the group numbers it, -1 if it is unknown or no member.
func (f *Fault) Culprit() int { return f.place - 1 }

// Is makes a fault whose time ran out match the error of a deadline.
func (f *Fault) Is(target error) bool {
	return f.Late && (target == context.DeadlineExceeded || target == store.ErrTimeout)
}

// message is what the keys "first" and "last" hold: a fault or a question.
type message struct {
	Fault *Fault `json:"fault,omitempty"`
	Asks  bool   `json:"asks,omitempty"`
}

// Notice is one rank's part. Make one with Join.
type Notice struct {
	cfg    Config
	cancel context.CancelCauseFunc
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	lacks func() []int
}

const (
	first = "first"
	last  = "last"
)

// own is this rank in the default group.
func (n *Notice) own() int { return n.cfg.Ranks[n.cfg.Rank] }

func hereKey(rank int) string { return "here/" + strconv.Itoa(rank) }

// Join leaves this rank's will and waits for faults of the others, in the background. The first one
// is given to cancel. ctx bounds the call only. Close must be called, unless Join returns
// an error. Post works even then.
func Join(ctx context.Context, cfg Config, cancel context.CancelCauseFunc) (*Notice, error) {
	n := &Notice{cfg: cfg, cancel: cancel, stop: func() {}}
	if err := n.leaveWill(ctx); err != nil {
		return n, err
	}
	watch, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.wg.Go(func() { n.watch(watch) })
	return n, nil
}

// leaveWill makes the store say that this rank is gone, once it is.
func (n *Notice) leaveWill(ctx context.Context) error {
	if n.cfg.Foreign {
		return nil
	}
	host, _ := os.Hostname()
	own := n.own()
	name := rankText(n.cfg.Rank, own)
	gone := Fault{Rank: own, By: -1, Gone: true, Text: fmt.Sprintf(
		"%s (host %.255s, process %d) died, or lost the store, before the group was made", name, host, os.Getpid())}
	err := store.SetWill(ctx, n.cfg.Store, first, nil, encode(message{Fault: &gone}))
	if err == nil || errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	n.withdraw() // the server may have it all the same
	return err
}

// Close withdraws the will and ends the wait. The group is made, or this rank has posted why not.
func (n *Notice) Close() {
	n.stop()
	n.wg.Wait()
	n.withdraw()
}

// withdraw takes the will back. If the store is gone, so is the will.
func (n *Notice) withdraw() {
	if n.cfg.Foreign {
		return
	}
	ctx, cancel := lag.WithTimeout(context.Background(), callLimit)
	defer cancel()
	_ = store.DropWill(ctx, n.cfg.Store, first)
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // numbers, strings and booleans
	}
	return b
}

func parse(b []byte) (message, error) {
	var m message
	if err := json.Unmarshal(b, &m); err != nil || m.Fault == nil && !m.Asks {
		return m, fmt.Errorf("the store holds %.80q where ranks tell why a group failed", b)
	}
	return m, nil
}

func (n *Notice) parse(b []byte) (message, error) {
	m, err := parse(b)
	if m.Fault != nil {
		n.place(m.Fault)
	}
	return m, err
}

// watch waits for what the others say. It ends without a word if the store fails: the calls of the
// rank itself fail then.
func (n *Notice) watch(ctx context.Context) {
	if n.cfg.Foreign {
		t := time.NewTimer(foreignPatience)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
	for _, key := range []string{first, last} {
		b, err := get(ctx, n.cfg.Store, key)
		if err != nil {
			return
		}
		m, err := n.parse(b)
		if err != nil {
			n.cancel(err)
			return
		}
		if m.Fault != nil {
			n.cancel(m.Fault)
			return
		}
		n.answer(ctx)
	}
}

// get waits for key as long as ctx lasts.
func get(ctx context.Context, st store.Store, key string) ([]byte, error) {
	for {
		b, err := st.Get(ctx, key)
		// The store's own timeout is not the group's.
		if err == nil || ctx.Err() != nil || !errors.Is(err, store.ErrTimeout) {
			return b, err
		}
	}
}

// answer says that this rank runs, and which ranks it lacks.
func (n *Notice) answer(ctx context.Context) {
	n.mu.Lock()
	lacks := n.lacks
	n.mu.Unlock()
	lacking := []int{}
	if lacks != nil {
		lacking = append(lacking, lacks()...)
	}
	_ = n.cfg.Store.Set(ctx, hereKey(n.own()), encode(lacking))
}

// Post tells the others why this rank fails, and returns the fault that all ranks are told: the
// first one. It takes half a second at most, five while this process waits for a CPU.
func (n *Notice) Post(f Fault) Fault {
	f.By = n.own()
	if n.cfg.Foreign {
		return f
	}
	f = Tell(n.cfg.Store, f)
	n.place(&f)
	return f
}

// place notes which members a fault names.
func (n *Notice) place(f *Fault) {
	f.place, f.by = slices.Index(n.cfg.Ranks, f.Rank)+1, slices.Index(n.cfg.Ranks, f.By)+1
}

// Tell is Post for a rank that need not be a member. st is the group's, f.By the rank.
func Tell(st store.Store, f Fault) Fault {
	ctx, cancel := lag.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if len(f.Text) > maxText {
		f.Text = f.Text[:maxText]
	}
	for _, key := range []string{first, last} {
		held, err := st.CompareSet(ctx, key, nil, encode(message{Fault: &f}))
		if err != nil {
			break // the others fail with the store
		}
		if m, err := parse(held); err == nil && m.Fault != nil {
			return *m.Fault
		}
	}
	return f
}

// Lacks sets the function that says which ranks this one waits for at a moment. Nil means none.
func (n *Notice) Lacks(f func() []int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lacks = f
}

// Silent is for a rank whose time has run out and that lacks some ranks. It returns which ranks keep
// the group from being made: those that some rank lacks and that do not answer. It returns none if
// all of them run, or if the store cannot tell. If a fault has been told already, its rank is
// the result. Silent takes two seconds at most, 20 while this process waits for a CPU.
func (n *Notice) Silent(lacking []int) []int {
	ctx, cancel := lag.WithTimeout(context.Background(), silentLimit)
	defer cancel()
	for _, key := range []string{first, last} {
		var held []byte
		var err error
		if key == first {
			held, err = n.cfg.Store.CompareSet(ctx, first, nil, encode(message{Asks: true}))
		} else if there, e := n.cfg.Store.Check(ctx, last); e == nil && there {
			held, err = n.cfg.Store.Get(ctx, last)
		}
		if err != nil {
			return nil
		}
		if m, err := n.parse(held); err == nil && m.Fault != nil {
			if i := m.Fault.Culprit(); i >= 0 {
				return []int{i}
			}
			return nil
		}
	}
	_ = n.cfg.Store.Set(ctx, hereKey(n.own()), encode(lacking))
	here := n.answers(ctx)
	here[n.cfg.Rank] = true
	suspects := slices.Clone(lacking)
	for i, r := range n.cfg.Ranks {
		if i == n.cfg.Rank || !here[i] {
			continue
		}
		b, err := n.cfg.Store.Get(ctx, hereKey(r))
		var theirs []int
		if err == nil && json.Unmarshal(b, &theirs) == nil {
			suspects = append(suspects, theirs...)
		}
	}
	slices.Sort(suspects)
	suspects = slices.Compact(suspects)
	return slices.DeleteFunc(suspects, func(i int) bool { return i < 0 || i >= len(here) || here[i] })
}

// answers waits for the other ranks and returns which have answered.
func (n *Notice) answers(ctx context.Context) (here []bool) {
	here = make([]bool, len(n.cfg.Ranks))
	var missing []string
	places := make(map[string]int)
	for i, r := range n.cfg.Ranks {
		if i != n.cfg.Rank {
			missing = append(missing, hereKey(r))
			places[hereKey(r)] = i
		}
	}
	for round := 1; ctx.Err() == nil; round++ {
		limited, end := lag.WithTimeout(ctx, answerRound)
		_ = n.cfg.Store.Wait(limited, missing...)
		end()
		before := len(missing)
		missing = slices.DeleteFunc(missing, func(key string) bool {
			there, err := n.cfg.Store.Check(ctx, key)
			here[places[key]] = err == nil && there
			return here[places[key]]
		})
		if len(missing) == 0 || round >= answerRounds && len(missing) == before {
			break
		}
	}
	return here
}
