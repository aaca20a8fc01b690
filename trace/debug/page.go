package debug

import (
	"bytes"
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"net/http"
	"runtime/pprof"
	"strconv"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/trace"
)

// Options are the options of New. The zero value works.
type Options struct {
	// Rank and Size are shown until the rank is in a group.
	Rank, Size int

	// Log has the lines that the page shows. Nil means none.
	Log *Log
}

// Page is the page of a rank. It may be mounted under any path. A program that mounts it decides who
// sees it.
type Page struct {
	recorder *trace.Recorder
	options  Options
	token    string
	probes   probes
	status   shared[*Status]
}

// New returns the page of the rank that a recorder records.
func New(r *trace.Recorder, opts ...Options) *Page {
	o := option.Last(opts)
	return &Page{recorder: r, options: o, token: rand.Text()}
}

// maxForm is the most bytes of a request's body.
const maxForm = 4 << 10

// Forms of a page's buttons: the values of the field do.
const (
	doDump       = "dump"       // write the recorder's file and say so, or return a dump
	doDownload   = "download"   // return a dump
	doGoroutines = "goroutines" // return the stacks of all goroutines
)

// ServeHTTP implements http.Handler.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		p.status.answer(w, r, p.statusOf, func(s *Status) view { return &rankView{frame: frameOf(r), Status: s} })
	case http.MethodPost:
		if !allowed(w, r, p.token) {
			return
		}
		p.do(w, r)
	default:
		w.Header().Set("Allow", "GET, HEAD, POST")
		http.Error(w, "the page takes GET and POST", http.StatusMethodNotAllowed)
	}
}

// allowed reads a form and checks its token. It answers requests that it refuses.
func allowed(w http.ResponseWriter, r *http.Request, token string) bool {
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil {
		http.Error(w, "the form cannot be read: "+err.Error(), http.StatusBadRequest)
		return false
	}
	if subtle.ConstantTimeCompare([]byte(r.PostForm.Get("token")), []byte(token)) != 1 {
		http.Error(w, "the field token is not this page's: load the page again", http.StatusForbidden)
		return false
	}
	return true
}

// do does what a button asks for.
func (p *Page) do(w http.ResponseWriter, r *http.Request) {
	switch r.PostForm.Get("do") {
	case doDump:
		if p.recorder.Prefix() == "" {
			p.download(w)
			return
		}
		v := rankView{frame: frameOf(r), Status: p.statusOf()}
		if name, err := p.recorder.Dump(); err != nil {
			v.Failed = err.Error()
		} else {
			v.Result = "The last operations are in " + name
		}
		write(w, r, textOf(r, nil, &v))
	case doDownload:
		p.download(w)
	case doGoroutines:
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		guardText(w)
		_ = pprof.Lookup("goroutine").WriteTo(w, 2)
	default:
		http.Error(w, fmt.Sprintf("the field do is %q: it must be %s, %s or %s", r.PostForm.Get("do"), doDump, doDownload, doGoroutines), http.StatusBadRequest)
	}
}

func (p *Page) download(w http.ResponseWriter) {
	var b bytes.Buffer
	if _, err := p.recorder.WriteTo(&b); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	attach(w, "rank_"+itoa(p.rank()))
	_, _ = w.Write(b.Bytes())
}

// rank is this rank's number, as in its dump.
func (p *Page) rank() int {
	for _, g := range p.recorder.Groups() {
		return g.Numbers[g.Rank]
	}
	return p.options.Rank
}

func attach(w http.ResponseWriter, name string) {
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Disposition", `attachment; filename="`+name+`"`)
	guardText(w)
}

// guardText sets the headers of every answer.
func guardText(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
}

func itoa(n int) string { return strconv.Itoa(n) }
