package membership

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config describes a member that wants the next epoch. Self and Base are required.
type Config struct {
	Self ID
	Base View // the last one, short or not

	// Done is how many collectives this member has completed in the last epoch.
	Done uint64

	// Suspects are members that seem to be gone. Cause says why, in a few words.
	Suspects []ID
	Cause    string

	// Lacks are members that this one could not connect with, in the time for that. If both vote, the link between them is
	// broken, and one of the two is left out.
	Lacks []ID

	// Min is the least number of members, 1 if it is less. Max is the number of members up to which
	// joiners are taken in; 0 means all joiners. The largest Min and the smallest Max of all votes
	// count.
	Min, Max int

	// Settle is how long the leader waits for Suspects; 0 means DefaultSettle. The longest one of the members that suspect
	// somebody counts.
	Settle time.Duration

	// Patience is how long the leader waits for members that nobody suspects, and until there are
	// Min; 0 means DefaultPatience.
	Patience time.Duration

	// Leaders, if not nil, is what calls of Decide by one member share. Without it a call whose context ends soon may
	// never take over from a leader that is silent.
	Leaders *Leaders

	// Beat is how often a leader shows that it is alive; 0 means DefaultBeat. All members must have
	// the same.
	Beat time.Duration
}

const (
	// DefaultSettle is enough for a live suspect: it has got the fault that names it, and votes at
	// once.
	DefaultSettle = 500 * time.Millisecond

	// DefaultPatience is for members that compute, and learn of the fault at their next operation.
	// torchft waits as long by default.
	DefaultPatience = time.Minute

	// DefaultBeat makes four beats in the second after which a leader is replaced.
	DefaultBeat = 250 * time.Millisecond

	// silentBeats is how many beats a leader may miss. The number doubles with every new leader, up
	// to 2^mostDoublings times as many.
	silentBeats   = 4
	mostDoublings = 3

	// joinerLook is how often a joiner looks whether there are members: at one of them, with one call.
	joinerLook = 2 * time.Second

	// answerBeats is how many beats joiners have to answer a leader. It is less than silentBeats.
	answerBeats = 3
)

// Op is a kind of call of the store.
type Op uint8

// The operations of a Call.
const (
	Done       Op = iota // there is nothing more to do
	Set                  // Keys to New
	CompareSet           // Keys[0] from Old to New; Reply.Values[0] is what it holds then
	Add                  // Delta to Keys[0]; Reply.Sum
	Look                 // Reply.Values are the values of Keys, "" for a missing key
	Await                // the same when all Keys exist; Reply.Late after Limit, if that is not 0
)

// Call is a call of the store that a machine wants to be done.
type Call struct {
	Op       Op
	Keys     []string
	Old, New string
	Delta    int64
	Limit    time.Duration
}

// Reply is the result of a Call.
type Reply struct {
	Values []string
	Sum    int64
	Late   bool
}

// Machine is a process's part in a decision. Next takes the reply to the last call, and a zero Reply
// at the beginning.
type Machine interface{ Next(Reply) Call }

// step is what a machine waits for.
type step uint8

const (
	start step = iota
	voted
	elected   // CompareSet on lead
	following // Await of view
	missing   // Look at votes of the members for which a joiner waits
	looking   // Look at lead
	checking  // Look at view, as a new leader
	gathering // Await of votes
	beating   // CompareSet on lead, by the leader
	reading   // Look at votes
	rereading // Await of votes that are there
	counting  // Add on joiners
	admitting // Look at joiners
	calling   // Set of call
	hearing   // Await of joiners' answers
	heard     // Look at them
	proposing // CompareSet on view
	telling   // Set of latest and call
	ended
)

// Member is the machine of a member of the last epoch.
type Member struct {
	cfg  Config
	next int // the epoch to be decided
	step step

	lead    string // what the key lead held
	attempt int    // how many leaders there were before
	beat    int

	// A leader's:
	votes   []ballot      // by place in Base.IDs
	asked   []int         // places whose votes the call under way reads
	stale   bool          // the leader has waited since it read the votes that it has
	limit   time.Duration // of the wait under way
	waited  time.Duration // in all
	counted bool          // joiners were counted since the last wait
	joiners int
	unsure  []ID // joiners that the call under way looks at
	pending []ID // joiners that may come
	here    []ID // those of pending that wait
	deaf    []ID // joiners that have not answered

	view View
	err  error
}

// ballot is what a leader knows of a member's vote.
type ballot struct {
	vote *vote // nil if there is none
	gone bool
	why  string // it is gone; may be empty
}

// NewMember returns the machine of a member.
func NewMember(cfg Config) *Member {
	cfg.Min = max(cfg.Min, 1)
	for _, d := range []struct {
		field *time.Duration
		usual time.Duration
	}{{&cfg.Settle, DefaultSettle}, {&cfg.Patience, DefaultPatience}, {&cfg.Beat, DefaultBeat}} {
		if *d.field <= 0 {
			*d.field = d.usual
		}
	}
	cfg.Cause = brief(cfg.Cause)
	cfg.Lacks = cfg.Lacks[:min(len(cfg.Lacks), mostLacks)]
	m := &Member{cfg: cfg}
	m.begin(cfg.Base)
	return m
}

// begin prepares the decision of the epoch after base.
func (m *Member) begin(base View) {
	*m = Member{cfg: m.cfg, next: base.Epoch + 1}
	m.cfg.Base = base
	m.cfg.Suspects = slices.Clone(m.cfg.Suspects)
	if base.Short != nil {
		for _, id := range base.IDs {
			if !slices.Contains(base.Short.Present, id) {
				m.cfg.Suspects = append(m.cfg.Suspects, id)
			}
		}
	}
}

// Result returns the view after the call Done. The error is an *EvictedError or a *ShortError if the
// view has no place for this member.
func (m *Member) Result() (View, error) { return m.view, m.err }

// ownVote is what this member writes.
func (m *Member) ownVote() *vote {
	v := &vote{Done: m.cfg.Done, Suspects: m.cfg.Suspects, Cause: m.cfg.Cause, Lacks: m.cfg.Lacks, Min: m.cfg.Min, Max: m.cfg.Max}
	if len(v.Suspects) > 0 {
		v.Settle = m.cfg.Settle
	}
	return v
}

// Vote returns the key of this member's vote and what it writes there.
func (m *Member) Vote() (key, value string) {
	return voteKey(m.next, m.cfg.Self), encode(m.ownVote())
}

// Next implements Machine.
func (m *Member) Next(r Reply) Call {
	switch m.step {
	case start:
		m.step = voted
		key, value := m.Vote()
		return Call{Op: Set, Keys: []string{key}, New: value}
	case voted:
		return m.run("")
	case elected:
		if r.Values[0] == m.mine() {
			m.lead, m.step = m.mine(), checking
			return Call{Op: Look, Keys: []string{viewKey(m.next)}}
		}
		return m.follow(r.Values[0])
	case following:
		if !r.Late {
			return m.finish(r.Values[0])
		}
		m.step = looking
		return Call{Op: Look, Keys: []string{leadKey(m.next)}}
	case looking:
		if r.Values[0] == m.lead || r.Values[0] == "" {
			return m.run(r.Values[0])
		}
		return m.follow(r.Values[0])
	case checking:
		if r.Values[0] != "" {
			return m.finish(r.Values[0])
		}
		m.votes = make([]ballot, len(m.cfg.Base.IDs))
		return m.weigh()
	case gathering:
		if !r.Late {
			return m.read(r.Values)
		}
		m.step, m.counted, m.stale = beating, false, true
		m.waited += m.limit
		m.beat++
		return Call{Op: CompareSet, Keys: []string{leadKey(m.next)}, Old: m.lead, New: m.mine()}
	case beating:
		if r.Values[0] != m.mine() {
			return m.follow(r.Values[0])
		}
		m.lead, m.step = m.mine(), reading
		m.asked = m.absent(func(int) bool { return true })
		if len(m.asked) == 0 {
			return m.weigh()
		}
		return Call{Op: Look, Keys: m.voteKeys()}
	case rereading:
		if r.Late { // votes were deleted, so there is a view
			return m.weigh()
		}
		return m.read(r.Values)
	case reading:
		return m.read(r.Values)
	case counting:
		return m.count(int(r.Sum))
	case admitting:
		m.pending, m.here = nil, nil
		for i, id := range m.unsure {
			if hasEnded(r.Values[i]) || slices.Contains(m.deaf, id) {
				continue
			}
			m.pending = append(m.pending, id) // without a value it has not written it yet
			if r.Values[i] == waiting {
				m.here = append(m.here, id)
			}
		}
		if len(m.here) == 0 {
			return m.weigh()
		}
		m.step = calling
		return Call{Op: Set, Keys: []string{callKey(m.next)}, New: asks}
	case calling:
		m.step = hearing
		return Call{Op: Await, Keys: m.answerKeys(), Limit: answerBeats * m.cfg.Beat}
	case hearing:
		if !r.Late {
			return m.weigh()
		}
		m.step, m.stale = heard, true
		return Call{Op: Look, Keys: m.answerKeys()}
	case heard:
		for i, id := range m.here {
			if r.Values[i] == "" {
				m.deaf = append(m.deaf, id)
			}
		}
		deaf := func(id ID) bool { return slices.Contains(m.deaf, id) }
		m.here, m.pending = slices.DeleteFunc(m.here, deaf), slices.DeleteFunc(m.pending, deaf)
		return m.weigh()
	case proposing:
		m.step = telling
		m.view, m.err = parseView(r.Values[0], m.next)
		if m.err != nil {
			break
		}
		return Call{Op: Set, Keys: []string{latestKey, callKey(m.next)}, New: strconv.Itoa(m.next)}
	case telling:
		return m.conclude()
	}
	m.step = ended
	return Call{}
}

// mine is what this member writes to the key lead.
func (m *Member) mine() string { return fmt.Sprintf("%d %d %d", m.cfg.Self, m.attempt, m.beat) }

// run makes this member a candidate in place of a leader that is silent.
func (m *Member) run(old string) Call {
	m.attempt, m.beat = attempts(old)+1, 0
	if old == "" {
		m.attempt = 0
	}
	m.lead, m.step = old, elected
	return Call{Op: CompareSet, Keys: []string{leadKey(m.next)}, Old: old, New: m.mine()}
}

// attempts returns how many leaders there were before the one that wrote lead.
func attempts(lead string) int {
	n := 0
	if words := strings.Fields(lead); len(words) == 3 {
		n, _ = strconv.Atoi(words[1])
	}
	return min(max(n, 0), 1<<20)
}

// follow waits for the view of another leader.
func (m *Member) follow(lead string) Call {
	m.lead, m.step, m.waited = lead, following, 0
	limit := m.cfg.Beat * silentBeats << min(attempts(lead), mostDoublings)
	return Call{Op: Await, Keys: []string{viewKey(m.next)}, Limit: limit}
}

// absent returns the places in the base whose votes are not known, as far as filter permits.
func (m *Member) absent(filter func(place int) bool) (places []int) {
	for i, b := range m.votes {
		if b.vote == nil && !b.gone && filter(i) {
			places = append(places, i)
		}
	}
	return places
}

// voted returns the places in the base of the members that have voted.
func (m *Member) voted() (places []int) {
	for i, b := range m.votes {
		if b.vote != nil {
			places = append(places, i)
		}
	}
	return places
}

// Lead returns the key by which a leader shows that it is alive, and the values that it may have now. A leader that
// gives up empties it. It returns no values if this member does not lead.
func (m *Member) Lead() (key string, values []string) {
	switch m.step {
	case elected:
		values = []string{m.mine()}
	case checking, gathering, reading, rereading, counting, admitting, calling, hearing, heard, proposing:
		values = []string{m.lead}
	case beating:
		values = []string{m.lead, m.mine()}
	}
	return leadKey(m.next), values
}

func (m *Member) voteKeys() []string {
	keys := make([]string, len(m.asked))
	for i, place := range m.asked {
		keys[i] = voteKey(m.next, m.cfg.Base.IDs[place])
	}
	return keys
}

func (m *Member) answerKeys() []string {
	keys := make([]string, len(m.here))
	for i, id := range m.here {
		keys[i] = answerKey(m.next, id)
	}
	return keys
}

// read takes the votes of the places that were asked for.
func (m *Member) read(values []string) Call {
	for i, place := range m.asked {
		switch v := new(vote); {
		case values[i] == "":
		case json.Unmarshal([]byte(values[i]), v) != nil: // it has ended, or given up
			m.votes[place] = ballot{gone: true}
			if strings.HasPrefix(values[i], gaveUp) {
				m.votes[place].why = strings.TrimPrefix(values[i], gone+": ")
			}
		default:
			m.votes[place].vote = v
		}
	}
	return m.weigh()
}

// weigh returns a leader's next step.
func (m *Member) weigh() Call {
	suspects, severed, least, room := m.suspects(), m.severed(), m.cfg.Min, m.cfg.Max
	present, settle := -len(severed), m.ownVote().Settle
	for _, b := range m.votes {
		if b.vote != nil {
			present++
			least, settle = max(least, b.vote.Min), max(settle, b.vote.Settle)
			if b.vote.Max > 0 && (room <= 0 || b.vote.Max < room) {
				room = b.vote.Max
			}
		}
	}
	expected := m.absent(func(i int) bool { return !suspects[m.cfg.Base.IDs[i]] })
	suspected := m.absent(func(i int) bool { return suspects[m.cfg.Base.IDs[i]] })
	late := m.waited >= m.cfg.Patience
	switch {
	case late:
	case len(expected) > 0:
		return m.gather(expected, m.cfg.Patience-m.waited)
	case len(suspected) > 0 && m.waited < settle:
		return m.gather(suspected, settle-m.waited)
	}
	if m.stale { // a member may have died since it voted
		m.stale, m.asked, m.step = false, m.voted(), rereading
		return Call{Op: Await, Keys: m.voteKeys(), Limit: m.cfg.Beat} // one call reads them all
	}
	if (room <= 0 || present < room) && !m.counted {
		m.counted, m.step = true, counting
		return Call{Op: Add, Keys: []string{joinersKey}}
	}
	taken := m.here
	if room > 0 {
		taken = taken[:min(len(taken), max(room-present, 0))]
	}
	if present+len(taken) < least && !late && (len(suspected) > 0 || room <= 0 || present < room) {
		return m.gather(suspected, m.cfg.Patience-m.waited)
	}
	m.step = proposing
	return Call{Op: CompareSet, Keys: []string{viewKey(m.next)}, New: encode(m.propose(suspects, severed, taken, least))}
}

// suspects are the members that some vote suspects.
func (m *Member) suspects() map[ID]bool {
	all := make(map[ID]bool)
	for _, id := range m.cfg.Suspects {
		all[id] = true
	}
	for _, b := range m.votes {
		if b.vote != nil {
			for _, id := range b.vote.Suspects {
				all[id] = true
			}
		}
	}
	return all
}

// gather waits for the votes at these places. Without places it waits for the next joiner.
func (m *Member) gather(places []int, limit time.Duration) Call {
	m.asked, m.step = places, gathering
	keys := m.voteKeys()
	if len(places) == 0 {
		m.counted = false
		keys = []string{joinKey(ID(m.cfg.Base.First + m.joiners))}
	}
	m.limit = min(limit, m.cfg.Beat)
	return Call{Op: Await, Keys: keys, Limit: m.limit}
}

// count looks at the joiners that may wait, of n in all.
func (m *Member) count(n int) Call {
	base := m.cfg.Base
	m.joiners = max(n, base.Joiners)
	m.unsure = slices.Clone(base.Pending)
	for k := base.Joiners; k < m.joiners; k++ {
		m.unsure = append(m.unsure, ID(base.First+k))
	}
	m.pending, m.here = nil, nil
	if len(m.unsure) == 0 {
		return m.weigh()
	}
	m.step = admitting
	keys := make([]string, len(m.unsure))
	for i, id := range m.unsure {
		keys[i] = joinKey(id)
	}
	return Call{Op: Look, Keys: keys}
}

// severed returns the members that are left out because they cannot connect with others that vote, and why. The member with
// most broken links goes first, until no link is broken. So of two hosts that do not reach each other the smaller one
// goes, and of two with as many members the one without the first member.
func (m *Member) severed() map[ID]string {
	lacks := make(map[ID][]ID)
	for i, b := range m.votes {
		if b.vote == nil {
			continue
		}
		id := m.cfg.Base.IDs[i]
		for _, other := range b.vote.Lacks {
			k := slices.Index(m.cfg.Base.IDs, other)
			if k >= 0 && k != i && m.votes[k].vote != nil && !slices.Contains(lacks[id], other) {
				lacks[id], lacks[other] = append(lacks[id], other), append(lacks[other], id)
			}
		}
	}
	out := make(map[ID]string)
	for {
		worst := ID(-1)
		for _, id := range m.cfg.Base.IDs {
			if n := len(lacks[id]); n > 0 && n >= len(lacks[worst]) {
				worst = id
			}
		}
		if worst < 0 {
			return out
		}
		out[worst] = fmt.Sprintf("the link with member %d is broken, and both reach the store", slices.Min(lacks[worst]))
		for _, other := range lacks[worst] {
			lacks[other] = slices.DeleteFunc(lacks[other], func(id ID) bool { return id == worst })
		}
		delete(lacks, worst)
	}
}

// propose makes the view.
func (m *Member) propose(suspects map[ID]bool, severed map[ID]string, taken []ID, least int) View {
	base := m.cfg.Base
	v := View{Epoch: m.next, First: base.First, Joiners: m.joiners, Pending: m.pending}
	if !m.counted {
		v.Joiners, v.Pending = base.Joiners, base.Pending
	}
	first := true
	for i, id := range base.IDs {
		b := m.votes[i]
		if b.vote == nil {
			v.Left = append(v.Left, Absent{id, m.why(id, b, suspects[id])})
			continue
		}
		if why, out := severed[id]; out {
			v.Left = append(v.Left, Absent{id, why})
			continue
		}
		v.IDs = append(v.IDs, id)
		if first {
			v.MinDone, v.MaxDone, first = b.vote.Done, b.vote.Done, false
		}
		v.MinDone, v.MaxDone = min(v.MinDone, b.vote.Done), max(v.MaxDone, b.vote.Done)
	}
	v.IDs = append(v.IDs, taken...)
	if len(v.IDs) < least {
		v.Short = &Short{Present: v.IDs, Need: least}
		for _, a := range v.Left {
			if _, here := severed[a.ID]; here {
				v.Short.Present = append(v.Short.Present, a.ID)
			}
		}
		v.IDs = base.IDs
		return v
	}
	v.Pending = slices.DeleteFunc(slices.Clone(v.Pending), v.Has)
	return v
}

// why says why a member is not in the next epoch.
func (m *Member) why(id ID, b ballot, suspected bool) string {
	switch {
	case b.why != "":
		return b.why
	case b.gone:
		return "its process has ended, or it has left"
	case !suspected:
		return fmt.Sprintf("it did not come within %v", m.waited)
	}
	for _, b := range m.votes {
		if b.vote != nil && b.vote.Cause != "" && slices.Contains(b.vote.Suspects, id) {
			return b.vote.Cause
		}
	}
	return "it was not there in the epoch before"
}

// finish is for a view that another member has written.
func (m *Member) finish(text string) Call {
	if m.view, m.err = parseView(text, m.next); m.err != nil {
		m.step = ended
		return Call{}
	}
	return m.conclude()
}

// conclude ends the decision of an epoch that has a view. A member that came too late for a short
// view goes on to the next epoch.
func (m *Member) conclude() Call {
	v := m.view
	switch {
	case v.Short != nil && slices.Contains(v.Short.Present, m.cfg.Self):
		m.err = &ShortError{v}
	case v.Short != nil:
		m.begin(v)
		return m.Next(Reply{})
	case !v.Has(m.cfg.Self):
		m.err = &EvictedError{m.cfg.Self, v}
	}
	m.step = ended
	return Call{}
}

// Joiner is the machine of a process that is in no epoch yet.
type Joiner struct {
	first int // members in epoch 0
	id    ID
	epoch int  // whose view it waits for
	base  []ID // the members before
	dead  int  // so many of them have ended
	step  step
	view  View
	err   error
}

// NewJoiner returns the machine of a process that joins a group that had first members in epoch 0.
func NewJoiner(first int) *Joiner { return &Joiner{first: first, id: -1, base: First(first).IDs} }

// Result returns the id and, after the call Done, the first view with this process.
func (j *Joiner) Result() (ID, View, error) { return j.id, j.view, j.err }

// apply asks for a number.
func (j *Joiner) apply() Call {
	j.step = counting
	return Call{Op: Add, Keys: []string{joinersKey}, Delta: 1}
}

// await waits until a leader calls, or has written a view.
func (j *Joiner) await() Call {
	j.step = hearing
	return Call{Op: Await, Keys: []string{callKey(j.epoch)}, Limit: joinerLook}
}

// follow waits for a view.
func (j *Joiner) follow() Call {
	j.step = following
	return Call{Op: Await, Keys: []string{viewKey(j.epoch)}, Limit: joinerLook}
}

// look looks for a view without a call, and for the will of a member that has ended since it voted for the last
// view, or since it got that view. A member that has given up may call again.
func (j *Joiner) look() Call {
	j.step = missing
	id := j.base[j.dead]
	return Call{Op: Look, Keys: []string{viewKey(j.epoch), voteKey(j.epoch, id), voteKey(j.epoch-1, id)}}
}

// take takes a view. A process that a leader has called in vain applies again.
func (j *Joiner) take(text string) Call {
	j.step = ended
	if j.view, j.err = parseView(text, j.epoch); j.err != nil || j.view.Has(j.id) {
		return Call{}
	}
	j.epoch, j.base, j.dead = j.epoch+1, j.view.IDs, 0
	if int(j.id) < j.view.First+j.view.Joiners && !slices.Contains(j.view.Pending, j.id) {
		return j.apply()
	}
	return j.look()
}

// Next implements Machine.
func (j *Joiner) Next(r Reply) Call {
	switch j.step {
	case start:
		return j.apply()
	case counting:
		j.id, j.step = ID(j.first+int(r.Sum)-1), voted
		return Call{Op: Set, Keys: []string{joinKey(j.id)}, New: waiting}
	case voted:
		j.step = looking
		return Call{Op: Look, Keys: []string{latestKey}}
	case looking:
		latest, _ := strconv.Atoi(r.Values[0])
		j.epoch = max(j.epoch, latest, 1)
		return j.look()
	case hearing:
		if r.Late {
			return j.look()
		}
		if r.Values[0] == asks {
			j.step = calling
			return Call{Op: Set, Keys: []string{answerKey(j.epoch, j.id)}, New: waiting}
		}
		return j.follow()
	case calling:
		return j.follow()
	case following:
		if r.Late {
			return j.look()
		}
		return j.take(r.Values[0])
	case missing:
		if r.Values[0] != "" {
			return j.take(r.Values[0])
		}
		if !slices.Contains(r.Values, gone) {
			return j.await()
		}
		if j.dead++; j.dead < len(j.base) {
			return j.look()
		}
		j.err = ErrNoMembers
	}
	j.step = ended
	return Call{}
}
