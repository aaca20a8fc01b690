package membership

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/store"
)

// Decide takes part in the decision of the epoch after cfg.Base, or of a later one if that is
// short. st has keys of this group alone. If ctx ends first, the member withdraws its vote, unless
// there is a view already. It may call Decide again with the same base.
//
// A store that may have lost keys (store.Keeper) may have lost a view: Decide then fails.
//
// Where the store has wills (store.Willer), the death of a member after its first Decide is known
// to the leader at once.
func Decide(ctx context.Context, st store.Store, cfg Config) (View, error) {
	m := NewMember(cfg)
	var epoch int
	err := run(ctx, st, m, func(c *Call) error {
		if m.step == following && cfg.Leaders != nil {
			c.Limit = cfg.Leaders.left(m.next, m.lead, c.Limit)
		}
		if c.Op != Set || m.step != voted || m.next == epoch {
			return nil
		}
		epoch = m.next
		return leaveWill(ctx, st, c.Keys[0], c.New)
	})
	if err == nil {
		err = store.Kept(ctx, st) // or there may have been another view
	}
	if err == nil {
		var v View
		if v, err = m.Result(); err == nil {
			return v, Stand(ctx, st, v.Epoch, cfg.Self)
		}
	}
	key, value := m.Vote()
	last, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), meet.LastWord)
	defer cancel()
	if errors.Is(err, ErrEvicted) || errors.Is(err, ErrTooFew) {
		store.DropWill(last, st, key)
		if errors.Is(err, ErrEvicted) {
			st.Delete(last, key)
		}
		return m.view, err
	}
	why := err
	if cause := context.Cause(ctx); cause != nil {
		why = cause
	}
	st.CompareSet(last, key, []byte(value), []byte(gaveUp+brief(why.Error())))
	store.DropWill(last, st, key)
	lead, held := m.Lead()
	for _, v := range held {
		st.CompareSet(last, lead, []byte(v), nil) // another member need not wait until this one seems silent
	}
	return View{}, fmt.Errorf("membership: member %d, deciding epoch %d: %w", cfg.Self, m.next, err)
}

// Leaders remembers for how long the leader of a decision has been silent, over several calls of Decide.
type Leaders struct {
	epoch int
	lead  string
	since time.Time
}

// left returns what is left of the time that a member waits for a leader.
func (l *Leaders) left(epoch int, lead string, limit time.Duration) time.Duration {
	if l.epoch != epoch || l.lead != lead {
		*l = Leaders{epoch, lead, time.Now()}
	}
	return max(limit-time.Since(l.since), time.Millisecond)
}

// leaveWill makes the store change a vote, or an application, when this process is gone.
func leaveWill(ctx context.Context, st store.Store, key, value string) error {
	return meet.Will(ctx, st, key, []byte(value), []byte(gone))
}

// Stand prepares for the death of a member in an epoch: the store then votes for it in the next
// decision, and nobody waits for it. It does nothing for a store without wills.
func Stand(ctx context.Context, st store.Store, epoch int, self ID) error {
	if err := leaveWill(ctx, st, voteKey(epoch+1, self), ""); err != nil {
		return err
	}
	return store.DropWill(ctx, st, voteKey(epoch, self))
}

// Gone returns nil when a member of a view has died since it voted for the view, as the store knows. It waits until then.
func Gone(ctx context.Context, st store.Store, v View, id ID) error {
	values, err := meet.Look(ctx, st, voteKey(v.Epoch, id))
	for err == nil && values[0] != gone {
		var b []byte
		if b, err = st.Get(ctx, voteKey(v.Epoch+1, id)); err == nil && string(b) != gone {
			<-ctx.Done() // it goes on to the next epoch, and has told why
			err = ctx.Err()
		}
		values[0] = gone
	}
	return err
}

// Forget deletes the keys of the decisions after base, up to that of v, but for the views. left has all members that
// were left out. Call it when all members of v have come.
func Forget(ctx context.Context, st store.Store, base, v View, left []Absent, self ID) error {
	var keys []string
	first := self == v.IDs[0]
	if first {
		keys = append(keys, callKey(base.Epoch)) // newcomers look at that of v
	}
	for e := base.Epoch + 1; e <= v.Epoch; e++ {
		keys = append(keys, voteKey(e, self))
		for _, a := range left {
			if first {
				keys = append(keys, voteKey(e, a.ID))
			}
		}
		if first {
			keys = append(keys, leadKey(e))
			if e < v.Epoch {
				keys = append(keys, callKey(e))
			}
		}
	}
	came := slices.Clone(base.Pending)
	for k := base.Joiners; k < v.Joiners; k++ {
		came = append(came, ID(base.First+k))
	}
	for _, id := range came {
		if first && !slices.Contains(v.Pending, id) {
			keys = append(keys, joinKey(id))
			for e := base.Epoch; e <= v.Epoch; e++ {
				keys = append(keys, answerKey(e, id))
			}
		}
	}
	var err error
	for _, key := range keys {
		_, e := st.Delete(ctx, key)
		err = errors.Join(err, e)
	}
	return err
}

// Leave tells the members that decide the next epoch that this one has left.
func Leave(st store.Store, epoch int, self ID) error {
	ctx, cancel := cputime.WithTimeout(context.Background(), meet.LastWord)
	defer cancel()
	key := voteKey(epoch+1, self)
	return errors.Join(st.Set(ctx, key, []byte(gone)), store.DropWill(ctx, st, key))
}

// Join returns the id of this process and the first view with it. first is the number of members in
// epoch 0. If ctx ends first, the process withdraws. Join calls known, if it is not nil, before any
// view can have the id.
func Join(ctx context.Context, st store.Store, first int, known func(ID)) (ID, View, error) {
	j, before := NewJoiner(first), ID(-1)
	err := run(ctx, st, j, func(c *Call) error {
		if j.step != voted {
			return nil
		}
		if known != nil {
			known(j.id)
		}
		if before >= 0 {
			if err := store.DropWill(ctx, st, joinKey(before)); err != nil {
				return err
			}
		}
		before = j.id
		return leaveWill(ctx, st, c.Keys[0], c.New)
	})
	id, v, bad := j.Result()
	if err = errors.Join(err, bad); err == nil {
		if err = store.DropWill(ctx, st, joinKey(id)); err == nil {
			err = Stand(ctx, st, v.Epoch, id)
		}
		return id, v, err
	}
	if id >= 0 {
		last, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), meet.LastWord)
		defer cancel()
		st.CompareSet(last, joinKey(id), []byte(waiting), []byte(gone))
		store.DropWill(last, st, joinKey(id))
	}
	return id, View{}, fmt.Errorf("membership: joining: %w", err)
}

// Pending returns how many joiners wait, as far as one can tell from their number and the last
// view.
func Pending(ctx context.Context, st store.Store, base View) (int, error) {
	n, err := st.Add(ctx, joinersKey, 0)
	if err != nil {
		return 0, err
	}
	m := &Member{cfg: Config{Base: base}}
	c := m.count(int(n))
	if c.Op != Look {
		return 0, nil
	}
	values, err := meet.Look(ctx, st, c.Keys...)
	waits := 0
	for _, v := range values {
		if v == waiting {
			waits++
		}
	}
	return waits, err
}

// run does the calls of a machine. before is called before each of them.
func run(ctx context.Context, st store.Store, m Machine, before func(*Call) error) error {
	var r Reply
	for {
		c := m.Next(r)
		if c.Op == Done {
			return nil
		}
		err := before(&c)
		if err == nil {
			r, err = do(ctx, st, c)
		}
		if err != nil {
			if why := context.Cause(ctx); why != nil && !errors.Is(err, why) {
				err = fmt.Errorf("%w: %w", err, why)
			}
			return err
		}
	}
}

func do(ctx context.Context, st store.Store, c Call) (r Reply, err error) {
	switch c.Op {
	case Set:
		if len(c.Keys) == 1 {
			err = st.Set(ctx, c.Keys[0], []byte(c.New))
		} else {
			err = st.MultiSet(ctx, c.Keys, slices.Repeat([][]byte{[]byte(c.New)}, len(c.Keys)))
		}
	case CompareSet:
		var b []byte
		if strings.HasPrefix(c.Keys[0], viewPrefix) {
			b, err = meet.Once(ctx, st, c.Keys[0], []byte(c.New))
		} else {
			b, err = st.CompareSet(ctx, c.Keys[0], []byte(c.Old), []byte(c.New))
		}
		r.Values = []string{string(b)}
	case Add:
		r.Sum, err = st.Add(ctx, c.Keys[0], c.Delta)
	case Look:
		r.Values, err = meet.Look(ctx, st, c.Keys...)
	case Await:
		return await(ctx, st, c)
	}
	return r, err
}

// await waits for keys. Without a limit it returns after the store's timeout, too.
func await(ctx context.Context, st store.Store, c Call) (r Reply, err error) {
	short := ctx
	if c.Limit > 0 {
		var cancel context.CancelFunc
		short, cancel = context.WithTimeout(ctx, c.Limit)
		defer cancel()
	}
	values, err := st.MultiGet(short, c.Keys)
	if err != nil && ctx.Err() == nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, store.ErrTimeout)) {
		return Reply{Late: true}, nil
	}
	for _, v := range values {
		r.Values = append(r.Values, string(v))
	}
	return r, err
}
