package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/c10d-go/c10d/weights"
)

// web answers the requests.
type web struct{ receiver *weights.Receiver }

func (s *web) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /version", s.version)
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

// picture is an image as it comes: rows of pixels from 0, paper, to 16, ink.
type picture struct {
	Image [][]float32 `json:"image"`
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
	Set     *current `json:"set"` // null until the first
	Sets    int64    `json:"sets"`
	Trainer trainer  `json:"trainer"`
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
	reply(w, http.StatusOK, v)
}
