package debug

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// style is the style of all pages.
//
//go:embed page.css
var style markup

// policy allows the page its own style, forms to itself, and nothing else.
var policy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
}()

// frame is what all pages have.
type frame struct {
	Refresh int    // seconds until the browser loads the page again; 0 means never
	Query   string // of the address, without refresh, with & at its end
	Result  string // of a button
	Report  string // several lines of it
	Failed  string // its error
}

func frameOf(r *http.Request) frame {
	var f frame
	if rank := r.URL.Query().Get("rank"); rank != "" {
		if n, err := strconv.Atoi(rank); err == nil {
			f.Query = "rank=" + itoa(n) + "&"
		}
	}
	if n, err := strconv.Atoi(r.URL.Query().Get("refresh")); err == nil && n > 0 && n <= 3600 && r.Method != http.MethodPost {
		f.Refresh = n
	}
	return f
}

// view is what a page shows.
type view interface{ write(*document) }

// textOf is a page, or for programs its status in JSON.
func textOf(r *http.Request, status any, page view) []byte {
	if asJSON(r) {
		text, err := json.MarshalIndent(status, "", "  ")
		if err != nil {
			text, _ = json.Marshal(err.Error())
		}
		return append(text, '\n')
	}
	var d document
	page.write(&d)
	return d.text.Bytes()
}

func asJSON(r *http.Request) bool {
	return r.Method != http.MethodPost && r.URL.Query().Get("format") == "json"
}

// write answers with a text of textOf.
func write(w http.ResponseWriter, r *http.Request, text []byte) {
	guardText(w)
	kind := "text/html; charset=utf-8"
	if asJSON(r) {
		kind = "application/json"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Security-Policy", policy)
	_, _ = w.Write(text)
}

// jobView is the page of a job.
type jobView struct {
	frame
	*JobStatus
}

// Asked are the first late ranks that have a page.
func (v *jobView) Asked() []int {
	const most = 4
	var all []int
	for _, r := range v.Ranks {
		if r.Late && r.Status != nil && len(all) < most {
			all = append(all, r.Rank)
		}
	}
	return all
}

// doing says what a rank does.
func (s *Status) doing() string {
	switch {
	case len(s.Pending) > 0:
		o := s.Pending[0]
		if o.P2P {
			return "in " + o.Op
		}
		return fmt.Sprintf("in %s, collective %d", o.Op, o.Collective-1)
	case s.State != "":
		return s.State
	case len(s.Recent) == 0:
		return "no operation yet"
	}
	o := s.Recent[len(s.Recent)-1]
	if s.failure() != nil {
		return o.Op + " failed: " + o.Error
	}
	return "computes; its last operation was " + o.Op
}

// doingFor says for how long.
func (s *Status) doingFor() string {
	if len(s.Pending) > 0 {
		return ageText(s.Pending[0].Took)
	} else if len(s.Recent) > 0 {
		o := s.Recent[len(s.Recent)-1]
		return ageText(s.Now.Sub(o.Called.Add(o.Took)))
	}
	return ""
}

// rankView is the page of a rank.
type rankView struct {
	frame
	*Status
	Job bool // it is shown by the page of the job

	Level string
	Text  string
	Why   []string
}

// judge says what the rank waits for.
func (v *rankView) judge() {
	v.Level, v.Text = levelOK, "No operation is pending."
	switch {
	case v.State != "":
		v.Level, v.Text = levelWaiting, upper(v.State)+"."
		for _, l := range slices.Backward(v.Log) {
			if l.Level == "WARN" || l.Level == "ERROR" {
				v.Level, v.Why = levelStuck, []string{l.Text}
				break
			}
		}
	case len(v.Pending) > 0:
		age := v.Pending[0].Took
		v.Text = fmt.Sprintf("%s is under way, for %s.", v.Pending[0].Op, ageText(age))
		if age < waitingAfter {
			return
		}
		v.Level = levelOf(age)
		v.Text = fmt.Sprintf("%s has been pending for %s.", v.Pending[0].Op, ageText(age))
		said := false
		for _, g := range v.Groups {
			for _, p := range g.Probes {
				for _, w := range p.Waits {
					if !said {
						v.Text = fmt.Sprintf("%s, for %s.", w.Text, ageText(age))
						said = true
					}
					v.Why = append(v.Why, w.Why...)
				}
			}
		}
	default:
		if o := v.failure(); o != nil {
			v.Level, v.Text, v.Why = levelStuck, o.Op+" failed.", []string{o.Error}
		} else {
			v.judgeLate()
		}
	}
}

// judgeLate looks for a collective that others have called and this rank has not, although it has had time.
func (v *rankView) judgeLate() {
	idle := waitingAfter // if it has called nothing
	if len(v.Recent) > 0 {
		o := v.Recent[len(v.Recent)-1]
		idle = v.Now.Sub(o.Called.Add(o.Took))
	}
	for _, g := range v.Groups {
		if idle < waitingAfter || len(g.Probes) != 1 { // each of several backends counts its own calls
			continue
		}
		var ahead []int
		for _, l := range g.Probes[0].Links {
			if l.Answered && l.Calls > g.Collectives && l.Rank >= 0 && l.Rank < len(g.Ranks) {
				ahead = append(ahead, g.Ranks[l.Rank])
			}
		}
		if len(ahead) == 0 {
			continue
		}
		slices.Sort(ahead)
		verb := " has"
		if len(ahead) > 1 {
			verb = " have"
		}
		v.Level = levelOf(idle)
		v.Text = fmt.Sprintf("%s%s called collective %d of %s, and this rank has not.", upper(ranksText(ahead)), verb, g.Collectives, v.groupText(g.Name))
		if len(v.Recent) > 0 {
			v.Why = []string{fmt.Sprintf("The last operation of this rank, %s, ended %s ago.", v.Recent[len(v.Recent)-1].Op, ageText(idle))}
		}
		return
	}
}

// linkRow is a row of the table of ranks.
type linkRow struct {
	Rank                     int // in the default group
	Transport, Detail, State string
	Calls, RTT, Quiet, Rate  string
	Late                     bool
}

// Links are the connections of a group.
func (g Group) Links() []linkRow {
	rows := make([]linkRow, len(g.Ranks))
	for i, global := range g.Ranks {
		rows[i].Rank = global
	}
	at := func(rank int) *linkRow {
		if rank < 0 || rank >= len(rows) {
			return new(linkRow)
		}
		return &rows[rank]
	}
	for _, e := range g.Explain {
		for _, l := range e.Links {
			r := at(l.Rank)
			r.Transport, r.Detail = l.Transport, l.Detail
		}
	}
	for _, p := range g.Probes {
		for _, l := range p.Links {
			r := at(l.Rank)
			switch {
			case l.Left:
				r.State = "has left"
			case l.Answered:
				r.State, r.Calls = "answers", strconv.FormatUint(l.Calls, 10)
			default:
				r.State = "silent"
			}
			if l.RTT > 0 {
				r.RTT = ageText(l.RTT)
			}
			if l.Quiet > 0 {
				r.Quiet = ageText(l.Quiet)
			}
			if l.Rate > 0 {
				r.Rate = bytesText(int64(l.Rate)) + "/s"
			}
		}
		for _, w := range p.Waits {
			for _, rank := range w.Ranks {
				at(rank).Late = true
			}
		}
	}
	if g.Rank >= 0 && g.Rank < len(rows) {
		rows[g.Rank].State = "this rank"
	}
	return rows
}

// number is the operation's number among those of its kind.
func (o Operation) number() uint64 {
	if o.P2P {
		return o.Seq
	}
	return o.Collective
}

// Size is how much the operation moves, in words.
func (o Operation) Size() string {
	if o.DType == "" {
		return ""
	}
	return fmt.Sprintf("%s %s %v", bytesText(o.Bytes), o.DType, o.Shape)
}

// Rate is the bytes of the operation by its time.
func (o Operation) Rate() string {
	if o.State != "done" || o.Bytes == 0 || o.Took <= 0 {
		return ""
	}
	return bytesText(int64(float64(o.Bytes)/o.Took.Seconds())) + "/s"
}

// clockText is a time of the day.
func clockText(t time.Time) string { return t.Format("15:04:05.000") }

// upToText is up to which size a choice counts.
func upToText(n int64) string {
	if n < 0 {
		return "any size"
	}
	return "to " + bytesText(n)
}
