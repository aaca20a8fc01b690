package membership

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// after gives a machine these replies, and returns its next call.
func after(m Machine, replies ...Reply) (c Call) {
	for _, r := range append([]Reply{{}}, replies...) {
		c = m.Next(r)
	}
	return c
}

func holds(values ...string) Reply { return Reply{Values: values} }

// leads has replies until member 0 of two leads, and waits for the vote of member 1.
var leads = []Reply{{}, holds("0 0 0"), holds("")}

// TestFollowersWait: longer, the more leaders there were before.
func TestFollowersWait(t *testing.T) {
	for lead, beats := range map[string]time.Duration{"0 0 7": 4, "5 1 0": 8, "5 3 0": 32, "5 30 0": 32, "5 -1 0": 4, "nonsense": 4} {
		m := NewMember(Config{Self: 1, Base: First(2)})
		require.Equal(t, Call{Op: CompareSet, Keys: []string{"lead/1"}, New: "1 0 0"}, after(m, Reply{}), "the first leader")
		require.Equal(t, Call{Op: Await, Keys: []string{"view/1"}, Limit: beats * DefaultBeat}, m.Next(holds(lead)), lead)
	}
	m := NewMember(Config{Self: 1, Base: First(2)})
	require.Equal(t, Call{Op: CompareSet, Keys: []string{"lead/1"}, Old: "0 2 9", New: "1 3 0"}, after(m, Reply{}, holds("0 2 9"), Reply{Late: true}, holds("0 2 9")))
	m = NewMember(Config{Self: 1, Base: First(2)})
	require.Equal(t, Call{Op: CompareSet, Keys: []string{"lead/1"}, New: "1 0 0"}, after(m, Reply{}, holds("0 2 9"), Reply{Late: true}, holds("")), "it has withdrawn")
}

// TestALeaderThatIsReplacedFollows: it does not lead beside the other.
func TestALeaderThatIsReplacedFollows(t *testing.T) {
	m := NewMember(Config{Self: 0, Base: First(2)})
	after(m, append(leads, Reply{Late: true})...)
	require.Equal(t, Call{Op: Await, Keys: []string{"view/1"}, Limit: 8 * DefaultBeat}, m.Next(holds("1 1 0")))
}

// TestAnswersThatHaveAllCome: the leader takes the newcomer in at once. It asks again, and reads the votes again, only after
// it has waited.
func TestAnswersThatHaveAllCome(t *testing.T) {
	asked := []Reply{{}, holds("0 0 0"), holds(""), holds(encode(vote{})), {Sum: 1}, holds(waiting), {}}
	m := NewMember(Config{Self: 0, Base: First(1)})
	require.Equal(t, Call{Op: Await, Keys: []string{"join/1/1"}, Limit: answerBeats * DefaultBeat}, after(m, asked...))
	c := m.Next(holds(waiting))
	require.Equal(t, CompareSet, c.Op)
	require.Equal(t, []string{"view/1"}, c.Keys)
	require.Contains(t, c.New, `"ids":[0,1]`)
	m = NewMember(Config{Self: 0, Base: First(1)})
	require.Equal(t, Call{Op: Look, Keys: []string{"join/1/1"}}, after(m, append(asked, Reply{Late: true})...))
}

// TestAViewThatIsNone: the leader tells nobody of it.
func TestAViewThatIsNone(t *testing.T) {
	m := NewMember(Config{Self: 0, Base: First(1)})
	c := after(m, Reply{}, holds("0 0 0"), holds(""), holds(encode(vote{})), Reply{})
	require.Equal(t, CompareSet, c.Op)
	require.Equal(t, []string{"view/1"}, c.Keys)
	require.Equal(t, Call{}, m.Next(holds("nonsense")))
	require.ErrorContains(t, must.Err(m.Result()), "no view of epoch 1")

	j := NewJoiner(1)
	require.Equal(t, Call{}, after(j, Reply{Sum: 1}, Reply{}, holds(""), holds("nonsense")))
	_, _, err := j.Result()
	require.ErrorContains(t, err, "no view of epoch 1")
}

// TestMissingInAShortView: whom an epoch lacked is waited for no longer than suspects, and whom it had as long as others.
func TestMissingInAShortView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) { return Decide(t.Context(), st, Config{Self: id, Base: First(3), Min: 3}) })
		require.ErrorIs(t, errs[0], ErrTooFew)
		begun := time.Now()
		views, errs = all(t, []ID{0, 1}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * 5 * time.Second)
			return Decide(t.Context(), st, Config{Self: id, Base: views[id]})
		})
		require.NoError(t, errors.Join(errs[0], errs[1]))
		require.Equal(t, []ID{0, 1}, views[0].IDs)
		require.Equal(t, 5*time.Second, time.Since(begun))
	})
}

// TestTooLateForAnEpoch: a member reads the view at once, also when all else is forgotten.
func TestTooLateForAnEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, base := store.NewHash(), First(2)
		v := must.Get(Decide(t.Context(), st, Config{Self: 0, Base: base, Suspects: []ID{1}}))
		require.NoError(t, Forget(t.Context(), st, base, v, v.Left, 0))
		begun := time.Now()
		require.ErrorIs(t, must.Err(Decide(t.Context(), st, Config{Self: 1, Base: base})), ErrEvicted)
		require.Zero(t, time.Since(begun))
	})
}

// TestADeadJoinerIsAskedOnce: not again whenever the leader looks for joiners, and not at all if there is no room.
func TestADeadJoinerIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		must.Get(st.Add(t.Context(), joinersKey, 1))
		require.NoError(t, st.Set(t.Context(), joinKey(1), []byte(waiting)))
		begun := time.Now()
		base := View{First: 1, IDs: []ID{0}, Joiners: 1, Pending: []ID{1}}
		v := must.Get(Decide(t.Context(), st, Config{Self: 0, Base: base, Max: 1}))
		require.Zero(t, time.Since(begun))
		require.Equal(t, View{Epoch: 1, First: 1, IDs: []ID{0}, Joiners: 1, Pending: []ID{1}}, v)
		require.ErrorIs(t, must.Err(Decide(t.Context(), st, Config{Self: 0, Base: v, Min: 2, Patience: 10 * time.Second})), ErrTooFew)
		require.Equal(t, 10*time.Second+answerBeats*DefaultBeat, time.Since(begun))
	})
}

// TestNoLinkWithTheDead: a member that has died is gone, and evicts nobody.
func TestNoLinkWithTheDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		require.NoError(t, Leave(st, 0, 0))
		v := must.Get(Decide(t.Context(), st, Config{Self: 1, Base: First(2), Lacks: []ID{0}}))
		require.Equal(t, []ID{1}, v.IDs)
		require.Equal(t, []Absent{{0, "its process has ended, or it has left"}}, v.Left)
	})
}

// TestOneSuspicionIsEnough: the leader waits no longer for a member that another one suspects, and the view says why.
func TestOneSuspicionIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, begun := store.NewHash(), time.Now()
		views, errs := all(t, []ID{0, 1, 2}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * time.Millisecond) // member 0 leads
			return Decide(t.Context(), st, Config{
				Self: id, Base: First(6), Suspects: []ID{5 - id}, Cause: map[ID]string{1: "its link broke", 2: "it died"}[id],
			})
		})
		require.NoError(t, errors.Join(errs[0], errs[1], errs[2]))
		require.Equal(t, []Absent{{3, "it died"}, {4, "its link broke"}, {5, "it was not there in the epoch before"}}, views[0].Left)
		require.Less(t, time.Since(begun), 2*DefaultSettle)
	})
}

// TestTheLongestSettleCounts: of the members that suspect somebody.
func TestTheLongestSettleCounts(t *testing.T) {
	for name, tc := range map[string]struct {
		settle [2]time.Duration
		second []ID // whom member 1 suspects
		want   time.Duration
	}{
		"the leader's":           {[2]time.Duration{3 * time.Second, time.Second}, []ID{2}, 3 * time.Second},
		"the other's":            {[2]time.Duration{time.Second, 3 * time.Second}, []ID{2}, 3 * time.Second},
		"who suspects nobody":    {[2]time.Duration{time.Second, 3 * time.Second}, nil, time.Second},
		"who suspects the first": {[2]time.Duration{time.Second, 3 * time.Second}, []ID{0}, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, begun := store.NewHash(), time.Now()
				views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) {
					return Decide(t.Context(), st, Config{Self: id, Base: First(3), Suspects: [][]ID{{2}, tc.second}[id], Settle: tc.settle[id]})
				})
				require.NoError(t, errors.Join(errs[0], errs[1]))
				require.Equal(t, []ID{0, 1}, views[0].IDs)
				require.Equal(t, tc.want, time.Since(begun))
			})
		})
	}
	m := NewMember(Config{Self: 0, Base: First(1), Suspects: []ID{0}})
	require.Equal(t, Call{Op: Await, Keys: []string{"vote/1/0"}, Limit: DefaultBeat}, after(m, leads...), "a suspect waits for its own vote")
}

// TestTooLateForAShortEpoch: a member that was not there goes on to the next one.
func TestTooLateForAShortEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		short, err := Decide(t.Context(), st, Config{Self: 0, Base: First(2), Min: 2})
		require.ErrorIs(t, err, ErrTooFew)
		views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: []View{short, First(2)}[id], Min: 2})
		})
		require.NoError(t, errors.Join(errs[0], errs[1]))
		require.Equal(t, View{Epoch: 2, First: 2, IDs: []ID{0, 1}}, views[1])
		require.Equal(t, views[0], views[1])
	})
}

// TestTooFewWait: for a suspect, or for a joiner if there is room.
func TestTooFewWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, begun := store.NewHash(), time.Now()
		_, errs := all(t, []ID{0, 1, 2}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id/2) * 5 * time.Second)
			return Decide(t.Context(), st, Config{Self: id, Base: First(3), Suspects: []ID{2}, Min: 3, Max: 2})
		})
		require.NoError(t, errors.Join(errs[0], errs[1], errs[2]))
		require.Equal(t, 5*time.Second, time.Since(begun))
	})
	synctest.Test(t, func(t *testing.T) {
		st, begun := store.NewHash(), time.Now()
		_, errs := all(t, []ID{0, 1}, func(id ID) (View, error) {
			if id == 1 {
				time.Sleep(5 * time.Second)
				_, v, err := Join(t.Context(), st, 1, nil)
				return v, err
			}
			return Decide(t.Context(), st, Config{Self: id, Base: First(1), Min: 2, Max: 2})
		})
		require.NoError(t, errors.Join(errs[0], errs[1]))
		require.Less(t, time.Since(begun), 6*time.Second)
	})
}
