package reduce

import (
	"errors"
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/tensor"
)

// Kind is a kind of reduction. The numbers are those of c10d's ReduceOp.
type Kind uint8

// The kinds.
const (
	Sum Kind = iota
	Avg
	Product
	Min
	Max
	BAnd
	BOr
	BXor
	PreMulSum
	Custom
)

var kindNames = [...]string{"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "custom"}

// String returns c10d's name of the kind, in lower case.
func (k Kind) String() string {
	if int(k) >= len(kindNames) {
		return fmt.Sprintf("reduction(%d)", uint8(k))
	}
	return kindNames[k]
}

// ParseKind returns the kind that String writes as name.
func ParseKind(name string) (Kind, error) {
	for k, s := range kindNames {
		if s == name {
			return Kind(k), nil
		}
	}
	return 0, fmt.Errorf("reduce: unknown reduction %q (known: %s)", name, strings.Join(kindNames[:PreMulSum], ", "))
}

// ErrUnsupported is matched by every UnsupportedError.
var ErrUnsupported = errors.New("reduce: unsupported reduction")

// UnsupportedError refuses a kind of reduction for a dtype.
type UnsupportedError struct {
	Kind   Kind
	DType  tensor.DType
	Reason string
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("reduce: %v of %v: %s", e.Kind, e.DType, e.Reason)
}

// Is reports whether target is ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == ErrUnsupported }

// supported returns an error if d has no reduction k.
func supported(k Kind, d tensor.DType) error {
	reason := ""
	switch {
	case !d.Valid():
		reason = "no such dtype"
	case k > Custom:
		reason = "no such reduction"
	case k == Custom:
		reason = "a custom reduction brings its own function"
	case k >= BAnd && k <= BXor && !d.IsInteger() && d != tensor.Bool:
		reason = "bitwise reductions need an integer or bool dtype"
	case k == Avg && !d.IsFloat() && !d.IsComplex():
		reason = "the average needs a floating-point or complex dtype"
	case k == PreMulSum && d == tensor.Bool:
		reason = "a bool cannot be multiplied"
	case (k == Product || k == Min || k == Max) && d.IsComplex():
		reason = "complex dtypes have only sum, avg and premul_sum"
	default:
		return nil
	}
	return &UnsupportedError{Kind: k, DType: d, Reason: reason}
}
