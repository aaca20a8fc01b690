package choice

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
)

const head = "c10d-table 1\ncommand c10d bench\nmachine one\n"

func parse(t *testing.T, rows string) *Table {
	t.Helper()
	return must.Get(Parse(strings.NewReader(head + rows)))
}

const measured = `
# two algorithms that cross between 1000 and 3000 bytes with 4 ranks
all_reduce tcp 4 1 1000 recursive-doubling 10
all_reduce tcp 4 1 3000 recursive-doubling 30
all_reduce tcp 4 1 1000 two-step 20
all_reduce tcp 4 1 3000 two-step 24     # rank order
all_reduce tcp 4 1 3000 ring:512 23.5
all_reduce tcp 8 1 1000 recursive-doubling 50
all_reduce tcp 8 1 1000 two-step 20
all_reduce -   4 4 1000 ring 7
all_reduce -   8 4 1000 ring 9
all_reduce -   8 4 1000 halving-doubling 8
all_reduce -   8 2 1000 halving-doubling 10
all_reduce -   8 2 1000 ring 9.5
all_gather tcp 4 1 1000 bruck 5
all_gather tcp 4 1 1000 ring 4
`

func TestChoose(t *testing.T) {
	table := parse(t, measured)
	tcp := func(q Query) Query {
		if q.Op = plan.OpAllReduce; q.Wire == "" {
			q.Wire = "tcp"
		}
		return q
	}
	for name, c := range map[string]struct {
		q    Query
		want string
		time time.Duration
		why  string
	}{
		"a point":          {tcp(Query{Bytes: 1000, Ranks: 4, Hosts: 1}), "recursive-doubling", 10 * time.Microsecond, "next is two-step with 20µs"},
		"below":            {tcp(Query{Bytes: 8, Ranks: 4, Hosts: 1}), "recursive-doubling", 10 * time.Microsecond, ""},
		"between, before":  {tcp(Query{Bytes: 2000, Ranks: 4, Hosts: 1}), "recursive-doubling", 20 * time.Microsecond, ""},
		"between, after":   {tcp(Query{Bytes: 2400, Ranks: 4, Hosts: 1}), "two-step", 22800 * time.Nanosecond, "next is ring:512 with 23.5µs"},
		"a chunk":          {tcp(Query{Bytes: 3000, Ranks: 4, Hosts: 1}), "ring:512", 23500 * time.Nanosecond, ""},
		"beyond":           {tcp(Query{Bytes: 30000, Ranks: 4, Hosts: 1}), "ring:512", 235 * time.Microsecond, ""},
		"rank order":       {tcp(Query{Bytes: 1000, Ranks: 4, Hosts: 1, RankOrder: true}), "two-step", 20 * time.Microsecond, "only algorithms that reduce in rank order"},
		"between ranks":    {tcp(Query{Bytes: 1000, Ranks: 5, Hosts: 1}), "recursive-doubling", 20 * time.Microsecond, "between those measured with 4 and 8 ranks"},
		"between ranks, 6": {tcp(Query{Bytes: 1000, Ranks: 6, Hosts: 1}), "two-step", 20 * time.Microsecond, "next is recursive-doubling with 30µs"},
		"few ranks":        {tcp(Query{Bytes: 1000, Ranks: 2, Hosts: 1}), "recursive-doubling", 10 * time.Microsecond, "as measured with 4 ranks"},
		"many ranks":       {tcp(Query{Bytes: 1000, Ranks: 99, Hosts: 1}), "two-step", 20 * time.Microsecond, "as measured with 8 ranks"},
		"flat":             {tcp(Query{Bytes: 1000, Ranks: 4, Hosts: 4}), "ring", 7 * time.Microsecond, "nothing was measured over tcp"},
		"hosts unknown":    {tcp(Query{Bytes: 1000, Ranks: 4}), "ring", 7 * time.Microsecond, "4 ranks: ring"},
		"any wire":         {tcp(Query{Bytes: 1000, Ranks: 4, Hosts: 1, Wire: "-"}), "ring", 7 * time.Microsecond, "nothing was measured on one host"},
		"grid":             {tcp(Query{Bytes: 1000, Ranks: 8, Hosts: 4}), "halving-doubling", 8 * time.Microsecond, ""},
		"grid, nearer":     {tcp(Query{Bytes: 1000, Ranks: 16, Hosts: 4}), "ring", 9500 * time.Nanosecond, "as measured with 8 ranks"},
		"another op":       {Query{Op: plan.OpAllGather, Wire: "tcp", Bytes: 1000, Ranks: 4, Hosts: 1, RankOrder: true}, "ring", 4 * time.Microsecond, ""},
		"nothing":          {Query{Op: plan.OpBarrier, Ranks: 4}, "dissemination", 0, "is the rule"},
		"nothing in order": {Query{Op: plan.OpReduceScatter, Bytes: 1 << 20, Ranks: 4, RankOrder: true}, "direct", 0, "long messages"},
		"too long":         {tcp(Query{Bytes: math.MaxInt64, Ranks: 4, Hosts: 1}), "ring:512", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := table.Choose(c.q)
			require.Equal(t, c.want, Name(got.Algorithm.Name, got.Chunk), got.Why)
			if name != "too long" {
				require.Equal(t, c.time, got.Time)
			} else {
				require.Positive(t, got.Time)
			}
			require.Contains(t, got.Why, c.why)
			require.NotContains(t, got.Why, "\n")
		})
	}
}

// TestChooseAgrees: what random tables choose does not depend on the order of their rows, and it
// serves.
func TestChooseAgrees(t *testing.T) {
	rng := must.Rand(t)
	for range 200 {
		var rows []Row
		seen := make(map[Row]bool)
		for range 1 + rng.IntN(60) {
			op := plan.Op(rng.IntN(len(plan.Ops())))
			all := plan.Algorithms(op)
			r := Row{
				Op: op, Wire: []string{"-", "tcp", "shm"}[rng.IntN(3)], Ranks: 1 + rng.IntN(9), Bytes: rng.Int64N(5000),
				Algorithm: all[rng.IntN(len(all))].Name,
			}
			r.Hosts = 1 + rng.IntN(r.Ranks)
			if !seen[r] {
				seen[r] = true
				r.Time = time.Duration(1 + rng.IntN(50))
				rows = append(rows, r)
			}
		}
		a := must.Get(NewTable("c", "m", rows))
		rng.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		b := must.Get(NewTable("other", "another", rows))
		require.Equal(t, a.Fingerprint(), b.Fingerprint())
		for range 50 {
			q := Query{
				Op: plan.Op(rng.IntN(len(plan.Ops()))), Bytes: rng.Int64N(9000), Wire: []string{"", "tcp", "rdma"}[rng.IntN(3)],
				Ranks: 1 + rng.IntN(12), RankOrder: rng.IntN(2) == 0,
			}
			q.Hosts = rng.IntN(q.Ranks + 1)
			got := a.Choose(q)
			require.Equal(t, got, b.Choose(q))
			require.Equal(t, q.Op, got.Algorithm.Op)
			require.True(t, q.serves(got.Algorithm), "%v for %+v", got.Algorithm, q)
		}
	}
}

// TestRules proves that there is something to do where nothing was measured.
func TestRules(t *testing.T) {
	empty := must.Get(NewTable("c", "m", nil))
	for _, op := range plan.Ops() {
		for _, bytes := range []int64{0, short, short + 1} {
			for _, q := range []Query{{}, {RankOrder: true}} {
				q.Op, q.Bytes, q.Ranks = op, bytes, 5
				got := empty.Choose(q)
				require.True(t, q.serves(got.Algorithm), "%v for %+v", got.Algorithm, q)
				require.Contains(t, got.Why, "nothing that serves was measured")
			}
		}
	}
}

// TestLine holds the integer arithmetic against rational numbers.
func TestLine(t *testing.T) {
	rng := must.Rand(t)
	for range 20000 {
		x0, x1 := rng.Int64N(1<<40), rng.Int64N(1<<40)
		if x0 > x1 {
			x0, x1 = x1, x0
		}
		if x0 == x1 {
			continue
		}
		x := x0 + rng.Int64N(x1-x0+1)
		t0, t1 := time.Duration(rng.Int64N(int64(maxTime))), time.Duration(rng.Int64N(int64(maxTime)))
		exact := new(big.Rat).Mul(big.NewRat(int64(t1-t0), x1-x0), big.NewRat(x-x0, 1))
		want, _ := exact.Add(exact, big.NewRat(int64(t0), 1)).Float64()
		require.InDelta(t, want, float64(line(x0, t0, x1, t1, x)), 1.01+want*1e-15)
	}
	require.EqualValues(t, 7, line(3, 7, 3, 9, 3))
	const most = time.Duration(math.MaxInt64)
	require.Equal(t, most, scale(most, 2, 1))
	require.Equal(t, most, scale(most, math.MaxInt64, 1))
}

func TestText(t *testing.T) {
	table := parse(t, measured)
	require.Equal(t, "c10d bench", table.Command())
	require.Equal(t, "one", table.Machine())
	var text bytes.Buffer
	n := must.Get(table.WriteTo(&text))
	require.EqualValues(t, text.Len(), n)
	require.Contains(t, text.String(), "\n# op wire ranks hosts bytes algorithm time_us\n")
	require.Contains(t, text.String(), "\nall_reduce tcp 4 1 3000 ring:512 23.5\n")
	file := filepath.Join(t.TempDir(), "my.table")
	require.NoError(t, os.WriteFile(file, text.Bytes(), 0o644))
	back := must.Get(Load(file))
	require.Equal(t, table, back)
	require.Len(t, back.Rows(), 14)
	require.Len(t, back.Fingerprint(), 32)
	changed := parse(t, strings.Replace(measured, "10\n", "10.001\n", 1))
	require.NotEqual(t, back.Fingerprint(), changed.Fingerprint())
}

func TestParseErrors(t *testing.T) {
	row := "all_reduce tcp 4 1 1000 ring 10"
	for text, want := range map[string]string{
		"":                                    "line 0: the table ends within its header",
		"# nothing\n":                         "line 1: the table ends within its header",
		"c10d-table 2":                        `line 1: "c10d-table 2", want "c10d-table 1"`,
		"c10d-table 1\nmachine x":             `line 2: "machine x", want "command" and`,
		"c10d-table 1\ncommand # ":            `line 2: "command", want "command" and`,
		"c10d-table 1\ncommand x\n\nmachin y": `line 4: "machin y", want "machine" and`,
		head + "all_reduce tcp":               "line 4: 2 fields, want 7: op, wire, ranks, hosts, bytes, algorithm, time_us",
		head + row + " 7":                     "line 4: 8 fields",
		head + row + "\n\n" + row:             "line 6: measured in line 4 already",
		head + strings.Replace(row, "all_reduce", "x", 1):           `line 4: op: plan: no collective "x"`,
		head + strings.Replace(row, "ring", "bruck", 1):             `line 4: algorithm: plan: no algorithm "bruck" of all_reduce`,
		head + strings.Replace(row, "ring", "ring:x", 1):            `line 4: algorithm: "ring:x", want an algorithm and its chunk`,
		head + strings.Replace(row, "ring", "ring:0", 1):            `line 4: algorithm: "ring:0", want`,
		head + strings.Replace(row, "ring", "direct:8", 1):          "line 4: algorithm: all_reduce direct with chunks of 8",
		head + strings.Replace(row, " 4 ", " four ", 1):             `line 4: ranks: "four", want a number`,
		head + strings.Replace(row, " 4 ", " 0 ", 1):                "line 4: ranks: 0, want 1 to 65536",
		head + strings.Replace(row, " 4 ", " 65537 ", 1):            `line 4: ranks: "65537", want a number`,
		head + strings.Replace(row, " 1 ", " 5 ", 1):                "line 4: hosts: 5, want 1 to 4",
		head + strings.Replace(row, " 1000 ", " -1 ", 1):            `line 4: bytes: "-1", want a number`,
		head + strings.Replace(row, " 1000 ", " 9999999999999 ", 1): "line 4: bytes: 9999999999999, want 0 to",
		head + strings.Replace(row, "ring 10", "ring 0", 1):         `line 4: time_us: "0", want microseconds`,
		head + strings.Replace(row, "ring 10", "ring NaN", 1):       `line 4: time_us: "NaN", want microseconds`,
		head + strings.Replace(row, "ring 10", "ring 1e99", 1):      `line 4: time_us: "1e99", want microseconds`,
		head + strings.Repeat("x", 1<<17):                           "line 4: bufio.Scanner: token too long",
	} {
		_, err := Parse(strings.NewReader(text))
		require.ErrorContains(t, err, "choice: "+want, "%.80q", text)
		parse := must.As[*ParseError](t, err)
		require.Equal(t, parse.Err, errors.Unwrap(err))
	}
	require.ErrorIs(t, must.Err(Load(filepath.Join(t.TempDir(), "none"))), os.ErrNotExist)
	file := filepath.Join(t.TempDir(), "bad.table")
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o644))
	require.ErrorContains(t, must.Err(Load(file)), "choice: "+file+": choice: line 1: ")
}

func TestNewTableErrors(t *testing.T) {
	good := Row{Op: plan.OpAllReduce, Ranks: 2, Hosts: 1, Algorithm: "ring", Time: 1}
	for want, edit := range map[string]func(r *Row){
		"row 0: ranks: 0":      func(r *Row) { r.Ranks = 0 },
		"row 0: hosts: 3":      func(r *Row) { r.Hosts = 3 },
		"row 0: time_us: 0s":   func(r *Row) { r.Time = 0 },
		"row 0: wire: \"a b\"": func(r *Row) { r.Wire = "a b" },
		"row 0: algorithm":     func(r *Row) { r.Op = 77 },
	} {
		r := good
		edit(&r)
		require.ErrorContains(t, must.Err(NewTable("c", "m", []Row{r})), "choice: "+want)
	}
	_, err := NewTable("c", "m", []Row{good, good})
	require.ErrorContains(t, err, "choice: two rows of all_reduce - 2 1 0 ring 0.001")
	require.ErrorContains(t, must.Err(NewTable("", "m", nil)), "want a line each")
	require.NoError(t, must.Err(NewTable("c", "m\n", []Row{good})), "a line's end is no part of it")
	require.ErrorContains(t, must.Err(NewTable("c", "m\nn", nil)), "want a line each")
	require.ErrorContains(t, must.Err(NewTable("c", "m", make([]Row, maxRows+1))), "want at most")
}

// TestDefault proves that the table in the program serves every collective of several
// algorithms.
func TestDefault(t *testing.T) {
	table := Default()
	require.Same(t, table, Default())
	for _, op := range plan.Ops() {
		if len(plan.Algorithms(op)) == 1 {
			continue // nothing to choose
		}
		for _, ranks := range []int{2, 8, 100} {
			for _, hosts := range []int{0, 1, 2, ranks} {
				c := table.Choose(Query{Op: op, Bytes: 4096, Ranks: ranks, Hosts: hosts})
				require.Positive(t, c.Time, c.Why)
			}
		}
	}
}

func TestCandidates(t *testing.T) {
	names := func(op plan.Op, bytes int64) string {
		return fmt.Sprint(Candidates(op, bytes))
	}
	require.Equal(t, "[binomial halving-gather direct]", names(plan.OpReduce, 1000))
	all := names(plan.OpAllReduce, 1<<20)
	for _, want := range []string{"ring ", "ring:16384 ", "ring:262144 ", "two-step ", "chain:65536 "} {
		require.Contains(t, all, want)
	}
	require.NotContains(t, all, "gloo")
	require.NotContains(t, all, "direct")
	require.NotContains(t, all, "1048576")
}

// FuzzParse feeds the parser anything.
func FuzzParse(f *testing.F) {
	f.Add(head + measured)
	f.Add(head + "all_reduce tcp 4 1 1000 ring:512 1e-9")
	f.Add("c10d-table 1\r\ncommand \x00\nmachine  # \n")
	f.Fuzz(func(t *testing.T, text string) {
		table, err := Parse(strings.NewReader(text))
		if err != nil {
			return
		}
		var out bytes.Buffer
		must.Get(table.WriteTo(&out))
		require.Equal(t, table.Fingerprint(), must.Get(Parse(&out)).Fingerprint())
		require.NotNil(t, table.Choose(Query{Op: plan.OpAllReduce, Bytes: 1 << 50, Ranks: 3}).Algorithm)
	})
}
