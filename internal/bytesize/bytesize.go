// Package bytesize reads and writes numbers of bytes in flags.
package bytesize

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Size is the flag.Value of a number of bytes such as 64K, 1M or 2G, in powers of two.
type Size int

func (b *Size) String() string { return Name(int(*b)) }

// Set reads a size.
func (b *Size) Set(s string) error {
	digits, scale := s, 1
	if n := len(s); n > 0 {
		if i := strings.IndexByte("KMG", s[n-1]&^0x20); i >= 0 {
			digits, scale = s[:n-1], 1<<(10*(i+1))
		}
	}
	v, err := strconv.Atoi(digits)
	if err != nil || v < 0 || v > min(1<<36, math.MaxInt)/scale {
		return fmt.Errorf("%q is not a size such as 4, 64K, 1M or 1G", s)
	}
	*b = Size(v * scale)
	return nil
}

// Name writes n with K, M or G if that is exact.
func Name[N int | int64](n N) string {
	for i, unit := range []string{"G", "M", "K"} {
		if scale := N(1) << (30 - 10*i); n >= scale && n%scale == 0 {
			return strconv.FormatInt(int64(n/scale), 10) + unit
		}
	}
	return strconv.FormatInt(int64(n), 10)
}
