package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/internal/script"
)

// version is a PyTorch release as 100*major + minor.
type version int

func parseVersion(s string) (version, error) {
	major, rest, _ := strings.Cut(s, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if err1 != nil || err2 != nil || a < 1 || b < 0 || b > 99 {
		return 0, fmt.Errorf("interop: %q is no version of PyTorch", s)
	}
	return version(100*a + b), nil
}

func (v version) String() string { return fmt.Sprintf("%d.%d", v/100, v%100) }

var (
	wide      = []string{"uint16", "uint32", "uint64"}
	float8    = []string{"float8_e5m2", "float8_e4m3fn"}
	complexes = []string{"complex64", "complex128"}
	floats    = []string{"float16", "bfloat16", "float32", "float64"}
	bitwise   = []string{"band", "bor", "bxor"}
)

// refusal returns why PyTorch's gloo refuses an operation with a dtype and an operator, or does
// it wrongly, and "" if it does it. The list comes from groups of PyTorch ranks, and each run
// compares it with them.
func refusal(v version, l script.Line) string {
	in := func(list []string, s string) bool { return slices.Contains(list, s) }
	op, d, r := l.Op, l.DType, l.Reduce
	switch {
	case v < 203 && in(wide, d):
		return "PyTorch before 2.3 has no uint16, uint32, uint64"
	case v < 201 && in(float8, d):
		return "PyTorch before 2.1 has no float8"
	case op == "send_recv" || op == "recv_any" || op == "barrier":
		return ""

	case v < 200 && (op == "reduce_scatter_tensor" || op == "all_gather_into_tensor"):
		return "gloo of PyTorch 1 lacks it"
	case v < 207 && op == "reduce_scatter":
		return "gloo before PyTorch 2.7 lacks it"
	case v < 212 && op == "all_to_all":
		return "gloo up to PyTorch 2.11 lacks it"

	case d == "int16" || in(wide, d) || in(float8, d):
		return "gloo has no int16, uint16, uint32, uint64, float8 (send and recv take every dtype)"
	case v < 203 && (d == "bfloat16" || d == "bool"):
		return "gloo before PyTorch 2.3 has no bfloat16 and bool (send and recv take every dtype)"
	case in(complexes, d) && op == "gather":
		return "gloo gathers no complex numbers"
	case in(complexes, d) && v < 209 && in([]string{"reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor"}, op):
		return "gloo has no complex dtype, and PyTorch before 2.9 views it as a real one in other operations only"
	case in(complexes, d) && r != "" && r != "sum" && r != "avg":
		return "complex numbers are only summed"

	case op == "reduce_scatter_tensor" && v < 207 && r != "sum":
		return "reduce_scatter_tensor before PyTorch 2.7 sums, whatever the operator"
	case r == "premul_sum":
		return "gloo has no PREMUL_SUM"
	case r == "avg" && v < 208:
		return "gloo before PyTorch 2.8 has no AVG"
	case r == "avg" && !in(floats, d) && !in(complexes, d):
		return "whole numbers are not averaged"
	case in(bitwise, r) && in(floats, d):
		return "bitwise operators need whole numbers"
	}
	return ""
}

// roundsApart returns why PyTorch's bits differ from this library's, and "" if they are equal.
// Such a cell is left out of the scripts.
func roundsApart(v version, l script.Line) string {
	if v >= 209 && l.Reduce == "avg" && slices.Contains(complexes, l.DType) && l.Op != "all_reduce" && l.Op != "all_reduce_coalesced" {
		return "PyTorch since 2.9 averages complex numbers by a multiplication with 1/size here, and by a division in all_reduce; this library divides"
	}
	return ""
}

// ignoresOperator reports whether PyTorch accepts the line but sums instead.
func ignoresOperator(v version, l script.Line) bool {
	return l.Op == "reduce_scatter_tensor" && v >= 200 && v < 207 && l.Reduce != "sum" &&
		refusal(v, script.Line{Op: l.Op, DType: l.DType, Reduce: "sum"}) == ""
}

// emptyRefusal returns why PyTorch's gloo fails in an operation on tensors without elements, and
// "" if it does not. A run does not check this list, because such an operation ends the group.
func emptyRefusal(v version, op string) string {
	switch {
	case op == "recv_any":
		return "receiving no elements from any rank fails in gloo (offset < this->size. 0 vs 0)"
	case op == "all_gather" && v < 200:
		return "gathering no elements ends the process of PyTorch 1 (SIGFPE)"
	}
	return ""
}
