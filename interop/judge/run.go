package main

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// wire is what the ranks of a case are connected by.
type wire struct {
	name string
	is   string // for judge.py
	gloo bool   // PyTorch's own group
}

// theirs is PyTorch's gloo, which every case is compared with.
var theirs = wire{name: "gloo", gloo: true}

// wires are those of this library.
var wires = []wire{{name: "memory"}, {name: "tcp", is: "tcp"}, {name: "gloo's wire", is: "gloo"}, {name: "DETAIL", is: "detail"}}

// suites are modules of PyTorch's tests, with the wires that they run on: "" is all.
var suites = []struct{ name, wires string }{
	{"distributed_test", ""},
	{"test_c10d_gloo", ""},
	{"test_pg_wrapper", "DETAIL"},
	{"test_zero_redundancy_optimizer", "memory"},
	{"test_join", "memory"},
	{"test_store", "memory"}, // the wire does not matter: it has no groups
}

// Outcome is what became of a run.
type Outcome struct {
	Label, Torch string
	Absent       []string // suites that this PyTorch does not have
	Cases        []Case
	Speed        []Speed `json:",omitempty"`
	Seconds      float64
}

// Case is one case on one wire.
type Case struct {
	Name, Wire   string
	Status, Gloo string // pass, fail or skip: here, and with gloo
	Verdict      Verdict
	Reason       string `json:",omitempty"` // of Expected: the number and text of it
	Again        bool   `json:",omitempty"` // it failed first, and then passed alone
	Text         string `json:",omitempty"` // why it failed
	Texts        []text `json:",omitempty"`
	Seconds      float64
}

// Verdict is the outcome of a case.
type Verdict string

const (
	Passed   Verdict = "passed"
	Expected Verdict = "expected" // it fails, or an error has another text, and the list has it
	Both     Verdict = "both"     // it fails or is skipped with gloo too
	Failed   Verdict = "failed"
)

// run runs all suites.
func (j *judge) run(ctx context.Context, x *Outcome) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, s := range suites {
		if slices.Contains(x.Absent, s.name) {
			j.say("%s: not in this PyTorch; -tests names the folder test/distributed of its sources", s.name)
			continue
		}
		wg.Go(func() {
			if err := j.suite(ctx, x, s.name, s.wires); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if len(x.Cases) == 0 {
		return errors.New("judge: no case fits -run and -wire")
	}
	slices.SortFunc(x.Cases, func(a, b Case) int { return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Wire, b.Wire)) })
	x.Seconds = time.Since(j.begun).Seconds()
	return nil
}

// suite runs one suite, with gloo and then on each wire.
func (j *judge) suite(ctx context.Context, x *Outcome, name, on string) error {
	all, err := j.list(ctx, name)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(c string) bool {
		return !j.only.MatchString(name+"."+c) || strings.Contains(strings.ToLower(c), "nccl")
	})
	gloo, err := j.cases(ctx, setting{name, theirs}, all)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, len(j.wires))
	for i, w := range j.wires {
		if on != "" && on != w.name {
			continue
		}
		var here []string
		for _, c := range all {
			if a := gloo[c]; a.Status != "skip" || strings.Contains(a.Text, "Only MPI supports") {
				here = append(here, c)
			}
		}
		wg.Go(func() {
			errs[i] = j.judged(ctx, x, setting{name, w}, here, gloo)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// list returns the cases of a suite.
func (j *judge) list(ctx context.Context, suite string) ([]string, error) {
	j.slots <- struct{}{}
	defer func() { <-j.slots }()
	w, err := j.start(ctx, setting{suite, theirs})
	if err != nil {
		return nil, err
	}
	w.stop()
	return w.list.Cases, nil
}

// cases runs cases, in parallel as far as there are slots.
func (j *judge) cases(ctx context.Context, s setting, cases []string) (map[string]answer, error) {
	answers := make(map[string]answer, len(cases))
	if len(cases) == 0 {
		return answers, nil
	}
	var mu sync.Mutex
	failed := 0
	done := func(a answer) {
		mu.Lock()
		defer mu.Unlock()
		answers[a.Case] = a
		if a.Status == "fail" {
			failed++
		}
		if n := len(answers); n%25 == 0 || n == len(cases) {
			j.say("%s, %s: %d of %d cases, %d failed", s.suite, s.wire.name, n, len(cases), failed)
		}
	}
	var wg sync.WaitGroup
	parts := slices.Collect(slices.Chunk(cases, max((len(cases)+cap(j.slots)-1)/cap(j.slots), 10)))
	errs := make([]error, len(parts))
	for i, part := range parts {
		wg.Go(func() { errs[i] = j.work(ctx, s, part, done) })
	}
	wg.Wait()
	return answers, errors.Join(errs...)
}

// judged runs cases with this library, and says what of them is as it should be.
func (j *judge) judged(ctx context.Context, x *Outcome, s setting, cases []string, gloo map[string]answer) error {
	first, err := j.cases(ctx, s, cases)
	if err != nil {
		return err
	}
	var bad []string
	found := make(map[string]Case, len(cases))
	judge := func(a answer) Case {
		name := s.suite + "." + a.Case
		return verdict(Case{Name: name, Wire: s.wire.name, Status: a.Status, Gloo: gloo[a.Case].Status, Text: a.Text, Texts: a.Texts, Seconds: a.Seconds})
	}
	for _, c := range cases {
		if found[c] = judge(first[c]); found[c].Verdict == Failed && first[c].Status == "fail" {
			bad = append(bad, c)
		}
	}
	if len(bad) > 0 {
		// Nothing else runs meanwhile.
		j.alone.Lock()
		defer j.alone.Unlock()
		for range cap(j.slots) - 1 {
			j.slots <- struct{}{}
			defer func() { <-j.slots }()
		}
		err = j.work(ctx, s, bad, func(a answer) {
			if c := judge(a); c.Verdict != Failed {
				c.Again, c.Text = true, first[a.Case].Text
				found[a.Case] = c
			}
		})
		if err != nil {
			return err
		}
	}
	j.files.Lock()
	defer j.files.Unlock()
	for _, c := range cases {
		x.Cases = append(x.Cases, found[c])
	}
	return nil
}

// verdict says what c is, by the list as it is now.
func verdict(c Case) Case {
	good := c.Status == "pass" && len(c.Texts) == 0
	i := slices.IndexFunc(expected, func(e expectation) bool {
		return e.fits(c) && (good || (e.why == otherText) == (c.Status == "pass"))
	})
	c.Reason = ""
	switch {
	case good:
		c.Verdict = Passed
		if i >= 0 {
			c.Reason = expected[i].why
		}
	case c.Status == "skip" && c.Gloo == "pass":
		c.Verdict = Failed // gloo does not skip it
	case i >= 0:
		c.Verdict, c.Reason = Expected, expected[i].why
	case c.Gloo == "fail" || c.Status == "skip" && c.Gloo == "skip":
		c.Verdict = Both
	default:
		c.Verdict = Failed
	}
	return c
}
