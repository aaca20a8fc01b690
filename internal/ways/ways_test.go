package ways

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
)

const head = "c10d-table 1\ncommand c10d bench\nmachine one\n"

func parse(t *testing.T, rows string) *choice.Table {
	t.Helper()
	return must.Get(Catalog.Parse(strings.NewReader(head + rows)))
}

// text returns the ways of an operation, with their last sizes.
func text(w *Ways, op plan.Op) string {
	var all []string
	for _, r := range w.Ranges(op) {
		s := r.Way.String()
		if r.UpTo < math.MaxInt64 {
			s += fmt.Sprint(" up to ", r.UpTo)
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

const measured = `
all_reduce  peers   4 1 1000 one-shot    10
all_reduce  peers   4 1 3000 one-shot    30
all_reduce  peers   4 1 1000 two-shot    20
all_reduce  peers   4 1 3000 two-shot    24
all_reduce  peers   4 1 3000 two-shot:16 23
all_reduce  peers   4 1 9000 two-shot:16 99
all_reduce  host    4 1 1000 host        7
all_reduce  host    4 1 1000 host-shared 8
all_gather  -       2 1 1000 direct      7
all_gather  -       2 1 1000 host        6
broadcast   hosts   3 2 1000 tree        6
broadcast   hosts   3 3 1000 flat        5
`

func TestNew(t *testing.T) {
	table := parse(t, measured)
	for name, c := range map[string]struct {
		op   plan.Op
		g    Group
		want string
	}{
		// The lines of one-shot and two-shot cross at 2250; two-shot:16 takes 23 us up to 3000.
		"measured":            {plan.OpAllReduce, Group{Link: Peers, Ranks: 4}, "one-shot up to 2250, two-shot up to 2500, two-shot:16 up to 3214, two-shot"},
		"not those":           {plan.OpAllReduce, Group{Link: Peers, Ranks: 3}, "one-shot up to 262144, two-shot"},
		"nor of many":         {plan.OpAllReduce, Group{Link: Peers, Ranks: 8}, "one-shot up to 65536, two-shot"},
		"two ranks":           {plan.OpAllReduce, Group{Link: Peers, Ranks: 2}, "one-shot"},
		"another link":        {plan.OpAllReduce, Group{Link: Host, Ranks: 4}, "host"},
		"shared devices":      {plan.OpAllReduce, Group{Link: Shared, Ranks: 4}, "host-shared"},
		"several hosts":       {plan.OpAllReduce, Group{Link: Hosts, Ranks: 4}, "host"},
		"any link":            {plan.OpAllGather, Group{Link: Peers, Ranks: 2}, "host"},
		"what the link has":   {plan.OpAllGather, Group{Link: Host, Ranks: 2}, "host"},
		"a rule":              {plan.OpReduceScatter, Group{Link: Peers, Ranks: 2}, "direct"},
		"any number of hosts": {plan.OpBroadcast, Group{Link: Hosts, Ranks: 3}, "flat"},
		"by chunks":           {plan.OpBroadcast, Group{Link: Host, Ranks: 3}, ""},
		"round a ring":        {plan.OpAllReduce, Group{Link: Neighbours, Ranks: 12}, "ring"},
		"parts round a ring":  {plan.OpReduceScatter, Group{Link: Neighbours, Ranks: 4}, "ring"},
		"gathered so":         {plan.OpAllGather, Group{Link: Neighbours, Ranks: 4}, "ring"},
		"no ring":             {plan.OpReduce, Group{Link: Neighbours, Ranks: 4}, "host"},
		"not by a rule":       {plan.OpAllReduce, Group{Link: Peers, Ranks: 16}, "one-shot up to 65536, two-shot"},
		"asked for":           {plan.OpAllReduce, Group{Link: Peers, Ranks: 4, Allowed: onlyRing}, "ring"},
		"broadcast":           {plan.OpBroadcast, Group{Link: Peers, Ranks: 3}, "one-shot up to 262144, two-shot"},
		"not allowed":         {plan.OpAllReduce, Group{Link: Peers, Ranks: 4, Allowed: func(_ plan.Op, name string) bool { return name == HostWork }}, "host"},
		"one is allowed":      {plan.OpBroadcast, Group{Link: Host, Ranks: 3, Allowed: func(_ plan.Op, name string) bool { return name == Chain }}, "chain"},
		"none is allowed":     {plan.OpBroadcast, Group{Link: Host, Ranks: 3, Allowed: func(_ plan.Op, name string) bool { return name == OneShot }}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := New(table, c.g)
			require.Equal(t, c.want, text(w, c.op))
			for _, r := range w.Ranges(c.op) {
				require.NotEmpty(t, r.Why)
			}
		})
	}
}

// TestFastest compares the ranges of random tables with what package choice chooses at each size.
func TestFastest(t *testing.T) {
	seed := must.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 200 {
		var rows []choice.Row
		for _, c := range Candidates(plan.OpAllReduce, Peers, 1<<20)[:2+rng.IntN(6)] {
			for bytes := int64(rng.IntN(50)); bytes < 5000; bytes = 2*bytes + 1 + int64(rng.IntN(500)) {
				rows = append(rows, choice.Row{
					Op: plan.OpAllReduce, Wire: string(Peers), Ranks: 2, Hosts: 1, Bytes: bytes, Algorithm: c.Name, Chunk: int64(c.Blocks),
					Time: time.Duration(1+bytes/10) + time.Duration(rng.IntN(300)),
				})
			}
		}
		table := must.Get(Catalog.NewTable("c", "m", rows))
		w := New(table, Group{Link: Peers, Ranks: 2})
		q := choice.Query{Op: plan.OpAllReduce, Wire: string(Peers), Ranks: 2, Hosts: 1}
		for range 100 {
			q.Bytes = rng.Int64N(12_000)
			want, r := table.Choose(q), w.Of(q.Op, int(q.Bytes))
			if got := choice.Name(want.Algorithm.Name, want.Chunk); got == r.Way.String() {
				continue
			}
			// Times are whole nanoseconds: another way may be as fast.
			require.LessOrEqual(t, timeOf(table, q, r.Way)-want.Time, 2*time.Nanosecond, "%d bytes: %v, want %s", q.Bytes, r.Way, want.Why)
		}
	}
}

// timeOf returns the time of one way.
func timeOf(table *choice.Table, q choice.Query, w Way) time.Duration {
	var rows []choice.Row
	for _, r := range table.Rows() {
		if r.Algorithm == w.Name && r.Chunk == int64(w.Blocks) {
			rows = append(rows, r)
		}
	}
	one, err := Catalog.NewTable("c", "m", rows)
	if err != nil {
		panic(err)
	}
	return one.Choose(q).Time
}

// TestDefault holds what the table in the program decides.
func TestDefault(t *testing.T) {
	require.Same(t, Default(), Default())
	w := New(Default(), Group{Link: Peers, Ranks: 2})
	require.Equal(t, "one-shot", text(w, plan.OpAllReduce))
	require.Contains(t, w.Of(plan.OpAllReduce, 4).Why, "next is host-shared with 29.207µs")
	require.False(t, w.Has(plan.OpAllReduce, HostShared))
}

func onlyRing(_ plan.Op, name string) bool { return name == Ring }

func TestCandidates(t *testing.T) {
	require.Equal(t, "[one-shot two-shot ring host-shared host]", fmt.Sprint(Candidates(plan.OpAllReduce, Peers, 1<<10)))
	require.Equal(t, "[direct direct:16 direct:32 direct:64 ring ring:16 ring:32 ring:64 host]",
		fmt.Sprint(Candidates(plan.OpAllGather, Peers, 1<<20)))
	require.Equal(t, "[ring host-shared host]", fmt.Sprint(Candidates(plan.OpAllReduce, Neighbours, 1<<10)))
	require.Empty(t, Candidates(plan.OpReduce, Neighbours, 1<<20))
	require.Equal(t, "[host-shared host]", fmt.Sprint(Candidates(plan.OpAllReduce, Shared, 1<<20)))
	require.Empty(t, Candidates(plan.OpAllGather, Host, 1<<20))
	require.Empty(t, Candidates(plan.OpAllReduce, Hosts, 1<<20))
	require.Empty(t, Candidates(plan.OpAllToAll, Shared, 1<<20))
	require.Empty(t, Candidates(plan.OpBarrier, Peers, 1<<20))
}

func TestCatalog(t *testing.T) {
	for text, want := range map[string]string{
		"all_reduce peers 2 1 4 mesh 1":        `no way "mesh" of all_reduce on CUDA devices (known: one-shot, two-shot, ring, host-shared, host)`,
		"all_to_all peers 2 1 4 one-shot 1":    `no way "one-shot" of all_to_all`,
		"all_reduce peers 2 1 4 host:16 1":     "with chunks of 16",
		"all_reduce peers 2 1 4 one-shot:no 1": "want an algorithm and its chunk",
	} {
		require.ErrorContains(t, must.Err(Catalog.Parse(strings.NewReader(head+text))), want)
	}
}

// TestAllocations holds that a look-up allocates nothing.
func TestAllocations(t *testing.T) {
	w := New(parse(t, measured), Group{Link: Peers, Ranks: 4})
	n := 0
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		for bytes := 1; bytes < 1<<20; bytes *= 8 {
			n += len(w.Of(plan.OpAllReduce, bytes).Name)
		}
	}))
	require.Positive(t, n)
}
