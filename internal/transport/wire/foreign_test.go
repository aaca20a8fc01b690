package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestForeign: a peer whose first message is not HELLO is no rank of this library. One that
// has sent nothing may be either.
func TestForeign(t *testing.T) {
	m, c := alone(t)
	require.Empty(t, m.Foreign())
	r := recv(m, 1, 7, make([]byte, 3))
	put(t, c, note(opSendReady, 7, 3), data(7, 3), "abc")
	require.NoError(t, wait(t, r))
	require.Equal(t, []int{1}, m.Foreign())

	m, c = alone(t)
	r = recv(m, 1, 7, make([]byte, 3))
	put(t, c, helloHeader(), note(opSendReady, 7, 3), data(7, 3), "abc")
	require.NoError(t, wait(t, r))
	require.Empty(t, m.Foreign())
}
