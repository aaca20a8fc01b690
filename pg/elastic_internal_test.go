package pg

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/work"
)

// TestGroupsWithPyTorchRanksHaveNoEpochs: they are refused, and their errors are as before.
func TestGroupsWithPyTorchRanksHaveNoEpochs(t *testing.T) {
	st := store.NewHash()
	w := &world{store: st, begunIn: st, size: 2} // the roll call has found a PyTorch rank
	g := &ProcessGroup{name: "0"}
	g.current.Store(&epoch{world: w, name: "0", size: 2, ranks: []int{0, 1}})
	w.root = g
	_, err := g.Reconfigure(t.Context(), ReconfigureOptions{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.EqualError(t, err, `pg: Reconfigure of group "0": PyTorch ranks may be in the group, and they cannot change their group: unsupported operation`)
	_, err = g.Pending(t.Context())
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.Nil(t, g.now().noteFailure())
	n, err := st.NumKeys(t.Context())
	require.NoError(t, err)
	require.Zero(t, n, "no key of ours")
}

// TestSuspects: the first fault counts as the cause, and the ranks of all are suspected.
func TestSuspects(t *testing.T) {
	w := &world{ours: true, number: 3}
	g := &epoch{world: w, ranks: []int{4, 6}}
	died, link := &work.Error{Peer: 1, Err: work.ErrPeerDied}, &work.Error{Peer: -1, Err: &work.LinkError{}}
	told := g.noteFailure()
	told(died)
	told(died)
	told(link)
	var e *EpochError
	require.ErrorAs(t, died, &e)
	require.Equal(t, EpochError{Epoch: 3, Suspects: []int{6}, Err: work.ErrPeerDied}, *e)
	require.ErrorIs(t, died, work.ErrPeerDied)
	require.ErrorAs(t, link, &e)
	require.Empty(t, e.Suspects)
	require.Equal(t, []int{6}, w.suspects)
	require.EqualError(t, w.cause, work.ErrPeerDied.Error())
}
