package group

import (
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/internal/place"
)

// stage gives the operation its streams and its memory on the host. After an error it has no memory.
func (o *Operation) stage() error {
	o.staged = true
	err := o.place()
	if err != nil {
		o.unstage()
	}
	return err
}

func (o *Operation) place() (err error) {
	if o.Program != nil {
		return o.Program.Stage(o)
	}
	if o.onHost() {
		o.cut()
		return nil
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		if l.Src != nil && err == nil {
			l.Src.Down, err = o.line.stream(o.B, o.line.down, l.Src.Dev, "down")
		}
		if l.Src != nil && o.Relay != nil && len(l.Dst) > 0 && err == nil {
			l.Src.Up, err = o.line.stream(o.B, o.line.up, l.Src.Dev, "up")
		}
		for _, d := range l.Dst {
			if err == nil {
				d.Up, err = o.line.stream(o.B, o.line.up, d.Dev, "up")
			}
		}
		if o.Makes && o.Near == nil && err == nil {
			err = o.makesOn(l.Src.Dev)
		}
	}
	if o.Makes && err == nil {
		err = o.B.Scratch.Tidy() // no later Get of this operation may
	}
	if o.Near != nil && err == nil {
		if err = o.makesOn(o.Near.Dev); err == nil {
			o.Near.Ptr, err = o.Scratch(o.Near.Dev, o.Near.Bytes)
		}
	}
	if err != nil {
		return err
	}
	if len(o.Legs) == 0 && o.Near == nil {
		return nil
	}
	if o.Relay != nil {
		if _, err := o.line.relays(o.B.Tracker); err != nil {
			return err
		}
	}
	if err := o.stagePacked(); err != nil {
		return err
	}
	if o.Shared != nil {
		if o.Shared.stage(o); o.Program != nil {
			return o.Program.Stage(o)
		}
	}
	bytes := o.layout()
	if o.fillWithin != nil {
		bytes = 1
	}
	if o.Makes {
		o.makeAt = Align(bytes)
		bytes = o.makeAt + o.B.Chunk
	}
	if o.measure(); o.long || o.claim != nil || o.Makes {
		o.word = Align(max(bytes, 1))
		bytes = o.word + stagingAlign
	}
	_, err = o.Pin(bytes)
	return err
}

// makesOn has the operation make memory on a device. Later collectives may be on the line's streams by then.
func (o *Operation) makesOn(dev int) error {
	s, err := o.B.messages.stream(o.B, o.B.messages.up, dev, "up")
	if err == nil && !slices.Contains(o.makes, s) {
		o.makes = append(o.makes, s)
	}
	return err
}

// enqueue gives the streams all that they will do for the operation. The host's
// part comes later, in its turns.
func (o *Operation) enqueue() error {
	all := o.everyPlace(o.places[:0])
	err := o.enqueueOn(all)
	clear(all)
	o.places = all
	return err
}

func (o *Operation) enqueueOn(places []*place.Place) error {
	if o.claim != nil {
		return o.enqueueClaim(places)
	}
	batch := &o.feed
	batch.begin(o, places)
	o.pack(batch)
	switch {
	case o.Program != nil:
		batch.err = o.Program.Fill(o, batch.batch)
	case o.inTurn():
		o.fillTurn(batch)
	case o.fillWithin != nil:
		batch.err = o.fillWithin(batch)
	case o.Relay != nil:
		o.fillOneToAll(batch)
	default:
		o.fill(batch)
	}
	o.unpack(batch)
	return batch.end()
}
