package gloo_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/copies"
	"github.com/c10d-go/c10d/tensor"
)

func choicesOf(b *gloo.Backend, op string) (cs []backend.Choice) {
	for _, c := range b.Explain().Choices {
		if c.Op == op {
			cs = append(cs, c)
		}
	}
	return cs
}

// TestCopies: one rank that asks for it makes all of them stage, and Explain tells so.
func TestCopies(t *testing.T) {
	onLinux(t)
	for name, tc := range map[string]struct {
		env    string
		second gloo.Copy
		why    string
	}{
		"auto":     {},
		"option":   {second: gloo.CopyStaged, why: "rank 1 is told not to"},
		"variable": {env: "staged", why: "rank 0 is told not to"},
		"override": {env: "nonsense, were it looked at", second: gloo.CopyAuto},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("C10D_COPY", tc.env)
			first := gloo.Copy("")
			if name == "override" {
				first = gloo.CopyAuto
			}
			bs, errs := connectWith(t, gloo.GroupTimeout, gloo.Options{Copy: first}, gloo.Options{Copy: tc.second}, gloo.Options{Copy: first})
			for r, err := range errs {
				require.NoError(t, err)
				e := bs[r].Explain()
				require.Equal(t, "shm", e.Links[0].Transport)
				cs := choicesOf(bs[r], "all_to_all")
				last := cs[len(cs)-1]
				require.Equal(t, int64(-1), last.UpTo)
				require.Equal(t, "staged", cs[0].Algorithm)
				require.NotContains(t, choicesOf(bs[r], "barrier")[0].Why, "copy")
				switch {
				case tc.why != "":
					require.Len(t, cs, 1)
					require.Contains(t, last.Why, "one copy is impossible: "+tc.why)
					require.Equal(t, "two copies: "+tc.why, e.Links[0].Detail)
				case strings.Contains(last.Why, "one copy is impossible: "):
					t.Logf("here %s", last.Why) // which this system's settings have forbidden
				case copies.Fast(): // faster than a single copy
					require.Len(t, cs, 1)
				default:
					require.Len(t, cs, 2)
					require.Equal(t, "single copy", last.Algorithm)
				}
			}
		})
	}
	_, errs := connectWith(t, 3*time.Second, gloo.Options{Copy: "twice"})
	require.ErrorContains(t, errs[0], `unknown copy "twice", want auto or staged`)
}

// TestLargeMoves does what is copied once, and the same with two copies.
func TestLargeMoves(t *testing.T) {
	onLinux(t)
	const p, n = 3, 300_001 // floats
	ctx := context.Background()
	for _, c := range []gloo.Copy{gloo.CopyAuto, gloo.CopyStaged} {
		t.Run(string(c), func(t *testing.T) {
			bs, errs := connectWith(t, gloo.GroupTimeout, slices.Repeat([]gloo.Options{{Copy: c}}, p)...)
			var wg sync.WaitGroup
			for r, b := range bs {
				require.NoError(t, errs[r])
				wg.Go(func() { largeMoves(ctx, t, b, p, n) })
			}
			gloo.Finish(t, "all ranks", &wg)
		})
	}
}

// filled returns n floats from first on.
func filled(n, first int) *tensor.Tensor {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(first + i)
	}
	return vec(v...)
}

func largeMoves(ctx context.Context, t *testing.T, b *gloo.Backend, p, n int) {
	r := b.Rank()
	// Rank r has the numbers from r*n on.
	mine, all := filled(n, r*n), filled(n*p, 0)

	out := filled(n*p, -1)
	assert.NoError(t, wait(b.AllGatherIntoTensor(ctx, out, mine, backend.AllGatherOptions{})))
	assert.Equal(t, all.Bytes(), out.Bytes())

	var parts []*tensor.Tensor // of different lengths
	for q := range p {
		parts = append(parts, filled(n-q, -1))
	}
	assert.NoError(t, wait(b.AllGatherV(ctx, parts, filled(n-r, r*n), backend.AllGatherOptions{})))
	for q, part := range parts {
		assert.Equal(t, filled(n-q, q*n).Bytes(), part.Bytes())
	}

	out = filled(n*p, -1)
	in := filled(n*p, 0)
	assert.NoError(t, wait(b.AllToAllSingle(ctx, out, in, nil, nil, backend.AllToAllOptions{})))
	for q := range p {
		assert.Equal(t, filled(n, r*n).Bytes(), out.Bytes()[4*q*n:][:4*n])
	}

	buf := filled(n, 7*r)
	assert.NoError(t, wait(b.Broadcast(ctx, list(buf), backend.BroadcastOptions{Root: 1})))
	assert.Equal(t, filled(n, 7).Bytes(), buf.Bytes())

	next, last := (r+1)%p, (r+p-1)%p
	got := filled(n, -1)
	sent, err := b.Send(ctx, mine, next, backend.P2POptions{})
	if assert.NoError(t, err) {
		assert.NoError(t, wait(b.Recv(ctx, got, last, backend.P2POptions{})))
		assert.NoError(t, sent.Wait(ctx))
		assert.Equal(t, filled(n, last*n).Bytes(), got.Bytes())
	}
}
