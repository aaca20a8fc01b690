package group

import (
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// Leg is a part of the data of an operation: n elements that are read from one tensor, written to
// several, or both, through one place on the host.
type Leg struct {
	N     int
	DType tensor.DType
	Src   *place.Place // nil if nothing is read
	Dst   []*place.Place

	// Tensors in CPU memory, instead of Src and Dst: all legs of an operation have some, or none has.
	hostSrc *tensor.Tensor
	hostDst []*tensor.Tensor
}

// Reads adds a tensor that is read, Writes one that is written.
func (l *Leg) Reads(t *tensor.Tensor) {
	if t.Device().Type == tensor.CPU {
		l.hostSrc = t
	} else {
		l.Src = place.Of(t)
	}
}

func (l *Leg) Writes(t *tensor.Tensor) {
	if t.Device().Type == tensor.CPU {
		l.hostDst = append(l.hostDst, t)
	} else {
		l.Dst = append(l.Dst, place.Of(t))
	}
}

// onHost reports whether the leg's tensors are in CPU memory.
func (l *Leg) onHost() bool { return l.hostSrc != nil || len(l.hostDst) > 0 }

// From is a leg that is only read. To is one that is only written. Both is one that is read and
// written.
func From(t *tensor.Tensor) Leg {
	l := Leg{N: t.Len(), DType: t.DType()}
	l.Reads(t)
	return l
}

func To(t *tensor.Tensor) Leg {
	l := Leg{N: t.Len(), DType: t.DType()}
	l.Writes(t)
	return l
}

func Both(t *tensor.Tensor) Leg {
	l := From(t)
	if l.onHost() {
		l.hostDst = []*tensor.Tensor{t}
	} else {
		l.Dst = []*place.Place{l.Src}
	}
	return l
}

func Legs(f func(*tensor.Tensor) Leg, ts ...*tensor.Tensor) []Leg {
	all := make([]Leg, len(ts))
	for i, t := range ts {
		all[i] = f(t)
	}
	return all
}

func (l *Leg) size() int { return l.DType.Size() }

// flat reports whether the leg can go piece by piece.
func (l *Leg) flat() bool {
	for _, d := range l.Dst {
		if !d.Flat {
			return false
		}
	}
	return l.Src == nil || l.Src.Flat
}

func (l *Leg) each(f func(*place.Place)) {
	for _, d := range l.Dst {
		f(d)
	}
	if l.Src != nil {
		for _, d := range l.Dst {
			if d.T == l.Src.T {
				return
			}
		}
		f(l.Src)
	}
}

// everyStream returns the streams that have the operation's copies.
func (o *Operation) everyStream() (all []driver.Stream) {
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) {
			for _, s := range []driver.Stream{p.Down, p.Up} {
				if s != nil && !slices.Contains(all, s) {
					all = append(all, s)
				}
			}
		})
	}
	return all
}

// line is what carries operations one after the other: a stream from each device
// to the host, one back, and the host's turns between them.
type line struct {
	host     *edges.Host
	relay    *edges.Host           // nil until a broadcast sends something on
	down, up map[int]driver.Stream // by device; guarded by Engine.making

	// broadcasts counts those from rank to rank, whose messages' tags need it: all
	// ranks count them alike, and operations not. The backend's calls guards it.
	broadcasts uint32
}

func (b *Engine) newLine() (*line, error) {
	h, err := b.Tracker.Host("host")
	if err != nil {
		return nil, err
	}
	return &line{host: h, down: make(map[int]driver.Stream), up: make(map[int]driver.Stream)}, nil
}

// stream returns the line's stream of a device.
func (l *line) stream(b *Engine, m map[int]driver.Stream, dev int, name string) (driver.Stream, error) {
	b.making.Lock()
	defer b.making.Unlock()
	if s, ok := m[dev]; ok {
		return s, nil
	}
	v, err := b.Driver.Device(dev)
	if err != nil {
		return nil, err
	}
	s, err := v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d %s.%d", b.Rank, name, dev)})
	if err != nil {
		return nil, err
	}
	m[dev] = s
	return s, nil
}

// relays returns the line of the turns in which the host sends chunks on.
func (l *line) relays(t *edges.Tracker) (*edges.Host, error) {
	if l.relay == nil {
		h, err := t.Host("relay")
		if err != nil {
			return nil, err
		}
		l.relay = h
	}
	return l.relay, nil
}

func (l *line) close(t *edges.Tracker) error {
	var errs []error
	for _, m := range []map[int]driver.Stream{l.down, l.up} {
		for _, s := range m {
			t.Forget(s)
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

// onHost reports whether the tensors of the operation are in CPU memory. It then has no commands, and its pieces are
// those of the other ranks.
func (o *Operation) onHost() bool { return len(o.Legs) > 0 && o.Legs[0].onHost() }

// everyPlace appends the places of the operation's tensors.
func (o *Operation) everyPlace(all []*place.Place) []*place.Place {
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) { all = append(all, p.Tensor()) })
	}
	return all
}
