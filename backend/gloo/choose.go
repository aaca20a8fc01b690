package gloo

import (
	"fmt"
	"os"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

// Sums is what the bits of a floating-point sum depend on, on the native wire.
// (On Gloo's they are Gloo's.) Whatever it is, all ranks get the same bits, and
// the same call gives them again.
type Sums string

const (
	// SumsFast depend on the algorithm too, and so on sizes and on how the ranks
	// are connected. It is the zero value.
	SumsFast Sums = ""
	// SumsInRankOrder are ((x0 + x1) + x2) and so on. Ranks that share memory
	// always add so.
	SumsInRankOrder Sums = "rank order"
	// SumsExact are as if computed without an error and rounded once, for Sum and
	// Avg of floats: they do not depend on the order, nor on the number of ranks as
	// long as what these have to add is the same. Other operators are applied in rank
	// order.
	SumsExact Sums = "exact"
)

func (s Sums) check() error {
	switch s {
	case SumsFast, SumsInRankOrder, SumsExact:
		return nil
	}
	return fmt.Errorf("gloo: unknown sums %q, want %q, %q or %q", string(s), SumsFast, SumsInRankOrder, SumsExact)
}

// tableVariable is the environment variable for Options.Table.
const tableVariable = "C10D_TABLE"

func (o Options) table() (*choice.Table, error) {
	file := o.Table
	if file == "" {
		file = os.Getenv(tableVariable)
	}
	if file == "" {
		return choice.Default(), nil
	}
	t, err := choice.Load(file)
	if err != nil {
		return nil, fmt.Errorf("gloo: table of algorithms: %w", err)
	}
	return t, nil
}

// chooser returns the algorithm for an operation on so many bytes, the same on every rank.
type chooser func(op plan.Op, bytes int64) choice.Choice

// choose returns the algorithm of a collective on the native mesh. Ranks that
// ask the same get the same.
func (b *Backend) choose(op plan.Op, bytes int64) choice.Choice {
	return b.table.Choose(choice.Query{
		Op: op, Bytes: bytes, Wire: "tcp", Ranks: b.size, Hosts: b.hosts, RankOrder: b.sums != SumsFast,
	})
}
