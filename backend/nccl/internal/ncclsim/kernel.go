package ncclsim

import (
	"bytes"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
)

// kernel does the tasks of a launch. It counts its member's collectives where it runs: a graph runs it many times.
func (l *Library) kernel(k *sim.Run) error {
	l.mu.Lock()
	x := l.launches[k.Uint64(0)]
	m := x.m
	m.running++
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		m.running--
		l.mu.Unlock()
	}()
	var ends []func() (bool, error)
	for _, t := range x.tasks {
		var data []byte
		if t.inN > 0 {
			data = bytes.Clone(k.Read(t.in, t.inN))
		}
		end, err := l.begin(k, t, data)
		if err != nil {
			return err
		}
		ends = append(ends, end)
	}
	for len(ends) > 0 {
		var err error
		waited := k.Spin(func() bool {
			l.mu.Lock()
			gone := m.aborted
			l.mu.Unlock()
			if gone {
				ends = nil
				return true
			}
			for i := 0; i < len(ends) && err == nil; i++ {
				var over bool
				if over, err = ends[i](); over {
					ends = append(ends[:i], ends[i+1:]...)
					i--
				}
			}
			return err != nil || len(ends) == 0
		})
		if !waited || err != nil {
			return err
		}
	}
	return nil
}

// begin shows the other ranks what a task has. The function that it returns ends the task once the others have come.
func (l *Library) begin(k *sim.Run, t *task, data []byte) (end func() (bool, error), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, rank := t.m.c, t.m.rank
	switch t.what.kind {
	case send:
		x := &message{data: data, t: t.what.t}
		to := [2]int{rank, t.what.root}
		c.messages[to] = append(c.messages[to], x)
		return func() (bool, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			return x.taken, nil
		}, nil
	case recv:
		from := [2]int{t.what.root, rank}
		return func() (bool, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			list := c.messages[from]
			if len(list) == 0 {
				return false, nil
			}
			x := list[0]
			if len(x.data) != t.outN || x.t != t.what.t {
				return true, l.differ("rank %d receives %v of %d bytes, rank %d sends %v of %d", rank, dtypes[t.what.t], t.outN, from[0], dtypes[x.t], len(x.data))
			}
			c.messages[from] = list[1:]
			x.taken = true
			if t.outN > 0 {
				copy(k.Write(t.out, t.outN), x.data)
			}
			return true, nil
		}, nil
	}
	n := t.m.number
	t.m.number++
	x := c.collective[n]
	if x == nil {
		x = &collective{what: t.what, parts: make([][]byte, c.size)}
		c.collective[n] = x
	}
	if x.what != t.what {
		return nil, l.differ("collective %d: rank %d calls %v, another rank %v", n, rank, t.what, x.what)
	}
	if t.multiply {
		r, err := backend.PreMulSum(t.factor).Reduction(dtypes[t.what.t], c.size)
		if err != nil {
			return nil, err
		}
		r.Before(data)
	}
	x.parts[rank] = data
	x.came++
	return func() (bool, error) {
		l.mu.Lock()
		came := x.came
		l.mu.Unlock()
		if came < c.size {
			return false, nil
		}
		if t.outN > 0 {
			out, err := x.result(rank)
			if err != nil {
				return true, err
			}
			copy(k.Write(t.out, t.outN), out)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if x.left++; x.left == c.size {
			delete(c.collective, n)
		}
		return true, nil
	}, nil
}

func (l *Library) differ(format string, args ...any) error {
	l.violation(format, args...)
	return fmt.Errorf(format, args...)
}

// result returns what a rank gets. The parts do not change any more.
func (x *collective) result(rank int) ([]byte, error) {
	w := x.what
	switch w.kind {
	case broadcast:
		return x.parts[w.root], nil
	case allGather:
		return bytes.Join(x.parts, nil), nil
	}
	from, n := 0, w.count*w.t.Size()
	if w.kind == reduceScatter {
		from = rank * n
	}
	r, err := operators[w.op].Reduction(dtypes[w.t], len(x.parts))
	if err != nil {
		return nil, err
	}
	var out []byte
	for _, p := range x.parts {
		part := bytes.Clone(p[from : from+n])
		if r.Before != nil {
			r.Before(part)
		}
		if out == nil {
			out = part
		} else {
			r.Combine(out, part)
		}
	}
	if r.After != nil {
		r.After(out)
	}
	return out, nil
}
