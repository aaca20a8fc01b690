package rollcall

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

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

	// Fresh says that nothing in the store is of an earlier run, because this process hosts it.
	Fresh bool

	// Known, if not nil, is called once this rank knows the run's name. Other ranks learn only
	// afterwards that this rank has come.
	Known func(ctx context.Context, id string) error

	// Ended, if not nil, tells what the launcher knows of a rank whose process has ended for good. ok is false if it
	// knows of none.
	Ended func(ctx context.Context) (rank int, how string, ok bool, err error)
}

// Foreign is a generation of PyTorch.
type Foreign struct {
	Dialect store.Dialect
	Store   store.Store
	Keys    func(rank int) []string // one of them is written when the rank comes
}

// Run is the result of a roll call.
type Run struct {
	// ID is the run's name, "" if foreign ranks take part.
	ID string

	// Dialect is that of the foreign ranks.
	Dialect store.Dialect

	// Key is the key of Config.Store that the run leaves: it says that the run has begun. Delete
	// it when Meet has returned on all ranks. It is empty if there is none.
	Key string
}

var (
	// ErrStale is matched by the error of a rank that finds its PyTorch key before it has written
	// it.
	ErrStale = errors.New("keys of an earlier run are in the store")

	// ErrTwice is matched by the error of a rank with two processes.
	ErrTwice = errors.New("started twice")

	// ErrDiffer is matched by the error of ranks of different runs, and of ranks whose rank 0
	// gave up.
	ErrDiffer = errors.New("the ranks are not of one run")
)

// Error is the error of Meet. It unwraps to a context's or store's error, or to one of this
// package's.
type Error struct {
	Rank, Size int
	After      time.Duration
	Missing    []int    // ranks that did not come, as far as this rank knows; ascending
	Seen       []string // what else is known of the first of Missing; may be empty
	Unanswered []int    // those of Missing that came, and that rank 0 has not answered
	Stopped    []int    // ranks that came and no longer answer
	Err        error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rendezvous: rank %d of %d: ", e.Rank, e.Size)
	for i, r := range e.Missing {
		if i == mostNamed {
			fmt.Fprintf(&b, "%d more ranks are missing; ", len(e.Missing)-i)
			break
		}
		fmt.Fprintf(&b, "rank %d has not called Init", r)
		if e.Timeout() {
			fmt.Fprintf(&b, " within %v", e.After.Round(time.Millisecond))
		}
		if i < len(e.Seen) && e.Seen[i] != "" {
			fmt.Fprintf(&b, " (%s)", e.Seen[i])
		}
		b.WriteString("; ")
	}
	for _, r := range e.Stopped[:min(len(e.Stopped), mostNamed)] {
		fmt.Fprintf(&b, "rank %d has called Init and does not answer: it has stopped, or its host is away; ", r)
	}
	s := strings.TrimSuffix(b.String(), "; ")
	if len(e.Missing)+len(e.Stopped) > 0 {
		s += ": "
	}
	return s + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether time ran out. It is part of net.Error.
func (e *Error) Timeout() bool {
	return errors.Is(e.Err, context.DeadlineExceeded) || errors.Is(e.Err, store.ErrTimeout)
}

// Temporary is part of net.Error. It reports the same as Timeout.
func (e *Error) Temporary() bool { return e.Timeout() }

const (
	mostNamed = 8

	// Rank 0 looks for ranks after firstPause, then less often up to longestPause.
	firstPause   = time.Millisecond
	longestPause = 50 * time.Millisecond

	// Other ranks wait for their answers. At these intervals they look for a foreign rank 0 and
	// for a second process of their rank.
	firstLook   = 10 * time.Millisecond
	longestLook = 250 * time.Millisecond

	// window is how many ranks rank 0 looks for before it pauses. Then it looks for the next ones.
	window = 32

	// A rank that has not joined staleAfter after rank 0 answered its record is not there: the record is of an earlier
	// run.
	staleAfter = time.Second

	// lastWord bounds a rank's calls of the store after its roll call has failed.
	lastWord = 500 * time.Millisecond
)

// lastKey has the record of the last rank 0 of any job.
const lastKey = "c10d-go/rollcall/last"

// goneKey has the record of the last rank whose connection to the store ended before all had joined.
const goneKey = "gone"

// never is a value that no rank writes.
const never = "\x00"

// record describes a rank.
type record struct {
	Nonce string `json:"nonce"`
	Rank  int    `json:"rank"`
	Size  int    `json:"size"`
	Job   string `json:"job,omitempty"`
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Fault *fault `json:"fault,omitempty"` // why there is no run
}

func (r record) process() string { return fmt.Sprintf("pid %d on host %s", r.PID, r.Host) }

// fault is an error that ranks send each other.
type fault struct {
	Text  string `json:"text,omitempty"` // "" is no fault
	Twice bool   `json:"twice,omitempty"`
	Ended bool   `json:"ended,omitempty"` // Rank has ended or given up
	Rank  int    `json:"rank,omitempty"`

	// For a rank 0 whose time ran out.
	Late    bool  `json:"late,omitempty"`
	Missing []int `json:"missing,omitempty"`
}

func (f *fault) Error() string { return f.Text }

// Culprit returns the rank that ended the roll call, -1 if no single one did.
func (f *fault) Culprit() int {
	if f.Ended {
		return f.Rank
	}
	return -1
}

func (f *fault) Is(target error) bool {
	switch target {
	case ErrTwice:
		return f.Twice
	case context.DeadlineExceeded, store.ErrTimeout:
		return f.Late
	case ErrDiffer:
		return !f.Twice && !f.Late && !f.Ended
	}
	return false
}

// Call is one rank's part in a roll call.
type Call struct {
	cfg    Config
	place  string // of this call's keys in Config.Store
	corner store.Store
	self   record
	mine   []byte // self, as written
	before string // what goneKey held before this rank came
	begun  time.Time
	most   int // rank 0: the largest number of ranks in a record that it has answered

	mu     sync.Mutex
	run    string        // nonce of rank 0, once known
	come   map[int]bool  // rank 0: who has joined
	seen   map[int]sight // rank 0: what it has found of the others
	answer bool          // rank r: rank 0 has answered
}

// sight is what rank 0 has found at a rank's key.
type sight struct {
	text  string // "" if there is no record
	since time.Time
}

// New prepares a call. Nothing is written before Meet.
func New(cfg Config) *Call {
	job := cfg.Job
	if job == "" {
		job = "-"
	}
	c := &Call{cfg: cfg, begun: time.Now(), come: make(map[int]bool), seen: make(map[int]sight)}
	c.place = "c10d-go/rollcall/" + job + "/" + cfg.Name
	c.corner = store.Prefix(c.place, cfg.Store)
	host, _ := os.Hostname()
	c.self = record{Nonce: nonce(), Rank: cfg.Rank, Size: cfg.Size, Job: cfg.Job, Host: host, PID: os.Getpid()}
	c.mine = encode(c.self)
	return c
}

// NewID returns a name for a run of one rank, which needs no roll call.
func NewID() string { return nonce() }

func nonce() string { return fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()) }

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings, numbers and booleans
	}
	return b
}

func rankKey(r int) string             { return "rank/" + strconv.Itoa(r) }
func answerKey(n string) string        { return "answer/" + n }
func joinedKey(n string, r int) string { return "joined/" + n + "/" + strconv.Itoa(r) }
func begunKey(n string) string         { return "begun/" + n }
func faultKey(n string) string         { return "fault/" + n }

// Meet returns when all ranks have joined, or a foreign rank is known to take part. An error is
// an *Error.
func (c *Call) Meet(ctx context.Context) (Run, error) {
	run, err := c.meet(ctx)
	if err == nil {
		return run, nil
	}
	e := &Error{Rank: c.cfg.Rank, Size: c.cfg.Size, After: time.Since(c.begun), Err: err}
	var f *fault
	if errors.As(err, &f) {
		for _, r := range f.Missing {
			if r != c.cfg.Rank {
				e.Missing = append(e.Missing, r)
			}
		}
		return Run{}, e
	}
	if ctx.Err() != nil || errors.Is(err, store.ErrTimeout) {
		if ctx.Err() != nil {
			e.Err = ctx.Err()
		}
		if why := cause(ctx); why != nil {
			e.Err = why
			return Run{}, e
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord)
		defer cancel()
		e.Missing = c.Missing(last)
		for _, r := range e.Missing {
			if text, err := c.peek(last, rankKey(r)); err == nil && text != "" && r != 0 {
				e.Unanswered = append(e.Unanswered, r)
			}
		}
		if len(e.Missing) == 0 && c.cfg.Rank != 0 {
			e.Stopped = []int{0} // all have come, and rank 0 has not said so
		} else if c.Unanswered() && !slices.Contains(e.Missing, 0) {
			e.Err = fmt.Errorf("rank 0 has called Init, but this rank has no answer of it: it waits for others, or has stopped: %w", e.Err)
		}
		e.Err = c.otherRun(last, e.Err)
	}
	return Run{}, e
}

// Twice looks in the store for a call of another process of this rank. If the call is under way, Twice
// ends it and returns the error that both processes get. It returns nil if the call is over, or if none
// has begun when ctx ends. It is for a process that cannot take part, because another process hosts the
// store at this one's address.
func Twice(ctx context.Context, cfg Config) error {
	c := New(cfg)
	for {
		b, err := c.corner.CompareSet(ctx, rankKey(c.cfg.Rank), []byte(never), []byte(never))
		if err != nil {
			return nil
		}
		if text := string(b); text != never {
			var other record
			if json.Unmarshal(b, &other) != nil || other.Nonce == "" || other.Fault != nil || other.Size != c.self.Size {
				return nil
			}
			_, f := c.twice(text)
			c.tell(ctx, other.Nonce, f)
			return &Error{Rank: c.cfg.Rank, Size: c.cfg.Size, After: time.Since(c.begun), Err: f}
		}
		if err := sleep(ctx, firstLook); err != nil {
			return nil
		}
	}
}

// cause returns why ctx was cancelled, nil if nobody said.
func cause(ctx context.Context) error {
	if why := context.Cause(ctx); why != ctx.Err() {
		return why
	}
	return nil
}

// otherRun adds to err what the store says of the last rank 0. It may be of another job, or of a world of another size.
// Or its roll call has failed, and the store says why.
func (c *Call) otherRun(ctx context.Context, err error) error {
	c.mu.Lock()
	met := c.run != ""
	c.mu.Unlock()
	var last record
	if met {
		return err
	}
	b, e := c.cfg.Store.CompareSet(ctx, lastKey, []byte(never), []byte(never))
	if e != nil || json.Unmarshal(b, &last) != nil {
		return err
	}
	switch {
	case last.Job != c.self.Job:
		return fmt.Errorf("%w (the last rank 0 in this store, %s, is of job %q; this rank is of job %q)", err, last.process(), last.Job, c.self.Job)
	case last.Size != c.self.Size:
		return fmt.Errorf("%w (the last rank 0 in this store, %s, was started with a world of %d ranks; this rank with one of %d)", err, last.process(), last.Size, c.self.Size)
	}
	var f fault
	if text, e := c.peek(ctx, begunKey(last.Nonce)); e == nil && json.Unmarshal([]byte(text), &f) == nil && f.Text != "" {
		return fmt.Errorf("%w (the last roll call in this store failed: %s)", err, f.Text)
	}
	return err
}

func (c *Call) meet(ctx context.Context) (run Run, err error) {
	for _, f := range c.cfg.Foreign {
		for _, key := range f.Keys(c.cfg.Rank) {
			if there, err := f.Store.Check(ctx, key); err != nil {
				return Run{}, err
			} else if there {
				return Run{}, fmt.Errorf("%w: rank %d has an address there already, at %q: use another prefix or a new store",
					ErrStale, c.cfg.Rank, key)
			}
		}
	}
	before, err := c.peek(ctx, goneKey)
	if err != nil {
		return Run{}, err
	}
	if !c.cfg.Fresh {
		c.before = before
	}
	gone := c.withFault(&fault{Ended: true, Rank: c.cfg.Rank, Text: fmt.Sprintf("rank %d (%s) died, or lost the store, before all ranks had called Init", c.cfg.Rank, c.self.process())})
	err = store.SetWill(ctx, c.corner, goneKey, []byte(before), encode(gone))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return Run{}, err
	}
	defer func() {
		if err != nil { // which the others know by now, or it is their time too
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord)
			defer cancel()
			store.DropWill(last, c.corner, goneKey) // or the next run would take it for one of its ranks'
		}
	}()
	if c.cfg.Rank == 0 {
		return c.lead(ctx)
	}
	if err := c.corner.Set(ctx, rankKey(c.cfg.Rank), c.mine); err != nil {
		return Run{}, err
	}
	return c.follow(ctx)
}

// peek returns the value of key, "" if it is missing. It does not wait.
func (c *Call) peek(ctx context.Context, key string) (string, error) {
	v, err := c.corner.CompareSet(ctx, key, []byte(never), []byte(never))
	if string(v) == never {
		v = nil
	}
	return string(v), err
}

// foreign reports whether rank r is a foreign one, by its keys.
func (c *Call) foreign(ctx context.Context, r int) (Run, bool, error) {
	for _, f := range c.cfg.Foreign {
		for _, key := range f.Keys(r) {
			if there, err := f.Store.Check(ctx, key); err != nil || there {
				return Run{Dialect: f.Dialect}, there, err
			}
		}
	}
	return Run{}, false, nil
}

// twice is the fault of a rank with two processes; other is the later one.
func (c *Call) twice(other string) (record, *fault) {
	var o record
	if json.Unmarshal([]byte(other), &o) != nil || o.Nonce == "" {
		return o, &fault{Text: fmt.Sprintf("the key of rank %d holds %.80q, which no rank writes", c.self.Rank, other)}
	}
	return o, &fault{Twice: true, Text: fmt.Sprintf(
		"rank %d was started twice: %s and %s; give each process a rank of its own, and each run a prefix of its own",
		c.self.Rank, c.self.process(), o.process())}
}

// fit returns a fault if two ranks cannot be in one run.
func fit(zero, r record) *fault {
	if zero.Size != r.Size {
		return &fault{Text: fmt.Sprintf("rank %d (%s) was started with a world of %d ranks, rank 0 (%s) with one of %d",
			r.Rank, r.process(), r.Size, zero.process(), zero.Size)}
	}
	return nil
}

// parseFault parses another rank's fault; it returns nil for "".
func parseFault(text string) error {
	if text == "" {
		return nil
	}
	var f fault
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return fmt.Errorf("another rank wrote %.80q, which is no record", text)
	}
	if f.Text == "" {
		return nil
	}
	return &f
}

// lead is rank 0's part.
func (c *Call) lead(ctx context.Context) (run Run, err error) {
	c.mu.Lock()
	c.run = c.self.Nonce
	c.mu.Unlock()
	answered := make([]string, c.cfg.Size) // nonces
	defer func() {
		if err != nil { // of a Set, too: the others may have seen this rank
			c.dismiss(ctx, answered, err)
		}
	}()
	if err := c.corner.Set(ctx, rankKey(0), c.mine); err != nil {
		return Run{}, err
	}
	if err := c.cfg.Store.Set(ctx, lastKey, c.mine); err != nil {
		return Run{}, err
	}
	if err := c.known(ctx, c.self.Nonce); err != nil {
		return Run{}, err
	}
	next := 1
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		if err := c.watch(ctx); err != nil {
			return Run{}, err
		}
		progress, missing := false, 0
		for range c.cfg.Size - 1 {
			r := next
			if next++; next == c.cfg.Size {
				next = 1
			}
			if c.has(r) {
				continue
			}
			if missing == window {
				next = r
				break
			}
			missing++
			moved, err := c.look(ctx, r, answered)
			if err != nil {
				return Run{}, err
			}
			if moved {
				progress = true
				continue
			}
			if run, foreign, err := c.foreign(ctx, r); err != nil {
				return Run{}, err
			} else if foreign {
				return run, c.forget(ctx)
			}
		}
		if missing == 0 {
			return c.begin(ctx, answered)
		}
		if progress {
			pause = firstPause
		}
		if err := sleep(ctx, pause); err != nil {
			return Run{}, err
		}
	}
}

func (c *Call) known(ctx context.Context, id string) error {
	if c.cfg.Known == nil {
		return nil
	}
	return c.cfg.Known(ctx, id)
}

func (c *Call) has(r int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.come[r]
}

// look looks once for rank r, and reports whether it has found anything new.
func (c *Call) look(ctx context.Context, r int, answered []string) (bool, error) {
	if answered[r] != "" {
		text, err := c.peek(ctx, joinedKey(c.self.Nonce, r))
		if err != nil {
			return false, err
		}
		if text != "" {
			c.mu.Lock()
			c.come[r] = true
			c.mu.Unlock()
			return true, parseFault(text)
		}
	}
	text, err := c.peek(ctx, rankKey(r))
	if err != nil {
		return false, err
	}
	c.mu.Lock()
	before, again := c.seen[r]
	if !again || text != before.text {
		c.seen[r] = sight{text, time.Now()}
	}
	c.mu.Unlock()
	var other record
	if again && text == before.text || json.Unmarshal([]byte(text), &other) != nil || other.Nonce == "" {
		return false, nil
	}
	if other.Fault != nil {
		if again || c.cfg.Fresh { // a process of this run has written it
			return true, other.Fault
		}
		return false, nil
	}
	answered[r] = other.Nonce
	c.most = max(c.most, other.Size)
	// It may be from an earlier run: then no rank reads the answer.
	return true, c.corner.Set(ctx, answerKey(other.Nonce), c.mine)
}

// someGone returns the fault of a rank whose connection to the store has ended since this rank came, or whose process
// has ended.
func (c *Call) someGone(ctx context.Context) error {
	now, err := c.peek(ctx, goneKey)
	if err != nil {
		return err
	}
	var other record
	if now != c.before && json.Unmarshal([]byte(now), &other) == nil && other.Fault != nil {
		return other.Fault
	}
	return c.ended(ctx)
}

// ended returns the fault of a rank whose process has ended, as the launcher knows. A rank that has met the others may
// end while this one has yet to read that all have joined.
func (c *Call) ended(ctx context.Context) error {
	if c.cfg.Ended == nil {
		return nil
	}
	r, how, ok, err := c.cfg.Ended(ctx)
	if err != nil || !ok || r == c.cfg.Rank {
		return err
	}
	c.mu.Lock()
	run := c.run
	c.mu.Unlock()
	if run != "" {
		if begun, err := c.peek(ctx, begunKey(run)); err != nil || begun != "" {
			return err
		}
	}
	return &fault{Ended: true, Rank: r, Text: how + " before all ranks had called Init"}
}

// watch returns another rank's fault for rank 0, or the error that rank 0 has been started twice.
func (c *Call) watch(ctx context.Context) error {
	if err := c.someGone(ctx); err != nil {
		return err
	}
	now, err := c.peek(ctx, rankKey(0))
	if err != nil {
		return err
	}
	if now != "" && now != string(c.mine) {
		other, f := c.twice(now)
		c.tell(ctx, other.Nonce, f)
		return f
	}
	for _, key := range []string{answerKey(c.self.Nonce), faultKey(c.self.Nonce)} {
		text, err := c.peek(ctx, key)
		if err != nil {
			return err
		}
		var told record
		if json.Unmarshal([]byte(text), &told) == nil && told.Fault != nil {
			return told.Fault
		}
	}
	return nil
}

// tell sends a fault to the process with a nonce.
func (c *Call) tell(ctx context.Context, nonce string, f *fault) {
	if nonce == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord)
	defer cancel()
	// If this fails, the other process waits until its timeout. Rank 0 may overwrite the first
	// key with its own answer.
	told := encode(c.withFault(f))
	c.corner.MultiSet(ctx, []string{answerKey(nonce), faultKey(nonce)}, [][]byte{told, told})
}

func (c *Call) withFault(f *fault) record {
	r := c.self
	r.Fault = f
	return r
}

// leave tells rank 0 why this rank ends. Rank 0 trusts a rank's record if it changes while rank 0
// is looking.
func (c *Call) leave(ctx context.Context, f *fault) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord)
	defer cancel()
	told := encode(c.withFault(f))
	c.mu.Lock()
	run := c.run
	c.mu.Unlock()
	if run != "" {
		c.corner.Set(ctx, faultKey(run), told)
		return
	}
	keys, values := []string{rankKey(c.cfg.Rank)}, [][]byte{told}
	if f.Twice { // rank 0 may not come
		keys, values = append(keys, goneKey), append(values, told)
	}
	c.corner.MultiSet(ctx, keys, values)
}

// begin ends the call of rank 0: all ranks have joined.
func (c *Call) begin(ctx context.Context, answered []string) (Run, error) {
	keys := make([]string, c.cfg.Size)
	for r := range keys {
		keys[r] = rankKey(r)
	}
	now, err := c.corner.MultiGet(ctx, keys)
	if err != nil {
		return Run{}, err
	}
	for r := 1; r < c.cfg.Size; r++ {
		var other record
		if json.Unmarshal(now[r], &other) == nil && other.Nonce != answered[r] {
			return Run{}, &fault{Twice: true, Text: fmt.Sprintf(
				"rank %d was started twice: the later process is %s; give each process a rank of its own, and each run a prefix of its own", r, other.process())}
		}
	}
	if err := c.corner.Set(ctx, begunKey(c.self.Nonce), encode(fault{})); err != nil {
		return Run{}, err
	}
	return c.named(c.self.Nonce), c.forget(ctx)
}

// dismiss tells the other ranks that there is no run. If a rank has a larger world, so may ranks beyond
// this one's. It ignores errors; a rank that it does not reach waits until its timeout.
func (c *Call) dismiss(ctx context.Context, answered []string, why error) {
	if cause := cause(ctx); cause != nil {
		why = cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord) // most of it is for ranks without a record
	defer cancel()
	var f *fault
	var of interface{ Culprit() int }
	switch {
	case errors.As(why, &f):
	case errors.As(why, &of): // of the group's other ranks
		f = &fault{Ended: true, Rank: of.Culprit(), Text: why.Error()}
	default:
		f = &fault{Text: fmt.Sprintf("rank 0 (%s) gave up: %v", c.self.process(), why)}
		if errors.Is(why, context.DeadlineExceeded) || errors.Is(why, store.ErrTimeout) {
			f.Late, f.Missing = true, c.Missing(ctx)
		}
	}
	c.corner.Set(ctx, begunKey(c.self.Nonce), encode(f))
	// Ranks that have joined read that. The others, and second processes of ranks, are told by their nonce.
	var there []string // keys of ranks with a record
	var texts [][]byte
	var unseen []string // of others
	c.mu.Lock()
	for r := 1; r < max(c.most, c.cfg.Size); r++ {
		if c.seen[r].text != "" {
			there = append(there, rankKey(r))
		} else {
			unseen = append(unseen, rankKey(r))
		}
	}
	c.mu.Unlock()
	if len(there) > 0 {
		texts, _ = c.corner.MultiGet(ctx, there)
	}
	for _, key := range unseen {
		text, err := c.peek(ctx, key)
		if err != nil {
			break
		}
		texts = append(texts, []byte(text))
	}
	var keys []string
	var values [][]byte
	told := encode(c.withFault(f))
	for _, text := range texts {
		var other record
		if json.Unmarshal(text, &other) != nil || other.Nonce == "" {
			continue
		}
		if r := other.Rank; r < 0 || r >= len(answered) || !c.has(r) || other.Nonce != answered[r] {
			keys, values = append(keys, answerKey(other.Nonce), faultKey(other.Nonce)), append(values, told, told) // see tell
		}
	}
	if len(keys) > 0 {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord)
		defer cancel()
		c.corner.MultiSet(late, keys, values)
	}
}

// forget empties this rank's record, so that the rank's next run is not taken for a second
// process.
func (c *Call) forget(ctx context.Context) error {
	if err := store.DropWill(ctx, c.corner, goneKey); err != nil {
		return err
	}
	_, err := c.corner.CompareSet(ctx, rankKey(c.cfg.Rank), c.mine, nil)
	return err
}

// follow is the part of the other ranks.
func (c *Call) follow(ctx context.Context) (Run, error) {
	waiting, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var found Run
	var looks sync.WaitGroup
	looks.Go(func() {
		run, err := c.lookAround(waiting)
		if found = run; err == nil {
			err = errFound
		}
		stop(err)
	})
	run, err := c.join(waiting)
	cause := context.Cause(waiting)
	stop(nil)
	looks.Wait()
	switch {
	case err == nil:
		return run, c.forget(ctx)
	case cause == errFound:
		return found, c.forget(ctx)
	case cause != nil && ctx.Err() == nil:
		err = cause
	}
	f := (*fault)(nil)
	told := errors.As(err, &f)
	c.mu.Lock()
	alone := c.run == "" // nobody else can tell the others
	c.mu.Unlock()
	switch {
	case told && f.Twice:
		c.leave(ctx, f)
	case !told && alone:
		c.leave(ctx, &fault{Ended: true, Rank: c.cfg.Rank, Text: fmt.Sprintf("rank %d (%s) gave up: %v", c.cfg.Rank, c.self.process(), err)})
	}
	return Run{}, err
}

var errFound = errors.New("rank 0 is a foreign one")

// lookAround returns when rank 0 is found to be foreign, or this rank to be started twice.
func (c *Call) lookAround(ctx context.Context) (Run, error) {
	for pause := firstLook; ; pause = min(2*pause, longestLook) {
		if err := sleep(ctx, pause); err != nil {
			return Run{}, err
		}
		if run, foreign, err := c.foreign(ctx, 0); err != nil || foreign {
			return run, err
		}
		if err := c.someGone(ctx); err != nil {
			return Run{}, err
		}
		told, err := c.peek(ctx, faultKey(c.self.Nonce))
		if err != nil {
			return Run{}, err
		}
		var by record
		if json.Unmarshal([]byte(told), &by) == nil && by.Fault != nil {
			return Run{}, by.Fault
		}
		now, err := c.peek(ctx, rankKey(c.cfg.Rank))
		if err != nil {
			return Run{}, err
		}
		var other record
		if json.Unmarshal([]byte(now), &other) == nil && other.Fault != nil {
			return Run{}, other.Fault // this process was told, or the one that took its place
		}
		if now != "" && now != string(c.mine) {
			other, f := c.twice(now)
			c.tell(ctx, other.Nonce, f)
			return Run{}, f
		}
	}
}

// join waits for rank 0's answer and until all have joined.
func (c *Call) join(ctx context.Context) (Run, error) {
	text, err := c.corner.Get(ctx, answerKey(c.self.Nonce))
	if err != nil {
		return Run{}, err
	}
	var zero record
	if json.Unmarshal(text, &zero) != nil || zero.Nonce == "" {
		return Run{}, fmt.Errorf("rank 0 wrote %.80q, which is no record", text)
	}
	if zero.Fault != nil {
		return Run{}, zero.Fault
	}
	c.mu.Lock()
	c.run, c.answer = zero.Nonce, true
	c.mu.Unlock()
	if err := c.known(ctx, zero.Nonce); err != nil {
		return Run{}, err
	}
	f := fit(zero, c.self)
	if f == nil {
		f = new(fault)
	}
	if err := c.corner.Set(ctx, joinedKey(zero.Nonce, c.cfg.Rank), encode(f)); err != nil {
		return Run{}, err
	}
	if f.Text != "" {
		return Run{}, f
	}
	begun, err := c.corner.Get(ctx, begunKey(zero.Nonce))
	if err != nil {
		return Run{}, err
	}
	if err := parseFault(string(begun)); err != nil {
		return Run{}, err
	}
	for _, key := range []string{answerKey(c.self.Nonce), joinedKey(zero.Nonce, c.cfg.Rank)} {
		if _, err := c.corner.Delete(ctx, key); err != nil {
			return Run{}, err
		}
	}
	return c.named(zero.Nonce), nil
}

// named returns the run with rank 0's nonce.
func (c *Call) named(nonce string) Run { return Run{ID: nonce, Key: c.place + "/" + begunKey(nonce)} }

// Unanswered reports whether rank 0 has not answered this rank.
func (c *Call) Unanswered() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cfg.Rank != 0 && !c.answer
}

// Missing returns ranks that have not come, as far as the store shows. A rank of which nothing is known is not among them.
func (c *Call) Missing(ctx context.Context) []int {
	c.mu.Lock()
	zero := c.run
	c.mu.Unlock()
	var missing []int
	for r := range c.cfg.Size {
		if r == c.cfg.Rank {
			continue
		}
		there := true
		var err error
		switch {
		case c.cfg.Rank == 0:
			there = !c.lacks(ctx, r)
		case zero == "":
			var text string
			text, err = c.peek(ctx, rankKey(r))
			there = text != "" // or of an earlier run
		case r > 0:
			there, err = c.corner.Check(ctx, joinedKey(zero, r))
		}
		if err == nil && !there {
			missing = append(missing, r)
		}
	}
	return missing
}

// lacks reports whether rank 0 knows that rank r is not there.
func (c *Call) lacks(ctx context.Context, r int) bool {
	c.mu.Lock()
	s, looked := c.seen[r]
	lacks := looked && !c.come[r] && (s.text == "" || time.Since(s.since) > staleAfter)
	c.mu.Unlock()
	if !lacks {
		return false
	}
	now, err := c.peek(ctx, rankKey(r))
	return err != nil || now == s.text // it has not come since rank 0 looked
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
