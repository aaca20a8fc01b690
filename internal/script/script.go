// Package script runs the same list of operations on every rank of a job and
// prints a digest of what each rank got. Two jobs, or two implementations, that
// print the same digests computed the same bits.
//
// A script has one JSON object a line:
//
//	{"op":"all_reduce","dtype":"float32","shape":[3,5],"reduce":"sum","fill":"int","seed":7}
//
// Inputs are made from a rule that any language can follow. Element i of
// rank r's input under seed s comes from
//
//	k = ((7i + 13r + 31s) mod 17) - 8
//
// Fill "int" gives k, for unsigned types k+8, for bool whether k is odd; fill
// "frac" gives k/7 rounded to the dtype. Tensor number j of a list adds 1009j
// to i. Ranks in a script are those of the default group,
// except that rows of splits go by rank in the line's group.
//
// A rank does not wait for the other ranks between lines. Each recv_any therefore needs a
// tag of its own. With a shared tag it may take the message of a later line.
package script

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

// Line is one operation of a script.
type Line struct {
	Op     string  `json:"op"`
	DType  string  `json:"dtype,omitempty"`  // PyTorch's name; float32 if empty
	Shape  []int   `json:"shape,omitempty"`  // of one tensor
	Shapes [][]int `json:"shapes,omitempty"` // all_reduce_coalesced
	Reduce string  `json:"reduce,omitempty"` // sum if empty
	Factor float64 `json:"factor,omitempty"` // of premul_sum
	Root   int     `json:"root,omitempty"`
	Src    int     `json:"src,omitempty"`
	Dst    int     `json:"dst,omitempty"`
	Tag    uint32  `json:"tag,omitempty"`
	Splits [][]int `json:"splits,omitempty"` // all_to_all_single: row i is what rank i of the group sends to each
	Fill   string  `json:"fill,omitempty"`   // int or frac; int if empty
	Seed   int     `json:"seed,omitempty"`
	Ranks  []int   `json:"ranks,omitempty"` // new_group
	Name   string  `json:"name,omitempty"`  // new_group
	Local  bool    `json:"local,omitempty"` // new_group: only the members take part, use_local_synchronization
	Group  string  `json:"group,omitempty"` // which group; the default one if empty

	dtype tensor.DType
	op    backend.ReduceOp
}

// needs says which fields an operation has beyond op, dtype, fill, seed and group.
var needs = map[string][]string{
	"all_reduce":             {"shape", "reduce"},
	"reduce":                 {"shape", "reduce", "root"},
	"broadcast":              {"shape", "root"},
	"all_gather":             {"shape"},
	"all_gather_into_tensor": {"shape"},
	"gather":                 {"shape", "root"},
	"scatter":                {"shape", "root"},
	"reduce_scatter":         {"shape", "reduce"},
	"reduce_scatter_tensor":  {"shape", "reduce"},
	"all_to_all":             {"shape"},
	"all_to_all_single":      {"shape", "splits"},
	"send_recv":              {"shape", "src", "dst", "tag"},
	"recv_any":               {"shape", "src", "dst", "tag"},
	"barrier":                {},
	"all_reduce_coalesced":   {"shapes", "reduce"},
	"new_group":              {"ranks", "name", "local"},
}

// Ops returns the operations that a script may have, in order.
func Ops() []string {
	ops := make([]string, 0, len(needs))
	for op := range needs {
		ops = append(ops, op)
	}
	slices.Sort(ops)
	return ops
}

// maxElements bounds a tensor of a script, and what a typing error can allocate.
const maxElements = 1 << 28

// Parse reads a script for a world of size ranks. Empty lines and lines that
// begin with # are left out. An error names the line.
func Parse(r io.Reader, size int) ([]Line, error) {
	var lines []Line
	groups := map[string][]int{}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for n := 1; sc.Scan(); n++ {
		text := bytes.TrimSpace(sc.Bytes())
		if len(text) == 0 || text[0] == '#' {
			continue
		}
		l, err := parseLine(text, size, groups)
		if err != nil {
			return nil, fmt.Errorf("script: line %d: %w", n, err)
		}
		lines = append(lines, l)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("script: %w", err)
	}
	return lines, nil
}

func parseLine(text []byte, size int, groups map[string][]int) (Line, error) {
	var l Line
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&l); err != nil {
		return l, err
	}
	if dec.More() {
		return l, fmt.Errorf("more than one object")
	}
	fields, ok := needs[l.Op]
	if !ok {
		return l, fmt.Errorf("unknown op %q (known: %s)", l.Op, strings.Join(Ops(), ", "))
	}
	members := make([]int, size)
	for i := range members {
		members[i] = i
	}
	if l.Group != "" {
		if members, ok = groups[l.Group]; !ok {
			return l, fmt.Errorf("no group %q has been made", l.Group)
		}
	}
	if l.Op == "new_group" {
		return l, l.checkNewGroup(size, groups)
	}
	var err error
	if l.DType == "" {
		l.DType = "float32"
	}
	if l.dtype, err = tensor.ParseDType(l.DType); err != nil {
		return l, err
	}
	if l.op, err = l.reduceOp(); err != nil {
		return l, err
	}
	switch l.Fill {
	case "", "int":
		l.Fill = "int"
	case "frac":
		if !l.dtype.IsFloat() && !l.dtype.IsComplex() {
			return l, fmt.Errorf("fill frac needs a floating dtype, not %v", l.dtype)
		}
	default:
		return l, fmt.Errorf("unknown fill %q (int or frac)", l.Fill)
	}
	if l.Seed < 0 || l.Seed > 1<<30 {
		return l, fmt.Errorf("seed %d is not within 0 and 2^30", l.Seed)
	}
	for _, s := range append([][]int{l.Shape}, l.Shapes...) {
		count := len(members)
		for _, d := range s {
			if d < 0 || d > maxElements || d > 0 && count > maxElements/d {
				return l, fmt.Errorf("shape %v is negative or too large", s)
			}
			count *= max(d, 1)
		}
	}
	if slices.Contains(fields, "root") && !slices.Contains(members, l.Root) {
		return l, fmt.Errorf("root %d is not in the group %v", l.Root, members)
	}
	if slices.Contains(fields, "src") {
		if !slices.Contains(members, l.Src) || !slices.Contains(members, l.Dst) || l.Src == l.Dst {
			return l, fmt.Errorf("src %d and dst %d are not two ranks of the group %v", l.Src, l.Dst, members)
		}
	}
	if l.Op == "all_reduce_coalesced" && len(l.Shapes) == 0 {
		return l, fmt.Errorf("all_reduce_coalesced needs shapes")
	}
	return l, l.checkSplits(len(members))
}

func (l *Line) reduceOp() (backend.ReduceOp, error) {
	switch l.Reduce {
	case "":
		return backend.Sum(), nil
	case "premul_sum":
		return backend.PreMulSum(l.Factor), nil
	}
	return backend.ParseReduceOp(l.Reduce)
}

func (l *Line) checkNewGroup(size int, groups map[string][]int) error {
	if l.Name == "" {
		return fmt.Errorf("new_group needs a name")
	}
	if _, taken := groups[l.Name]; taken {
		return fmt.Errorf("group %q exists already", l.Name)
	}
	if l.Group != "" {
		return fmt.Errorf("new_group is made from the default group")
	}
	ranks := slices.Clone(l.Ranks)
	slices.Sort(ranks)
	for i, r := range ranks {
		if r < 0 || r >= size || i > 0 && ranks[i-1] == r {
			return fmt.Errorf("ranks %v are not distinct ranks of a world of %d", l.Ranks, size)
		}
	}
	if len(ranks) == 0 {
		return fmt.Errorf("new_group needs ranks")
	}
	groups[l.Name] = ranks
	return nil
}

func (l *Line) checkSplits(size int) error {
	if l.Splits == nil {
		return nil
	}
	if l.Op != "all_to_all_single" {
		return fmt.Errorf("only all_to_all_single has splits")
	}
	if len(l.Splits) != size {
		return fmt.Errorf("%d rows of splits for %d ranks", len(l.Splits), size)
	}
	for i, row := range l.Splits {
		if len(row) != size {
			return fmt.Errorf("row %d has %d splits for %d ranks", i, len(row), size)
		}
		sum := 0
		for _, n := range row {
			if n < 0 || n > maxElements || sum > maxElements-n {
				return fmt.Errorf("splits of row %d are negative or too large", i)
			}
			sum += n
		}
	}
	return nil
}

// Input returns rank's input tensor number j of a shape, by the rule of the package.
func (l *Line) Input(rank, j int, shape ...int) (*tensor.Tensor, error) {
	n := 1
	for _, d := range shape {
		n *= d
	}
	t, err := tensor.New(l.dtype, n)
	if err != nil {
		return nil, err
	}
	base := 13*rank + 31*l.Seed + 7*1009*j
	for i := range n {
		k := (7*i+base)%17 - 8
		v := float64(k)
		switch {
		case l.Fill == "frac":
			v /= 7
		case l.dtype == tensor.Bool:
			v = float64(k & 1)
		case l.dtype.IsUnsigned():
			v += 8
		}
		if err := t.SetFloat64(v, i); err != nil {
			return nil, err
		}
	}
	return t.Reshape(shape...)
}
