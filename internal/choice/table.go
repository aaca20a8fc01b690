package choice

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed" // the default table
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
)

// AnyWire is the wire of measurements that hold for any wire.
const AnyWire = "-"

// Row is a measurement.
type Row struct {
	Op           plan.Op
	Wire         string // what carried the messages; "" is AnyWire
	Ranks, Hosts int
	Bytes        int64 // as in plan.Call
	Algorithm    string
	Chunk        int64 // 0: the algorithm's own
	Time         time.Duration
}

// Catalog finds the algorithm of a collective by its name, as [plan.Lookup] does. A table has the
// algorithms of one catalog. Two lookups of a name return the same pointer.
type Catalog func(op plan.Op, name string) (*plan.Algorithm, error)

// Table is a set of measurements. It is immutable.
type Table struct {
	command, machine string
	rows             []Row // sorted
	index            map[place][]config
	fingerprint      string
}

// Limits of a table's values.
const (
	maxRows  = 1 << 17
	maxRanks = 1 << 16
	maxBytes = 1 << 40
	maxTime  = time.Hour
)

const header = "c10d-table 1"

//go:embed default.table
var defaultText []byte

var defaultTable = sync.OnceValue(func() *Table {
	t, err := Parse(bytes.NewReader(defaultText))
	if err != nil {
		panic("choice: the default table: " + err.Error())
	}
	return t
})

// Default returns the table in the program.
func Default() *Table { return defaultTable() }

// NewTable is [Catalog.NewTable] with the algorithms of package plan.
func NewTable(command, machine string, rows []Row) (*Table, error) {
	return Catalog(plan.Lookup).NewTable(command, machine, rows)
}

// NewTable returns a table of rows, which command has measured on machine.
func (c Catalog) NewTable(command, machine string, rows []Row) (*Table, error) {
	t := &Table{command: strings.TrimSpace(command), machine: strings.TrimSpace(machine), rows: slices.Clone(rows)}
	if t.command == "" || t.machine == "" || strings.ContainsAny(t.command+t.machine, "\r\n") {
		return nil, fmt.Errorf("choice: command %q and machine %q, want a line each", command, machine)
	}
	if len(rows) > maxRows {
		return nil, fmt.Errorf("choice: %d rows, want at most %d", len(rows), maxRows)
	}
	for i := range t.rows {
		r := &t.rows[i]
		if r.Wire == "" {
			r.Wire = AnyWire
		}
		if field, err := r.check(c); err != nil {
			return nil, fmt.Errorf("choice: row %d: %s: %w", i, field, err)
		}
	}
	slices.SortFunc(t.rows, Row.compare)
	for i := 1; i < len(t.rows); i++ {
		if a, b := t.rows[i-1], t.rows[i]; a.key() == b.key() {
			return nil, fmt.Errorf("choice: two rows of %v", b)
		}
	}
	t.build(c)
	return t, nil
}

// check returns the field that is wrong, and why.
func (r *Row) check(c Catalog) (field string, err error) {
	a, err := c(r.Op, r.Algorithm)
	switch {
	case err != nil:
		return "algorithm", err
	case r.Chunk < 0 || r.Chunk > maxBytes || r.Chunk > 0 && !a.Chunks:
		return "algorithm", fmt.Errorf("%v with chunks of %d", a, r.Chunk)
	case r.Wire == "" || strings.ContainsAny(r.Wire, " \t\r\n#") || len(r.Wire) > 32:
		return "wire", fmt.Errorf("%q, want a word", r.Wire)
	case r.Ranks < 1 || r.Ranks > maxRanks:
		return "ranks", fmt.Errorf("%d, want 1 to %d", r.Ranks, maxRanks)
	case r.Hosts < 1 || r.Hosts > r.Ranks:
		return "hosts", fmt.Errorf("%d, want 1 to %d", r.Hosts, r.Ranks)
	case r.Bytes < 0 || r.Bytes > maxBytes:
		return "bytes", fmt.Errorf("%d, want 0 to %d", r.Bytes, int64(maxBytes))
	case r.Time <= 0 || r.Time > maxTime:
		return "time_us", fmt.Errorf("%v, want more than 0 and at most %v", r.Time, maxTime)
	}
	return "", nil
}

// key is the row without its time.
func (r Row) key() Row { r.Time = 0; return r }

func (r Row) compare(o Row) int {
	return cmp.Or(
		cmp.Compare(r.Op, o.Op), cmp.Compare(r.Wire, o.Wire), cmp.Compare(r.Ranks, o.Ranks), cmp.Compare(r.Hosts, o.Hosts),
		cmp.Compare(r.Algorithm, o.Algorithm), cmp.Compare(r.Chunk, o.Chunk), cmp.Compare(r.Bytes, o.Bytes), cmp.Compare(r.Time, o.Time),
	)
}

// Name returns the algorithm, with its chunk if it has one, as a table has it.
func Name(algorithm string, chunk int64) string {
	if chunk == 0 {
		return algorithm
	}
	return algorithm + ":" + strconv.FormatInt(chunk, 10)
}

// String returns the row as a line of a table.
func (r Row) String() string { return strings.Join(r.fields(), " ") }

func (r Row) fields() []string {
	us := strconv.FormatFloat(float64(r.Time)/1e3, 'f', -1, 64)
	return []string{
		r.Op.String(), r.Wire, strconv.Itoa(r.Ranks), strconv.Itoa(r.Hosts),
		strconv.FormatInt(r.Bytes, 10), Name(r.Algorithm, r.Chunk), us,
	}
}

var columns = [...]string{"op", "wire", "ranks", "hosts", "bytes", "algorithm", "time_us"}

// Command returns the command that made the table.
func (t *Table) Command() string { return t.command }

// Machine returns the machines on which the table was made.
func (t *Table) Machine() string { return t.machine }

// Rows returns the measurements, sorted.
func (t *Table) Rows() []Row { return slices.Clone(t.rows) }

// Fingerprint returns 32 hexadecimal digits that are the same for tables with
// the same measurements.
func (t *Table) Fingerprint() string { return t.fingerprint }

func digest(rows []Row) string {
	h := sha256.New()
	fmt.Fprintln(h, header)
	for _, r := range rows {
		fmt.Fprintln(h, r)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// WriteTo writes the table as a text that Parse reads.
func (t *Table) WriteTo(w io.Writer) (int64, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\ncommand %s\nmachine %s\n", header, t.command, t.machine)
	fmt.Fprintln(&b, "# "+strings.Join(columns[:], " "))
	for _, r := range t.rows {
		fmt.Fprintln(&b, strings.Join(r.fields(), " "))
	}
	return b.WriteTo(w)
}

// Load is [Catalog.Load] with the algorithms of package plan.
func Load(file string) (*Table, error) { return Catalog(plan.Lookup).Load(file) }

// Load reads a table from a file.
func (c Catalog) Load(file string) (*Table, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("choice: %w", err)
	}
	defer f.Close()
	t, err := c.Parse(f)
	if err != nil {
		return nil, fmt.Errorf("choice: %s: %w", file, err)
	}
	return t, nil
}

// ParseError describes an error in a table's text.
type ParseError struct {
	Line  int    // from 1
	Field string // a column, or "" for the line
	Err   error
}

func (e *ParseError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("choice: line %d: %v", e.Line, e.Err)
	}
	return fmt.Sprintf("choice: line %d: %s: %v", e.Line, e.Field, e.Err)
}

// Unwrap returns the cause.
func (e *ParseError) Unwrap() error { return e.Err }

// Parse is [Catalog.Parse] with the algorithms of package plan.
func Parse(r io.Reader) (*Table, error) { return Catalog(plan.Lookup).Parse(r) }

// Parse reads a table. An error in its text is a [*ParseError].
func (c Catalog) Parse(r io.Reader) (*Table, error) {
	var head []string // format, command, machine
	var rows []Row
	lines := make(map[Row]int)
	line := 0
	fail := func(field, format string, args ...any) (*Table, error) {
		return nil, &ParseError{line, field, fmt.Errorf(format, args...)}
	}
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		line++
		text, _, _ := strings.Cut(scan.Text(), "#")
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		switch len(head) {
		case 0:
			if text != header {
				return fail("", "%q, want %q", text, header)
			}
			head = append(head, text)
			continue
		case 1, 2:
			want := []string{"", "command", "machine"}[len(head)]
			key, value, _ := strings.Cut(text, " ")
			if key != want || strings.TrimSpace(value) == "" {
				return fail("", "%q, want %q and what made the table", text, want)
			}
			head = append(head, value)
			continue
		}
		f := strings.Fields(text)
		if len(f) != len(columns) {
			return fail("", "%d fields, want %d: %s", len(f), len(columns), strings.Join(columns[:], ", "))
		}
		row, field, err := c.parseRow(f)
		if err != nil {
			return fail(field, "%w", err)
		}
		if first := lines[row.key()]; first > 0 {
			return fail("", "measured in line %d already", first)
		}
		if len(rows) == maxRows {
			return fail("", "more than %d measurements", maxRows)
		}
		lines[row.key()] = line
		rows = append(rows, row)
	}
	if err := scan.Err(); err != nil {
		line++
		return fail("", "%w", err)
	}
	if len(head) < 3 {
		return fail("", "the table ends within its header: want %q, command and machine", header)
	}
	return c.NewTable(head[1], head[2], rows)
}

func (c Catalog) parseRow(f []string) (r Row, field string, err error) {
	if r.Op, err = plan.ParseOp(f[0]); err != nil {
		return r, columns[0], err
	}
	r.Wire = f[1]
	var n [3]int64
	for i := range n {
		if n[i], err = strconv.ParseInt(f[2+i], 10, 64); err != nil || n[i] < 0 || i < 2 && n[i] > maxRanks {
			return r, columns[2+i], fmt.Errorf("%q, want a number", f[2+i])
		}
	}
	r.Ranks, r.Hosts, r.Bytes = int(n[0]), int(n[1]), n[2]
	name, chunk, cut := strings.Cut(f[5], ":")
	if r.Algorithm = name; cut {
		if r.Chunk, err = strconv.ParseInt(chunk, 10, 64); err != nil || r.Chunk < 1 {
			return r, columns[5], fmt.Errorf("%q, want an algorithm and its chunk in bytes", f[5])
		}
	}
	us, err := strconv.ParseFloat(f[6], 64)
	if err != nil || !(us > 0) || us > maxTime.Seconds()*1e6 {
		return r, columns[6], fmt.Errorf("%q, want microseconds", f[6])
	}
	r.Time = max(1, time.Duration(math.Round(us*1e3)))
	field, err = r.check(c)
	return r, field, err
}
