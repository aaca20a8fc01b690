package main

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/weights"
)

//go:embed page.html
var page []byte

// web answers the requests.
type web struct {
	receiver *weights.Receiver
	images   *dataset.Set // examples for users
	latency  latencies
}

func (s *web) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Write(page)
	})
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /version", s.version)
	mux.HandleFunc("GET /digit", s.digit)
	mux.HandleFunc("POST /predict", s.predict)
	return mux
}

func reply(w http.ResponseWriter, code int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		// JSON has no infinities: the trainer sent parameters that are not finite.
		code, text = http.StatusInternalServerError, []byte(fmt.Sprintf(`{"error":%q}`, "serve: "+err.Error()))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	w.Write(append(text, '\n'))
}

func fail(w http.ResponseWriter, code int, format string, args ...any) {
	reply(w, code, map[string]string{"error": "serve: " + fmt.Sprintf(format, args...)})
}

// picture is an image as it comes and goes: rows of pixels from 0, paper, to 16, ink.
type picture struct {
	Image [][]float32 `json:"image"`
	Label *uint8      `json:"label,omitempty"`
}

func (p *picture) pixels() ([]float32, error) {
	if len(p.Image) != side {
		return nil, fmt.Errorf("the image has %d rows, want %d", len(p.Image), side)
	}
	var pixels []float32
	for y, row := range p.Image {
		if len(row) != side {
			return nil, fmt.Errorf("row %d has %d pixels, want %d", y, len(row), side)
		}
		for x, v := range row {
			if v < 0 || v > white {
				return nil, fmt.Errorf("pixel %d of row %d is %v, not within 0 and %d", x, y, v, white)
			}
			pixels = append(pixels, v/white)
		}
	}
	return pixels, nil
}

type prediction struct {
	Digit         int       `json:"digit"`
	Probabilities []float64 `json:"probabilities"`
	Set           label     `json:"set"` // with which parameters
}

func (s *web) predict(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	var image picture
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&image); err != nil {
		fail(w, http.StatusBadRequest, "%v", err)
		return
	}
	pixels, err := image.pixels()
	if err != nil {
		fail(w, http.StatusBadRequest, "%v", err)
		return
	}
	set, ok := acquire(s.receiver)
	if !ok {
		fail(w, http.StatusServiceUnavailable, "no trainer has sent parameters yet")
		return
	}
	defer set.Release()
	p := set.network.probabilities(set.parameters, pixels)
	reply(w, http.StatusOK, prediction{Digit: slices.Index(p, slices.Max(p)), Probabilities: p, Set: set.label})
	s.latency.add(time.Since(start))
}

// healthz reports whether predictions are possible. They need parameters, but no trainer.
func (s *web) healthz(w http.ResponseWriter, _ *http.Request) {
	if s.receiver.Status().Version == 0 {
		reply(w, http.StatusServiceUnavailable, map[string]string{"status": "no parameters yet"})
		return
	}
	reply(w, http.StatusOK, map[string]string{"status": "ok"})
}

type current struct {
	label
	Age        float64 `json:"age_seconds"`
	Parameters int     `json:"parameters"`
}

type trainer struct {
	State string `json:"state"` // waiting for the first one, connected or lost
	Error string `json:"error,omitempty"`
}

type overview struct {
	Set         *current `json:"set"` // null until the first
	Sets        int64    `json:"sets"`
	Trainer     trainer  `json:"trainer"`
	Predictions int64    `json:"predictions"`
	P50         float64  `json:"p50_ms"` // of the last predictions, see latencies
	P99         float64  `json:"p99_ms"`
}

func (s *web) version(w http.ResponseWriter, _ *http.Request) {
	status := s.receiver.Status()
	v := overview{Sets: status.Updates, Trainer: trainer{State: "waiting"}}
	switch {
	case status.Connected:
		v.Trainer.State = "connected"
	case status.Version != 0:
		v.Trainer.State = "lost"
	}
	if status.Err != nil {
		v.Trainer.Error = status.Err.Error()
	}
	if set, ok := acquire(s.receiver); ok {
		v.Set = &current{label: set.label, Age: time.Since(set.Published).Seconds(), Parameters: set.network.elements()}
		set.Release()
	}
	v.Predictions, v.P50, v.P99 = s.latency.figures()
	reply(w, http.StatusOK, v)
}

// digit gives a held-out image, in the form that predict takes.
func (s *web) digit(w http.ResponseWriter, _ *http.Request) {
	i := rand.IntN(s.images.Len())
	p := picture{Label: &s.images.Labels[i]}
	for y := range side {
		row := make([]float32, side)
		for x := range row {
			row[x] = s.images.Inputs[(i*side+y)*side+x] * white
		}
		p.Image = append(p.Image, row)
	}
	reply(w, http.StatusOK, p)
}

// latencies are the times that the last predictions took.
type latencies struct {
	mu    sync.Mutex
	count int64
	last  [4096]time.Duration // 40 of them are beyond the 99th percentile
}

func (l *latencies) add(d time.Duration) {
	l.mu.Lock()
	l.last[l.count%int64(len(l.last))] = d
	l.count++
	l.mu.Unlock()
}

// figures returns how many predictions there were, and the 50th and the 99th
// percentile of their times in milliseconds.
func (l *latencies) figures() (count int64, p50, p99 float64) {
	l.mu.Lock()
	sorted := slices.Clone(l.last[:min(l.count, int64(len(l.last)))])
	count = l.count
	l.mu.Unlock()
	if count == 0 {
		return 0, 0, 0
	}
	slices.Sort(sorted)
	at := func(percent int) float64 {
		return float64(sorted[(len(sorted)-1)*percent/100].Microseconds()) / 1000
	}
	return count, at(50), at(99)
}
