package pg_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// picky encodes text, but for "bad".
type picky struct{}

var errPicky = errors.New("no word for\x1b[31m this")

func (picky) Encode(s string) ([]byte, error) {
	if s == "bad" {
		return nil, errPicky
	}
	return []byte(s), nil
}

func (picky) Decode(b []byte) (string, error) { return string(b), nil }

// TestObjectsThatCannotBeEncoded: every rank that should have got the object gets an error at once. It
// names the rank and the reason. The group can be used on.
func TestObjectsThatCannotBeEncoded(t *testing.T) {
	const culprit = 1
	say := func(g *pg.ProcessGroup) string {
		if g.Rank() == culprit {
			return "bad"
		}
		return strings.Repeat("x", g.Rank()) // shorter than the reason
	}
	for _, tc := range []struct {
		name  string
		hears func(rank int) bool // besides the culprit
		call  func(ctx context.Context, g *pg.ProcessGroup) error
	}{
		{"AllGatherObject", func(int) bool { return true }, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.AllGatherObject(ctx, g, say(g), picky{}))
		}},
		{"GatherObject", func(rank int) bool { return rank == 2 }, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.GatherObject(ctx, g, say(g), 2, picky{}))
		}},
		{"BroadcastObject", func(int) bool { return true }, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.BroadcastObject(ctx, g, []string{"good", say(g), "good"}, culprit, picky{}))
		}},
		{"ScatterObject", func(int) bool { return true }, func(ctx context.Context, g *pg.ProcessGroup) error {
			var parts []string
			if g.Rank() == culprit {
				parts = []string{"a", "b", "bad"}
			}
			return must.Err(pg.ScatterObject(ctx, g, parts, culprit, picky{}))
		}},
		{"SendObject", func(rank int) bool { return rank == 2 }, func(ctx context.Context, g *pg.ProcessGroup) (err error) {
			switch g.Rank() {
			case culprit:
				err = pg.SendObject(ctx, g, []string{"good", "bad"}, 2, picky{})
			case 2:
				_, err = pg.RecvObject(ctx, g, 2, culprit, picky{})
			}
			return err
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				for range 2 {
					err := tc.call(ctx, g)
					switch {
					case g.Rank() == culprit:
						require.ErrorIs(t, err, errPicky)
						require.Equal(t, "pg: "+tc.name+": object of rank 1: no word for\x1b[31m this", err.Error())
					case tc.hears(g.Rank()):
						e := must.As[*pg.ObjectError](t, err)
						require.Equal(t, culprit, e.Rank)
						require.Equal(t, "object of rank 1: it could not be encoded there: no word for?[31m this", err.Error()[strings.Index(err.Error(), "object"):])
					default:
						require.NoError(t, err)
					}
				}
				all, err := pg.AllGatherObject(ctx, g, "fine", picky{})
				require.NoError(t, err, "the group can be used on")
				require.Equal(t, []string{"fine", "fine", "fine"}, all)
			})
		})
	}
	t.Run("too few objects", func(t *testing.T) {
		pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := pg.ScatterObject(ctx, g, []string{"a"}, 0, picky{})
			require.ErrorContains(t, err, "1 objects for 3 ranks")
		})
	})
	t.Run("several cannot", func(t *testing.T) {
		pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
			what := "bad"
			if g.Rank() == 0 {
				what = "good"
			}
			_, err := pg.AllGatherObject(t.Context(), g, what, picky{})
			e := must.As[*pg.ObjectError](t, err)
			require.Equal(t, max(g.Rank(), 1), e.Rank)
		})
	})
	t.Run("bytes that stand for a failure", func(t *testing.T) {
		var told []byte
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			if g.Rank() == 0 { // what a failing rank sends
				size := []int64{0}
				require.NoError(t, wait(g.Recv(t.Context(), of(t, size, 1), 1)))
				told = make([]byte, size[0])
				require.NoError(t, wait(g.Recv(t.Context(), of(t, told, len(told)), 1)))
				require.Equal(t, byte(0), told[0], "no pickle begins so")
				return
			}
			require.Error(t, pg.SendObject(t.Context(), g, []string{"bad"}, 0, picky{}))
		})
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			_, err := pg.BroadcastObject(t.Context(), g, [][]byte{told}, 0)
			require.ErrorContains(t, err, "begins with the mark of objects that could not be encoded", "and is not taken for one")
		})
	})
}
