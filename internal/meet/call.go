package meet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/store"
)

// Config describes this rank and the store. Store, Rank and Size are required.
type Config struct {
	// Store is the ranks' common store.
	Store store.Store

	// Name distinguishes calls of several groups at the same time.
	Name string

	Rank, Size int

	// Job is the launcher's name for the job, or empty. Runs of different jobs do not see each
	// other.
	Job string

	// Foreign has the keys of ranks that do not take part in the call.
	Foreign []Foreign

	// Notices, if not nil, returns the store of Run.Notice for a run's name. A rank that dies after all have come is
	// named there.
	Notices func(id string) store.Store

	// Ended, if not nil, waits until the launcher says that a rank's process has ended for good.
	Ended func(ctx context.Context) (rank int, how string, err error)
}

// Foreign is a generation of PyTorch.
type Foreign struct {
	Store store.Store
	Keys  func(rank int) []string // one of them is written when the rank comes
}

// Run is the result of a call.
type Run struct {
	// ID is the run's name, "" if foreign ranks take part.
	ID string

	// Store is that of the foreign ranks.
	Store store.Store

	// Keys are what the run leaves in Config.Store. Delete them when Meet has returned on all ranks.
	Keys []string

	// Notice has this rank's will. Call Listen and Close. It is nil without Config.Notices or an ID.
	Notice *Notice
}

const (
	// Who reads the log pauses after firstLook, then less often up to longestLook. It looks for foreign ranks, for
	// questions, and for entries that are late.
	firstLook   = 10 * time.Millisecond
	longestLook = 250 * time.Millisecond

	// answerLimit bounds the wait for an answer, which takes longestLook.
	answerLimit = 2 * time.Second
)

// lastKey has the record of the last rank 0 of any job.
const lastKey = "c10d-go/meet/last"

// record describes a process.
type record struct {
	Nonce string `json:"nonce"`
	Rank  int    `json:"rank"`
	Size  int    `json:"size"`
	Job   string `json:"job,omitempty"`
	Host  string `json:"host"`
	PID   int    `json:"pid"`
}

// end is how a turn ended. One field is set, none if the store holds something else.
type end struct {
	Zero    *record `json:"zero,omitempty"`    // rank 0 has come: its run meets in the next turn
	Begun   *begun  `json:"begun,omitempty"`   // all have come
	Foreign int     `json:"foreign,omitempty"` // the place of Config.Foreign, counted from 1, of which a rank has come
	Fault   *Fault  `json:"fault,omitempty"`
}

// begun says which entries of a turn's log are the run's.
type begun struct {
	Read    int   `json:"read"`           // up to this one
	Late    []int `json:"late,omitempty"` // but for these
	Answers int   `json:"answers,omitempty"`
}

const turnKey = "turn" // a turn that has ended; there may be later ones

func endKey(t int) string        { return fmt.Sprintf("turn/%d/end", t) }
func countKey(t int) string      { return fmt.Sprintf("turn/%d/log", t) }
func entryKey(t, i int) string   { return fmt.Sprintf("turn/%d/log/%d", t, i) }
func answersKey(t int) string    { return fmt.Sprintf("turn/%d/answers", t) }
func askKey(t, k int) string     { return fmt.Sprintf("turn/%d/ask/%d", t, k) }
func answerKey(t, k int) string  { return fmt.Sprintf("turn/%d/answer/%d", t, k) }
func rankKey(r int) string       { return "rank/" + strconv.Itoa(r) }
func processKey(r, n int) string { return fmt.Sprintf("rank/%d/%d", r, n) }

// Call is one rank's part in a meeting.
type Call struct {
	cfg    Config
	place  string // of this call's keys in Config.Store
	corner store.Store
	self   record
	begun  time.Time

	wills  []string // keys
	wrote  []string // keys for this rank alone
	notice *Notice
	run    string // whose notice that is
	number int    // of this process among those of its rank

	mu     sync.Mutex
	turn   int  // which this rank waits for
	before end  // of the turn before
	log    *log // nil if another rank reads it
}

// New prepares a call. Nothing is written before Meet.
func New(cfg Config) *Call {
	job := cfg.Job
	if job == "" {
		job = "-"
	}
	c := &Call{cfg: cfg, begun: time.Now()}
	c.place = "c10d-go/meet/" + job + "/" + cfg.Name
	c.corner = store.Prefix(c.place, cfg.Store)
	host, _ := os.Hostname()
	c.self = record{Nonce: nonce(), Rank: cfg.Rank, Size: cfg.Size, Job: cfg.Job, Host: host, PID: os.Getpid()}
	return c
}

// NewID returns a name for a run of one rank, which meets nobody.
func NewID() string { return nonce() }

func nonce() string { return fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()) }

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings, numbers and booleans
	}
	return b
}

// Meet returns when all ranks have come, or a foreign rank is known to take part. An error is
// an *Error.
func (c *Call) Meet(ctx context.Context) (Run, error) {
	run, err := c.meet(ctx)
	if err != nil {
		err = c.fail(ctx, err)
	}
	last, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), LastWord)
	defer cancel()
	together(func(begin func(func() error)) {
		begin(func() (err error) {
			for _, key := range slices.Backward(c.wills) { // or the next run would take them for those of its ranks
				err = store.DropWill(last, c.corner, key)
			}
			return err
		})
		if run.ID != "" && c.cfg.Rank == 0 {
			begin(func() error { return c.advance(last, 0, c.turn) }) // its end is deleted soon
		}
		for _, key := range c.wrote {
			begin(func() error { _, err := c.corner.Delete(last, key); return err })
		}
	})
	if c.notice != nil && run.Notice == nil {
		c.notice.Close()
	}
	return run, err
}

func (c *Call) meet(ctx context.Context) (Run, error) {
	var turn int
	var before end
	var stale string
	err := together(func(begin func(func() error)) {
		begin(func() (err error) { _, stale, err = c.foreign(ctx, c.cfg.Rank); return err })
		begin(func() (err error) { turn, before, err = c.latest(ctx); return err })
	})
	if stale != "" {
		return Run{}, fmt.Errorf("%w: rank %d has an address there already, at %q: use another prefix or a new store",
			ErrStale, c.cfg.Rank, stale)
	}
	if err != nil {
		return Run{}, err
	}
	waits, stop := context.WithCancelCause(ctx)
	var watches sync.WaitGroup
	defer watches.Wait()
	defer stop(nil)
	first := true
	for {
		if c.cfg.Rank == 0 {
			if before, err = c.announce(ctx, turn); err != nil {
				return Run{}, err
			}
			turn++
			if !c.leads(before) {
				continue
			}
		}
		c.enter(turn, before)
		if c.cfg.Rank == 0 {
			watches.Go(func() { c.log.lead(waits, stop) })
		}
		index, err := c.arrive(ctx, first)
		if err != nil {
			return Run{}, err
		}
		if first {
			c.watch(waits, stop, watches.Go)
			first = false
		}
		inTurn, over := context.WithCancel(waits)
		if before.Zero == nil && index == 1 {
			reader := c.read()
			watches.Go(func() { reader.lead(inTurn, stop) })
		}
		now, err := c.ended(waits, turn)
		over()
		if found := (*foreignZero)(nil); errors.As(context.Cause(waits), &found) {
			return Run{Store: found.st}, nil
		}
		if err != nil {
			if why := context.Cause(waits); why != nil && ctx.Err() == nil {
				err = why
			}
			return Run{}, err
		}
		switch {
		case now.Fault != nil:
			return Run{}, now.Fault
		case now.Zero != nil && c.cfg.Rank == 0:
			return Run{}, twice(c.self, *now.Zero)
		case now.Foreign > 0 && now.Foreign <= len(c.cfg.Foreign) && before.Zero != nil:
			return Run{Store: c.cfg.Foreign[now.Foreign-1].Store}, nil
		case now.Begun != nil && before.Zero != nil:
			if index > now.Begun.Read || slices.Contains(now.Begun.Late, index) {
				return Run{}, &Fault{Rank: c.cfg.Rank, By: -1, Kind: kindTwice, Text: fmt.Sprintf(
					"rank %d was started twice: this process is %s, and another one has met the others", c.cfg.Rank, c.self.process())}
			}
			return Run{ID: before.Zero.Nonce, Notice: c.notice, Keys: c.left(turn, now.Begun.Answers)}, nil
		}
		turn, before = turn+1, now
	}
}

// left returns the keys of the last two turns that no rank deletes by itself.
func (c *Call) left(turn, answers int) (keys []string) {
	keys = []string{endKey(turn - 1), countKey(turn - 1), endKey(turn), countKey(turn)}
	if answers > 0 {
		keys = append(keys, answersKey(turn))
	}
	for k := range answers {
		keys = append(keys, askKey(turn, k+1), answerKey(turn, k+1))
	}
	for i, key := range keys {
		keys[i] = c.place + "/" + key
	}
	return keys
}

// foreign returns the key that shows that rank r is a foreign one, "" if there is none, and its place in Config.Foreign.
func (c *Call) foreign(ctx context.Context, r int) (place int, key string, err error) {
	var mu sync.Mutex
	err = together(func(begin func(func() error)) {
		for i, f := range c.cfg.Foreign {
			for _, k := range f.Keys(r) {
				begin(func() error {
					there, err := f.Store.Check(ctx, k)
					mu.Lock()
					defer mu.Unlock()
					if there && (key == "" || i < place) {
						place, key = i, k
					}
					return err
				})
			}
		}
	})
	return place, key, err
}

// together makes calls at the same time. It returns the first error in the order in which they began.
func together(calls func(begin func(func() error))) error {
	var wg sync.WaitGroup
	var errs []*error
	calls(func(f func() error) {
		err := new(error)
		errs = append(errs, err)
		wg.Go(func() { *err = f() })
	})
	wg.Wait()
	for _, err := range errs {
		if *err != nil {
			return *err
		}
	}
	return nil
}

// enter notes the turn that this rank waits for.
func (c *Call) enter(turn int, before end) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.turn, c.before, c.log = turn, before, nil
	if c.leads(before) {
		c.log = c.newLog()
	}
}

// read makes this rank the one that reads the log of its turn.
func (c *Call) read() *log {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = c.newLog()
	return c.log
}

// leads reports whether a turn's end is this rank 0's.
func (c *Call) leads(e end) bool { return e.Zero != nil && e.Zero.Nonce == c.self.Nonce }

// peek returns the value of key, "" if it is missing. It does not wait.
func (c *Call) peek(ctx context.Context, key string) (string, error) {
	values, err := Look(ctx, c.corner, key)
	return values[0], err
}

// latest returns the turn that has not ended, and how the one before did.
func (c *Call) latest(ctx context.Context) (turn int, before end, err error) {
	n, err := c.corner.Add(ctx, turnKey, 0)
	if err != nil {
		return 0, end{}, err
	}
	var text, now string
	err = together(func(begin func(func() error)) {
		begin(func() (err error) { now, err = c.peek(ctx, endKey(int(n)+1)); return err })
		if n > 0 {
			begin(func() (err error) { text, err = c.peek(ctx, endKey(int(n))); return err })
		}
	})
	for turn = int(n) + 1; err == nil && now != ""; turn++ {
		text = now
		now, err = c.peek(ctx, endKey(turn+1))
	}
	if err != nil {
		return 0, end{}, err
	}
	return turn, c.parse(text), c.advance(ctx, int(n), turn-1)
}

// advance notes that the turn to has ended. from is what the key held.
func (c *Call) advance(ctx context.Context, from, to int) error {
	for from < to {
		b, err := c.corner.CompareSet(ctx, turnKey, []byte(strconv.Itoa(from)), []byte(strconv.Itoa(to)))
		if err != nil {
			return err
		}
		if from, err = strconv.Atoi(string(b)); err != nil {
			return fmt.Errorf("key %q holds %.80q, which is no number", turnKey, b)
		}
	}
	return nil
}

func (c *Call) parse(text string) (e end) {
	if json.Unmarshal([]byte(text), &e) != nil {
		return end{}
	}
	if e.Zero != nil && e.Zero.Nonce == "" {
		e.Zero = nil
	}
	if e.Fault != nil {
		e.Fault.place, e.Fault.by = e.Fault.Rank+1, e.Fault.By+1
	}
	return e
}

// endTurn ends a turn, unless it has ended. It returns how.
func (c *Call) endTurn(ctx context.Context, turn int, e end) (end, error) {
	b, err := Once(ctx, c.corner, endKey(turn), encode(e))
	return c.parse(string(b)), err
}

// ended waits for the end of a turn.
func (c *Call) ended(ctx context.Context, turn int) (end, error) {
	b, err := c.corner.Get(ctx, endKey(turn))
	return c.parse(string(b)), err
}

// announce tells the others that this rank 0 has come, unless the turn has ended already. It returns how the turn ended.
func (c *Call) announce(ctx context.Context, turn int) (end, error) {
	if err := c.join(ctx, c.self.Nonce); err != nil {
		return end{}, err
	}
	if err := c.leaveWill(ctx, turn, turn+1); err != nil {
		return end{}, err
	}
	c.enter(turn, end{}) // where this rank says why it ends
	return c.endTurn(ctx, turn, end{Zero: &c.self})
}

// join leaves this rank's will in the notice of a run.
func (c *Call) join(ctx context.Context, run string) (err error) {
	if c.cfg.Notices == nil || c.run == run {
		return nil
	}
	if c.notice != nil {
		c.notice.Close()
	}
	c.run = run
	c.notice, err = Prepare(ctx, NoticeConfig{Store: c.cfg.Notices(run), Rank: c.cfg.Rank, Ranks: everyRank(c.cfg.Size)})
	return err
}

func everyRank(size int) []int {
	ranks := make([]int, size)
	for r := range ranks {
		ranks[r] = r
	}
	return ranks
}

// leaveWill makes the store end turns if this process is gone. A turn ends no later than the one after it, so the earlier
// will is left first and dropped last.
func (c *Call) leaveWill(ctx context.Context, turns ...int) error {
	gone := &Fault{Rank: c.cfg.Rank, By: -1, Gone: true, Text: fmt.Sprintf(
		"rank %d (%s) died, or lost the store, before all ranks had called Init", c.cfg.Rank, c.self.process())}
	for _, turn := range turns {
		key := endKey(turn)
		if slices.Contains(c.wills, key) {
			continue
		}
		c.wills = append(c.wills, key) // the server may have it even after an error
		if err := Will(ctx, c.corner, key, nil, encode(end{Fault: gone})); err != nil {
			return err
		}
	}
	return nil
}

// arrive enters this rank in the log of its turn, and returns the place there. Rank 0's place is 0, without an entry.
func (c *Call) arrive(ctx context.Context, first bool) (index int, err error) {
	turn, zero := c.turn, c.before.Zero
	if zero != nil && zero.Size != c.self.Size {
		return 0, differ(*zero, c.self)
	}
	// When rank 0 comes, this rank may die before it hears so. Then it is missed in the next turn.
	wills := []int{turn}
	if zero == nil {
		wills = append(wills, turn+1)
	}
	err = together(func(begin func(func() error)) {
		begin(func() error { return c.leaveWill(ctx, wills...) })
		if zero != nil {
			begin(func() error { return c.join(ctx, zero.Nonce) })
		}
	})
	if err != nil {
		return 0, err
	}
	// A process that others may see here has left its wills.
	var number, place int64
	err = together(func(begin func(func() error)) {
		if first {
			begin(func() (err error) { number, err = c.corner.Add(ctx, rankKey(c.cfg.Rank), 1); return err })
		}
		if c.cfg.Rank > 0 {
			begin(func() (err error) { place, err = c.corner.Add(ctx, countKey(turn), 1); return err })
		}
	})
	if err != nil {
		return 0, err
	}
	var keys []string
	var values [][]byte
	if c.cfg.Rank == 0 {
		if err := c.cfg.Store.Set(ctx, lastKey, encode(c.self)); err != nil {
			return 0, err
		}
	}
	if first {
		c.number = int(number)
		keys, values = append(keys, processKey(c.cfg.Rank, c.number)), append(values, encode(c.self))
	}
	if c.cfg.Rank > 0 {
		keys, values = append(keys, entryKey(turn, int(place))), append(values, encode(c.self))
	}
	c.wrote = append(c.wrote, keys...)
	if len(keys) > 0 {
		err = c.corner.MultiSet(ctx, keys, values)
	}
	return int(place), err
}

// foreignZero ends the wait of a rank whose rank 0 is a foreign one.
type foreignZero struct{ st store.Store }

func (*foreignZero) Error() string { return "rank 0 is a foreign one" }

// watch waits, in the background, for what concerns this rank alone, and for the launcher. begin begins a goroutine.
func (c *Call) watch(ctx context.Context, stop context.CancelCauseFunc, begin func(func())) {
	begin(func() {
		b, err := c.corner.Get(ctx, processKey(c.cfg.Rank, c.number+1))
		var other record
		if err == nil && json.Unmarshal(b, &other) == nil && other.Nonce != "" {
			c.post(ctx, twice(c.self, other))
		}
	})
	if c.cfg.Ended != nil {
		begin(func() {
			if r, how, err := c.cfg.Ended(ctx); err == nil && r != c.cfg.Rank {
				c.post(ctx, &Fault{Rank: r, By: r, Text: how + " before all ranks had called Init"})
			}
		})
	}
	if c.cfg.Rank == 0 {
		return
	}
	for _, f := range c.cfg.Foreign {
		for _, key := range f.Keys(0) {
			begin(func() {
				if f.Store.Wait(ctx, key) == nil {
					stop(&foreignZero{f.Store})
				}
			})
		}
	}
}

// post ends the turn that this rank waits for with a fault, and those after it in which rank 0 comes. It returns how
// the last one ended.
func (c *Call) post(ctx context.Context, f *Fault) (end, error) {
	c.mu.Lock()
	turn := c.turn
	c.mu.Unlock()
	if len(f.Text) > maxText {
		f.Text = f.Text[:maxText]
	}
	for ; ; turn++ {
		e, err := c.endTurn(ctx, turn, end{Fault: f})
		if err != nil || e.Zero == nil {
			return e, err
		}
	}
}

// fail tells the others why this rank ends, and makes the error for the caller.
func (c *Call) fail(ctx context.Context, err error) error {
	e := &Error{Rank: c.cfg.Rank, Size: c.cfg.Size, After: time.Since(c.begun), Err: err}
	var f *Fault
	told := errors.As(err, &f)
	late, asks := false, false
	switch {
	case told:
		e.lacks(f)
		if f.By != c.cfg.Rank {
			return e
		}
	case ctx.Err() != nil || errors.Is(err, store.ErrTimeout):
		asks = true
		if ctx.Err() != nil {
			e.Err = context.Cause(ctx)
			asks = e.Err == ctx.Err() // nobody has said why
		}
		f = &Fault{Rank: c.cfg.Rank, By: c.cfg.Rank, Text: fmt.Sprintf("rank %d (%s) gave up: %v", c.cfg.Rank, c.self.process(), e.Err)}
		if late = e.Timeout(); !late && c.cfg.Rank == 0 {
			f.Kind = kindDiffer
		}
	default:
		f = &Fault{Rank: c.cfg.Rank, By: c.cfg.Rank, Text: fmt.Sprintf("rank %d (%s) gave up: %v", c.cfg.Rank, c.self.process(), err)}
	}
	c.mu.Lock()
	begun := c.turn > 0
	c.mu.Unlock()
	if !begun {
		return e
	}
	if late || asks {
		limit := LastWord
		if late {
			limit = answerLimit
		}
		ask, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), limit)
		if c.log != nil {
			c.log.catchUp(ask) // what this rank knows has to do otherwise
		}
		missing, answered, err := c.Missing(ask)
		cancel()
		if e.Missing = missing; late && !answered && err == nil {
			e.Stopped = []int{0}
		}
		f.Missing, f.Stopped = e.Missing, e.Stopped
	}
	if f.Late = late; late {
		f.Rank = -1
		if named := slices.Concat(e.Missing, e.Stopped); len(named) > 0 {
			f.Rank = named[0]
		}
	}
	last, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), LastWord)
	defer cancel()
	if late {
		e.Err = c.otherRun(last, e.Err)
	}
	stands, err := c.post(last, f)
	if err == nil && stands.Begun != nil && c.notice != nil {
		c.notice.Post(*f) // the others connect
	}
	return e
}

// lacks takes the missing ranks from another rank's fault.
func (e *Error) lacks(f *Fault) {
	own := func(r int) bool { return r == e.Rank }
	e.Missing = slices.DeleteFunc(slices.Clone(f.Missing), own)
	e.Stopped = slices.DeleteFunc(slices.Clone(f.Stopped), own)
}

// otherRun adds to err what the store says of the last rank 0. It may be of another job, or of a world of another size.
// Or the turn before has ended with a fault.
func (c *Call) otherRun(ctx context.Context, err error) error {
	c.mu.Lock()
	before := c.before
	c.mu.Unlock()
	var last record
	if before.Zero != nil {
		return err
	}
	text, e := Look(ctx, c.cfg.Store, lastKey)
	known := e == nil && json.Unmarshal([]byte(text[0]), &last) == nil
	switch {
	case known && last.Job != c.self.Job:
		return fmt.Errorf("%w (the last rank 0 in this store, %s, is of job %q; this rank is of job %q)", err, last.process(), last.Job, c.self.Job)
	case known && last.Size != c.self.Size:
		return fmt.Errorf("%w (the last rank 0 in this store, %s, was started with a world of %d ranks; this rank with one of %d)", err, last.process(), last.Size, c.self.Size)
	case before.Fault != nil:
		return fmt.Errorf("%w (the last meeting in this store failed: %s)", err, before.Fault.Text)
	}
	return err
}

// Twice looks in the store for a call of another process of this rank 0. If the call is under way, Twice
// ends it and returns the error that both processes get. It returns nil if the call is over, or if none
// has begun when ctx ends. It is for a process that cannot take part, because another process hosts the
// store at this one's address.
func Twice(ctx context.Context, cfg Config) error {
	c := New(cfg)
	turn, before, err := c.latest(ctx)
	for ; err == nil; turn++ {
		if before.Begun != nil {
			return nil
		}
		if before.Zero != nil {
			if before.Zero.Size != c.self.Size {
				return nil
			}
			c.turn = turn
			f := twice(*before.Zero, c.self)
			if now, err := c.post(ctx, f); err != nil || now.Fault == nil {
				return nil
			}
			return &Error{Rank: c.cfg.Rank, Size: c.cfg.Size, After: time.Since(c.begun), Err: f}
		}
		before, err = c.ended(ctx, turn)
	}
	return nil
}

// Missing returns which ranks have not come. answered is false if rank 0 has come and does not answer. An error is the
// store's.
func (c *Call) Missing(ctx context.Context) (missing []int, answered bool, err error) {
	c.mu.Lock()
	turn, zero, l := c.turn, c.before.Zero, c.log
	c.mu.Unlock()
	if l != nil {
		return l.absent(), true, nil
	}
	if turn == 0 {
		return nil, true, nil // it has not begun
	}
	missing, answered, err = c.ask(ctx, turn)
	if answered || ctx.Err() == nil && err != nil {
		return missing, answered, err
	}
	// The log has to say who has come.
	look, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), LastWord)
	defer cancel()
	here := c.newLog()
	if err := here.catchUp(look); err != nil {
		return nil, zero == nil, err
	}
	// Ranks delete their entries when the turn has ended.
	if text, err := c.peek(look, endKey(turn)); err != nil {
		return nil, zero == nil, err
	} else if text != "" {
		missing, answered = c.lacking(c.parse(text))
		return missing, answered, nil
	}
	missing = slices.DeleteFunc(here.absent(), func(r int) bool { return r == c.cfg.Rank || r == 0 && zero != nil })
	return missing, zero == nil, nil
}

// lacking returns what a turn's end says of missing ranks, and whether rank 0 has answered.
func (c *Call) lacking(e end) (missing []int, answered bool) {
	if e.Fault == nil {
		return nil, true
	}
	return slices.DeleteFunc(slices.Clone(e.Fault.Missing), func(r int) bool { return r == c.cfg.Rank }), len(e.Fault.Stopped) == 0
}

// ask asks the rank that reads the log which ranks have not come.
func (c *Call) ask(ctx context.Context, turn int) (missing []int, answered bool, err error) {
	n, err := c.corner.Add(ctx, answersKey(turn), 0)
	if err != nil {
		return nil, false, err
	}
	k := int(n) + 1
	if err := c.corner.Set(ctx, askKey(turn, k), nil); err != nil {
		return nil, false, err
	}
	limited, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	over := make(chan end, 1)
	wg.Go(func() {
		if e, err := c.ended(limited, turn); err == nil {
			over <- e
			cancel()
		}
	})
	text, err := c.corner.Get(limited, answerKey(turn, k))
	cancel()
	wg.Wait()
	if err == nil {
		err = json.Unmarshal(text, &missing)
		return missing, err == nil, err
	}
	select {
	case e := <-over: // with the answer, if that rank's time has run out
		missing, answered = c.lacking(e)
		return missing, answered, nil
	default:
		return nil, false, nil
	}
}
