package trace

import (
	"testing"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// BenchmarkCall is what a recorder costs a call, without the call: the difference of the two.
func BenchmarkCall(b *testing.B) {
	x, err := tensor.New(tensor.Float32, 256)
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"off", "on", "observed"} {
		b.Run(name, func(b *testing.B) {
			r := Off
			switch name {
			case "on":
				r = New()
			case "observed":
				r = New(Options{Observers: []Observer{nobody{}}})
			}
			g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Timeout: time.Minute, Prompt: true})
			gloo := &named{name: "gloo"}
			b.ReportAllocs()
			var p work.Promise
			for b.Loop() {
				p = work.Promise{}
				p.Init(&work.Issuer{}, work.AllReduce, 0)
				ts := []*tensor.Tensor{x}
				var c Call
				c.Begin(g, gloo, work.AllReduce, ts, ts, -1, 0)
				_, _ = c.Issued(p.Work(), nil)
				p.Start()
				p.Complete(nil)
			}
		})
	}
}

// named is a backend that has only a name.
type named struct {
	backend.Backend
	name string
}

func (n *named) Name() string { return n.name }

type nobody struct{}

func (nobody) Called(Event) {}
func (nobody) Ended(Event)  {}
