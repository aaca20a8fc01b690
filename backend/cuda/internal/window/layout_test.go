package window

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestChannelBytes: what a channel takes, as others count on, is what the layout gives it.
func TestChannelBytes(t *testing.T) {
	const channels, lane, turns = 64, 16, MostRanks * 4
	for ranks := 2; ranks <= MostRanks; ranks++ {
		l := Options{Ranks: ranks, Channels: channels, Depth: depthFor(ranks)}.layout()
		require.Equal(t, channels*ChannelBytes(ranks)+turns, l.countsAt, "%d ranks", ranks)
		l = Options{Ranks: ranks, Channels: channels, Depth: depthFor(ranks), LaneChannels: lane}.layout()
		require.Equal(t, lane*LaneChannelBytes()+turns, l.lanes+l.counts, "%d ranks", ranks)
	}
}
