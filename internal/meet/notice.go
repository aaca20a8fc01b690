package meet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/store"
)

const (
	// Ranks have answerRounds rounds to answer a question, and more while answers come. A rank that
	// runs takes a round trip, or up to 50 ms with a store that polls. The rest is for other hosts
	// whose CPUs are busy. On a host with busy CPUs rounds take longer, see cputime.WithTimeout.
	answerRounds = 4
	answerRound  = 250 * time.Millisecond

	// silentLimit bounds Silent.
	silentLimit = 2 * time.Second

	// maxText bounds a fault's text: a will with the key has to fit into 4 KiB.
	maxText = 2 << 10
)

// NoticeConfig says which rank of which group this is. All fields are required.
type NoticeConfig struct {
	Store store.Store // for the group alone
	Ranks []int       // the members' ranks in the default group, by rank in the group
	Rank  int         // this rank in the group
}

// message is what the keys "first" and "last" hold: a fault or a question.
type message struct {
	Fault *Fault `json:"fault,omitempty"`
	Asks  bool   `json:"asks,omitempty"`
}

// Notice lets the ranks that make a group tell each other why it cannot be made. Make one with Join.
type Notice struct {
	cfg    NoticeConfig
	cancel context.CancelCauseFunc
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	lacks func() []int
}

// The keys of a notice. Both hold a message.
const (
	first = "first"
	last  = "last"
)

// own is this rank in the default group.
func (n *Notice) own() int { return n.cfg.Ranks[n.cfg.Rank] }

func hereKey(rank int) string { return "here/" + strconv.Itoa(rank) }

// Join is Prepare and Listen.
func Join(ctx context.Context, cfg NoticeConfig, cancel context.CancelCauseFunc) (*Notice, error) {
	n, err := Prepare(ctx, cfg)
	if err == nil {
		n.Listen(cancel)
	}
	return n, err
}

// Prepare leaves this rank's will: once it is gone, the store says so. Close must be called. After an error Post works, too.
func Prepare(ctx context.Context, cfg NoticeConfig) (*Notice, error) {
	n := &Notice{cfg: cfg, stop: func() {}}
	host, _ := os.Hostname()
	gone := Fault{Rank: n.own(), By: -1, Gone: true, Text: fmt.Sprintf(
		"%s (host %.255s, process %d) died, or lost the store, before the group was made", rankText(cfg.Rank, n.own()), host, os.Getpid())}
	return n, Will(ctx, cfg.Store, first, nil, encode(message{Fault: &gone}))
}

// Listen waits for faults of the others, in the background. The first one is given to cancel.
func (n *Notice) Listen(cancel context.CancelCauseFunc) {
	watch, stop := context.WithCancel(context.Background())
	n.cancel, n.stop = cancel, stop
	n.wg.Go(func() { n.watch(watch) })
}

// Close withdraws the will and ends the wait. The group is made, or this rank has posted why not.
func (n *Notice) Close() {
	n.stop()
	n.wg.Wait()
	ctx, cancel := cputime.WithTimeout(context.Background(), LastWord)
	defer cancel()
	_ = store.DropWill(ctx, n.cfg.Store, first) // if the store is gone, so is the will
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
		if ctx.Err() != nil || !errors.Is(err, store.ErrTimeout) {
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
	ctx, cancel := cputime.WithTimeout(context.Background(), LastWord)
	defer cancel()
	if len(f.Text) > maxText {
		f.Text = f.Text[:maxText]
	}
	for _, key := range []string{first, last} {
		held, err := Once(ctx, st, key, encode(message{Fault: &f}))
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
	ctx, cancel := cputime.WithTimeout(context.Background(), silentLimit)
	defer cancel()
	for _, key := range []string{first, last} {
		var held []byte
		var err error
		if key == first {
			held, err = Once(ctx, n.cfg.Store, first, encode(message{Asks: true}))
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
		limited, end := cputime.WithTimeout(ctx, answerRound)
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
