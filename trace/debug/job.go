package debug

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
	"github.com/c10d-go/c10d/trace"
)

// JobOptions are the options of NewJob. Size and Ask are required.
type JobOptions struct {
	Name string // of the job
	Size int    // number of ranks

	// Ask sends a request to the page of a rank: a GET for its Status in JSON if form is nil, else a
	// POST of form. It returns the body of the answer, with its type.
	Ask func(ctx context.Context, rank int, form url.Values) (Answer, error)

	// About is what is known of a process whose rank does not answer. It may be nil.
	About func(rank int) string

	// Dir is where dumps go, each time into a new directory.
	Dir string
}

// Answer is the body of a rank's answer.
type Answer struct {
	Type string `json:"type"` // Content-Type
	Name string `json:"name"` // of the file to download, "" if it is not one
	Body []byte `json:"body"`
}

// Job is the page of all ranks of a job. The launcher has one.
type Job struct {
	options JobOptions
	token   string
	status  shared[*JobStatus]
}

// NewJob returns the page of a job.
func NewJob(o JobOptions) *Job { return &Job{options: o, token: rand.Text()} }

// JobStatus is what the ranks of a job do.
type JobStatus struct {
	Name  string     `json:"name"`
	Size  int        `json:"size"`
	Now   time.Time  `json:"now"`
	Level string     `json:"level"`           // ok, waiting or stuck
	Text  string     `json:"text"`            // the same in words: which rank is late in which operation
	Why   []string   `json:"why,omitempty"`   // details
	Late  []int      `json:"late,omitempty"`  // ranks that others wait for
	Ranks []JobRank  `json:"ranks"`           // by rank
	Merge *trace.Job `json:"merge,omitempty"` // of the last operations of all ranks
	Token string     `json:"token"`           // the field token of a POST
}

// JobRank is a rank of a job.
type JobRank struct {
	Rank   int     `json:"rank"`
	Error  string  `json:"error,omitempty"` // why there is no status
	About  string  `json:"about,omitempty"` // what is known of a process without a status
	Status *Status `json:"status,omitempty"`
	Late   bool    `json:"late,omitempty"` // others wait for it
}

// Limits of the questions to the ranks.
const (
	askFor  = 2 * time.Second
	dumpFor = 10 * time.Second
	atOnce  = 32
)

// Operations count as waiting after waitingAfter, and as stuck after stuckAfter.
const (
	waitingAfter = time.Second
	stuckAfter   = 10 * time.Second
)

// The levels of a verdict.
const (
	levelOK      = "ok"
	levelWaiting = "waiting"
	levelStuck   = "stuck"
)

// ServeHTTP implements http.Handler.
func (j *Job) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rank := -1
	if text := r.URL.Query().Get("rank"); text != "" {
		var err error
		if rank, err = strconv.Atoi(text); err != nil || rank < 0 || rank >= j.options.Size {
			http.Error(w, fmt.Sprintf("there is no rank %q: the job has ranks 0 to %d", text, j.options.Size-1), http.StatusNotFound)
			return
		}
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		j.show(w, r, rank)
	case http.MethodPost:
		if !allowed(w, r, j.token) {
			return
		}
		j.do(w, r, rank)
	default:
		w.Header().Set("Allow", "GET, HEAD, POST")
		http.Error(w, "the page takes GET and POST", http.StatusMethodNotAllowed)
	}
}

func (j *Job) show(w http.ResponseWriter, r *http.Request, rank int) {
	if rank < 0 {
		look := func() *JobStatus { return j.Status(context.WithoutCancel(r.Context())) }
		j.status.answer(w, r, look, func(s *JobStatus) view { return &jobView{frame: frameOf(r), JobStatus: s} })
		return
	}
	s, err := j.statusOf(r.Context(), rank)
	if err != nil {
		http.Error(w, fmt.Sprintf("rank %d: %v", rank, err), http.StatusBadGateway)
		return
	}
	s.Rank, s.Token = rank, j.token // the launcher's number, in all epochs
	write(w, r, textOf(r, s, &rankView{frame: frameOf(r), Status: s, Job: true}))
}

// statusOf asks a rank.
func (j *Job) statusOf(ctx context.Context, rank int) (*Status, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	a, err := j.options.Ask(ctx, rank, nil)
	if err != nil {
		return nil, err
	}
	s := new(Status)
	if err := json.Unmarshal(a.Body, s); err != nil {
		return nil, fmt.Errorf("its page answers something else: %w", err)
	}
	return s, nil
}

// each calls f for every rank, some at once.
func (j *Job) each(f func(rank int)) {
	var all sync.WaitGroup
	free := make(chan struct{}, atOnce)
	for rank := range j.options.Size {
		free <- struct{}{}
		all.Go(func() {
			f(rank)
			<-free
		})
	}
	all.Wait()
}

// Status asks all ranks. Ranks that do not answer within two seconds have an error.
func (j *Job) Status(ctx context.Context) *JobStatus {
	s := &JobStatus{Name: j.options.Name, Size: j.options.Size, Now: time.Now(), Token: j.token, Ranks: make([]JobRank, j.options.Size)}
	j.each(func(rank int) {
		x := JobRank{Rank: rank}
		var err error
		if x.Status, err = j.statusOf(ctx, rank); err != nil {
			x.Error = err.Error()
			if j.options.About != nil {
				x.About = j.options.About(rank)
			}
		} else {
			x.Status.Token = ""
		}
		s.Ranks[rank] = x
	})
	s.number()
	s.judge()
	return s
}

// number makes numbers in the default group those of the launcher. They are the same in epoch 0. Each later epoch
// counts from 0 again, and a member that does not answer is -1 then.
func (s *JobStatus) number() {
	type member struct{ epoch, rank int }
	known := make(map[member]int)
	for i := range s.Ranks {
		if st := s.Ranks[i].Status; st != nil {
			st.Rank = i
			for _, g := range st.Groups {
				if g.Rank >= 0 && g.Rank < len(g.Ranks) {
					known[member{g.Epoch, g.Ranks[g.Rank]}] = i
				}
			}
		}
	}
	for i := range s.Ranks {
		if st := s.Ranks[i].Status; st != nil {
			for _, g := range st.Groups {
				for k, r := range g.Ranks {
					if n, ok := known[member{g.Epoch, r}]; ok {
						g.Ranks[k] = n
					} else if g.Epoch > 0 {
						g.Ranks[k] = -1
					}
				}
			}
		}
	}
}

// judge finds the ranks that others wait for.
func (s *JobStatus) judge() {
	var files []*trace.File
	var off []int // ranks whose operations nobody knows
	for i := range s.Ranks {
		switch st := s.Ranks[i].Status; {
		case st == nil:
		case st.State == stateOff:
			off = append(off, i)
		default:
			files = append(files, st.file())
		}
	}
	if m, err := trace.Merge(files); err == nil {
		m.Missing = slices.DeleteFunc(m.Missing, func(r int) bool { return r < 0 })
		s.Merge = m
	}
	s.Level, s.Text = levelOK, "No operation has been pending for more than a second."
	switch {
	case s.judgeCollectives(), s.judgeMeeting(), s.judgeMessages(), s.judgeFailures():
	default:
		if lost := s.unanswered(); len(lost) > 0 {
			s.Level, s.Text = levelWaiting, "No page of "+ranksText(lost)+"."
			s.Why = append(s.Why, s.aboutLost()...)
		}
	}
	if len(off) > 0 {
		verb := " records no operations."
		if len(off) > 1 {
			verb = " record no operations."
		}
		s.Why = append(s.Why, upper(ranksText(off))+verb)
	}
	if len(files) == 0 && s.Level == levelOK {
		s.Text = "No rank records operations."
	}
	for _, r := range s.Late {
		if r >= 0 && r < len(s.Ranks) {
			s.Ranks[r].Late = true
		}
	}
}

// file is a status as a dump.
func (s *Status) file() *trace.File {
	f := &trace.File{Name: "rank " + itoa(s.Rank), Rank: s.Rank, Host: s.Host, Groups: make(map[string][]int), Calls: make(map[string]int64)}
	for _, g := range s.Groups {
		f.Groups[g.Name], f.Calls[g.Name] = g.Ranks, int64(g.Collectives)
	}
	for _, o := range append(slices.Clone(s.Recent), s.Pending...) {
		e := trace.Entry{
			Record: int64(o.Record), Group: o.Group, Op: o.Op, P2P: o.P2P, Collective: int64(o.Collective), Sizes: strings.ReplaceAll(fmt.Sprint(o.Shape), " ", ", "),
			State: cmp.Or(map[string]string{"done": "completed", "called": "scheduled"}[o.State], "started"), Route: o.Route, Error: o.Error, Called: o.Called,
		}
		if o.State == "done" || o.State == "failed" {
			e.Ended = o.Called.Add(o.Took)
		}
		f.Entries = append(f.Entries, e)
	}
	return f
}

// oldest returns for how long a collective has been pending on some rank, and on which ranks.
func (s *JobStatus) oldest(group string, number int64) (age time.Duration, ranks []int) {
	for i := range s.Ranks {
		st := s.Ranks[i].Status
		if st == nil {
			continue
		}
		for _, o := range st.Pending {
			if !o.P2P && o.Group == group && int64(o.Collective) == number {
				age = max(age, o.Took)
				ranks = append(ranks, s.Ranks[i].Rank)
			}
		}
	}
	return age, ranks
}

// stuckCall is a collective in which ranks wait.
type stuckCall struct {
	trace.Stuck
	age     time.Duration
	waiting []int // in it
	late    []int // have not called it, and members without a status
}

// stuckCalls returns the collectives that have been pending for long.
func (s *JobStatus) stuckCalls() (all []stuckCall) {
	if s.Merge == nil {
		return nil
	}
	for _, stuck := range s.Merge.Stuck {
		c := stuckCall{Stuck: stuck}
		if c.age, c.waiting = s.oldest(stuck.Group, stuck.Number); c.age < waitingAfter {
			continue
		}
		var members []int
		for i := range s.Ranks {
			if st := s.Ranks[i].Status; st != nil && st.group(stuck.Group) != nil {
				members = st.group(stuck.Group).Ranks
			}
		}
		lost := slices.DeleteFunc(s.unanswered(), func(r int) bool { return !slices.Contains(members, r) && !slices.Contains(members, -1) })
		c.late = append(slices.Clone(c.NotCalled), lost...)
		slices.Sort(c.late)
		all = append(all, c)
	}
	return all
}

// judgeCollectives is for collectives that have been pending for long. A rank that is missing in one may itself
// wait in another. A collective with a missing rank that waits in none is shown first.
func (s *JobStatus) judgeCollectives() bool {
	all := s.stuckCalls()
	if len(all) == 0 {
		return false
	}
	waits := func(r int) bool {
		return slices.ContainsFunc(all, func(c stuckCall) bool { return slices.Contains(c.waiting, r) })
	}
	first := slices.IndexFunc(all, func(c stuckCall) bool {
		return slices.ContainsFunc(c.late, func(r int) bool { return !waits(r) })
	})
	stuck := all[max(first, 0)]
	s.Level = levelOf(stuck.age)
	s.Late = stuck.late
	what := fmt.Sprintf("%s, collective %d of %s,", stuck.Op, stuck.Number-1, s.groupText(stuck.Group))
	left := slices.DeleteFunc(slices.Clone(stuck.Lost), func(r int) bool { return s.Ranks[r].Status.group(stuck.Group) != nil })
	switch {
	case len(s.Late) > 0:
		s.Text = what + " waits for " + ranksText(s.Late) + "."
	case stuck.Differ != "":
		s.Text = what + " has different calls: " + stuck.Differ + "."
	default:
		s.Text = what + " takes long."
		switch {
		case len(left) > 0: // nobody knows whether these have called it
		case len(s.Merge.Missing) == 0:
			s.Text += " Every rank has called it."
		default:
			s.Text += " Every rank that records operations has called it."
		}
	}
	for _, r := range left {
		s.Why = append(s.Why, fmt.Sprintf("Rank %d has left %s, and its page no longer has operations that old.", r, s.groupText(stuck.Group)))
	}
	for _, r := range stuck.NotCalled {
		s.Why = append(s.Why, s.whyLate(r, stuck.Group, stuck.Number))
	}
	s.Why = append(s.Why, s.aboutLost()...)
	if len(s.Late) > 0 && stuck.Differ != "" {
		s.Why = append(s.Why, "Calls differ: "+stuck.Differ+".")
	}
	verb := " waits in it, for "
	if len(stuck.waiting) > 1 {
		verb = " wait in it, the first for "
	}
	s.Why = append(s.Why, upper(ranksText(stuck.waiting))+verb+ageText(stuck.age)+".")
	return true
}

// whyLate says what a rank does that has not called a collective.
func (s *JobStatus) whyLate(rank int, group string, number int64) string {
	text := fmt.Sprintf("Rank %d has not called it", rank)
	st := s.Ranks[rank].Status
	if g := st.group(group); g != nil {
		text += fmt.Sprintf(": it has called %d of %d collectives", g.Collectives, number)
	}
	switch {
	case len(st.Pending) > 0:
		o := st.Pending[0]
		text += fmt.Sprintf(", and is in %s of %s for %s", o.Op, s.groupText(o.Group), ageText(o.Took))
	case len(st.Recent) > 0:
		o := st.Recent[len(st.Recent)-1]
		text += fmt.Sprintf(". Its last operation, %s, ended %s ago", o.Op, ageText(st.Now.Sub(o.Called.Add(o.Took))))
	}
	return text + "."
}

// judgeMeeting is for a job whose default group is not made on some ranks.
func (s *JobStatus) judgeMeeting() bool {
	var waiting []int
	var warnings []string // the last one of each rank
	for i := range s.Ranks {
		st := s.Ranks[i].Status
		if st == nil || len(st.Groups) > 0 || st.State == "" || st.State == stateOff || st.State == stateClosed {
			continue
		}
		waiting = append(waiting, s.Ranks[i].Rank)
		for _, l := range slices.Backward(st.Log) {
			if l.Level == "WARN" {
				warnings = append(warnings, fmt.Sprintf("Rank %d: %s", s.Ranks[i].Rank, l.Text))
				break
			}
		}
	}
	lost := s.unanswered()
	if len(waiting) == 0 || len(lost)+len(warnings) == 0 {
		return false
	}
	s.Level = levelWaiting
	if len(warnings) > 0 {
		s.Level = levelStuck
	}
	s.Late = lost
	if len(lost) == 0 {
		s.Text = upper(ranksText(waiting)) + " cannot make the default group. All ranks have a page."
		s.Why = warnings
		return true
	}
	s.Text = upper(ranksText(waiting)) + " cannot make the default group: no sign of " + ranksText(lost) + "."
	s.Why = s.aboutLost()
	return true
}

// judgeMessages is for sends and receives.
func (s *JobStatus) judgeMessages() bool {
	for i := range s.Ranks {
		st := s.Ranks[i].Status
		if st == nil || len(st.Pending) == 0 || st.Pending[0].Took < waitingAfter {
			continue
		}
		o := st.Pending[0]
		s.Level = levelOf(o.Took)
		s.Text = fmt.Sprintf("%s of rank %d in %s has been pending for %s.", o.Op, s.Ranks[i].Rank, s.groupText(o.Group), ageText(o.Took))
		if g := st.group(o.Group); g != nil && o.Peer >= 0 && o.Peer < len(g.Ranks) && g.Ranks[o.Peer] >= 0 {
			s.Late = []int{g.Ranks[o.Peer]}
			s.Text = fmt.Sprintf("%s of rank %d in %s waits for rank %d, for %s.", o.Op, s.Ranks[i].Rank, s.groupText(o.Group), g.Ranks[o.Peer], ageText(o.Took))
		}
		for _, g := range st.Groups {
			for _, p := range g.Probes {
				for _, w := range p.Waits {
					s.Why = append(s.Why, w.Why...)
				}
			}
		}
		s.Why = append(s.Why, s.aboutLost()...)
		return true
	}
	return false
}

// failure returns the last operation if it has failed, and its group is still there. A group that has
// gone on in another epoch is not.
func (s *Status) failure() *Operation {
	if len(s.Recent) == 0 {
		return nil
	}
	o := &s.Recent[len(s.Recent)-1]
	if o.State != "failed" || len(s.Groups) > 0 && s.group(o.Group) == nil {
		return nil
	}
	return o
}

// judgeFailures is for jobs in which the last operation of a rank has failed.
func (s *JobStatus) judgeFailures() bool {
	var first *Operation
	for i := range s.Ranks {
		st := s.Ranks[i].Status
		if st == nil {
			continue
		}
		if o := st.failure(); o != nil && (first == nil || o.Called.Add(o.Took).Before(first.Called.Add(first.Took))) {
			first = o
			s.Text = fmt.Sprintf("%s failed on rank %d.", o.Op, s.Ranks[i].Rank)
			s.Why = []string{o.Error}
		}
	}
	if first != nil {
		s.Level = levelStuck
	}
	return first != nil
}

func levelOf(age time.Duration) string {
	if age >= stuckAfter {
		return levelStuck
	}
	return levelWaiting
}

// unanswered returns the ranks without a status.
func (s *JobStatus) unanswered() []int {
	var all []int
	for i := range s.Ranks {
		if s.Ranks[i].Status == nil {
			all = append(all, s.Ranks[i].Rank)
		}
	}
	return all
}

// aboutLost says what is known of ranks without a status.
func (s *JobStatus) aboutLost() []string {
	const most = 8
	var all []string
	for i := range s.Ranks {
		x := &s.Ranks[i]
		if x.Status != nil {
			continue
		}
		if len(all) == most {
			return append(all, "There are more ranks without a page.")
		}
		text := fmt.Sprintf("Rank %d: %s", x.Rank, x.Error)
		if x.About != "" {
			text = fmt.Sprintf("Rank %d: %s (%s)", x.Rank, x.About, x.Error)
		}
		all = append(all, text+".")
	}
	return all
}

// groupText names a group.
func (s *JobStatus) groupText(name string) string {
	for i := range s.Ranks {
		if st := s.Ranks[i].Status; st != nil {
			return st.groupText(name)
		}
	}
	return fmt.Sprintf("group %q", name)
}

func (s *Status) groupText(name string) string {
	if g := s.group(name); g != nil && g.Description != "" {
		return fmt.Sprintf("group %q (%s)", name, g.Description)
	}
	return fmt.Sprintf("group %q", name)
}

// group returns a group of the rank, nil if it is in none of that name.
func (s *Status) group(name string) *Group {
	if i := slices.IndexFunc(s.Groups, func(g Group) bool { return g.Name == name }); i >= 0 {
		return &s.Groups[i]
	}
	return nil
}

// do does what a button asks for: a dump of all ranks, or what the page of one rank does.
func (j *Job) do(w http.ResponseWriter, r *http.Request, rank int) {
	if rank >= 0 {
		j.pass(w, r, rank)
		return
	}
	if r.PostForm.Get("do") != doDump {
		http.Error(w, fmt.Sprintf("the field do is %q: it must be %s, or the address must have rank=K", r.PostForm.Get("do"), doDump), http.StatusBadRequest)
		return
	}
	v := jobView{frame: frameOf(r)}
	report, dir, err := j.dump(r.Context())
	if err != nil {
		v.Failed = err.Error()
	}
	if dir != "" {
		v.Result, v.Report = "The last operations of the ranks are in "+dir+". For a trace: c10d trace -o trace.json "+dir+"/rank_*", report
	}
	v.JobStatus = j.Status(r.Context())
	write(w, r, textOf(r, nil, &v))
}

// pass passes a form on to a rank, with the rank's token.
func (j *Job) pass(w http.ResponseWriter, r *http.Request, rank int) {
	s, err := j.statusOf(r.Context(), rank)
	if err == nil {
		form := url.Values{"do": {r.PostForm.Get("do")}, "token": {s.Token}}
		if form.Get("do") == doDump {
			form.Set("do", doDownload)
		}
		ctx, cancel := context.WithTimeout(r.Context(), dumpFor)
		defer cancel()
		var a Answer
		if a, err = j.options.Ask(ctx, rank, form); err == nil {
			guardText(w)
			if a.Name != "" {
				attach(w, a.Name)
			} else {
				w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			}
			_, _ = w.Write(a.Body)
			return
		}
	}
	http.Error(w, fmt.Sprintf("rank %d: %v", rank, err), http.StatusBadGateway)
}

// dump writes the dumps of all ranks that answer into a new directory, and merges them. The error
// names the ranks without a dump.
func (j *Job) dump(ctx context.Context) (report, dir string, err error) {
	ctx, cancel := context.WithTimeout(ctx, dumpFor)
	defer cancel()
	dumps, errs := make([][]byte, j.options.Size), make([]error, j.options.Size)
	j.each(func(rank int) {
		s, err := j.statusOf(ctx, rank)
		if err == nil {
			var a Answer
			a, err = j.options.Ask(ctx, rank, url.Values{"do": {doDownload}, "token": {s.Token}})
			dumps[rank] = a.Body
		}
		if err != nil {
			errs[rank] = fmt.Errorf("no dump of rank %d: %w", rank, err)
		}
	})
	if dir, err = os.MkdirTemp(j.options.Dir, "c10d-dump-"); err != nil {
		return "", "", errors.Join(append(errs, err)...)
	}
	var files []*trace.File
	for rank, d := range dumps {
		if d == nil {
			continue
		}
		name := filepath.Join(dir, "rank_"+itoa(rank))
		f, err := trace.Parse(name, d)
		if err = errors.Join(err, ownfile.Replace(name, d)); err != nil {
			errs[rank] = err
			continue
		}
		files = append(files, f)
	}
	var b bytes.Buffer
	for _, run := range trace.Runs(files) { // more than one if a rank has called pg.Init again
		merged, err := trace.Merge(run)
		if err != nil {
			return "", dir, errors.Join(append(errs, err)...)
		}
		_ = merged.Print(&b, 10)
	}
	return b.String(), dir, errors.Join(errs...)
}

// ranksText lists ranks: rank 2; ranks 0-3, 7.
func ranksText(ranks []int) string {
	if len(ranks) == 1 {
		return "rank " + itoa(ranks[0])
	}
	var parts []string
	for i := 0; i < len(ranks); {
		k := i
		for k+1 < len(ranks) && ranks[k+1] == ranks[k]+1 {
			k++
		}
		part := itoa(ranks[i])
		if k > i {
			part += "-" + itoa(ranks[k])
		}
		parts, i = append(parts, part), k+1
	}
	return "ranks " + strings.Join(parts, ", ")
}

// upper begins a sentence.
func upper(s string) string { return strings.ToUpper(s[:min(1, len(s))]) + s[min(1, len(s)):] }

// ageText rounds a duration for people.
func ageText(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < time.Microsecond:
		return "< 1 µs"
	case d < time.Millisecond:
		return digits(float64(d)/float64(time.Microsecond)) + " µs"
	case d < time.Second:
		return digits(float64(d)/float64(time.Millisecond)) + " ms"
	case d < 2*time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// bytesText is a size for people.
func bytesText(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	return digits(f) + " " + units[i]
}

// digits are three of a number below 1024.
func digits(f float64) string {
	if f >= 100 {
		return strconv.Itoa(int(f + 0.5))
	}
	return strconv.FormatFloat(f, 'g', 3, 64)
}
