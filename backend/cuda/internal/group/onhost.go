package group

// writesHost notes what a collective that has been issued writes there.
func (b *Engine) writesHost(o *Operation) {
	if b.OnHost == nil || !o.onHost() {
		return
	}
	for i := range o.Legs {
		if l := &o.Legs[i]; len(l.hostDst) > 0 {
			b.OnHost.Writes(o.Work(), l.hostDst)
		}
	}
}

// runOnHost does the host's part of all pieces. Tensors whose elements are not in order are copied.
func (o *Operation) runOnHost() error {
	all := make([][]byte, len(o.Legs))
	for i := range o.Legs {
		l := &o.Legs[i]
		t := l.hostSrc
		if t == nil {
			t = l.hostDst[0]
		}
		if t.IsContiguous() {
			all[i] = t.Bytes()
			continue
		}
		all[i] = make([]byte, t.ByteLen())
		if l.hostSrc != nil {
			if err := t.Pack(all[i]); err != nil {
				return err
			}
		}
	}
	if err := o.callAll(func(l *Leg, i, lo int) []byte { return all[i][lo*l.size():] }); err != nil {
		return err
	}
	for i := range o.Legs {
		for k, t := range o.Legs[i].hostDst {
			if k == 0 && o.Legs[i].hostSrc == nil && t.IsContiguous() || t == o.Legs[i].hostSrc && t.IsContiguous() {
				continue // it was written itself
			}
			if err := t.Unpack(all[i]); err != nil {
				return err
			}
		}
	}
	return nil
}
